"""The swap store: reads and writes planes of units and chunks; knows files and extents, not Adam."""

from __future__ import annotations

import torch

from ..aio import Queue
from ..config.schema import Aio
from ..ledger import Ledger
from ..links import AHEAD, DoneTicket, NvmeLinks, Ticket
from ..plan import Chunk, MemoryPlan
from .directory import SwapDirectory
from .layout import StoreLayout

FILE_NAME = "planes.swap"


class SwapStore:
    """One run's planes on NVMe. Open it with :meth:`open`, close it to remove it."""

    def __init__(self, directory: SwapDirectory, queue: Queue, plan: MemoryPlan, ledger: Ledger) -> None:
        self._directory, self._queue, self._plan = directory, queue, plan
        self._layout = StoreLayout(plan)
        self._links = NvmeLinks(queue, ledger)
        self._moments_written = [False] * len(plan.chunks)
        self.path = directory.path

    @classmethod
    def open(cls, nvme_path: str, plan: MemoryPlan, aio: Aio, ledger: Ledger, *, rank: int = 0) -> SwapStore:
        """Makes the directory and the file, with all its space, or leaves nothing behind.

        Raises:
            StoreError: the path cannot be used, or has too little free space.
            TransferError: the file cannot be made or given its space.
        """
        size = plan.bytes_total("nvme")
        directory = SwapDirectory(nvme_path, rank=rank)
        queue: Queue | None = None
        try:
            directory.check_space(size)
            queue = Queue(
                directory.path / FILE_NAME,
                backend=aio.backend,
                queue_depth=aio.queue_depth,
                request_bytes=aio.block_size,
                direct_io=aio.direct_io,
                threads=aio.thread_count,
            )
            queue.preallocate(size)
            return cls(directory, queue, plan, ledger)
        except BaseException:
            if queue is not None:
                queue.close()
            directory.close()
            raise

    # -- weights ------------------------------------------------------------------------------------------

    def read_weight(self, unit: int, slot: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of a slot (uint8) with the unit's weight plane."""
        extent = self._layout.weights[unit]
        return self._links.read(
            slot[: extent.size], extent.offset, [("weight", extent.size)], priority=priority
        )

    def write_weight(self, unit: int, slot: torch.Tensor, begin: int, end: int) -> Ticket:
        """Writes bytes [begin, end) of the unit's weight plane, which lies at the front of ``slot``."""
        part = self._layout.weights[unit].part(begin, end)
        return self._links.write(slot[begin:end], part.offset, [("weight", part.size)])

    # -- state of chunks ----------------------------------------------------------------------------------

    def state_bytes(self, chunk: Chunk) -> int:
        """Bytes of the chunk's planes together."""
        return self._layout.states[chunk.index].size

    def read_state(self, chunk: Chunk, buffer: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of ``buffer`` with the chunk's planes. Moments never written are zeros, unread."""
        extent = self._layout.states[chunk.index]
        planes = self._planes(chunk)
        stored = extent.size
        if not self._moments_written[chunk.index]:
            planes = [plane for plane in planes if plane[0] == "residual"]
            stored = sum(size for _, size in planes)
            buffer[stored : extent.size].zero_()
        if not stored:
            return DoneTicket()
        return self._links.read(buffer[:stored], extent.offset, planes, priority=priority)

    def write_state(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        """Writes the chunk's planes from the front of ``buffer``."""
        extent = self._layout.states[chunk.index]
        self._moments_written[chunk.index] = True
        return self._links.write(buffer[: extent.size], extent.offset, self._planes(chunk))

    def write_residual(self, chunk: Chunk, residual: torch.Tensor) -> Ticket:
        """Writes the residual plane alone (it is the first in the extent): ``residual`` is uint8."""
        part = self._layout.states[chunk.index].part(0, residual.numel())
        return self._links.write(residual, part.offset, [("residual", part.size)])

    def _planes(self, chunk: Chunk) -> list[tuple[str, int]]:
        return [(plane.name, chunk.elements * plane.itemsize) for plane in self._plan.placement.state_planes]

    # -- end ----------------------------------------------------------------------------------------------

    def start_steps(self) -> None:
        """The set-up is over: from now on seconds count."""
        self._links.start_steps()

    def update_seconds(self) -> None:
        """Brings the ledger's busy seconds up to date."""
        self._links.update_seconds()

    def close(self) -> None:
        """Ends all transfers and removes file and directory. Idempotent."""
        self._queue.close()
        self._directory.close()
