"""Checksums of what was written to the swap files, kept in memory, and reads that are held against them.

Note [Blocks]
The bytes of a plane or chunk are cut into blocks, each with its own CRC-32C: every 64 KiB (4 MiB where they are only
for commits), and where an extent, a chunk's part of the weights, or the residual plane ends. So whatever a step
writes at once is whole blocks, and a block lies in one file. Where a single parameter's pages are written, the rest
of their blocks is taken from the plane that they are written from. A sum is taken when its write begins, by the
thread that asks for the write; it is checked by the thread that waits for the read, before anybody sees the bytes.
A commit keeps one sum for each item (`crc` joins those of its blocks). After a restart an item is held against that
when it is first read; from then on its blocks are known again.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..bytesize import KiB, MiB
from ..errors import TransferError
from ..links import Ticket
from ..optim.checksum import crc32c
from ..plan import MemoryPlan
from .crc import join
from .layout import StoreLayout, Stripes, state_planes, weight_cuts

BLOCK_BYTES = 64 * KiB
"""Thirteen bytes of memory for so many on disk."""
COMMIT_BLOCK_BYTES = 4 * MiB
"""Where no read is checked but the first one after a restart: then of all of an item."""


class Mismatch(NamedTuple):
    """Bytes [begin, end) of a plane or chunk are not those that were written."""

    begin: int
    end: int
    written: int
    read: int
    is_whole: bool = False
    """They are all that a commit says of an item, and it cannot be said which of them are wrong."""


class Blocks:
    """The blocks of one plane or chunk, and the sums of those that were written. See Note [Blocks]."""

    def __init__(self, stripes: Stripes, ends: Iterable[int] = (), *, block_bytes: int = BLOCK_BYTES) -> None:
        """
        Args:
            ends: where writes begin and end, besides the ends of extents.
        """
        given = [stripes.size, *ends, *_ends([stripes])]
        regular = np.arange(0, stripes.size, block_bytes, dtype=np.uint64)
        self._cuts = cuts = np.union1d(regular, np.array(given, np.uint64))
        self._sums = np.zeros(len(cuts) - 1, np.uint32)
        self._known = np.zeros(len(cuts) - 1, np.bool_)
        self._expected: dict[tuple[int, int], int] = {}

    @property
    def is_unproven(self) -> bool:
        """Whether something that a commit names has not been read since."""
        return bool(self._expected)

    def expect(self, begin: int, end: int, total: int) -> None:
        """Bytes [begin, end), which are whole blocks, have the sum ``total`` when they are first read."""
        self._expected[begin, end] = total

    def total(self, begin: int, end: int) -> int:
        """The sum of [begin, end), which are whole blocks that were all written."""
        if (begin, end) in self._expected:
            return self._expected[begin, end]
        first, last = self._touched(begin, end)
        cuts = self._cuts[first : last + 1]
        if not self._known[first:last].all() or cuts[0] != begin or cuts[-1] != end:
            raise AssertionError(f"bytes {begin} to {end} were not written as a whole")
        return join(self._sums[first:last].tolist(), np.diff(cuts).tolist())

    def record(self, buffer: torch.Tensor, begin: int, end: int) -> None:
        """Bytes [begin, end) are being written from ``buffer``, at whose front all blocks lie that they touch."""
        first, last = self._touched(begin, end)
        self._sums[first:last] = crc32c(buffer, self._cuts[first : last + 1])
        whole = (self._cuts[first:last] >= begin) & (self._cuts[first + 1 : last + 1] <= end)
        self._known[first:last] |= whole
        for other in [other for other in self._expected if other[0] < end and other[1] > begin]:
            if not begin <= other[0] <= other[1] <= end:
                raise AssertionError(f"bytes {begin} to {end} are a part of what nobody has read")
            del self._expected[other]

    def mismatch(self, buffer: torch.Tensor, end: int) -> Mismatch | None:
        """The first block of [0, end), read to the front of ``buffer``, that is not what was written."""
        first, last = self._touched(0, end)
        sums = crc32c(buffer, self._cuts[first : last + 1])
        wrong = np.flatnonzero((sums != self._sums[first:last]) & self._known[first:last])
        if not wrong.size:
            return self._prove(sums, end)
        at = int(wrong[0])
        return Mismatch(
            int(self._cuts[at]), int(self._cuts[at + 1]), int(self._sums[first + at]), int(sums[at])
        )

    def _prove(self, sums: npt.NDArray[np.uint32], end: int) -> Mismatch | None:
        """Holds what was read for the first time against what the commit says."""
        for (begin, last_byte), total in [*self._expected.items()]:
            if last_byte > end:
                continue
            first, last = self._touched(begin, last_byte)
            sizes = np.diff(self._cuts[first : last + 1])
            found = join(sums[first:last].tolist(), sizes.tolist())
            if found != total:
                return Mismatch(begin, last_byte, total, found, is_whole=True)
            self._sums[first:last], self._known[first:last] = sums[first:last], True
            del self._expected[begin, last_byte]
        return None

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        first = int(np.searchsorted(self._cuts, np.uint64(begin), "right")) - 1
        return first, max(first, int(np.searchsorted(self._cuts, np.uint64(end), "left")))


class Checksums:
    """The blocks of everything that a store holds."""

    def __init__(self, layout: StoreLayout, plan: MemoryPlan, *, block_bytes: int = BLOCK_BYTES) -> None:
        first, *others = layout.generations
        self.weights = [
            Blocks(
                stripes,
                [*weight_cuts(plan, unit), *_ends(other.weights[unit] for other in others)],
                block_bytes=block_bytes,
            )
            for unit, stripes in enumerate(first.weights)
        ]
        self.states = [
            Blocks(
                stripes,
                [
                    *(size for _, size in state_planes(plan, chunk)[:1]),
                    *_ends(other.states[chunk.index] for other in others),
                ],
                block_bytes=block_bytes,
            )
            for stripes, chunk in zip(first.states, plan.chunks if first.states else (), strict=True)
        ]


def _ends(planes: Iterable[Stripes]) -> Iterator[int]:
    """Where extents end."""
    for stripes in planes:
        yield from accumulate(extent.size for extent in stripes.extents)


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


class Owner(NamedTuple):
    """Whose bytes a plane or chunk holds, for messages."""

    unit: str
    params: Sequence[tuple[str, int, int]]
    """Of each parameter its name and its first and last byte in the weight plane."""
    chunk: tuple[int, int, int] | None
    """Of a chunk its number, and where it begins and ends in bytes of the weight plane."""


PARAMS_NAMED_MAX = 3


def name_of(owner: Owner, planes: Sequence[tuple[str, int]], found: Mismatch) -> str:
    """Plane, unit or chunk, and parameters of bytes of a weight plane or of a chunk's state."""
    ends = [*accumulate(size for _, size in planes)]
    which = bisect_right(ends, found.begin)
    plane, size = planes[which]
    at = ends[which] - size
    first, last, what = found.begin - at, min(found.end - at, size), ""
    if owner.chunk is not None:  # elements of a plane are in order, whatever its format
        number, begin, end = owner.chunk
        first, last = begin + first * (end - begin) // size, begin - (-last * (end - begin) // size)
        what = f"chunk {number} of "
    names = [name for name, begin, end in owner.params if begin < last and end > first]
    if len(names) > PARAMS_NAMED_MAX:
        names[PARAMS_NAMED_MAX:] = [f"{len(names) - PARAMS_NAMED_MAX} more"]
    return f"{plane} of {what}unit {owner.unit} ({', '.join(names) or 'padding'})"


def explain(found: Mismatch, what: str, path: str, offset: int, *, more: str = "") -> TransferError:
    """The error of a read that gave other bytes than were written.

    Args:
        what: plane, unit or chunk, and parameters.
        offset: of the block in the file at ``path``.
        more: what else there is to say.
    """
    size = found.end - found.begin
    return TransferError(
        errno.EBADMSG, "read", path, offset=offset, size=size, done=size,
        hint=f"{what}: crc32c {found.written:#010x} was written and {found.read:#010x} read; the drive, or another"
        f" process, has changed the file: nothing of it was used{more}",
    )  # fmt: skip
