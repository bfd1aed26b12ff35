"""What a portable checkpoint says of itself. Pure: no torch, no files.

Note [Checkpoint]
A directory with `checkpoint.json` and safetensors files: weights under the model's own names, and of what is trained
the planes of its state (`NAME.exp_avg`, ...), each parameter by itself, so that nothing of a placement, a chunk or a
rank shows. Elements lie in the order in which they lie in memory: of a tensor that is not contiguous the file has the
permuted shape. `checkpoint.json` (two lines, as `untrusted.seal` makes them) names every file, and of every plane
its place and CRC-32C: whoever loads needs no other header. The safetensors headers are for other programs.
A frozen weight may be left out: then its CRC-32C is there, to know the right base by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..bytesize import MiB, format_bytes
from ..errors import CheckpointError
from ..placement import STATE_PLANES, Formats, in_plane
from ..store.manifest import ITEMSIZES, WEIGHT_DTYPES
from ..untrusted import seal

NAME = "checkpoint.json"
FORMAT, VERSION = "offload checkpoint", 1
MANIFEST_BYTES_MAX = 64 * MiB
WEIGHT = "weight"

_MOMENT_DTYPES = {1: "int8", 2: "bfloat16", 4: "float32"}
_DTYPES = {
    "residual": {1: "int8", 2: "int16"},
    "exp_avg_sq": {**_MOMENT_DTYPES, 1: "uint8"},
    "scale": {8: "float32"},
}
"""Of state planes, by bytes per element, where they are not as other moments; a scale has two numbers to a block."""


def state_dtypes(formats: Formats) -> dict[str, str]:
    """The state planes of what is trained, and the types of their elements."""
    return {
        spec.name: _DTYPES.get(spec.name, _MOMENT_DTYPES)[spec.itemsize] for spec in STATE_PLANES[formats]
    }


def plane_elements(plane: str, numel: int) -> int:
    """How many elements the plane of a parameter has."""
    return in_plane(plane, 0, numel)[1]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One safetensors file."""

    name: str
    size: int
    header_bytes: int
    header_crc32c: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one plane of a parameter lies, and the sum of its bytes."""

    file: int | None
    """None where it was left out."""
    offset: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of its elements in the files, in elements."""
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]
    """Other names that it has in the model."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Its sizes in the order in which its elements lie."""
        order = sorted(range(len(self.shape)), key=lambda axis: (-self.stride[axis], axis))
        return tuple(self.shape[axis] for axis in order)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that is no parameter: a buffer, or what else a run needs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: Place

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """See Note [Checkpoint]."""

    step: int
    time: int
    """Seconds since 1970."""
    formats: Formats
    files: tuple[FileEntry, ...]
    params: tuple[SavedParam, ...]
    places: tuple[Mapping[str, Place], ...]
    """Of each parameter, by plane, in the order of :meth:`planes`."""
    tensors: tuple[SavedTensor, ...]
    model: dict[str, Any]
    """The configuration of the model, where it has one that is JSON."""
    training: dict[str, Any]
    """JSON of whoever trains."""

    def planes(self, param: SavedParam) -> dict[str, str]:
        """The planes of a parameter and the types of their elements."""
        return planes_of(self.formats, param)

    def each(self) -> Iterator[tuple[SavedParam, str, Place, int]]:
        """Every plane of every parameter that was not left out: whose, which, where, and its bytes."""
        for param, places in zip(self.params, self.places, strict=True):
            for plane, dtype in self.planes(param).items():
                if places[plane].file is not None:
                    size = plane_elements(plane, param.numel) * ITEMSIZES[dtype]
                    yield param, plane, places[plane], size

    @property
    def bytes_total(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """The file.

        Raises:
            CheckpointError: it would be larger than one may be.
        """
        body = {
            "step": self.step,
            "time": self.time,
            **self.formats._asdict(),
            "files": [[file.name, file.size, file.header_bytes, file.header_crc32c] for file in self.files],
            "params": [
                [
                    *(param.name, param.shape, param.stride, param.dtype, param.trainable, param.aliases),
                    [_place_list(places[plane]) for plane in self.planes(param)],
                ]
                for param, places in zip(self.params, self.places, strict=True)
            ],
            "tensors": [
                [tensor.name, tensor.shape, tensor.dtype, _place_list(tensor.place)]
                for tensor in self.tensors
            ],
            "model": self.model,
            "training": self.training,
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        encoded = seal(text, format=FORMAT, version=VERSION)
        if len(encoded) > MANIFEST_BYTES_MAX:
            raise CheckpointError(
                f"what a checkpoint says of {len(self.params)} parameters takes {format_bytes(len(encoded))}, and it"
                f" may take {format_bytes(MANIFEST_BYTES_MAX)}; keep client_state small"
            )
        return encoded


def planes_of(formats: Formats, param: SavedParam) -> dict[str, str]:
    """The planes of a parameter, its weight first, and the types of their elements."""
    if not param.trainable:
        return {WEIGHT: param.dtype}
    return {WEIGHT: WEIGHT_DTYPES[formats.precision], **state_dtypes(formats)}


def _place_list(place: Place) -> list[int | None]:
    return [place.file, place.offset, place.crc32c]
