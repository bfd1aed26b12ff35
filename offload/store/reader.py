"""Reads manifests that may come from a stranger: whatever is wrong is refused in one line. Pure, but for one file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ..bytesize import PAGE_BYTES
from ..errors import CheckpointError
from ..untrusted import BYTES_MAX, COUNT_MAX, HEAD_BYTES_MAX, Value, load_json, read_small_file, refuse, shown
from .layout import Extent, PlaneExtents, Stripes
from .manifest import (
    ITEMS_MAX,
    ITEMSIZES,
    MANIFEST_BYTES_MAX,
    FileEntry,
    ItemEntry,
    Manifest,
    ParamEntry,
    PlaneEntry,
    Shapes,
    UnitEntry,
    serial_of,
    text_of,
)

FILES_MAX, PLANES_MAX, DIMENSIONS_MAX = 64, 16, 32


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        CheckpointError: it is damaged, cut short, of another version, or contradicts itself; names the file.
        FileNotFoundError: there is none.
    """
    try:
        return decode(read_small_file(path, MANIFEST_BYTES_MAX))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_serial(path: Path) -> int:
    """The number of the commit whose manifest is in a file, by its first line. Raises as :func:`read_manifest`."""
    try:
        return serial_of(read_small_file(path, MANIFEST_BYTES_MAX, HEAD_BYTES_MAX))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def decode(data: bytes) -> Manifest:
    """The manifest in ``data``.

    Raises:
        CheckpointError: as :func:`read_manifest`, without the name of the file.
    """
    body = Value("", load_json(text_of(data))).of_type(dict, "an object")
    if body.get("serial") != serial_of(data):
        refuse("serial", "its two lines do not say the same")
    known = (
        "run", "serial", "step", "time", "files", "weight_dtype", "units", "planes", "plane_bytes", "weights",
        "states", "items", "training",
    )  # fmt: skip
    for name in body.keys() ^ set(known):
        refuse(name, "it is missing" if name in known else "no manifest has it")
    field = {name: Value(name, body[name]) for name in known}
    files = field["files"].each(_file, FILES_MAX)
    if not files or len({file.directory for file in files}) != len(files):
        refuse("files", "there is none, or one twice")
    shapes = _shapes(field)
    extents = _extents(field, shapes, files)
    return Manifest(
        run=field["run"].text(),
        serial=field["serial"].whole(1, COUNT_MAX),
        step=field["step"].whole(0, COUNT_MAX),
        time=field["time"].whole(0, COUNT_MAX),
        files=files,
        shapes=shapes,
        extents=extents,
        items=_items(field["items"], shapes, extents),
        training=field["training"].of_type(dict, "an object"),
    )


def _file(value: Value) -> FileEntry:
    directory, size = value.elements(2, 2)
    path = directory.text()
    if not path.startswith("/") or path.startswith("//") or os.path.normpath(path) != path:
        refuse(directory.where, f"{shown(path)} is not an absolute path without . and ..")
    return FileEntry(path, size.whole(0, BYTES_MAX))


# -- shapes -----------------------------------------------------------------------------------------------


def _shapes(field: dict[str, Value]) -> Shapes:
    weight_dtype = field["weight_dtype"].one_of(ITEMSIZES)
    units = field["units"].each(lambda value: _unit(value, weight_dtype), ITEMS_MAX)
    names = [name for unit in units for param in unit.params for name in (param.name, *param.aliases)]
    if len(set(names)) != len(names):
        refuse("units", "a parameter occurs twice")
    planes = field["planes"].each(_plane, PLANES_MAX)
    if len({plane.name for plane in planes}) != len(planes):
        refuse("planes", "a name occurs twice")
    chunks = sum(len(unit.chunk_ends) for unit in units)
    plane_bytes = field["plane_bytes"].each(
        lambda value: value.wholes(BYTES_MAX, PLANES_MAX, len(planes)), ITEMS_MAX, chunks
    )
    return Shapes(weight_dtype, units, planes, plane_bytes)


def _plane(value: Value) -> PlaneEntry:
    name, dtype = value.elements(2, 2)
    return PlaneEntry(name.text(), dtype.one_of(ITEMSIZES))


def _unit(value: Value, weight_dtype: str) -> UnitEntry:
    name, size, ends, listed = value.elements(4, 4)
    weight_bytes = size.whole(0, BYTES_MAX)
    chunk_ends = ends.wholes(BYTES_MAX, ITEMS_MAX)
    if any(end <= begin for begin, end in pairwise((0, *chunk_ends))):
        refuse(ends.where, "chunks do not follow each other")
    trained = (chunk_ends[-1] if chunk_ends else 0) * ITEMSIZES[weight_dtype]
    if trained > weight_bytes or weight_bytes % PAGE_BYTES:
        refuse(value.where, f"{weight_bytes} bytes do not hold {trained} of chunks and end on a page")
    if any(end * ITEMSIZES[weight_dtype] % PAGE_BYTES for end in chunk_ends):
        refuse(ends.where, "a chunk does not end on a page")
    params = listed.each(_param, ITEMS_MAX)
    _check_places(listed.where, params, weight_dtype, trained, weight_bytes)
    return UnitEntry(name.text(), weight_bytes, chunk_ends, params)


def _param(value: Value) -> ParamEntry:
    name, shape, stride, dtype, trainable, offset, aliases = value.elements(7, 7)
    sizes = shape.wholes(BYTES_MAX, DIMENSIONS_MAX)
    return ParamEntry(
        name.text(),
        sizes,
        stride.wholes(BYTES_MAX, DIMENSIONS_MAX, len(sizes)),
        dtype.one_of(ITEMSIZES),
        trainable.flag(),
        offset.whole(0, BYTES_MAX),
        aliases.each(Value.text, DIMENSIONS_MAX),
    )


def _check_places(
    where: str, params: Sequence[ParamEntry], weight_dtype: str, trained: int, weight_bytes: int
) -> None:
    """Parameters lie side by side, each in its part of the plane, and their elements in them."""
    ends = []
    for param in params:
        count, reach = math.prod(param.shape), 1
        for size, step in zip(param.shape, param.stride, strict=True):
            reach += (size - 1) * step if size else 0
        end = param.offset + count * ITEMSIZES[param.dtype]
        if count and reach != count:
            refuse(where, f"{param.name}: strides {list(param.stride)} do not fit shape {list(param.shape)}")
        if param.offset % ITEMSIZES[param.dtype]:
            refuse(where, f"{param.name}: offset {param.offset} is not a multiple of its elements' size")
        first, last = (0, trained) if param.trainable else (trained, weight_bytes)
        if not first <= param.offset <= end <= last:
            refuse(
                where,
                f"{param.name}: bytes {param.offset} to {shown(end)} lie outside its part of the plane",
            )
        if param.trainable and param.dtype != weight_dtype:
            refuse(where, f"{param.name}: trained weights are {weight_dtype}, not {param.dtype}")
        ends.append((param.offset, end, param.name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(entry for entry in ends if entry[0] < entry[1])):
        if begin < end:
            refuse(where, f"{name} and {other} overlap")


# -- extents ----------------------------------------------------------------------------------------------


def _extents(
    field: dict[str, Value], shapes: Shapes, files: Sequence[FileEntry]
) -> tuple[PlaneExtents, PlaneExtents]:
    itemsize = ITEMSIZES[shapes.weight_dtype]
    whole = [unit.weight_bytes for unit in shapes.units]
    trained = [unit.elements * itemsize for unit in shapes.units]
    state = [sum(sizes) for sizes in shapes.plane_bytes]
    weights = list(field["weights"].elements(2, 2))
    states = list(field["states"].elements(2, 2))
    first = PlaneExtents(_stripes(weights[0], [whole], files), _stripes(states[0], [state], files))
    second = PlaneExtents(_stripes(weights[1], [trained, whole], files), _stripes(states[1], [state], files))
    pieces = sorted(
        (extent.path, extent.offset, extent.size)
        for each in (first, second)
        for stripes in each.all
        for extent in stripes.extents
    )
    for (path, offset, size), (other_path, other, _) in pairwise(pieces):
        if path == other_path and other < offset + size:
            refuse("extents", f"two overlap at byte {other} of file {path}")
    return first, second


def _stripes(value: Value, sizes: Sequence[Sequence[int]], files: Sequence[FileEntry]) -> list[Stripes]:
    """One for each plane, each as large as one of ``sizes`` says."""
    found = []
    count = len(sizes[0])
    for index, plane in enumerate(value.elements(ITEMS_MAX, count)):
        numbers = plane.wholes(BYTES_MAX, 3 * FILES_MAX + 3)
        if len(numbers) % 3:
            refuse(plane.where, f"{len(numbers)} numbers are no extents")
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        stripes = Stripes(tuple(_extent(plane, files, *numbers) for numbers in triples))
        if all(stripes.size != each[index] for each in sizes):
            refuse(plane.where, f"{stripes.size} bytes of extents for {sizes[0][index]}")
        found.append(stripes)
    return found


def _extent(value: Value, files: Sequence[FileEntry], path: int, offset: int, size: int) -> Extent:
    if path >= len(files):
        refuse(value.where, f"file {path} of {len(files)}")
    if size == 0 or offset % PAGE_BYTES or size % PAGE_BYTES or offset + size > files[path].size:
        refuse(value.where, f"bytes {offset} to {offset + size} are no pages of a file of {files[path].size}")
    return Extent(path, offset, size)


def _items(value: Value, shapes: Shapes, extents: Sequence[PlaneExtents]) -> tuple[ItemEntry | None, ...]:
    numbered = shapes.items()
    values = iter(list(value.elements(ITEMS_MAX, len(numbered))))
    found: list[ItemEntry | None] = []
    for unit, items in enumerate(numbered.weights):
        for item in items:
            entry = _item(next(values), {item.end - item.begin})
            if entry is None:
                refuse("items", f"a part of the weights of {shapes.units[unit].name} was never written")
            if item.end > extents[entry.extent].weights[unit].size:
                refuse("items", f"{shapes.units[unit].name} has no such extent")
            found.append(entry)
    for sizes in shapes.plane_bytes:
        found.append(_item(next(values), {sizes[0] if sizes else 0, sum(sizes)}))
    return tuple(found)


def _item(value: Value, sizes: set[int]) -> ItemEntry | None:
    if value.value is None:
        return None
    extent, written, crc32c = value.wholes((1 << 63) - 1, 3, 3)
    if extent > 1 or written not in sizes or crc32c >> 32:
        refuse(value.where, f"extent {extent}, {written} bytes, crc32c {crc32c} are none that can be")
    return ItemEntry(extent, written, crc32c)
