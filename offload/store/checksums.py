"""Checksums of what was written to the swap files, kept in memory, and reads that are held against them.

Note [Blocks]
The bytes of a plane or chunk are cut into blocks, each with its own CRC-32C: every 64 KiB, and where an extent, a
chunk's part of the weights, or the residual plane ends. So whatever a step writes at once is whole blocks, and a
block lies in one file. Where a single parameter's pages are written, the rest of their blocks is taken from the
plane that they are written from. A sum is taken when its write begins, by the thread that asks for the write;
it is checked by the thread that waits for the read, before anybody sees the bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from ..bytesize import KiB
from ..errors import TransferError
from ..links import Ticket
from ..optim.checksum import crc32c
from ..plan import MemoryPlan
from .layout import StoreLayout, Stripes

BLOCK_BYTES = 64 * KiB
"""Four bytes of memory for so many on disk."""


class Mismatch(NamedTuple):
    """Bytes [begin, end) of a plane or chunk are not those that were written."""

    begin: int
    end: int
    written: int
    read: int


class Blocks:
    """The blocks of one plane or chunk, and the sums of those that were written. See Note [Blocks]."""

    def __init__(self, stripes: Stripes, ends: Iterable[int] = ()) -> None:
        """
        Args:
            ends: where writes begin and end, besides the ends of extents.
        """
        extents = np.cumsum([extent.size for extent in stripes.extents]).tolist()
        cuts = {0, *range(0, stripes.size, BLOCK_BYTES), *ends, *extents}
        self._cuts = np.array(sorted(cuts), np.uint64)
        self._sums = np.zeros(len(cuts) - 1, np.uint32)
        self._known = np.zeros(len(cuts) - 1, np.bool_)

    def record(self, buffer: torch.Tensor, begin: int, end: int) -> None:
        """Bytes [begin, end) are being written from ``buffer``, at whose front all blocks lie that they touch."""
        first, last = self._touched(begin, end)
        self._sums[first:last] = crc32c(buffer, self._cuts[first : last + 1])
        whole = (self._cuts[first:last] >= begin) & (self._cuts[first + 1 : last + 1] <= end)
        self._known[first:last] |= whole

    def mismatch(self, buffer: torch.Tensor, end: int) -> Mismatch | None:
        """The first block of [0, end), read to the front of ``buffer``, that is not what was written."""
        first, last = self._touched(0, end)
        sums = crc32c(buffer, self._cuts[first : last + 1])
        wrong = np.flatnonzero((sums != self._sums[first:last]) & self._known[first:last])
        if not wrong.size:
            return None
        at = int(wrong[0])
        return Mismatch(
            int(self._cuts[at]), int(self._cuts[at + 1]), int(self._sums[first + at]), int(sums[at])
        )

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        first = int(np.searchsorted(self._cuts, np.uint64(begin), "right")) - 1
        return first, max(first, int(np.searchsorted(self._cuts, np.uint64(end), "left")))


class Checksums:
    """The blocks of everything that a store holds."""

    def __init__(self, layout: StoreLayout, plan: MemoryPlan) -> None:
        itemsize = plan.inventory.weight_itemsize
        self.weights = [
            Blocks(
                stripes, (at * itemsize for chunk in plan.chunks_of[unit] for at in (chunk.begin, chunk.end))
            )
            for unit, stripes in enumerate(layout.weights)
        ]
        residual = plan.placement.residual_itemsize
        self.states = [
            Blocks(stripes, [chunk.elements * residual])
            for stripes, chunk in zip(layout.states, plan.chunks if layout.states else (), strict=True)
        ]


class CheckedTicket:
    """A read whose bytes are held against their sums by whoever waits for it."""

    def __init__(self, read: Ticket, check: Callable[[], TransferError | None]) -> None:
        self._read = read
        self._check: Callable[[], TransferError | None] | None = check
        self._failure: TransferError | None = None

    def done(self) -> bool:
        return self._read.done()

    def wait(self) -> None:
        """Raises TransferError also where the bytes are not those that were written."""
        self._read.wait()
        if self._check is not None:
            self._failure = self._check()
            self._check = None
        if self._failure is not None:
            raise self._failure


def explain(found: Mismatch, what: str, path: str, offset: int) -> TransferError:
    """The error of a read that gave other bytes than were written.

    Args:
        what: plane, and unit or chunk.
        offset: of the block in the file at ``path``.
    """
    size = found.end - found.begin
    return TransferError(
        errno.EBADMSG, "read", path, offset=offset, size=size, done=size,
        hint=f"{what}: crc32c {found.written:#010x} was written and {found.read:#010x} read; the drive, or another"
        " process, has changed the file: nothing of it was used",
    )  # fmt: skip
