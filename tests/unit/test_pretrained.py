"""Checkpoints: read and written against transformers and safetensors themselves; hostile files; failures."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from offload.errors import CheckpointError, ConfigError, StoreError, TransferError
from offload.models import pretrained
from offload.models.decoder import Decoder, to_hf_config
from offload.models.presets import DecoderConfig
from offload.models.pretrained import (
    TensorSpec,
    build_meta_model,
    export_specs,
    open_checkpoint,
    write_checkpoint,
)
from offload.models.safetensors_file import DTYPES, read_header, read_tensor, write_file

TINY = DecoderConfig(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
)
IDS = torch.arange(40).reshape(2, 20) % 101


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and on a busy machine their barriers cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**to_hf_config(replace(TINY, tie_embeddings=tied)))).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tied=True),
    "gpt2": gpt2,
}


def fetch_of(model: nn.Module) -> Callable[[str], Tensor]:
    state = model.state_dict()
    return lambda name: state[name]


def config_of(model: nn.Module) -> dict[str, Any]:
    return dict(model.config.to_dict())  # type: ignore[union-attr, operator]


def no_leftovers(folder: Path, *expected: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


# Reading


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_transformers_saved(tmp_path: Path, name: str, shards: int) -> None:
    model = MODELS[name]().bfloat16()
    size = sum(p.numel() * 2 for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size if shards == 1 else size // 3)  # type: ignore[operator]
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    tied = {"lm_head.weight"} if name != "llama" else set()
    assert set(checkpoint.names) == set(state) - tied and set(checkpoint.tied) == tied
    for key, expected in state.items():
        assert key in checkpoint
        assert checkpoint.shape(key) == tuple(expected.shape) and checkpoint.dtype(key) == "bfloat16"
        assert torch.equal(checkpoint.tensor(key), expected)
    assert checkpoint.num_bytes == sum(p.numel() * 2 for p in model.parameters())
    assert dict(checkpoint.parameter_shapes()) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert checkpoint.config["vocab_size"] == 101


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)  # type: ignore[operator]
    layers = [int(n.split(".")[2]) for n in open_checkpoint(tmp_path).names if ".layers." in n]
    assert layers == sorted(layers) and max(layers) == 11


def test_tensor_is_a_copy(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)  # type: ignore[operator]
    checkpoint = open_checkpoint(tmp_path)
    first = checkpoint.tensor("transformer.wte.weight")
    first.zero_()
    assert checkpoint.tensor("transformer.wte.weight").any()


@pytest.mark.parametrize("dtype", [name for name, _ in DTYPES.values()])
def test_every_type_and_shape_round_trips(tmp_path: Path, dtype: str) -> None:
    """Written by safetensors and read by us; written by us and read by safetensors."""
    kind = getattr(torch, dtype)
    tensors = {
        "scalar": torch.ones(()).to(kind),
        "empty": torch.zeros(0, 4).to(kind),
        "odd": torch.arange(7).to(kind),
        "other": torch.arange(12.0).reshape(3, 4),
    }
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = read_header(tmp_path / "theirs.safetensors")
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]
    write_file(tmp_path / "ours.safetensors", specs, lambda name: tensors[name])
    with safe_open(tmp_path / "ours.safetensors", "pt") as ours:
        assert ours.metadata() == {"format": "pt"}
        for name, expected in tensors.items():
            for got in (read_tensor(theirs[name]), ours.get_tensor(name)):
                assert got.dtype == expected.dtype and got.shape == expected.shape
                assert torch.equal(got.float(), expected.float())
    for entry in read_header(tmp_path / "ours.safetensors").values():
        item = getattr(torch, entry.spec.dtype).itemsize
        assert entry.size == 0 or entry.offset % item == 0  # aligned, whatever stands before it


def test_non_contiguous_and_wrong_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    write_file(tmp_path / "a", [TensorSpec("x", (4, 3), "float32")], lambda name: base.t())
    assert torch.equal(read_tensor(read_header(tmp_path / "a")["x"]), base.t())
    for number, wrong in enumerate((base, base.t().double(), base.t().to("meta"))):
        with pytest.raises(ConfigError, match=r"^x "):
            write_file(tmp_path / f"w{number}", [TensorSpec("x", (4, 3), "float32")], lambda name, t=wrong: t)
    with pytest.raises(ConfigError, match="complex64"):
        write_file(tmp_path / "c", [TensorSpec("x", (1,), "complex64")], lambda name: base)


def hostile(header: object, data: bytes = b"\0" * 16, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\x01\0\0\0\0\0\0",
    "header longer than the file": hostile(one(), length=1 << 20),
    "header of 2^63": hostile(one(), length=(1 << 63) + 1),
    "not JSON": hostile(b"{not json}"),
    "not UTF-8": hostile(b'{"\xff": 1}'),
    "deep": hostile(b"[" * 200_000),
    "a list": hostile([1]),
    "a pickle": b"\x80\x02}q\x00." * 10,
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "entry is no object": hostile({"x": 3}),
    "no offsets": hostile({"x": {"dtype": "F32", "shape": [4]}}),
    "unknown type": hostile(one(dtype="F4")),
    "type is a list": hostile(one(dtype=["F32"])),
    "negative dimension": hostile(one(shape=[-4])),
    "negative both": hostile(one(shape=[-2, -2])),
    "bool dimension": hostile(one(shape=[True, 4])),
    "float dimension": hostile(one(shape=[4.0])),
    "huge dimension": hostile(one(shape=[1 << 61, 8])),
    "past the end": hostile(one(shape=[8], data_offsets=[0, 32])),
    "negative offset": hostile(one(data_offsets=[-16, 0])),
    "backwards": hostile(one(data_offsets=[16, 0])),
    "three offsets": hostile(one(data_offsets=[0, 8, 16])),
    "wrong size": hostile(one(shape=[3])),
    "twice": hostile(
        b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "overlap": hostile({**one(), "y": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_hostile_oracle_accepts_the_honest_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(hostile({"__metadata__": {"format": "pt"}, **one()}))
    assert read_header(tmp_path / "a")["x"].spec == ("x", (4,), "float32")


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    def refuses(message: str, folder: Path = tmp_path) -> None:
        with pytest.raises(CheckpointError, match=message) as error:
            open_checkpoint(folder)
        assert "\n" not in str(error.value)

    refuses("not a directory", tmp_path / "missing")
    refuses("config.json is missing")
    (tmp_path / "config.json").write_text("{")
    refuses("config.json is no JSON")
    (tmp_path / "config.json").write_text("[]")
    refuses("no JSON object")
    (tmp_path / "config.json").write_text("{}")
    refuses("neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").touch()
    refuses("pytorch_model.bin, a pickle.*save_pretrained")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}}')
    refuses("no weight_map")
    for file in ("../a.safetensors", "/etc/passwd", "", "..", "a/b", 3):
        index.write_text(json.dumps({"weight_map": {"x": file}}))
        refuses("outside the directory")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    refuses("a.safetensors cannot be read: No such file")
    save_file({"y": torch.ones(2)}, tmp_path / "a.safetensors")
    refuses("lacks 'x'")
    save_file({}, tmp_path / "model.safetensors")
    refuses("holds no tensors")


def test_untied_model_without_its_output_layer(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint
    with pytest.raises(CheckpointError, match="tie_word_embeddings false"):
        checkpoint.tensor("lm_head.weight")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert open_checkpoint(tmp_path).shape("lm_head.weight") == (3, 2)
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        open_checkpoint(tmp_path).shape("other")


def test_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    """A mapped file would kill the process with SIGBUS here."""
    gpt2().save_pretrained(tmp_path)  # type: ignore[operator]
    checkpoint = open_checkpoint(tmp_path)
    name, entry = max(checkpoint.entries.items(), key=lambda item: item[1].offset)
    os.truncate(entry.path, entry.offset + 8)
    with pytest.raises(TransferError, match="changed since it was opened") as error:
        checkpoint.tensor(name)
    assert (error.value.offset, error.value.size, error.value.done) == (entry.offset, entry.size, 8)


def test_headers_need_no_torch(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)  # type: ignore[operator]
    code = (
        "import sys; from offload.models.pretrained import open_checkpoint;"
        f"print(len(open_checkpoint({str(tmp_path)!r}).parameter_shapes())); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) == len(list(gpt2().parameters()))


# Models without memory

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gemma2": {"head_dim": 8},
    "qwen2": {},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "mixtral": {"num_local_experts": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_model_has_the_buffers_of_a_normal_one(tmp_path: Path, family: str) -> None:
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("gpt2", "bloom"):
        common = {key: common[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
    config = transformers.AutoConfig.for_model(family, **{**common, **FAMILIES[family]})
    config.save_pretrained(tmp_path)
    normal = AutoModelForCausalLM.from_config(config)
    meta = build_meta_model(tmp_path)
    expected = dict(normal.named_parameters())
    assert [name for name, _ in meta.named_parameters()] == list(expected)
    for name, parameter in meta.named_parameters():
        assert parameter.is_meta and parameter.requires_grad
        assert parameter.shape == expected[name].shape and parameter.dtype == expected[name].dtype
    buffers = dict(normal.named_buffers())
    assert [name for name, _ in meta.named_buffers()] == list(buffers)
    for name, buffer in meta.named_buffers():
        assert (
            not buffer.is_meta and buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name])
        ), name
    assert set(meta.state_dict()) == set(normal.state_dict())


def test_meta_model_filled_from_the_checkpoint_is_the_model(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    checkpoint = open_checkpoint(tmp_path)
    meta = build_meta_model(tmp_path, dtype=torch.float32).eval()
    meta.load_state_dict(
        {n: checkpoint.tensor(n) for n, _ in meta.named_parameters()}, strict=False, assign=True
    )
    meta.tie_weights()  # type: ignore[operator]
    assert torch.equal(meta(IDS).logits, model(IDS).logits)


def test_meta_model_leaves_no_hook_and_no_memory(tmp_path: Path, run_forked: Callable[..., Any]) -> None:
    """2.7 GB of parameters take no memory; afterwards modules are built as ever."""
    LlamaConfig(hidden_size=4096, num_hidden_layers=2, intermediate_size=11008).save_pretrained(tmp_path)
    code = (
        "import torch, sys, resource; from offload.models.pretrained import build_meta_model;"
        "import transformers.models.llama.modeling_llama;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"model = build_meta_model({str(tmp_path)!r});"
        "whole = sum(p.nbytes for p in model.parameters()) >> 10;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, whole);"
        "sys.exit(torch.nn.Linear(2, 2).weight.is_meta)"
    )
    done = run_forked(code)
    assert done.returncode == 0, done.stderr
    grown, whole = map(int, done.stdout.split())  # KiB
    assert whole > 2 << 20 and grown < 100 << 10
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        build_meta_model(tmp_path / "missing")
    assert not nn.Linear(2, 2).weight.is_meta


def test_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_thing"}')
    with pytest.raises(ConfigError, match="not understood") as error:
        build_meta_model(tmp_path)
    assert "\n" not in str(error.value)
    transformers.AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no causal language model"):
        build_meta_model(tmp_path)


# Writing


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000, 1])
def test_preset_opens_in_transformers_with_equal_logits(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    config = replace(TINY, tie_embeddings=tied)
    torch.manual_seed(0)
    model = Decoder(config).eval()
    out = tmp_path / "new" / "model"
    write_checkpoint(out, export_specs(model), fetch_of(model), to_hf_config(config), shard_bytes=shard_bytes)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())  # nothing missing, unexpected or mismatched
    torch.testing.assert_close(loaded.eval()(IDS).logits, model(IDS), rtol=1e-5, atol=1e-5)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 1 << 30)
    largest = max(spec.num_bytes for spec in export_specs(model))
    assert all(file.stat().st_size < max(shard_bytes, largest) + 10_000 for file in files)
    assert all(torch.equal(open_checkpoint(out).tensor(n), t) for n, t in model.state_dict().items())
    no_leftovers(out.parent, "model")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_models_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    write_checkpoint(
        tmp_path / "m", export_specs(model), fetch_of(model), config_of(model), shard_bytes=30_000
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True, dtype=dtype)
    assert not any(info.values())
    state = loaded.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    if (
        dtype is torch.float32
    ):  # transformers' .to(bfloat16) rounds Llama's rotary frequencies, loading does not
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)


def test_one_tensor_at_a_time_in_bounded_memory(tmp_path: Path) -> None:
    """64 tensors of 4 MiB in two shards: each fetched once, when no earlier one is alive."""
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    order: list[str] = []

    def fetch(name: str) -> Tensor:
        assert all(reference() is None for reference in alive)
        tensor = torch.full((1024, 1024), float(name[1:]))
        alive.append(weakref.ref(tensor))
        order.append(name)
        return tensor

    specs = [TensorSpec(f"t{i}", (1024, 1024), "float32") for i in range(64)]
    write_checkpoint(tmp_path / "m", specs, fetch, {}, shard_bytes=128 << 20)
    assert order == [spec.name for spec in specs]
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.names == order and checkpoint.tensor("t63")[0, 0] == 63
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fail_at", range(4))
def test_nth_fetch_fails(tmp_path: Path, fail_at: int, overwrite: bool) -> None:
    """Whatever tensor cannot be had, nothing half-done stays, and what was there is still there."""
    out = tmp_path / "m"
    specs = [TensorSpec(f"t{i}", (4,), "float32") for i in range(4)]
    if overwrite:
        write_checkpoint(out, specs, lambda name: torch.ones(4), {"old": True})

    def fetch(name: str) -> Tensor:
        if name == f"t{fail_at}":
            raise RuntimeError("lost")
        return torch.zeros(4)

    with pytest.raises(RuntimeError, match="lost"):
        write_checkpoint(out, specs, fetch, {}, shard_bytes=16, overwrite=overwrite)
    no_leftovers(tmp_path, *(["m"] if overwrite else []))
    if overwrite:
        assert open_checkpoint(out).config == {"old": True} and open_checkpoint(out).tensor("t0").all()


@pytest.mark.parametrize("fail_at", range(12))
def test_nth_sync_or_rename_fails(tmp_path: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fsync and rename fails once, until none is left; the old or the new checkpoint is there, whole."""
    out = tmp_path / "m"
    specs = [TensorSpec(f"t{i}", (4,), "float32") for i in range(2)]
    write_checkpoint(out, specs, lambda name: torch.ones(4), {"old": True})
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "rename", failing(Path.rename))
        try:
            write_checkpoint(
                out, specs, lambda name: torch.zeros(4), {"old": False}, shard_bytes=16, overwrite=True
            )
        except TransferError as error:
            assert error.errno == errno.ENOSPC and "\n" not in str(error)
        else:
            assert calls <= fail_at
    checkpoint = open_checkpoint(out)
    assert (
        bool(checkpoint.tensor("t0").all()) == bool(checkpoint.tensor("t1").all()) == checkpoint.config["old"]
    )
    no_leftovers(tmp_path, "m")


def test_all_syncs_and_renames_were_made_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range above is long enough: a whole replacement makes fewer calls."""
    calls: list[str] = []
    specs = [TensorSpec(f"t{i}", (4,), "float32") for i in range(2)]
    write_checkpoint(tmp_path / "m", specs, lambda name: torch.ones(4), {})
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or sync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, target: calls.append("rename") or rename(self, target))
    write_checkpoint(tmp_path / "m", specs, lambda name: torch.zeros(4), {}, shard_bytes=16, overwrite=True)
    assert calls.count("rename") == 2 and len(calls) <= 12


def test_targets_that_are_not_replaced(tmp_path: Path) -> None:
    specs = [TensorSpec("x", (1,), "float32")]

    def write(out: Path, **changes: Any) -> None:
        write_checkpoint(out, changes.pop("specs", specs), lambda name: torch.ones(1), {}, **changes)

    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    with pytest.raises(ConfigError, match="not empty"):
        write(tmp_path / "empty")
    write(tmp_path / "empty", overwrite=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("home", "file", "link"):
        with pytest.raises(ConfigError, match="no checkpoint directory"):
            write(tmp_path / name, overwrite=True)
    assert (home / "thesis.txt").exists()
    for changes in ({"specs": []}, {"specs": specs * 2}, {"shard_bytes": 0}, {"tokenizer_files": home}):
        with pytest.raises(ConfigError):
            write(tmp_path / "new", **changes)
    with pytest.raises(StoreError, match="cannot be written"):
        write(tmp_path / "file" / "new")
    assert not (tmp_path / "new").exists()


def test_too_little_space_is_refused_before_writing(tmp_path: Path) -> None:
    def fetch(name: str) -> Tensor:
        raise AssertionError("nothing should be fetched")

    with pytest.raises(StoreError, match=r"free, the checkpoint needs 4\.00 TiB; free space"):
        write_checkpoint(tmp_path / "m", [TensorSpec("x", (1 << 40,), "float32")], fetch, {})
    no_leftovers(tmp_path)


def test_tokenizer_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
        (source / name).write_text("{}")
    specs = [TensorSpec("x", (1,), "float32")]
    write_checkpoint(tmp_path / "m", specs, lambda name: torch.ones(1), {}, tokenizer_files=source)
    no_leftovers(
        tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    )


def test_export_specs_reads_no_values() -> None:
    with torch.device("meta"):
        model = Decoder(replace(TINY, tie_embeddings=True))
    names = [spec.name for spec in export_specs(model)]
    assert names == [name for name, _ in model.named_parameters()] and "lm_head.weight" not in names
    counted = [spec.name for spec in export_specs(nn.BatchNorm1d(3))]
    assert counted == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert pretrained.TensorSpec is TensorSpec
