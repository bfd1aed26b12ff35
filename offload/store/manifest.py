"""What a commit says: everything that is needed to read a store without its model. Pure: no torch, no files.

Note [Manifest]
A manifest is two lines of JSON: what it is, with its number and the size and SHA-256 of the second; and the shapes and
places of all parameters, chunks and planes, the files, two generations of extents, and of each item (in the order of
`layout.Items`) the extent that is current, how many of its bytes were written, and their CRC-32C. It may come from a
stranger: it is held against itself before anybody uses a number of it (`reader`), and nothing is allocated by what
it says. Optimizer state of which nothing is written is zeros.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..bytesize import MiB, format_bytes
from ..errors import CheckpointError, StoreError
from ..plan import MemoryPlan
from ..untrusted import body_of, head_of, seal
from .layout import Items, PlaneExtents, Stripes, state_planes

FORMAT, VERSION = "offload swap store", 1
MANIFEST_BYTES_MAX = 32 * MiB
ITEMS_MAX = 1 << 18
"""Of weights and states together: what a manifest of that size holds."""

ITEMSIZES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip
"""Bytes per element of the types of parameters and planes, by torch's name."""
WEIGHT_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Of trained weights, by precision of training."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The swap file on one path."""

    directory: str
    size: int


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """One parameter, and where it lies in its unit's weight plane."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of its elements in the plane, in elements."""
    dtype: str
    trainable: bool
    offset: int
    """In bytes."""
    aliases: tuple[str, ...] = ()
    """Other names that it has in the model."""

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class UnitEntry:
    """One unit: its parameters and chunks."""

    name: str
    weight_bytes: int
    chunk_ends: tuple[int, ...]
    """Of its chunks, in elements; the last is the length of its trainable region."""
    params: tuple[ParamEntry, ...]

    @property
    def elements(self) -> int:
        return self.chunk_ends[-1] if self.chunk_ends else 0


@dataclass(frozen=True, slots=True)
class PlaneEntry:
    """One state plane: what lies side by side in a chunk's extent."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is stored, without where. Two stores with the same shapes can read each other's bytes."""

    weight_dtype: str
    """Of everything that is trained."""
    units: tuple[UnitEntry, ...]
    planes: tuple[PlaneEntry, ...]
    plane_bytes: tuple[tuple[int, ...], ...]
    """Of each chunk, the bytes of each plane."""

    def items(self) -> Items:
        """All items, numbered."""
        itemsize = ITEMSIZES[self.weight_dtype]
        cuts = (
            sorted({0, *(end * itemsize for end in unit.chunk_ends), unit.weight_bytes})
            for unit in self.units
        )
        return Items(cuts, map(sum, self.plane_bytes))

    def chunk(self, number: int) -> tuple[UnitEntry, int, int]:
        """A chunk's unit, and where it begins and ends there, in elements."""
        for unit in self.units:
            if number < len(unit.chunk_ends):
                return unit, (0, *unit.chunk_ends)[number], unit.chunk_ends[number]
            number -= len(unit.chunk_ends)
        raise AssertionError("there is no such chunk")

    def difference(self, other: Shapes) -> str:
        """What differs first, in words; empty where nothing does."""
        if self.weight_dtype != other.weight_dtype:
            return f"weights are {self.weight_dtype} there and {other.weight_dtype} here"
        theirs, ours = (
            {param.name: param for unit in each.units for param in unit.params} for each in (self, other)
        )
        if len(theirs) != len(ours):
            only = min(theirs.keys() ^ ours.keys())
            return f"{len(theirs)} parameters there and {len(ours)} here, where {only} is on one side only"
        for name, here in ours.items():
            there = theirs.get(name)
            if there is None:
                return f"{_describe(here)} here, and none of that name there"
            if _describe(there) != _describe(here):
                return f"{_describe(there)} there, {_describe(here)} here"
        for name, here in ours.items():
            if theirs[name] != here:
                return f"{name} lies in another place or order, or has other names, there"
        if self.planes != other.planes:
            names = (
                ", ".join(f"{plane.name} {plane.dtype}" for plane in each.planes) for each in (self, other)
            )
            return "optimizer state is {} there and {} here".format(*names)
        return "" if self == other else "units or chunks are cut in another way there"


def _describe(param: ParamEntry) -> str:
    frozen = "" if param.trainable else ", frozen"
    return f"{param.name} {list(param.shape)} {param.dtype}{frozen}"


@dataclass(frozen=True, slots=True)
class ItemEntry:
    """What the commit has of one item."""

    extent: int
    """Which generation of its extents."""
    written: int
    """Bytes from its begin."""
    crc32c: int
    """Of these bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """See Note [Manifest]."""

    run: str
    """A name that no other run has."""
    serial: int
    """Counts the commits of a run, from 1."""
    step: int
    time: int
    """Seconds since 1970."""
    files: tuple[FileEntry, ...]
    shapes: Shapes
    extents: tuple[PlaneExtents, PlaneExtents]
    items: tuple[ItemEntry | None, ...]
    """None of what was never written."""
    training: dict[str, Any] = field(default_factory=dict)
    """JSON of whoever trains: hyper-parameters, schedulers, random numbers, the place in the data."""

    def encode(self) -> bytes:
        """The file.

        Raises:
            StoreError: it would be larger than one may be.
        """
        body = {
            "run": self.run,
            "serial": self.serial,
            "step": self.step,
            "time": self.time,
            "files": [[file.directory, file.size] for file in self.files],
            "weight_dtype": self.shapes.weight_dtype,
            "units": [_unit_list(unit) for unit in self.shapes.units],
            "planes": [[plane.name, plane.dtype] for plane in self.shapes.planes],
            "plane_bytes": self.shapes.plane_bytes,
            "weights": [_extent_lists(extents.weights) for extents in self.extents],
            "states": [_extent_lists(extents.states) for extents in self.extents],
            "items": [item and [item.extent, item.written, item.crc32c] for item in self.items],
            "training": self.training,
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        encoded = seal(text, format=FORMAT, version=VERSION, serial=self.serial)
        if len(encoded) > MANIFEST_BYTES_MAX:
            raise StoreError(
                errno.EFBIG,
                f"a commit of {len(self.items)} items takes {format_bytes(len(text))}, and a manifest holds"
                f" {format_bytes(MANIFEST_BYTES_MAX)}; give zero_optimization.sub_group_size a larger value",
            )
        return encoded


@dataclass(frozen=True, slots=True)
class ParamDetail:
    """What a plan does not know of a parameter."""

    dtype: str
    stride: tuple[int, ...]
    aliases: tuple[str, ...] = ()


def shapes_of(plan: MemoryPlan, params: Mapping[str, ParamDetail], plane_dtypes: Mapping[str, str]) -> Shapes:
    """What a plan stores."""
    units = []
    for unit, layout in enumerate(plan.inventory.units):
        entries = []
        for placed in layout.params:
            info, more = placed.info, params[placed.info.name]
            entries.append(
                ParamEntry(
                    info.name,
                    info.shape,
                    more.stride,
                    more.dtype,
                    info.trainable,
                    placed.offset,
                    more.aliases,
                )
            )
        ends = tuple(chunk.end for chunk in plan.chunks_of[unit])
        units.append(UnitEntry(layout.name, layout.weight_bytes, ends, tuple(entries)))
    planes = tuple(PlaneEntry(plane.name, plane_dtypes[plane.name]) for plane in plan.placement.state_planes)
    sizes = tuple(tuple(size for _, size in state_planes(plan, chunk)) for chunk in plan.chunks)
    return Shapes(WEIGHT_DTYPES[plan.placement.precision], tuple(units), planes, sizes)


def serial_of(data: bytes) -> int:
    """The number that the first line of a manifest says.

    Raises:
        CheckpointError: it is no such line.
    """
    serial = head_of(data, FORMAT, VERSION)[0].get("serial")
    if type(serial) is not int or serial < 1:
        raise CheckpointError("its first line is damaged")
    return serial


def text_of(data: bytes) -> bytes:
    """The second line of a manifest, when it is whole.

    Raises:
        CheckpointError: it is not.
    """
    return body_of(data, FORMAT, VERSION)


def _unit_list(unit: UnitEntry) -> list[Any]:
    params = [
        [param.name, param.shape, param.stride, param.dtype, param.trainable, param.offset, param.aliases]
        for param in unit.params
    ]
    return [unit.name, unit.weight_bytes, unit.chunk_ends, params]


def _extent_lists(planes: Iterable[Stripes]) -> list[list[int]]:
    """Path, offset and size of each extent, flat: there are many."""
    return [
        [number for extent in stripes.extents for number in (extent.path, extent.offset, extent.size)]
        for stripes in planes
    ]
