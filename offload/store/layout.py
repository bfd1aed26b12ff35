"""Where everything lies in the swap files. Pure.

First the weight planes, unit by unit, then the state of each chunk: its planes side by side, so that a
chunk is one large sequential request each way. Every extent starts and ends on a page.

Note [Striping]
Over several paths a plane or chunk is cut into one piece for each, as long as its share: all drives then work on
the one transfer that is waited for, and each moves one sequential request. Shares are kept over the sum of all
extents, to the page; what is too small to be cut lies on the path that is farthest behind its share.

With two generations (see `generations`) there are two of everything that is trained; each is laid out like that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Literal

from ..bytesize import PAGE_BYTES, KiB
from ..plan import Chunk, MemoryPlan

PIECE_BYTES_MIN = 256 * KiB
"""A piece smaller than this costs a drive more in requests than it gains in bandwidth."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a swap file: bytes [offset, offset + size) of the file on path number `path`."""

    path: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Stripes:
    """One plane or chunk: its bytes, in order, over the extents."""

    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        return sum(extent.size for extent in self.extents)

    def part(self, begin: int, end: int) -> Iterator[tuple[int, int, Extent]]:
        """Where bytes [begin, end) lie: (first, last, extent) for each extent that holds some of them."""
        if not 0 <= begin <= end <= self.size:
            raise AssertionError(f"part {begin}..{end} of {self.size} bytes")
        at = 0
        for extent in self.extents:
            first, last = max(begin, at), min(end, at + extent.size)
            if first < last:
                is_whole = last - first == extent.size
                piece = extent if is_whole else Extent(extent.path, extent.offset + first - at, last - first)
                yield first, last, piece
            at += extent.size


PlaneKind = Literal["weights", "states"]


@dataclass(frozen=True, slots=True)
class Item:
    """What is written as one: bytes [begin, end) of a unit's weight plane, or all of a chunk's state."""

    index: int
    begin: int
    end: int


class Items:
    """All items of a store. See `generations`, Note [Generations]."""

    def __init__(self, weight_cuts: Iterable[Sequence[int]], state_sizes: Iterable[int]) -> None:
        """
        Args:
            weight_cuts: where the items of each unit's weight plane begin, and the end of the last.
            state_sizes: bytes of the state of each chunk.
        """
        numbers = count()
        self.weights = [
            [Item(next(numbers), begin, end) for begin, end in pairwise(cuts)] for cuts in weight_cuts
        ]
        self.states = [Item(next(numbers), 0, size) for size in state_sizes]

    @classmethod
    def of(cls, plan: MemoryPlan) -> Items:
        """Those of a plan, as far as they are in the swap files."""
        weights = range(len(plan.inventory.units)) if plan.placement.stores_weights else ()
        chunks = plan.chunks if plan.placement.stores_state else ()
        return cls(
            (weight_cuts(plan, unit) for unit in weights), (plan.chunk_bytes(chunk) for chunk in chunks)
        )

    def __len__(self) -> int:
        return sum(map(len, self.weights)) + len(self.states)

    def each(self) -> Iterator[tuple[PlaneKind, int, Item]]:
        """All, in their order: of what, of which unit or chunk, and the item."""
        for unit, items in enumerate(self.weights):
            for item in items:
                yield "weights", unit, item
        for chunk, item in enumerate(self.states):
            yield "states", chunk, item


def weight_cuts(plan: MemoryPlan, unit: int) -> list[int]:
    """Where the parts of a unit's weight plane begin and end: one for each chunk, and what is frozen."""
    itemsize = plan.inventory.weight_itemsize
    ends = {chunk.end * itemsize for chunk in plan.chunks_of[unit]}
    return sorted({0, *ends, plan.inventory.units[unit].weight_bytes})


def state_planes(plan: MemoryPlan, chunk: Chunk) -> list[tuple[str, int]]:
    """The planes that lie side by side in a chunk's extent, and the bytes of each."""
    return list(plan.placement.plane_bytes(chunk.elements))


@dataclass(slots=True)
class PlaneExtents:
    """One generation: `weights[unit]` and `states[chunk.index]`; empty where that is not in the swap files."""

    weights: list[Stripes]
    states: list[Stripes]

    def of(self, kind: PlaneKind, owner: int) -> Stripes:
        """Those of a unit's weights, or of a chunk's state."""
        return (self.weights if kind == "weights" else self.states)[owner]

    @property
    def all(self) -> Iterator[Stripes]:
        yield from self.weights
        yield from self.states


class StoreLayout:
    """Extents of all planes, in one generation or two, and the sizes of the files."""

    def __init__(
        self,
        plan: MemoryPlan,
        weight_shares: Sequence[float] = (1.0,),
        state_shares: Sequence[float] = (1.0,),
    ) -> None:
        """
        Args:
            weight_shares: of each path, of the bytes of weights; they add up to 1.
            state_shares: the same for optimizer state.
        """
        self.sizes = [0] * len(weight_shares)
        """Bytes of the file on each path."""
        self.generations: list[PlaneExtents] = []
        units, itemsize = plan.inventory.units, plan.inventory.weight_itemsize
        whole, trained = ([unit.weight_bytes for unit in units], [unit.elements * itemsize for unit in units])
        for generation in range(plan.placement.generations):
            extents = PlaneExtents([], [])
            if plan.placement.stores_weights:
                cut = _Cutter(weight_shares, self.sizes)
                extents.weights = [cut(size) for size in (trained if generation else whole)]
            if plan.placement.stores_state:
                cut = _Cutter(state_shares, self.sizes)
                extents.states = [cut(plan.chunk_bytes(chunk)) for chunk in plan.chunks]
            self.generations.append(extents)

    @classmethod
    def of(cls, generations: Sequence[PlaneExtents], sizes: Sequence[int]) -> StoreLayout:
        """One that was made before."""
        layout = cls.__new__(cls)
        layout.generations, layout.sizes = [*generations], [*sizes]
        return layout

    @property
    def weights(self) -> list[Stripes]:
        """Of the first generation."""
        return self.generations[0].weights

    @property
    def states(self) -> list[Stripes]:
        """Of the first generation."""
        return self.generations[0].states

    @property
    def is_striped(self) -> bool:
        """Whether paths share planes or chunks, so that one of them can hold up another."""
        return any(len(stripes.extents) > 1 for extents in self.generations for stripes in extents.all)

    def extent_counts(self, items: Items) -> list[int]:
        """How many extents each item has."""
        counts = [len(self.generations)] * len(items)
        for extents in self.generations[1:]:
            for unit, parts in enumerate(items.weights):
                for item in parts:
                    counts[item.index] -= item.end > extents.weights[unit].size
        return counts

    def grow(self, unit: int) -> int:
        """Gives what is frozen of a unit its second extent, at the end of a file; the number of its path.

        It is in one piece, on the path where the frozen weights begin: this is rare.
        """
        first, second = (extents.weights for extents in self.generations)
        trained, whole = second[unit].size, first[unit].size
        path = next(extent.path for _, _, extent in first[unit].part(trained, whole))
        extent = Extent(path, self.sizes[path], whole - trained)
        second[unit] = Stripes((*second[unit].extents, extent))
        self.sizes[path] += extent.size
        return path


class _Cutter:
    """Cuts one plane or chunk after another. See Note [Striping]."""

    def __init__(self, shares: Sequence[float], ends: list[int]) -> None:
        """
        Args:
            ends: of what lies on each path; grows.
        """
        self._shares, self._ends = shares, ends
        self._given = [0] * len(shares)

    def __call__(self, size: int) -> Stripes:
        if size % PAGE_BYTES:
            raise AssertionError(f"{size} bytes are not whole pages")
        total = sum(self._given) + size
        behind = [share * total - given for share, given in zip(self._shares, self._given, strict=True)]
        most = max(range(len(behind)), key=behind.__getitem__)
        pieces = [0] * len(behind)
        for path, wanted in enumerate(behind):
            whole = int(wanted) // PAGE_BYTES * PAGE_BYTES
            if path != most and whole >= PIECE_BYTES_MIN:
                pieces[path] = min(whole, size - sum(pieces))
        pieces[most] = size - sum(pieces)
        extents = []
        for path, piece in enumerate(pieces):
            if piece:
                extents.append(Extent(path, self._ends[path], piece))
                self._ends[path] += piece
                self._given[path] += piece
        return Stripes(tuple(extents))
