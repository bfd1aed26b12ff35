"""Reads manifests that may come from a stranger: whatever is wrong is refused in one line. Pure, but for one file."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..bytesize import PAGE_BYTES, MiB, format_bytes
from ..errors import CheckpointError
from .layout import Extent, PlaneExtents, Stripes
from .manifest import (
    HEAD_BYTES_MAX,
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
    body_of,
    serial_of,
)

T = TypeVar("T")

BYTES_MAX = 1 << 56
"""Of one file, plane or tensor: more than a file system holds, and sums of some cannot overflow 63 bits."""
COUNT_MAX = (1 << 53) - 1
FILES_MAX, PLANES_MAX, DIMENSIONS_MAX, TEXT_MAX = 64, 16, 32, 4096


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


def read_small_file(path: Path, size_max: int, wanted: int | None = None) -> bytes:
    """The bytes of a regular file, or the first of them; no link is followed.

    Raises:
        CheckpointError: it is something else, or too large.
        FileNotFoundError: there is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"cannot be read: {what}") from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError("it is not a regular file")
        if about.st_size > size_max:
            raise CheckpointError(
                f"it has {format_bytes(about.st_size)}, and nothing of its kind has more than {format_bytes(size_max)}"
            )
        return _read_all(fd, size_max if wanted is None else wanted)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


def _read_all(fd: int, size_max: int) -> bytes:
    pieces = []
    while size_max > 0 and (piece := os.read(fd, min(size_max, MiB))):
        pieces.append(piece)
        size_max -= len(piece)
    return b"".join(pieces)


def decode(data: bytes) -> Manifest:
    """The manifest in ``data``.

    Raises:
        CheckpointError: as :func:`read_manifest`, without the name of the file.
    """
    body = _Value("", load_json(body_of(data))).of_type(dict, "an object")
    if body.get("serial") != serial_of(data):
        _refuse("serial", "its two lines do not say the same")
    known = (
        "run", "serial", "step", "time", "files", "weight_dtype", "units", "planes", "plane_bytes", "weights",
        "states", "items", "training",
    )  # fmt: skip
    for name in body.keys() ^ set(known):
        _refuse(name, "it is missing" if name in known else "no manifest has it")
    field = {name: _Value(name, body[name]) for name in known}
    files = field["files"].each(_file, FILES_MAX)
    if not files or len({file.directory for file in files}) != len(files):
        _refuse("files", "there is none, or one twice")
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


def load_json(text: bytes) -> Any:
    """JSON without what JSON does not have (NaN, and names that occur twice).

    Raises:
        CheckpointError: it is none.
    """

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {' '.join(str(error).split())[:200]}") from None


def _refuse(where: str, what: str) -> NoReturn:
    raise CheckpointError(f"{where}: {what}")


class _Value:
    """A value of the JSON; where it stands is put into words only where it is refused."""

    __slots__ = ("_key", "_outer", "value")

    def __init__(self, key: str | int, value: Any, outer: _Value | None = None) -> None:
        self._key, self.value, self._outer = key, value, outer

    @property
    def where(self) -> str:
        return str(self._key) if self._outer is None else f"{self._outer.where}[{self._key}]"

    def of_type(self, kind: type[T], name: str) -> T:
        if type(self.value) is not kind:
            _refuse(self.where or "the manifest", f"{name} belongs here, not {_shown(self.value)}")
        return self.value

    def whole(self, least: int, most: int) -> int:
        number = self.of_type(int, "a whole number")
        if not least <= number <= most:
            _refuse(self.where, f"{_shown(number)} is not from {least} to {most}")
        return number

    def text(self) -> str:
        text = self.of_type(str, "text")
        if not text or len(text) > TEXT_MAX or not text.isprintable():
            _refuse(self.where, f"{_shown(text)} is empty, too long, or cannot be printed")
        return text

    def flag(self) -> bool:
        return self.of_type(bool, "true or false")

    def one_of(self, known: Sequence[str] | dict[str, int]) -> str:
        text = self.text()
        if text not in known:
            _refuse(self.where, f"{_shown(text)} is not known")
        return text

    def elements(self, count_max: int, count: int | None = None) -> Iterator[_Value]:
        values = self.of_type(list, "a list")
        if len(values) > count_max or (count is not None and len(values) != count):
            wanted = f"at most {count_max}" if count is None else str(count)
            _refuse(self.where, f"{len(values)} entries where {wanted} belong")
        return (_Value(index, value, self) for index, value in enumerate(values))

    def each(self, read: Callable[[_Value], T], count_max: int, count: int | None = None) -> tuple[T, ...]:
        return tuple(read(value) for value in self.elements(count_max, count))

    def wholes(self, most: int, count_max: int, count: int | None = None) -> tuple[int, ...]:
        values = self.of_type(list, "a list")
        fits = len(values) <= count_max if count is None else len(values) == count
        if fits and {*map(type, values)} == {int} and min(values) >= 0 and max(values) <= most:
            return tuple(values)  # the usual case, of which there are many
        return self.each(lambda value: value.whole(0, most), count_max, count)


def _shown(value: Any) -> str:
    text = (
        ascii(value) if isinstance(value, (str, int, float)) and not _is_huge(value) else type(value).__name__
    )
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >> 256 != 0


def _file(value: _Value) -> FileEntry:
    directory, size = value.elements(2, 2)
    path = directory.text()
    if not path.startswith("/") or path.startswith("//") or os.path.normpath(path) != path:
        _refuse(directory.where, f"{_shown(path)} is not an absolute path without . and ..")
    return FileEntry(path, size.whole(0, BYTES_MAX))


# -- shapes -----------------------------------------------------------------------------------------------


def _shapes(field: dict[str, _Value]) -> Shapes:
    weight_dtype = field["weight_dtype"].one_of(ITEMSIZES)
    units = field["units"].each(lambda value: _unit(value, weight_dtype), ITEMS_MAX)
    names = [name for unit in units for param in unit.params for name in (param.name, *param.aliases)]
    if len(set(names)) != len(names):
        _refuse("units", "a parameter occurs twice")
    planes = field["planes"].each(_plane, PLANES_MAX)
    if len({plane.name for plane in planes}) != len(planes):
        _refuse("planes", "a name occurs twice")
    chunks = sum(len(unit.chunk_ends) for unit in units)
    plane_bytes = field["plane_bytes"].each(
        lambda value: value.wholes(BYTES_MAX, PLANES_MAX, len(planes)), ITEMS_MAX, chunks
    )
    return Shapes(weight_dtype, units, planes, plane_bytes)


def _plane(value: _Value) -> PlaneEntry:
    name, dtype = value.elements(2, 2)
    return PlaneEntry(name.text(), dtype.one_of(ITEMSIZES))


def _unit(value: _Value, weight_dtype: str) -> UnitEntry:
    name, size, ends, listed = value.elements(4, 4)
    weight_bytes = size.whole(0, BYTES_MAX)
    chunk_ends = ends.wholes(BYTES_MAX, ITEMS_MAX)
    if any(end <= begin for begin, end in pairwise((0, *chunk_ends))):
        _refuse(ends.where, "chunks do not follow each other")
    trained = (chunk_ends[-1] if chunk_ends else 0) * ITEMSIZES[weight_dtype]
    if trained > weight_bytes or weight_bytes % PAGE_BYTES:
        _refuse(value.where, f"{weight_bytes} bytes do not hold {trained} of chunks and end on a page")
    if any(end * ITEMSIZES[weight_dtype] % PAGE_BYTES for end in chunk_ends):
        _refuse(ends.where, "a chunk does not end on a page")
    params = listed.each(_param, ITEMS_MAX)
    _check_places(listed.where, params, weight_dtype, trained, weight_bytes)
    return UnitEntry(name.text(), weight_bytes, chunk_ends, params)


def _param(value: _Value) -> ParamEntry:
    name, shape, stride, dtype, trainable, offset, aliases = value.elements(7, 7)
    sizes = shape.wholes(BYTES_MAX, DIMENSIONS_MAX)
    return ParamEntry(
        name.text(),
        sizes,
        stride.wholes(BYTES_MAX, DIMENSIONS_MAX, len(sizes)),
        dtype.one_of(ITEMSIZES),
        trainable.flag(),
        offset.whole(0, BYTES_MAX),
        aliases.each(_Value.text, DIMENSIONS_MAX),
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
            _refuse(where, f"{param.name}: strides {list(param.stride)} do not fit shape {list(param.shape)}")
        if param.offset % ITEMSIZES[param.dtype]:
            _refuse(where, f"{param.name}: offset {param.offset} is not a multiple of its elements' size")
        first, last = (0, trained) if param.trainable else (trained, weight_bytes)
        if not first <= param.offset <= end <= last:
            _refuse(
                where,
                f"{param.name}: bytes {param.offset} to {_shown(end)} lie outside its part of the plane",
            )
        if param.trainable and param.dtype != weight_dtype:
            _refuse(where, f"{param.name}: trained weights are {weight_dtype}, not {param.dtype}")
        ends.append((param.offset, end, param.name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(entry for entry in ends if entry[0] < entry[1])):
        if begin < end:
            _refuse(where, f"{name} and {other} overlap")


# -- extents ----------------------------------------------------------------------------------------------


def _extents(
    field: dict[str, _Value], shapes: Shapes, files: Sequence[FileEntry]
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
            _refuse("extents", f"two overlap at byte {other} of file {path}")
    return first, second


def _stripes(value: _Value, sizes: Sequence[Sequence[int]], files: Sequence[FileEntry]) -> list[Stripes]:
    """One for each plane, each as large as one of ``sizes`` says."""
    found = []
    count = len(sizes[0])
    for index, plane in enumerate(value.elements(ITEMS_MAX, count)):
        numbers = plane.wholes(BYTES_MAX, 3 * FILES_MAX + 3)
        if len(numbers) % 3:
            _refuse(plane.where, f"{len(numbers)} numbers are no extents")
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        stripes = Stripes(tuple(_extent(plane, files, *numbers) for numbers in triples))
        if all(stripes.size != each[index] for each in sizes):
            _refuse(plane.where, f"{stripes.size} bytes of extents for {sizes[0][index]}")
        found.append(stripes)
    return found


def _extent(value: _Value, files: Sequence[FileEntry], path: int, offset: int, size: int) -> Extent:
    if path >= len(files):
        _refuse(value.where, f"file {path} of {len(files)}")
    if size == 0 or offset % PAGE_BYTES or size % PAGE_BYTES or offset + size > files[path].size:
        _refuse(
            value.where, f"bytes {offset} to {offset + size} are no pages of a file of {files[path].size}"
        )
    return Extent(path, offset, size)


def _items(value: _Value, shapes: Shapes, extents: Sequence[PlaneExtents]) -> tuple[ItemEntry | None, ...]:
    numbered = shapes.items()
    values = iter(list(value.elements(ITEMS_MAX, len(numbered))))
    found: list[ItemEntry | None] = []
    for unit, items in enumerate(numbered.weights):
        for item in items:
            entry = _item(next(values), {item.end - item.begin})
            if entry is None:
                _refuse("items", f"a part of the weights of {shapes.units[unit].name} was never written")
            if item.end > extents[entry.extent].weights[unit].size:
                _refuse("items", f"{shapes.units[unit].name} has no such extent")
            found.append(entry)
    for sizes in shapes.plane_bytes:
        found.append(_item(next(values), {sizes[0] if sizes else 0, sum(sizes)}))
    return tuple(found)


def _item(value: _Value, sizes: set[int]) -> ItemEntry | None:
    if value.value is None:
        return None
    extent, written, crc32c = value.wholes((1 << 63) - 1, 3, 3)
    if extent > 1 or written not in sizes or crc32c >> 32:
        _refuse(value.where, f"extent {extent}, {written} bytes, crc32c {crc32c} are none that can be")
    return ItemEntry(extent, written, crc32c)
