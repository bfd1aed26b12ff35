"""Which piece of which transfer goes next. Knows no thread, no descriptor and no clock but a ticket's."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from .engines import Operation

PRIORITIES = 3


class Transfer:
    """One ticket's work. The worker's alone once it is in the schedule, until ``finished`` is set."""

    def __init__(
        self, operation: Operation, view: memoryview | None, offset: int = 0, priority: int = 0
    ) -> None:
        """
        Args:
            view: of the buffer; released when the transfer is over.
        """
        self.operation, self.offset, self.priority = operation, offset, priority
        self._view = view
        self.size = view.nbytes if view is not None else 0
        self.address = _address_of(view) if view is not None and self.size else 0
        self.number = 0  # order of submission within the queue
        self.place = 0  # in the line of those who wait for room
        self.bytes_cut = 0  # handed out as pieces so far
        self.bytes_done = 0  # of pieces that have ended
        self.pieces_open = 0  # handed out, not ended
        self.error = 0  # the first one
        self.order = 0
        self.begun = time.monotonic()
        self.ended = 0.0
        self.finished = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.pieces_open == 0 and (self.error != 0 or self.bytes_cut == self.size)

    @property
    def seconds(self) -> float:
        """From submission to the end, or to now."""
        return (self.ended if self.finished.is_set() else time.monotonic()) - self.begun

    def overlaps(self, other: Transfer) -> bool:
        """Whether both use some of the same memory."""
        return self.address < other.address + other.size and other.address < self.address + self.size

    def finish(self, order: int) -> None:
        """The kernel does not touch the buffer any more."""
        self.order, self.ended = order, time.monotonic()
        if self._view is not None:
            self._view.release()
            self._view = None
        self.finished.set()


def _address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a transfer that fits one request."""

    transfer: Transfer
    begin: int = 0
    size: int = 0
    done: int = 0
    direct: bool = False
    refusals: int = 0
    """Attempts in a row that moved no byte."""


@dataclass(slots=True)
class _Level:
    resumed: deque[Piece] = field(default_factory=deque)
    waiting: deque[Transfer] = field(default_factory=deque)


def cut(transfer: Transfer, *, request_bytes: int, alignment: int, direct: bool) -> Piece:
    """The next piece of a transfer: a head up to a boundary, what lies between boundaries, a tail."""
    begin = transfer.bytes_cut
    left = transfer.size - begin
    past_boundary = (transfer.offset + begin) % alignment
    piece = Piece(transfer, begin)
    if not direct:
        piece.size = min(left, request_bytes)
    elif past_boundary:
        piece.size = min(left, alignment - past_boundary)
    elif left < alignment:
        piece.size = left
    else:
        piece.size = min(left - left % alignment, request_bytes)
        piece.direct = (transfer.address + begin) % alignment == 0
    transfer.bytes_cut += piece.size
    transfer.pieces_open += 1
    return piece


class Schedule:
    """The highest priority first, and within it the order of submission.

    A sync waits until all writes submitted before it have ended, and for nothing else; it then goes first.
    """

    def __init__(self, *, request_bytes: int, alignment: int) -> None:
        self._request_bytes, self._alignment = request_bytes, alignment
        self._levels = [_Level() for _ in range(PRIORITIES)]
        self._syncs: deque[Transfer] = deque()
        self._writes: dict[int, Transfer] = {}  # not ended, by number, ascending

    def add(self, transfer: Transfer) -> None:
        if transfer.operation == "fsync":
            self._syncs.append(transfer)
            return
        if transfer.operation == "write":
            self._writes[transfer.number] = transfer
        self._levels[transfer.priority].waiting.append(transfer)

    def next(self, *, direct: bool) -> Piece | None:
        """Cuts or takes up the next piece; None where what is left waits for pieces in flight."""
        oldest_write = next(iter(self._writes), None)
        if self._syncs and (oldest_write is None or oldest_write > self._syncs[0].number):
            sync = self._syncs.popleft()
            sync.pieces_open = 1
            return Piece(sync)
        for level in self._levels:
            if level.resumed:
                return level.resumed.popleft()
            if level.waiting:
                transfer = level.waiting[0]
                piece = cut(
                    transfer, request_bytes=self._request_bytes, alignment=self._alignment, direct=direct
                )
                if transfer.bytes_cut == transfer.size:
                    level.waiting.popleft()
                return piece
        return None

    def put_back(self, piece: Piece) -> None:
        """A piece that has not ended; it goes before new ones."""
        self._levels[piece.transfer.priority].resumed.appendleft(piece)

    def drop(self, transfer: Transfer) -> None:
        """Gives up what is not in flight of a transfer."""
        level = self._levels[transfer.priority]
        for piece in [piece for piece in level.resumed if piece.transfer is transfer]:
            level.resumed.remove(piece)
            transfer.bytes_done += piece.done
            transfer.pieces_open -= 1
        for waiting in (level.waiting, self._syncs):
            if transfer in waiting:
                waiting.remove(transfer)

    def holds(self, transfer: Transfer) -> bool:
        """Whether something of it is not in flight."""
        level = self._levels[transfer.priority]
        resumed = any(piece.transfer is transfer for piece in level.resumed)
        return resumed or transfer in level.waiting or transfer in self._syncs

    def drop_all(self) -> list[Transfer]:
        """Gives up everything that is not in flight; the transfers concerned."""
        dropped = dict.fromkeys(self._syncs)
        self._syncs.clear()
        for level in self._levels:
            dropped |= dict.fromkeys(piece.transfer for piece in level.resumed)
            dropped |= dict.fromkeys(level.waiting)
        for transfer in dropped:
            self.drop(transfer)
        return list(dropped)

    def ended(self, transfer: Transfer) -> None:
        """Syncs that waited for it may go."""
        self._writes.pop(transfer.number, None)

    @property
    def empty(self) -> bool:
        return not self._syncs and not any(level.resumed or level.waiting for level in self._levels)
