"""Where everything lies in the swap files. Pure.

First the weight planes, unit by unit, then the state of each chunk: its planes side by side, so that a
chunk is one large sequential request each way. Every extent starts and ends on a page.

Note [Striping]
Over several paths a plane or chunk is cut into one piece for each, as long as its share: all drives then work on
the one transfer that is waited for, and each moves one sequential request. Shares are kept over the sum of all
extents, to the page; what is too small to be cut lies on the path that is farthest behind its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..bytesize import PAGE_BYTES, KiB
from ..plan import MemoryPlan

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
                yield first, last, Extent(extent.path, extent.offset + first - at, last - first)
            at += extent.size


class StoreLayout:
    """Extents of a plan: `weights[unit]` (homed on nvme or not stored at all) and `states[chunk.index]`."""

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
        self.weights: list[Stripes] = []
        self.states: list[Stripes] = []
        self.sizes = [0] * len(weight_shares)
        """Bytes of the file on each path."""
        if plan.placement.param_home == "nvme":
            cut = _Cutter(weight_shares, self.sizes)
            self.weights = [cut(unit.weight_bytes) for unit in plan.inventory.units]
        if plan.placement.state_home == "nvme":
            cut = _Cutter(state_shares, self.sizes)
            self.states = [cut(plan.chunk_bytes(chunk)) for chunk in plan.chunks]

    @property
    def is_striped(self) -> bool:
        """Whether paths share planes or chunks, so that one of them can hold up another."""
        return any(len(stripes.extents) > 1 for stripes in (*self.weights, *self.states))


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
