"""The thread of one queue: it keeps requests in flight, and looks at every result."""

from __future__ import annotations

import errno
import threading
import time
from typing import Literal

from .engines import Engine, Request, cpu_seconds_of, start_thread
from .file import File
from .schedule import Piece, Schedule, Transfer
from .stats import Stats

# A piece that is refused so often in a row without moving a byte will not pass.
_REFUSALS_MAX = 20
_REFUSALS_AT_ONCE = 4  # before the first pause
_PAUSE_MS_MAX = 64


Added = Literal["yes", "no room", "closed"]


class Worker:
    """What works on one file, apart from the queue, so that a queue that is dropped can end it."""

    def __init__(
        self, file: File, engine: Engine, *, depth: int, request_bytes: int, bytes_pending_max: int
    ) -> None:
        """
        Args:
            bytes_pending_max: accepted and not done, at most; 0 is no limit.
        """
        self.file, self.stats = file, Stats()
        self.depth = min(max(depth, 1), engine.depth_max)
        self._engine = engine
        self._schedule = Schedule(request_bytes=request_bytes, alignment=file.alignment)
        self._slots: dict[int, Piece] = {}
        self._tokens = list(range(self.depth))
        self._finished = 0
        self._lock = threading.Lock()  # guards all below
        self._inbox: list[Transfer] = []
        self._cancels: list[Transfer] = []
        self._added = 0
        self._reaping = self._has_slots = False
        self._stopping = self._cancelling = False
        self._stop_seen = self._cancel_seen = False
        self._room = threading.Condition(self._lock)
        self._pending_max, self._pending = bytes_pending_max, 0
        self._line: set[tuple[int, int]] = set()  # those who wait for room: priority and place
        self._places = 0
        self._cpu_seconds = 0.0  # once it has exited
        self.exited = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload.aio", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def add_within(self, seconds: float, transfer: Transfer) -> Added:
        """Accepts a transfer once there is room for its bytes; it keeps its place in the line for the next try.

        The highest priority is first in line. A transfer larger than all the room is accepted alone.
        """
        with self._lock:
            if self._pending_max:
                if not transfer.place:
                    self._places += 1
                    transfer.place = self._places
                place = (transfer.priority, transfer.place)
                self._line.add(place)
                may_go = self._room.wait_for(
                    lambda: self._stopping or self._may_enter(place, transfer.size), seconds
                )
                if not may_go:
                    return "no room"
                self._line.discard(place)
                self._room.notify_all()  # there may be room for the next one, too
            if self._stopping:
                return "closed"
            self._pending += transfer.size
            self._added += 1
            transfer.number = self._added
            self._inbox.append(transfer)
            if self._has_slots:
                self._rouse()
        return "yes"

    def _may_enter(self, place: tuple[int, int], size: int) -> bool:
        return min(self._line) == place and (self._pending == 0 or self._pending + size <= self._pending_max)

    def leave_line(self, transfer: Transfer) -> None:
        with self._lock:
            self._line.discard((transfer.priority, transfer.place))
            self._room.notify_all()

    def cancel(self, transfer: Transfer) -> None:
        """Ends with ECANCELED what is not in flight of it."""
        with self._lock:
            if not self.exited.is_set():
                self._cancels.append(transfer)
                self._rouse()

    def request_stop(self, *, cancel: bool) -> None:
        with self._lock:
            if self.exited.is_set():
                return
            self._stopping = True
            self._cancelling = self._cancelling or cancel
            self._rouse()
            self._room.notify_all()

    def join_within(self, seconds: float) -> bool:
        """Waits for the end of the thread."""
        if threading.current_thread() is self._thread:
            return True
        if not self.exited.wait(seconds):
            return False
        self._thread.join()
        return True

    def cpu_seconds(self) -> float:
        """Of the thread, and of those of the engine."""
        with self._lock:  # until it has exited both are there
            return self._cpu_seconds if self.exited.is_set() else self._cpu_now()

    def _cpu_now(self) -> float:
        return cpu_seconds_of(self._thread) + self._engine.cpu_seconds()

    def _rouse(self) -> None:
        if self._reaping:  # one wake is enough
            self._engine.wake()
        self._reaping = self._has_slots = False

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self.file.forget_all_cached()
        finally:
            self._end()

    def _end(self) -> None:
        """Also after an error in this code: nothing is in flight, and nobody waits for ever."""
        with self._lock:
            self._stopping = True
            self._cpu_seconds = self._cpu_now()
            self._engine.close()
            left = dict.fromkeys([piece.transfer for piece in self._slots.values()] + self._inbox)
            for transfer in left | dict.fromkeys(self._schedule.drop_all()):
                transfer.error = transfer.error or errno.EIO
                transfer.finish(0)
            self._slots.clear()
            self._inbox.clear()
            self._room.notify_all()
            self.exited.set()

    def _turn(self) -> bool:
        self._take_inbox()
        self._submit()
        with self._lock:  # what arrives after this finds `_reaping`, and wakes the engine
            seen = (self._stop_seen, self._cancel_seen) == (self._stopping, self._cancelling)
            if self._inbox or self._cancels or not seen:
                return True
            if self._stop_seen and not self._slots and self._schedule.empty:
                return False
            self._reaping = True
            self._has_slots = bool(self._tokens)  # with none free, new work has to wait anyway
        for token, result in self._engine.reap(self.depth, wait=True):
            self._complete(token, result)
        return True

    def _take_inbox(self) -> None:
        with self._lock:
            self._reaping = self._has_slots = False
            arrived, self._inbox = self._inbox, []
            cancels, self._cancels = self._cancels, []
            self._stop_seen, self._cancel_seen = self._stopping, self._cancelling
        for transfer in arrived:
            if transfer.operation != "fsync" and transfer.size == 0:
                self._finish(transfer)
            else:
                self._schedule.add(transfer)
        for transfer in cancels:
            if not transfer.error and self._schedule.holds(transfer):
                transfer.error = errno.ECANCELED
                self._schedule.drop(transfer)
                self._end_if_over(transfer)
        if self._cancel_seen:
            for transfer in self._schedule.drop_all():
                transfer.error = transfer.error or errno.ECANCELED
                self._end_if_over(transfer)

    # -- requests -----------------------------------------------------------------------------------------

    def _submit(self) -> None:
        requests = []
        while self._tokens and (piece := self._schedule.next(direct=self.file.direct)) is not None:
            token = self._tokens.pop()
            self._slots[token] = piece
            requests.append(self._request_of(piece, token))
        if not requests:
            return
        taken = self._engine.submit(requests)
        now = time.monotonic()
        for request in requests[:taken]:
            self.stats.begin(request, now)
        for request in reversed(requests[taken:]):  # last first, to keep their order
            self._schedule.put_back(self._take_slot(request.token))

    def _request_of(self, piece: Piece, token: int) -> Request:
        transfer = piece.transfer
        at = piece.begin + piece.done
        return Request(
            operation=transfer.operation,
            fd=self.file.fd(direct=piece.direct),
            address=transfer.address + at,
            size=piece.size - piece.done,
            offset=transfer.offset + at,
            token=token,
        )

    def _take_slot(self, token: int) -> Piece:
        self._tokens.append(token)
        return self._slots.pop(token)

    # -- results ------------------------------------------------------------------------------------------

    def _complete(self, token: int, result: int) -> None:
        piece = self._take_slot(token)
        transfer = piece.transfer
        is_sync = transfer.operation == "fsync"
        buffered = not is_sync and not piece.direct
        self.stats.end(token, buffered=buffered)
        if result < 0:
            self._refused(piece, -result)
        elif is_sync:
            self.file.forget_all_cached()  # all clean now
            self._end_piece(piece, 0)
        else:
            if buffered:
                offset = transfer.offset + piece.begin + piece.done
                self.file.forget_cached(offset, result, written=transfer.operation == "write")
            self._advanced(piece, result)

    def _refused(self, piece: Piece, code: int) -> None:
        """Nothing was moved."""
        transfer = piece.transfer
        again = transfer.error == 0 and piece.refusals < _REFUSALS_MAX
        if code in (errno.EINTR, errno.EAGAIN) and again:
            self.stats.count(transfer.operation, "retried")
            piece.refusals += 1
            _pause_after(piece.refusals)
            self._schedule.put_back(piece)
        elif code == errno.EINVAL and piece.direct and transfer.error == 0 and self.file.give_up_direct(code):
            piece.direct = False
            self._schedule.put_back(piece)
        else:
            self._end_piece(piece, code)

    def _advanced(self, piece: Piece, moved: int) -> None:
        transfer = piece.transfer
        if moved > piece.size - piece.done:
            raise AssertionError("the kernel transferred more than was asked for")
        if moved == 0:
            if transfer.operation == "read":
                self._end_piece(piece, errno.ENODATA)  # the file ends here
            elif piece.refusals < _REFUSALS_MAX:
                self._refused(piece, errno.EAGAIN)
            else:
                self._end_piece(piece, errno.EIO)
            return
        before = piece.done
        piece.done += moved
        piece.refusals = 0
        over = piece.done == piece.size or transfer.error != 0
        if not over and piece.direct:
            # O_DIRECT goes on from a boundary: the bytes past the last one are transferred again. Where that
            # would be no progress (a file that ends within a block) the rest goes buffered.
            boundary = piece.done - piece.done % self.file.alignment
            piece.direct = boundary > before
            if piece.direct:
                piece.done = boundary
        self.stats.count(transfer.operation, "bytes", piece.done - before)
        if over:
            self._end_piece(piece, 0)
        else:
            self.stats.count(transfer.operation, "resumed")
            self._schedule.put_back(piece)

    def _end_piece(self, piece: Piece, code: int) -> None:
        transfer = piece.transfer
        transfer.bytes_done += piece.done
        transfer.pieces_open -= 1
        if code and not transfer.error:
            transfer.error = code
            self._schedule.drop(transfer)
        self._end_if_over(transfer)

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer.is_over:
            self._schedule.ended(transfer)
            if transfer.error:
                self.stats.count(transfer.operation, "failed")
            self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        self._finished += 1
        transfer.finish(self._finished)
        with self._lock:
            self._pending -= transfer.size
            if self._line:
                self._room.notify_all()


def _pause_after(refusals: int) -> None:
    """The kernel is short of something. The whole queue pauses: more requests would not help it."""
    if refusals > _REFUSALS_AT_ONCE:
        time.sleep(min(1 << (refusals - _REFUSALS_AT_ONCE - 1), _PAUSE_MS_MAX) / 1000)
