"""Reads what a checkpoint says, which may come from a stranger: what is wrong is refused in one line. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ..errors import CheckpointError
from ..placement import MOMENTS, STATE_PLANES, Formats
from ..store.manifest import ITEMSIZES, WEIGHT_DTYPES
from ..untrusted import BYTES_MAX, COUNT_MAX, Value, body_of, load_json, read_small_file, refuse, shown
from .manifest import (
    FORMAT,
    MANIFEST_BYTES_MAX,
    NAME,
    VERSION,
    WEIGHT,
    Checkpoint,
    FileEntry,
    Place,
    SavedParam,
    SavedTensor,
    plane_elements,
    planes_of,
)

FILES_MAX, PARAMS_MAX, DIMENSIONS_MAX, ALIASES_MAX = 1 << 16, 1 << 18, 32, 256
FILE_NAME = re.compile(r"(weights|state|tensors)-[0-9a-f]{8}-[0-9]{5}\.safetensors")
"""A name of ours, and so one without a directory."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """What the checkpoint in a directory says.

    Raises:
        CheckpointError: it is damaged, cut short, of another version, or contradicts itself; names the file.
        FileNotFoundError: there is none.
    """
    path = folder / NAME
    try:
        return decode(read_small_file(path, MANIFEST_BYTES_MAX))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def decode(data: bytes) -> Checkpoint:
    """The checkpoint that ``data`` tells of.

    Raises:
        CheckpointError: as :func:`read_checkpoint`, without the name of the file.
    """
    body = Value("", load_json(body_of(data, FORMAT, VERSION))).of_type(dict, "an object")
    known = (
        "step", "time", "rule", "precision", "state_format", "files", "params", "tensors", "model", "training",
    )  # fmt: skip
    for name in body.keys() ^ set(known):
        refuse(shown(name)[1:-1], "it is missing" if name in known else "no checkpoint has it")
    field = {name: Value(name, body[name]) for name in known}
    rule, precision = field["rule"].one_of((*MOMENTS,)), field["precision"].one_of((*WEIGHT_DTYPES,))
    known_formats: dict[str, Formats] = {
        of.state_format: of for of in STATE_PLANES if of[:2] == (rule, precision)
    }
    formats = known_formats[field["state_format"].one_of((*known_formats,))]
    files = field["files"].each(_file, FILES_MAX)
    rows = [_param(value, formats, files) for value in field["params"].elements(PARAMS_MAX)]
    params, places = tuple(param for param, _ in rows), tuple(found for _, found in rows)
    tensors = field["tensors"].each(lambda value: _tensor(value, files), PARAMS_MAX)
    for what, names in (
        ("files", [file.name for file in files]),
        ("params", [name for param in params for name in param.names]),
        ("tensors", [tensor.name for tensor in tensors]),
    ):
        if len(set(names)) != len(names):
            refuse(what, "a name occurs twice")
    found = Checkpoint(
        step=field["step"].whole(0, COUNT_MAX),
        time=field["time"].whole(0, COUNT_MAX),
        formats=formats,
        files=files,
        params=params,
        places=places,
        tensors=tensors,
        model=field["model"].of_type(dict, "an object"),
        training=field["training"].of_type(dict, "an object"),
    )
    _check_apart(found)
    return found


def _file(value: Value) -> FileEntry:
    name, size, header_bytes, crc32c = value.elements(4, 4)
    text, whole = name.text(), size.whole(0, BYTES_MAX)
    if not FILE_NAME.fullmatch(text):
        refuse(name.where, f"{shown(text)} is no name of a file of a checkpoint")
    return FileEntry(text, whole, header_bytes.whole(8, max(whole, 8)), crc32c.whole(0, (1 << 32) - 1))


def _param(
    value: Value, formats: Formats, files: Sequence[FileEntry]
) -> tuple[SavedParam, Mapping[str, Place]]:
    name, shape, stride, dtype, trainable, aliases, listed = value.elements(7, 7)
    sizes = _sizes(shape)
    steps = stride.wholes(BYTES_MAX, DIMENSIONS_MAX, len(sizes))
    param = SavedParam(
        name.text(),
        sizes,
        steps,
        dtype.one_of(ITEMSIZES),
        trainable.flag(),
        aliases.each(Value.text, ALIASES_MAX),
    )
    _check_dense(value, param)
    planes = planes_of(formats, param)
    if param.dtype != planes[WEIGHT]:
        refuse(dtype.where, f"trained weights are {planes[WEIGHT]} here, not {param.dtype}")
    found = {}
    for entry, (plane, kind) in zip(listed.elements(len(planes), len(planes)), planes.items(), strict=True):
        size = plane_elements(plane, param.numel) * ITEMSIZES[kind]
        found[plane] = _place(entry, size, files, may_be_absent=not param.trainable)
    return param, found


def _sizes(value: Value) -> tuple[int, ...]:
    sizes = value.wholes(BYTES_MAX, DIMENSIONS_MAX)
    if math.prod(sizes) > BYTES_MAX // 16:
        refuse(value.where, "no tensor has so many elements")
    return sizes


def _check_dense(value: Value, param: SavedParam) -> None:
    """Elements lie side by side: each size, by its stride, continues the one before."""
    expected = 1
    if param.numel == 0:
        return
    for step, size in sorted(zip(param.stride, param.shape, strict=True)):
        if size != 1 and step != expected:
            refuse(value.where, f"strides {list(param.stride)} do not fit shape {list(param.shape)}")
        expected *= size


def _tensor(value: Value, files: Sequence[FileEntry]) -> SavedTensor:
    name, shape, dtype, place = value.elements(4, 4)
    sizes, kind = _sizes(shape), dtype.one_of(ITEMSIZES)
    size = math.prod(sizes) * ITEMSIZES[kind]
    return SavedTensor(name.text(), sizes, kind, _place(place, size, files, may_be_absent=False))


def _place(value: Value, size: int, files: Sequence[FileEntry], *, may_be_absent: bool) -> Place:
    file, offset, crc32c = value.elements(3, 3)
    total = crc32c.whole(0, (1 << 32) - 1)
    if file.value is None and may_be_absent:
        return Place(None, offset.whole(0, 0), total)
    number, at = file.whole(0, len(files) - 1), offset.whole(0, BYTES_MAX)
    if at < files[number].header_bytes or at + size > files[number].size:
        refuse(value.where, f"bytes {at} to {at + size} are not in a file of {files[number].size}")
    return Place(number, at, total)


def _check_apart(checkpoint: Checkpoint) -> None:
    pieces = sorted(_pieces(checkpoint))
    for (file, offset, size), (other_file, other, _) in pairwise(pieces):
        if file == other_file and other < offset + size:
            refuse("params", f"two planes overlap at byte {other} of {checkpoint.files[file].name}")


def _pieces(checkpoint: Checkpoint) -> Iterator[tuple[int, int, int]]:
    for _, _, place, size in checkpoint.each():
        if size and place.file is not None:
            yield place.file, place.offset, size
    for tensor in checkpoint.tensors:
        if tensor.size and tensor.place.file is not None:
            yield tensor.place.file, tensor.place.offset, tensor.size
