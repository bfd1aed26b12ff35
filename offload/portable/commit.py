"""The values in a swap store's last commit, by parameter: of a run that has ended, and without its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..placement import STATE_BLOCK, STATE_PLANES, Formats, in_plane
from ..store.committed import CommittedFiles
from ..store.directory import SwapDirectory
from ..store.layout import Item, PlaneKind
from ..store.manifest import ITEMSIZES, WEIGHT_DTYPES, Manifest, ParamEntry, Shapes
from ..store.tensors import Tensors
from .manifest import WEIGHT, SavedParam, planes_of, state_dtypes
from .saved import torch_dtype


def formats_of(shapes: Shapes) -> Formats:
    """The formats of what is stored.

    Raises:
        CheckpointError: they are none of ours, or the planes of a chunk are not as long as it says.
    """
    formats = _formats_of(shapes)
    specs = STATE_PLANES[formats]
    number = 0
    for unit in shapes.units:
        for begin, end in pairwise((0, *unit.chunk_ends)):
            sizes = [*zip(specs, shapes.plane_bytes[number], strict=True)]
            fits = all(spec.size_bytes(end - begin) == size for spec, size in sizes[:-1])
            if not fits or any(spec.size_bytes(end - begin) > size for spec, size in sizes[-1:]):
                raise CheckpointError(
                    f"chunk {number} has planes of {list(shapes.plane_bytes[number])} bytes for {end - begin} elements"
                )
            number += 1
        if formats.state_format == "int8" and any(
            param.offset // ITEMSIZES[shapes.weight_dtype] % STATE_BLOCK
            for param in unit.params
            if param.trainable
        ):
            raise CheckpointError(
                f"{unit.name}: a parameter does not begin where a block of 8-bit moments does"
            )
    return formats


def _formats_of(shapes: Shapes) -> Formats:
    found = [(plane.name, plane.dtype) for plane in shapes.planes]
    for formats in STATE_PLANES:
        is_weight = WEIGHT_DTYPES[formats.precision] == shapes.weight_dtype
        if is_weight and [*state_dtypes(formats).items()] == found:
            return formats
    names = ", ".join(f"{name} {dtype}" for name, dtype in found)
    raise CheckpointError(
        f"weights of {shapes.weight_dtype} with state of {names} are no format that is known"
    )


def units_of(manifest: Manifest) -> list[list[SavedParam]]:
    """All parameters, unit by unit."""
    return [
        [
            SavedParam(param.name, param.shape, param.stride, param.dtype, param.trainable, param.aliases)
            for param in unit.params
        ]
        for unit in manifest.shapes.units
    ]


def params_of(manifest: Manifest) -> list[SavedParam]:
    """All parameters, in the order of :func:`units_of`."""
    return [*chain.from_iterable(units_of(manifest))]


class CommitFiles:
    """The last commit in a swap directory, locked: nobody goes on from it meanwhile. One chunk of it is in memory."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            StoreError: it is no swap directory, or its run goes on.
            CheckpointError: it holds no commit, or one that cannot be understood.
        """
        self.where = directory
        with ExitStack() as stack:
            owned = SwapDirectory.take(directory)
            stack.callback(owned.release)
            self._files = stack.enter_context(CommittedFiles(directory))
            self.manifest = manifest = self._files.manifest
            self._tensors = Tensors(directory, manifest.training.get("tensors"))
            try:
                self.formats = formats_of(manifest.shapes)
            except CheckpointError as error:
                raise CheckpointError(f"{directory}: {error}") from None
            self._stack = stack.pop_all()
        self.step = manifest.step
        self.params: Sequence[SavedParam] = params_of(manifest)
        state = manifest.training.get("state")
        self.training: dict[str, Any] = state if isinstance(state, dict) else {}
        self.model: dict[str, object] = {}
        self._items = manifest.shapes.items()
        self._entries: dict[str, tuple[int, ParamEntry]] = {}
        self._chunks: list[list[tuple[int, int, int]]] = []  # of each unit: number, begin, end
        number = 0
        for index, unit in enumerate(manifest.shapes.units):
            self._entries.update((param.name, (index, param)) for param in unit.params)
            ends = (0, *unit.chunk_ends)
            self._chunks.append([(number + at, ends[at], ends[at + 1]) for at in range(len(unit.chunk_ends))])
            number += len(unit.chunk_ends)
        self._last: dict[PlaneKind, tuple[Item, torch.Tensor]] = {}

    def planes(self, param: SavedParam) -> Mapping[str, str]:
        return planes_of(self.formats, param)

    def is_left_out(self, param: SavedParam) -> bool:
        return False

    def weight_sum(self, param: SavedParam) -> int:
        raise AssertionError("a swap store leaves nothing out")

    def read(self, param: SavedParam, plane: str, begin: int, end: int) -> torch.Tensor:
        dtype = torch_dtype(self.planes(param)[plane])
        pieces = [
            *(self._weight(param, begin, end) if plane == WEIGHT else self._state(param, plane, begin, end))
        ]
        data = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        return data.clone().view(dtype)

    def read_into(self, target: torch.Tensor, param: SavedParam, plane: str, begin: int, end: int) -> None:
        target.copy_(self.read(param, plane, begin, end))

    def tensor_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return self._tensors.specs

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def _weight(self, param: SavedParam, begin: int, end: int) -> Iterator[torch.Tensor]:
        unit, entry = self._entries[param.name]
        itemsize = ITEMSIZES[entry.dtype]
        first, last = entry.offset + begin * itemsize, entry.offset + end * itemsize
        for item in self._items.weights[unit]:
            low, high = max(first, item.begin), min(last, item.end)
            if low < high:
                yield self._item("weights", unit, item)[low - item.begin : high - item.begin]

    def _state(self, param: SavedParam, plane: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        shapes = self.manifest.shapes
        unit, entry = self._entries[param.name]
        which = next(index for index, each in enumerate(shapes.planes) if each.name == plane)
        itemsize = ITEMSIZES[shapes.planes[which].dtype]
        element = entry.offset // ITEMSIZES[shapes.weight_dtype]
        for number, chunk_begin, chunk_end in self._chunks[unit]:
            low, high = (
                max(element + begin, chunk_begin) - chunk_begin,
                min(element + end, chunk_end) - chunk_begin,
            )
            if low < high:
                low, high = in_plane(plane, low, high)
                at = sum(shapes.plane_bytes[number][:which])
                data = self._item("states", number, self._items.states[number])
                yield data[at + low * itemsize : at + high * itemsize]

    def _item(self, kind: PlaneKind, owner: int, item: Item) -> torch.Tensor:
        last = self._last.get(kind)
        if last is None or last[0] != item:
            self._last.pop(kind, None)
            last = self._last[kind] = item, self._files.read(kind, owner, item)
        return last[1]

    def __enter__(self) -> CommitFiles:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._last.clear()
        self._stack.close()
