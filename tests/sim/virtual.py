"""A swap file in memory under a virtual clock: transfers end at seeded polls, in any order, or fail.

It has the interface of `offload.aio.Queue`, so the real store, links, mover, pipeline and engine run on it.
It knows the one rule that a disk does not tell: transfers in flight at once that overlap, one of them a
write, have no defined result. Breaking that rule in the file or in memory raises AssertionError at
submission; what is being read is poisoned until it has arrived, and what is being written may not change
until it has ended.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from offload.errors import TransferError

POISON = 0xA5


@dataclass(eq=False)
class VirtualTicket:
    """One transfer. `due` is the time at which it ends; `failed` whether it then fails."""

    queue: VirtualQueue
    operation: str
    buffer: np.ndarray | None
    """Gone when the transfer has ended: a slot is not reused while anybody looks at it."""
    offset: int
    size: int
    address: int
    due: int
    failed: bool
    original: np.ndarray | None = None
    """What a write was given: its buffer must still be that when it ends."""
    ended: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.size

    def done(self) -> bool:
        self.queue.tick()
        return self.ended

    def wait(self) -> None:
        if not self.ended:
            self.queue.run_until(self)
        if self.failed:
            raise TransferError(
                errno.EIO, self.operation, self.queue.path, offset=self.offset, size=self.size, done=0
            )

    def overlaps_file(self, offset: int, end: int) -> bool:
        return self.offset < end and offset < self.end

    def overlaps_memory(self, address: int, size: int) -> bool:
        return self.address < address + size and address < self.address + self.size


class VirtualQueue:
    """Stands in for `offload.aio.Queue`. Same seed, same order of events."""

    backend, direct, closed = "virtual", True, False

    def __init__(
        self, path: str = "virtual", *, seed: int = 0, fail: Callable[[int], bool] | None = None, **_: object
    ) -> None:
        """
        Args:
            fail: whether transfer number n (from 0) fails.
        """
        self.path = str(path)
        self.bytes = np.zeros(0, dtype=np.uint8)
        self.held = False
        """While true nothing ends by itself: only what is waited for."""
        self.submitted: list[VirtualTicket] = []
        self._random = random.Random(seed)
        self._fail = fail or (lambda number: False)
        self._clock = 0
        self._in_flight: list[VirtualTicket] = []

    @property
    def in_flight(self) -> list[VirtualTicket]:
        return list(self._in_flight)

    def preallocate(self, size: int) -> None:
        self.bytes = np.full(size, POISON, dtype=np.uint8)

    def read(self, buffer: np.ndarray, offset: int, *, priority: int = 0) -> VirtualTicket:
        ticket = self._submit("read", buffer, offset)
        ticket.buffer[:] = POISON
        return ticket

    def write(self, buffer: np.ndarray, offset: int, *, priority: int = 0) -> VirtualTicket:
        ticket = self._submit("write", buffer, offset)
        ticket.original = ticket.buffer.copy()
        return ticket

    def stats(self) -> SimpleNamespace:
        side = SimpleNamespace(seconds_busy=0.0)
        return SimpleNamespace(read=side, write=side)

    def close(self, *, cancel: bool = False) -> None:
        self.closed = True
        while self._in_flight:
            self._end(self._in_flight[0])

    # -- the clock ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time goes on a little; what is due by then ends."""
        if not self.held:
            self._advance(self._clock + 1)

    def run_until(self, ticket: VirtualTicket) -> None:
        """Time goes on until a transfer has ended; others that end on the way end before it."""
        self._advance(ticket.due)
        if not ticket.ended:
            self._end(ticket)

    def _advance(self, clock: int) -> None:
        self._clock = max(self._clock, clock)
        due = [ticket for ticket in self._in_flight if ticket.due <= self._clock]
        for ticket in sorted(due, key=lambda ticket: ticket.due):
            self._end(ticket)

    def _submit(self, operation: str, buffer: np.ndarray, offset: int) -> VirtualTicket:
        buffer = np.asarray(buffer)
        assert not self.closed, "a transfer after close"
        assert buffer.dtype == np.uint8 and buffer.size <= self.bytes.size - offset and offset >= 0
        delay = self._random.choice((0, 1, 2, 5, 5, 20, 200))
        failed = self._fail(len(self.submitted))
        address = buffer.__array_interface__["data"][0]
        ticket = VirtualTicket(
            self, operation, buffer, offset, buffer.size, address, self._clock + delay, failed
        )
        for other in self._in_flight:
            both_read = operation == other.operation == "read"
            if other.overlaps_file(offset, ticket.end) and not both_read:
                raise AssertionError(
                    f"{operation} of {offset}..{ticket.end} while a {other.operation} of"
                    f" {other.offset}..{other.end} is in flight"
                )
            both_write = operation == other.operation == "write"
            if other.overlaps_memory(address, buffer.size) and not both_write:
                raise AssertionError(f"a {operation} and a {other.operation} in flight share memory")
        self.submitted.append(ticket)
        self._in_flight.append(ticket)
        return ticket

    def _end(self, ticket: VirtualTicket) -> None:
        self._in_flight.remove(ticket)
        ticket.ended = True
        if ticket.operation == "write":
            assert np.array_equal(ticket.buffer, ticket.original), "changed while it was being written"
            if not ticket.failed:
                self.bytes[ticket.offset : ticket.end] = ticket.buffer
        elif not ticket.failed:
            ticket.buffer[:] = self.bytes[ticket.offset : ticket.end]
        ticket.buffer = ticket.original = None


class VirtualDirectory:
    """Stands in for `SwapDirectory`."""

    path = "virtual"
    closed = False

    def close(self) -> None:
        self.closed = True
