"""Text data: packing against brute force, order, resume, cache, and what must not be read."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from offload.errors import ConfigError, TransferError
from offload.models import documents
from offload.models.text import ByteTokenizer, HfTokenizer, TextDataset, load_tokenizer, tokenize_files

EOS = ByteTokenizer.eos_id


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folder_of(tmp_path: Path, files: dict[str, str | bytes]) -> Path:
    root = tmp_path / "data"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def dataset(data: Path, cache: Path, **changes: object) -> TextDataset:
    arguments: dict[str, object] = {"seq": 8, "cache_dir": cache, **changes}
    return TextDataset(data, ByteTokenizer(), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def hf_file(tmp_path: Path) -> Path:
    """A real byte-level BPE, trained here; its file asks for truncation and padding: they must not happen."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_every_token_once_per_epoch(tmp_path: Path, cache: Path) -> None:
    """Brute force: the documents by hand, joined, cut, counted."""
    texts = {
        "b.txt": "hello\nworld",
        "a.md": "# á title\n" * 7,
        "sub/c.py": "x = 1\n" * 20,
        "no.bin": "not text",
    }
    root = folder_of(tmp_path, texts)
    expected: list[int] = []
    for name in ("a.md", "b.txt", "sub/c.py"):  # sorted, a folder's own files first
        expected += [*texts[name].encode(), EOS]
    data = dataset(root, cache, micro_batch=3)
    assert data.tokens.tolist() == expected
    assert data.num_sequences == len(expected) // 8
    seen = []
    for _ in range(-(-data.num_sequences // 3)):
        seen += data.next_batch()["input_ids"].tolist()
    pieces = [expected[i * 8 : i * 8 + 8] for i in range(data.num_sequences)]
    epoch = seen[: data.num_sequences]
    assert Counter(map(tuple, epoch)) == Counter(map(tuple, pieces))
    assert epoch != pieces  # and they are shuffled


def test_batch_is_what_models_take(tmp_path: Path, cache: Path) -> None:
    batch = dataset(folder_of(tmp_path, {"a.txt": "abcdefgh" * 9}), cache, micro_batch=2).next_batch()
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 8) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    batch["labels"][0, 0] = -100  # a caller may mask labels: they are no view of the inputs or of the file
    assert batch["input_ids"][0, 0] != -100


def test_order_is_seeded_and_differs_between_epochs(tmp_path: Path, cache: Path) -> None:
    root = folder_of(tmp_path, {"a.txt": "".join(chr(33 + i % 90) for i in range(800))})

    def epochs(**changes: object) -> list[list[int]]:
        data = dataset(root, cache, **changes)
        rows = torch.cat([data.next_batch()["input_ids"] for _ in range(2 * data.num_sequences)])
        return [half.flatten().tolist() for half in rows.chunk(2)]

    first, second = epochs()
    assert [first, second] == epochs()
    assert first != second and first != epochs(seed=1)[0]
    assert sorted(first) == sorted(second)
    plain = epochs(shuffle=False)
    assert plain[0] == plain[1] == list(range(33, 123)) * 8 + list(range(33, 113))


def test_order_is_pinned(tmp_path: Path, cache: Path) -> None:
    """A resumed run must see the same order under another numpy: this order may never change."""
    data = dataset(folder_of(tmp_path, {"a.txt": "x" * 80}), cache, seed=7)
    assert data._order.tolist() == [8, 4, 3, 6, 2, 1, 0, 5, 9, 7]


def test_resume_at_every_batch(tmp_path: Path, cache: Path) -> None:
    """Nine batches over two and a half epochs; from each, the rest is the same."""
    root = folder_of(tmp_path, {"a.txt": "".join(chr(33 + i) for i in range(90))})
    straight = dataset(root, cache, micro_batch=3)
    states, batches = [straight.state_dict()], []
    for _ in range(9):
        batches.append(straight.next_batch()["input_ids"])
        states.append(json.loads(json.dumps(straight.state_dict())))
    assert straight.epoch == 2
    for index, state in enumerate(states[:-1]):
        resumed = dataset(root, cache, micro_batch=3)
        resumed.load_state_dict(state)
        for expected in batches[index:]:
            assert torch.equal(resumed.next_batch()["input_ids"], expected)


def test_other_data_cannot_resume(tmp_path: Path, cache: Path) -> None:
    root = folder_of(tmp_path, {"a.txt": "x" * 80})
    state = dataset(root, cache).state_dict()
    for changes in ({"seq": 4}, {"seed": 5}, {"shuffle": False}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            dataset(root, cache, **changes).load_state_dict(state)
    (root / "a.txt").write_text("x" * 90)
    with pytest.raises(ConfigError, match="num_tokens was 81 and is 91"):
        dataset(root, cache).load_state_dict(state)
    with pytest.raises(ConfigError, match="epoch 0, sequence 99"):
        dataset(root, cache).load_state_dict({**dataset(root, cache).state_dict(), "position": 99})


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_global_batch(tmp_path: Path, cache: Path, world_size: int) -> None:
    root = folder_of(tmp_path, {"a.txt": "".join(chr(33 + i % 90) for i in range(200))})
    whole = dataset(root, cache, micro_batch=2 * world_size)
    ranks = [dataset(root, cache, micro_batch=2, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(7):
        parts = [rank.next_batch()["input_ids"] for rank in ranks]
        assert torch.equal(torch.cat(parts), whole.next_batch()["input_ids"])
    assert ranks[0].state_dict() == ranks[1].state_dict() == whole.state_dict()


def test_micro_batch_larger_than_the_data(tmp_path: Path, cache: Path) -> None:
    data = dataset(folder_of(tmp_path, {"a.txt": "x" * 20}), cache, micro_batch=5)
    assert data.next_batch()["input_ids"].shape == (5, 8)
    assert (data.epoch, data.position) == (2, 1)


def test_cache_is_used_until_something_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder_of(tmp_path, {"a.txt": "x" * 50})
    read: list[str] = []
    original = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: read.append(text) or original(self, text))
    for _ in range(2):
        dataset(root, cache)
    assert len(read) == 1 and len(list(cache.iterdir())) == 1
    os.utime(root / "a.txt", ns=(1, 1))
    dataset(root, cache)
    (root / "b.txt").write_text("y")
    dataset(root, cache)
    assert len(read) == 4
    monkeypatch.setattr(ByteTokenizer, "digest", "other")
    dataset(root, cache)
    assert len(read) == 6 and len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"rubbish" * 100, "cut"])
def test_damaged_cache_is_built_again(tmp_path: Path, cache: Path, damage: bytes | str) -> None:
    root = folder_of(tmp_path, {"a.txt": "abc" * 50})
    expected = dataset(root, cache).tokens.tolist()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1] if isinstance(damage, str) else damage)
    assert dataset(root, cache).tokens.tolist() == expected


def test_failure_leaves_no_cache(tmp_path: Path, cache: Path) -> None:
    root = folder_of(tmp_path, {"a.jsonl": '{"text": "fine"}\n{"body": "no"}\n'})
    with pytest.raises(ConfigError, match="line 2"):
        dataset(root, cache)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_names_the_way_out(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {"a.txt": "x" * 50})
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(TransferError, match="another cache directory"):
        dataset(root, blocked / "cache")


def test_wide_vocabulary_is_stored_in_32_bits(tmp_path: Path, cache: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 100_000  # type: ignore[misc]
        eos_id = 99_999  # type: ignore[misc]
        digest = "wide"  # type: ignore[misc]

    root = folder_of(tmp_path, {"a.txt": "abc"})
    assert tokenize_files(root, Wide(), cache_dir=cache).tolist() == [97, 98, 99, 99_999]
    assert tokenize_files(root, ByteTokenizer(), cache_dir=cache).dtype == np.uint16


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_pieces_split_no_character_and_prefer_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Whatever the size of a read, the pieces joined are the text, and nothing was replaced."""
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    text = "\ufeffaé\n漢字 and 🙂🙂🙂 without a line end " * 5 + "\r\nlast"
    root = folder_of(tmp_path, {"a.txt": text})
    stats = documents.ReadStats()
    (source,) = documents.find_files(root)
    pieces = [list(d) for d in documents.read_documents(source, field="text", stats=stats, alone=True)]
    assert "".join(pieces[0]) == text.removeprefix("\ufeff")
    assert stats.undecodable == 0 and stats.bytes_read == source.size


def test_undecodable_bytes_are_replaced_counted_and_logged(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder_of(tmp_path, {"a.txt": b"ok \xff\xfe genuine \xef\xbf\xbd " + b"x" * 20})
    with caplog.at_level(logging.WARNING, logger="offload"):
        data = dataset(root, cache)
    assert "replaced 2 byte sequences" in caplog.text
    assert ByteTokenizer().decode(data.tokens) == "ok \ufffd\ufffd genuine \ufffd " + "x" * 20


def test_jsonl_records_are_documents(tmp_path: Path, cache: Path) -> None:
    lines = [json.dumps({"text": "one"}), "", json.dumps({"text": "zwei\n", "n": 1}), '{"text": "\\ud800"}']
    root = folder_of(tmp_path, {"a.jsonl": "\n".join(lines)})
    tokens = tokenize_files(root, ByteTokenizer(), cache_dir=cache).tolist()
    assert tokens == [*b"one", EOS, *b"zwei\n", EOS, *b"?", EOS]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "title": "y", "n": 1}', "line 2 has no text in field 'text'; .* body, title"),
        ('{"text": 5}', "no field holds text"),
        ("[1]", "each line holds one object"),
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_jsonl_without_text_names_line_and_fields(
    tmp_path: Path, cache: Path, line: str, message: str
) -> None:
    root = folder_of(tmp_path, {"a.jsonl": '{"text": "fine"}\n' + line})
    with pytest.raises(ConfigError, match=message) as error:
        dataset(root, cache)
    assert "\n" not in str(error.value) and "a.jsonl" in str(error.value)


def test_jsonl_field_and_long_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path, {"a.jsonl": '{"body": "' + "x" * 50 + '"}'})
    assert dataset(root, cache, field="body").num_tokens == 51
    monkeypatch.setattr(documents, "JSONL_LINE_BYTES_MAX", 40)
    with pytest.raises(ConfigError, match="line 1 is longer than 40 B"):
        dataset(root, cache)


def test_what_is_no_regular_file_is_skipped(tmp_path: Path, cache: Path) -> None:
    """A pipe would block the read for ever; the timeout of this test is the assertion."""
    root = folder_of(
        tmp_path, {"a.txt": "good text\n", ".hidden/b.txt": "no", "__pycache__/c.py": "no", "d.txt": b"\0\1"}
    )
    os.mkfifo(root / "pipe.txt")
    (root / "broken.txt").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root)
    (root / "folder.txt").mkdir()
    (root / "link.txt").symlink_to(root / "a.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(root / "sock.txt"))
        tokens = tokenize_files(root, ByteTokenizer(), cache_dir=cache).tolist()
    assert tokens == [*b"good text\n", EOS] * 2


def test_data_that_cannot_train_is_refused(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bin").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "a.bin").write_text("x")
    (tmp_path / "short.txt").write_text("abc")
    cases = {
        "missing": "No such file",
        "pipe": "neither a file nor a folder",
        "empty.txt": "is empty",
        "bin": "is binary",
        "nothing": r"no readable text file \(.jsonl .md",
        "short.txt": "gives 4 tokens, fewer than one sequence of 8; .* at most 4",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message) as error:
            dataset(tmp_path / name, cache)
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "any.name").write_text("any suffix is fine when the file itself is named")
    assert dataset(tmp_path / "any.name", cache).num_tokens == 49


@pytest.mark.parametrize("changes", [{"seq": 1}, {"micro_batch": 0}, {"rank": 2, "world_size": 2}])
def test_arguments_out_of_range(tmp_path: Path, cache: Path, changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="seq must be"):
        dataset(folder_of(tmp_path, {"a.txt": "x" * 50}), cache, **changes)


def test_progress_ends_at_all_bytes(tmp_path: Path, cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    dataset(
        folder_of(tmp_path, {"a.txt": "x\n" * 400_000, "b.txt": "y" * 300_000}),
        cache,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (1_100_000, 1_100_000) and calls == sorted(calls) and len(calls) > 4


def test_byte_tokenizer() -> None:
    text = "naïve 漢字 🙂\n\0"
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode([256, *ids.tolist(), 257]) == text
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_hf_tokenizer_packs_whole_texts(tmp_path: Path, cache: Path, hf_file: Path) -> None:
    for given in (hf_file, hf_file.parent):
        tokenizer = load_tokenizer(given)
        assert tokenizer.vocab_size == 320 and tokenizer.eos_id == 0
    text = "def main() -> None:\n    return None\n" * 30_000  # more than one piece
    root = folder_of(tmp_path, {"a.txt": text})
    tokens = tokenize_files(root, HfTokenizer(hf_file), cache_dir=cache)
    assert tokens[-1] == 0 and tokens.max() < 320
    assert HfTokenizer(hf_file).decode(tokens[:-1]) == text
    assert len(tokens) < len(text)  # merged, so it is not the bytes


def test_hf_tokenizer_end_of_text(hf_file: Path, tmp_path: Path) -> None:
    config = hf_file.parent / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "A", "lstrip": False}}))
    named = HfTokenizer(hf_file)
    assert named.decode([named.eos_id]) == "A"
    assert HfTokenizer(hf_file, eos_token="<|endoftext|>").eos_id == 0
    assert named.digest != HfTokenizer(hf_file, eos_token="<|endoftext|>").digest
    with pytest.raises(ConfigError, match="'<none>'"):
        HfTokenizer(hf_file, eos_token="<none>")


def test_tokenizer_errors_are_one_line(tmp_path: Path, cache: Path, hf_file: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "folder").mkdir()
    for name in ("missing", "broken.json", "folder"):
        with pytest.raises(ConfigError, match=name) as error:
            HfTokenizer(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="258 tokens, the model's vocabulary 200"):
        dataset(folder_of(tmp_path, {"a.txt": "x" * 50}), cache, model_vocab_size=200)


def test_cache_is_built_in_bounded_memory(tmp_path: Path, cache: Path) -> None:
    """60 MB of text and 120 MB of tokens pass through a few MB (by tracemalloc, which numpy reports to)."""
    import tracemalloc

    root = folder_of(
        tmp_path, {"a.txt": b"0123456789 abcde\n" * 3_500_000, "b.txt": b"no line ends " * 50_000}
    )
    tracemalloc.start()
    try:
        tokens = tokenize_files(root, ByteTokenizer(), cache_dir=cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tokens) == 17 * 3_500_000 + 13 * 50_000 + 2
    assert peak < 8 << 20
