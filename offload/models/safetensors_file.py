"""The safetensors format: headers read without torch, files written one tensor at a time.

A file is 8 bytes of header length, a JSON header ``name -> {dtype, shape, data_offsets}``, and the bytes. The
safetensors library can only write tensors that are all in memory; a model that is not needs the header
first, from the shapes alone, and then its tensors one after the other.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from ..bytesize import MiB, align_up
from ..errors import CheckpointError, ConfigError, TransferError

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES_MAX: Final = 100 * 1000 * 1000
"""The format's own limit."""
TENSORS_MAX: Final = 1 << 18
"""Of one file that is read."""
_WRITE_BYTES: Final = 64 * MiB

# The format's name of a type -> (torch's name, bytes of an element).
DTYPES: Final[dict[str, tuple[str, int]]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CODES: Final = {name: (code, size) for code, (name, size) in DTYPES.items()}


class TensorSpec(NamedTuple):
    """What a header says of one tensor. ``dtype`` as torch prints it, with or without ``torch.``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _code(self)[1]


def _code(spec: TensorSpec) -> tuple[str, int]:
    found = _CODES.get(str(spec.dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(
            f"{spec.name} is {spec.dtype}, which safetensors does not hold; convert it to bfloat16"
        )
    return found


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file: where its bytes lie."""

    spec: TensorSpec
    path: Path
    offset: int
    """From the start of the file."""
    size: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, in the order of their bytes. Every size is checked against the file's own
    size."""
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length > min(HEADER_BYTES_MAX, file_size - 8):
                raise CheckpointError(
                    f"{path} is no safetensors file: a header of {length} bytes in a file of {file_size}; "
                    f"copy it again (an unfinished download, or a git-lfs pointer, looks like this)"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        if len(header) > TENSORS_MAX:
            raise ValueError(f"it has {len(header)} entries, and no file has more than {TENSORS_MAX}")
        header.pop("__metadata__", None)
        entries = [_entry(name, value, path, 8 + length, file_size) for name, value in header.items()]
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a broken header: {str(error)[:200]}; copy the file again"
        ) from error
    entries.sort(key=lambda entry: entry.offset)
    for before, after in pairwise(entries):
        if before.offset + before.size > after.offset:
            raise CheckpointError(
                f"{path} has a broken header: {before.spec.name} and {after.spec.name} overlap"
            )
    return {entry.spec.name: entry for entry in entries}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, value: Any, path: Path, data_start: int, file_size: int) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ValueError(f"{name!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name!r} has dtype {code!r}, which is not supported")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise ValueError(f"{name!r} has a shape or offsets that are no lists of counts")
    begin, end = offsets
    torch_name, item_size = DTYPES[code]
    if not begin <= end <= file_size - data_start:
        raise ValueError(f"{name!r} ends at byte {end} of {file_size - data_start}")
    if math.prod(shape) * item_size != end - begin:
        raise ValueError(
            f"{name!r} has {end - begin} bytes, its shape {shape} of {torch_name} needs another number"
        )
    return TensorEntry(TensorSpec(name, tuple(shape), torch_name), path, data_start + begin, end - begin)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def read_tensor(entry: TensorEntry) -> Tensor:
    """A tensor of its own memory with the entry's bytes."""
    # Read, not mapped: a mapped tensor would change when the file is replaced, kill the process when it is
    # cut short, and count as memory of ours for as long as any tensor of the same file lives.
    import torch

    tensor = torch.empty(entry.spec.shape, dtype=getattr(torch, entry.spec.dtype))
    if entry.size == 0:
        return tensor
    target = tensor.reshape(-1).view(torch.uint8).numpy().data
    done = 0
    try:
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while done < entry.size:
                got = file.readinto(target[done:])
                if not got:
                    raise OSError(errno.EIO, "the file ended")
                done += got
    except OSError as error:
        raise TransferError(
            error.errno or errno.EIO,
            "read",
            str(entry.path),
            offset=entry.offset,
            size=entry.size,
            done=done,
            hint="the file changed since it was opened" if "ended" in str(error) else "",
        ) from error
    return tensor


class FileLayout(NamedTuple):
    """Where the tensors of one file lie."""

    header: bytes
    """All that comes before the first tensor."""
    specs: list[TensorSpec]
    """In the order of their bytes."""
    offsets: list[int]
    """Of each, from the start of the file."""
    size: int
    """Of the whole file."""


def lay_out(
    specs: Sequence[TensorSpec], *, aliases: Mapping[str, str] | None = None, page_bytes: int = 8
) -> FileLayout:
    """One file's header, and the places of its tensors.

    Wide elements come first, so that each tensor is aligned to its element: readers that map the file need that.

    Args:
        aliases: names that a model has for tensors of other names, as ``safetensors.torch.save_model`` notes them.
        page_bytes: the first tensor begins at a multiple of it, and those that are whole pages come first.

    Raises:
        ConfigError: a type that the format does not have, or more tensors than a header holds.
    """
    ordered = sorted(
        specs, key=lambda spec: (page_bytes > 8 and spec.num_bytes % page_bytes != 0, -_code(spec)[1])
    )
    about = {"format": "pt", **(aliases or {})}  # transformers refuses a file without a format
    header: dict[str, Any] = {"__metadata__": about}
    offsets = [0]
    for spec in ordered:
        end = offsets[-1] + spec.num_bytes
        header[spec.name] = {
            "dtype": _code(spec)[0],
            "shape": list(spec.shape),
            "data_offsets": [offsets[-1], end],
        }
        offsets.append(end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align_up(8 + len(text), page_bytes) - 8)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(
            f"{len(ordered)} tensors need a header of {len(text)} bytes; use a smaller shard_bytes"
        )
    *begins, end = (8 + len(text) + offset for offset in offsets)
    return FileLayout(len(text).to_bytes(8, "little") + text, ordered, begins, end)


def write_file(
    path: Path,
    specs: Sequence[TensorSpec],
    fetch: Callable[[str], Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Writes one file and flushes it to the disk, holding one tensor at a time.

    ``fetch`` is called once per spec and must return exactly that shape and dtype. ``aliases``: see
    :func:`lay_out`.
    """
    layout = lay_out(specs, aliases=aliases)
    done = 0
    try:
        with path.open("xb") as file:
            file.write(layout.header)
            for spec in layout.specs:
                done += _write_tensor(file, spec, fetch(spec.name))
            file.flush()
            os.fsync(file.fileno())
    except TransferError:
        raise
    except OSError as error:
        raise TransferError(
            error.errno or errno.EIO,
            "write",
            str(path),
            offset=len(layout.header) + done,
            size=layout.size - len(layout.header),
            done=done,
            hint="free space or give another directory" if error.errno == errno.ENOSPC else "",
        ) from error


def _write_tensor(file: BinaryIO, spec: TensorSpec, tensor: Tensor) -> int:
    import torch

    dtype = str(spec.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{dtype}":
        raise ConfigError(
            f"{spec.name} was announced as {dtype} {spec.shape} and is {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.is_meta:
        raise ConfigError(f"{spec.name} is on the meta device and has no values to write")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    for start in range(0, len(data), _WRITE_BYTES):
        file.write(data[start : start + _WRITE_BYTES])
    return len(data)
