"""Text files to micro-batches: tokenised once into a memory-mapped file, packed, shuffled, resumable."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ConfigError, TransferError
from .documents import ReadStats, SourceFile, find_files, read_documents
from .tokenizers import ByteTokenizer, HfTokenizer, Tokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "HfTokenizer", "TextDataset", "Tokenizer", "load_tokenizer", "tokenize_files"]

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes of text read, bytes of text in all) while the cache is built."""

TokenArray = npt.NDArray[np.unsignedinteger[Any]]

_CACHE_FORMAT: Final = 1
"""Part of every cache's key: raise it when the same text would give other tokens."""
_NPY_HEADER_BYTES: Final = 128


class TextDataset:
    """Endless micro-batches of packed text. See Note [Packing] and Note [Order].

    A batch is ``{"input_ids": (micro_batch, seq), "labels": the same}`` in int64: labels are not shifted, as
    both our decoder and transformers' models shift them themselves. So ``model(**batch)`` works with either.
    """

    # Note [Packing]
    # All documents, each followed by one end-of-text token, are one long row of tokens in the order of their
    # names. Sequence i is tokens [i * seq, (i + 1) * seq). So every token is in exactly one sequence, but
    # for the last `num_tokens % seq`, which are dropped. Sequences may begin in the middle of a document.
    #
    # Note [Order]
    # The order of epoch e is sorted by the output of a Philox generator keyed by (seed, e): bit generators
    # are stable over numpy versions, while `permutation` is not promised to be. A batch never ends early:
    # the last one of an epoch takes its missing rows from the next. So (epoch, position) says everything
    # about the future, and is all that is saved. Position counts sequences over all ranks: a run may resume
    # with another number of ranks.

    def __init__(
        self,
        data: str | os.PathLike[str],
        tokenizer: Tokenizer,
        *,
        seq: int,
        cache_dir: str | os.PathLike[str],
        micro_batch: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        field: str = "text",
        model_vocab_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """``data``: a text file or a folder; ``seq``: tokens of a sequence; ``micro_batch``: sequences of a
        batch.

        ``field``: where a ``.jsonl`` record has its text. ``model_vocab_size``: refuse a tokenizer that has
        more. Rank r of ``world_size`` gets the r-th part of every global batch.
        """
        if seq < 2 or micro_batch < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"seq must be at least 2, micro_batch at least 1 and rank below world_size; "
                f"got seq {seq}, micro_batch {micro_batch}, rank {rank} of {world_size}"
            )
        if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary {model_vocab_size};"
                f" use the tokenizer the model was made for"
            )
        self.seq, self.micro_batch, self.seed, self.shuffle = seq, micro_batch, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.tokens = tokenize_files(data, tokenizer, cache_dir=cache_dir, field=field, progress=progress)
        if len(self.tokens) < seq:
            raise ConfigError(
                f"data {os.fspath(data)} gives {len(self.tokens)} tokens, fewer than one sequence of {seq}; "
                f"give more text or a seq of at most {len(self.tokens)}"
            )
        self._tokenizer_digest = tokenizer.digest
        self.epoch, self.position = 0, 0
        self._order = self._epoch_order(0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the data, the dropped tail included."""
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch, over all ranks."""
        return len(self.tokens) // self.seq

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches for ever, from the current position; the position is the dataset's, not the iterator's."""
        while True:
            yield self.next_batch()

    def next_batch(self) -> dict[str, Tensor]:
        """This rank's next micro-batch; moves the position of all ranks."""
        rows = [self._next_row() for _ in range(self.micro_batch * self.world_size)]
        mine = rows[self.rank * self.micro_batch : (self.rank + 1) * self.micro_batch]
        ids = torch.from_numpy(np.stack([self.sequence(row) for row in mine]))
        return {"input_ids": ids, "labels": ids.clone()}

    def sequence(self, index: int) -> npt.NDArray[np.int64]:
        """Sequence ``index`` in the order of the text, (seq,)."""
        return self.tokens[index * self.seq : (index + 1) * self.seq].astype(np.int64)

    def _next_row(self) -> int:
        if self.position == self.num_sequences:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._epoch_order(self.epoch)
        self.position += 1
        return int(self._order[self.position - 1])

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.integer[Any]]:
        if not self.shuffle:
            return np.arange(self.num_sequences)
        keys = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_sequences)
        return np.argsort(keys, kind="stable")

    def state_dict(self) -> dict[str, int | str | bool]:
        """Where the data stands, and what it must still be for that to mean anything."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last batch before ``state_dict``; other data or settings are refused."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"the data cannot resume: {name} was {state.get(name)!r} and is {value!r}; "
                    f"restore it, or start the data anew without the saved state"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self.num_sequences:
            raise ConfigError(
                f"the data cannot resume at epoch {epoch}, sequence {position} of {self.num_sequences}"
            )
        self.epoch, self.position = epoch, position
        self._order = self._epoch_order(epoch)

    def _identity(self) -> dict[str, int | str | bool]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "seq": self.seq,
            "num_tokens": self.num_tokens,
            "tokenizer": self._tokenizer_digest,
        }


def tokenize_files(
    data: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    cache_dir: str | os.PathLike[str],
    field: str = "text",
    progress: Progress | None = None,
) -> TokenArray:
    """All tokens of ``data``, memory-mapped, read-only, from a cache that is built on first use.

    The cache is named by the files' names, sizes and times, the tokenizer and ``field``: any change builds a
    new one. It appears under its name only when complete; several processes may build it at once, and the
    last one stays. Memory while building: one piece of text and its tokens.
    """
    sources = find_files(data)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    path = Path(cache_dir) / f"tokens-{_cache_key(sources, tokenizer, field)}.npy"
    cached = _open_cache(path, dtype)
    if cached is not None:
        log.info("data %s: %d tokens from %s", os.fspath(data), len(cached), path)
        return cached
    if not any(source.size for source in sources):
        raise ConfigError(f"data {os.fspath(data)} is empty; give a file or folder with text in it")
    stats = _build_cache(path, sources, tokenizer, field, dtype, progress)
    if stats.undecodable:
        log.warning(
            "data %s: replaced %d byte sequences that are no UTF-8", os.fspath(data), stats.undecodable
        )
    built = _open_cache(path, dtype)
    if built is None:
        raise AssertionError(f"cache {path} was just written and cannot be opened")
    log.info("data %s: %d tokens from %d files", os.fspath(data), len(built), len(sources))
    return built


def _cache_key(sources: list[SourceFile], tokenizer: Tokenizer, field: str) -> str:
    files = [(source.name, source.size, source.mtime_ns) for source in sources]
    text = json.dumps([_CACHE_FORMAT, tokenizer.digest, field, files])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _open_cache(path: Path, dtype: np.dtype[Any]) -> TokenArray | None:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError, OSError) as error:  # cut short, or not ours; the text is still there
        log.warning("cache %s cannot be read and is built again: %s", path, error)
        return None
    if tokens.dtype != dtype or tokens.ndim != 1:
        log.warning("cache %s holds something else and is built again", path)
        return None
    return tokens  # type: ignore[no-any-return]


def _build_cache(
    path: Path,
    sources: list[SourceFile],
    tokenizer: Tokenizer,
    field: str,
    dtype: np.dtype[Any],
    progress: Progress | None,
) -> ReadStats:
    """Writes ``path`` whole or not at all."""
    total = sum(source.size for source in sources)
    stats, written = ReadStats(), 0
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(bytes(_NPY_HEADER_BYTES))
            for ids in _token_pieces(sources, tokenizer, field, stats):
                file.write(np.ascontiguousarray(ids, dtype=dtype).tobytes())
                written += len(ids)
                if progress is not None:
                    progress(min(stats.bytes_read, total), total)
            _write_npy_header(file, dtype, written)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        temporary = None
    except TransferError:
        raise
    except OSError as error:
        done = written * dtype.itemsize
        raise TransferError(
            error.errno or 5,
            "write",
            str(temporary or path),
            offset=done,
            size=total * dtype.itemsize,
            done=done,
            hint="give another cache directory",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return stats


def _token_pieces(
    sources: list[SourceFile], tokenizer: Tokenizer, field: str, stats: ReadStats
) -> Iterator[npt.NDArray[np.integer[Any]]]:
    end = np.array([tokenizer.eos_id])
    for source in sources:
        for document in read_documents(source, field=field, stats=stats, alone=len(sources) == 1):
            some = False
            for text in document:
                ids = tokenizer.encode(text)
                some = some or len(ids) > 0
                yield ids
            if some:
                yield end


def _write_npy_header(file: BinaryIO | Any, dtype: np.dtype[Any], count: int) -> None:
    """The .npy header of a flat array, padded to its fixed size, so that the length can be written last."""
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)})
    body = text.encode("latin1").ljust(_NPY_HEADER_BYTES - 11) + b"\n"
    file.seek(0)
    file.write(b"\x93NUMPY\x01\x00" + (_NPY_HEADER_BYTES - 10).to_bytes(2, "little") + body)
