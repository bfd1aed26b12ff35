"""The swap store: reads and writes planes of units and chunks; knows files and extents, not Adam."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ..config.schema import Aio
from ..errors import TransferError
from ..ledger import Ledger
from ..links import AHEAD, AllTickets, DoneTicket, Ticket
from ..placement import SwapPaths
from ..plan import Chunk, MemoryPlan
from .checksums import Blocks, CheckedTicket, Checksums, explain
from .drives import Drive, fit_shares, open_drives, shares_of
from .layout import Extent, StoreLayout, Stripes

logger = logging.getLogger("offload.store")

IMBALANCE_MAX = 1.5
"""Drives that finish their shares at times farther apart than this factor are told of."""
IMBALANCE_SECONDS_MIN = 1.0
"""Nothing is said before the slower one has worked so long: a moment says nothing of a drive."""


class SwapStore:
    """One run's planes on NVMe. Open it with :meth:`open`, close it to remove it."""

    def __init__(
        self,
        drives: Sequence[Drive],
        layout: StoreLayout,
        plan: MemoryPlan,
        ledger: Ledger,
        *,
        verify: bool = False,
    ) -> None:
        self._drives, self._layout, self._plan, self._ledger = drives, layout, plan, ledger
        self._sums = Checksums(layout, plan) if verify else None
        self._moments_written = [False] * len(plan.chunks)
        self._imbalance_told = False
        self.path = drives[0].directory.path

    @classmethod
    def open(
        cls,
        paths: SwapPaths,
        plan: MemoryPlan,
        aio: Aio,
        ledger: Ledger,
        *,
        verify: bool = False,
        rank: int = 0,
    ) -> SwapStore:
        """Makes the directories and the files, with all their space, or leaves nothing behind.

        Args:
            verify: whether every read is held against the checksums of what was written.

        Raises:
            StoreError: a path cannot be used, or there is too little free space.
            TransferError: a file cannot be made or given its space.
        """
        drives = open_drives([path.path for path in paths.all], aio, ledger, rank=rank)
        try:
            if len(drives) == 1:
                drives[0].directory.check_space(plan.bytes_total("nvme"))
            shares = fit_shares(shares_of(paths.all, drives), plan.bytes_total("nvme"), drives)
            layout = StoreLayout(plan, paths.among(shares, "weights"), paths.among(shares, "states"))
            for drive, size in zip(drives, layout.sizes, strict=True):
                drive.queue.preallocate(size)
            return cls(drives, layout, plan, ledger, verify=verify)
        except BaseException:
            for drive in drives:
                drive.close()
            raise

    # -- weights ------------------------------------------------------------------------------------------

    def read_weight(self, unit: int, slot: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of a slot (uint8) with the unit's weight plane."""
        stripes = self._layout.weights[unit]
        planes = [("weight", stripes.size)]
        ticket = self._read(slot, stripes, planes, priority)
        if self._sums is None:
            return ticket
        owner = f"unit {self._plan.inventory.units[unit].name}"
        return self._checked(ticket, self._sums.weights[unit], slot, stripes, planes, owner)

    def write_weight(self, unit: int, slot: torch.Tensor, begin: int, end: int) -> Ticket:
        """Writes bytes [begin, end) of the unit's weight plane, which lies at the front of ``slot``."""
        if unit == 0:
            self.update_seconds()
        if self._sums is not None:
            self._sums.weights[unit].record(slot, begin, end)
        return self._write(slot, self._layout.weights[unit], [("weight", end)], begin)

    # -- state of chunks ----------------------------------------------------------------------------------

    def state_bytes(self, chunk: Chunk) -> int:
        """Bytes of the chunk's planes together."""
        return self._layout.states[chunk.index].size

    def read_state(self, chunk: Chunk, buffer: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of ``buffer`` with the chunk's planes. Moments never written are zeros, unread."""
        stripes = self._layout.states[chunk.index]
        planes = self._planes(chunk)
        if not self._moments_written[chunk.index]:
            planes = [plane for plane in planes if plane[0] == "residual"]
            stored = sum(size for _, size in planes)
            buffer[stored : stripes.size].zero_()
        ticket = self._read(buffer, stripes, planes, priority)
        if self._sums is None or not planes:
            return ticket
        owner = f"chunk {chunk.index} of unit {self._plan.inventory.units[chunk.unit].name}"
        return self._checked(ticket, self._sums.states[chunk.index], buffer, stripes, planes, owner)

    def write_state(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        """Writes the chunk's planes from the front of ``buffer``."""
        self._moments_written[chunk.index] = True
        if chunk.index == 0:
            self.update_seconds()  # once a step: a drive that falls behind is told of while the run goes on
        return self._write_state(chunk, buffer, self._planes(chunk))

    def write_residual(self, chunk: Chunk, residual: torch.Tensor) -> Ticket:
        """Writes the residual plane alone (it is the first in the extent): ``residual`` is uint8."""
        return self._write_state(chunk, residual, [("residual", residual.numel())])

    def _write_state(self, chunk: Chunk, buffer: torch.Tensor, planes: Sequence[tuple[str, int]]) -> Ticket:
        if self._sums is not None:
            self._sums.states[chunk.index].record(buffer, 0, sum(size for _, size in planes))
        return self._write(buffer, self._layout.states[chunk.index], planes)

    def _planes(self, chunk: Chunk) -> list[tuple[str, int]]:
        return list(self._plan.placement.plane_bytes(chunk.elements))

    # -- transfers over stripes ---------------------------------------------------------------------------

    def _read(
        self, buffer: torch.Tensor, stripes: Stripes, planes: Sequence[tuple[str, int]], priority: int
    ) -> Ticket:
        """Fills the front of ``buffer`` with planes that lie side by side in ``stripes``."""

        def start(extent: Extent, piece: torch.Tensor, inside: Sequence[tuple[str, int]]) -> Ticket:
            return self._drives[extent.path].links.read(piece, extent.offset, inside, priority=priority)

        return self._each(buffer, stripes, planes, 0, start)

    def _write(
        self, buffer: torch.Tensor, stripes: Stripes, planes: Sequence[tuple[str, int]], begin: int = 0
    ) -> Ticket:
        def start(extent: Extent, piece: torch.Tensor, inside: Sequence[tuple[str, int]]) -> Ticket:
            return self._drives[extent.path].links.write(piece, extent.offset, inside)

        return self._each(buffer, stripes, planes, begin, start)

    @staticmethod
    def _each(
        buffer: torch.Tensor,
        stripes: Stripes,
        planes: Sequence[tuple[str, int]],
        begin: int,
        start: Callable[[Extent, torch.Tensor, Sequence[tuple[str, int]]], Ticket],
    ) -> Ticket:
        """One transfer for each extent that holds bytes from ``begin`` to the end of the planes."""
        end = sum(size for _, size in planes)
        tickets = [
            start(extent, buffer[first:last], _planes_within(planes, first, last))
            for first, last, extent in stripes.part(begin, end)
        ]
        if not tickets:
            return DoneTicket()
        return tickets[0] if len(tickets) == 1 else AllTickets(tickets)

    def _checked(
        self,
        read: Ticket,
        blocks: Blocks,
        buffer: torch.Tensor,
        stripes: Stripes,
        planes: Sequence[tuple[str, int]],
        owner: str,
    ) -> Ticket:
        def check() -> TransferError | None:
            found = blocks.mismatch(buffer, sum(size for _, size in planes))
            if found is None:
                return None
            plane = _planes_within(planes, found.begin, found.end)[0][0]
            extent = next(extent for _, _, extent in stripes.part(found.begin, found.end))
            path = str(self._drives[extent.path].queue.path)
            return explain(found, f"{plane} of {owner}", path, extent.offset)

        return CheckedTicket(read, check)

    # -- end ----------------------------------------------------------------------------------------------

    def start_steps(self) -> None:
        """The set-up is over: from now on seconds count."""
        for drive in self._drives:
            drive.links.start_steps()

    def update_seconds(self) -> None:
        """Brings the ledger's busy seconds up to date: on a link, those of its busiest path."""
        by_path = [drive.links.seconds() for drive in self._drives]
        for index, link in enumerate(("nvme_read", "nvme_write")):
            self._ledger.seconds[link] = max(seconds[index] for seconds in by_path)
        self._tell_imbalance([sum(seconds) for seconds in by_path])

    def _tell_imbalance(self, seconds: Sequence[float]) -> None:
        if self._imbalance_told or not self._layout.is_striped or min(seconds) <= 0:
            return
        if max(seconds) < max(IMBALANCE_SECONDS_MIN, IMBALANCE_MAX * min(seconds)):
            return
        self._imbalance_told = True
        slow, fast = (self._drives[list(seconds).index(pick(seconds))] for pick in (max, min))
        logger.warning(
            "%s was busy for %.1f s with its share and %s for %.1f s: give the first a smaller weight",
            slow.directory.root,
            max(seconds),
            fast.directory.root,
            min(seconds),
        )

    def close(self) -> None:
        """Ends all transfers and removes files and directories. Idempotent."""
        for drive in self._drives:
            drive.close()


def _planes_within(planes: Sequence[tuple[str, int]], begin: int, end: int) -> list[tuple[str, int]]:
    """What of planes that lie side by side is in bytes [begin, end)."""
    inside, at = [], 0
    for name, size in planes:
        length = min(end, at + size) - max(begin, at)
        if length > 0:
            inside.append((name, length))
        at += size
    return inside
