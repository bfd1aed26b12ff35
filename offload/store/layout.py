"""Where everything lies in the swap file. Pure.

First the weight planes, unit by unit, then the state of each chunk: its planes side by side, so that a
chunk is one large sequential request each way. Every extent starts and ends on a page.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..inventory import PAGE_BYTES
from ..plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of the swap file: bytes [offset, offset + size)."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    def part(self, begin: int, end: int) -> Extent:
        """Bytes [begin, end) of this extent."""
        if not 0 <= begin <= end <= self.size:
            raise AssertionError(f"part {begin}..{end} of an extent of {self.size} bytes")
        return Extent(self.offset + begin, end - begin)


class StoreLayout:
    """Extents of a plan: `weights[unit]` (homed on nvme or not stored at all) and `states[chunk.index]`."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.weights: list[Extent] = []
        self.states: list[Extent] = []
        end = 0
        if plan.placement.param_home == "nvme":
            for unit in plan.inventory.units:
                self.weights.append(Extent(end, unit.weight_bytes))
                end += unit.weight_bytes
        if plan.placement.state_home == "nvme":
            for chunk in plan.chunks:
                self.states.append(Extent(end, plan.chunk_bytes(chunk)))
                end += plan.chunk_bytes(chunk)
        self.size = end
        for extent in (*self.weights, *self.states):
            if extent.offset % PAGE_BYTES or extent.size % PAGE_BYTES:
                raise AssertionError(f"{extent} is not made of whole pages")
