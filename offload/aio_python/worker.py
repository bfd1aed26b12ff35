"""The thread of one queue: it keeps requests in flight, and looks at every result."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass

from .engines import Engine, IoThread, Request
from .file import File
from .schedule import Piece, Schedule, Transfer
from .stats import Stats

# A piece that is refused so often in a row without moving a byte will not pass.
_REFUSALS_MAX = 20
_REFUSALS_AT_ONCE = 4  # before the first pause
_PAUSE_MS_MAX = 64


@dataclass(slots=True)
class _Slot:
    piece: Piece
    begun: float = 0.0


class Worker:
    """What works on one file, apart from the queue, so that a queue that is dropped can end it."""

    def __init__(self, file: File, engine: Engine, *, depth: int, request_bytes: int) -> None:
        self.file, self.stats = file, Stats()
        self.depth = min(max(depth, 1), engine.depth_max)
        self._engine = engine
        self._schedule = Schedule(request_bytes=request_bytes, alignment=file.alignment)
        self._slots: dict[int, _Slot] = {}
        self._tokens = list(range(self.depth))
        self._finished = 0
        self._lock = threading.Lock()  # guards all below
        self._inbox: list[Transfer] = []
        self._added = 0
        self._sleeping = False
        self._stopping = self._cancelling = False
        self._stop_seen = self._cancel_seen = False
        self.exited = threading.Event()
        self._thread = IoThread(self._run)

    def start(self) -> None:
        self._thread.start()

    def add(self, transfer: Transfer) -> bool:
        """False where the worker is stopping."""
        with self._lock:
            if self._stopping:
                return False
            self._added += 1
            transfer.number = self._added
            self._inbox.append(transfer)
            self._rouse()
        return True

    def request_stop(self, *, cancel: bool) -> None:
        with self._lock:
            if self.exited.is_set():
                return
            self._stopping = True
            self._cancelling = self._cancelling or cancel
            self._rouse()

    def join(self) -> None:
        """Waits for the end of the thread; Ctrl-C interrupts it."""
        if threading.current_thread() is not self._thread:
            self.exited.wait()
            self._thread.join()

    @property
    def cpu_seconds(self) -> float:
        """Of its thread and those of the engine."""
        return self._thread.cpu_seconds + self._engine.cpu_seconds

    def _rouse(self) -> None:
        if self._sleeping:  # one wake is enough
            self._engine.wake()
        self._sleeping = False

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self.file.forget_all_cached()
        finally:
            self._end()

    def _end(self) -> None:
        """Also after an error in this code: nothing is in flight, and nobody waits for ever."""
        self._engine.close()
        with self._lock:
            self._stopping = True
            left = dict.fromkeys([slot.piece.transfer for slot in self._slots.values()] + self._inbox)
            for transfer in left | dict.fromkeys(self._schedule.drop_all()):
                transfer.error = transfer.error or errno.EIO
                transfer.finish(0)
            self._slots.clear()
            self._inbox.clear()
            self.exited.set()

    def _turn(self) -> bool:
        self._take_inbox()
        self._submit()
        with self._lock:  # what arrives after this finds `_sleeping`, and wakes the engine
            seen = (self._stop_seen, self._cancel_seen) == (self._stopping, self._cancelling)
            if self._inbox or not seen:
                return True
            if self._stop_seen and not self._slots and self._schedule.empty:
                return False
            self._sleeping = bool(self._tokens)  # with no slot free, new work has to wait anyway
        for token, result in self._engine.reap(self.depth, wait=True):
            self._complete(token, result)
        return True

    def _take_inbox(self) -> None:
        with self._lock:
            self._sleeping = False
            arrived, self._inbox = self._inbox, []
            self._stop_seen, self._cancel_seen = self._stopping, self._cancelling
        for transfer in arrived:
            if transfer.operation != "fsync" and transfer.size == 0:
                self._finish(transfer)
            else:
                self._schedule.add(transfer)
        if self._cancel_seen:
            for transfer in self._schedule.drop_all():
                transfer.error = transfer.error or errno.ECANCELED
                self._end_if_over(transfer)

    # -- requests -----------------------------------------------------------------------------------------

    def _submit(self) -> None:
        requests = []
        while self._tokens and (piece := self._schedule.next(direct=self.file.direct)) is not None:
            token = self._tokens.pop()
            self._slots[token] = _Slot(piece)
            requests.append(self._request_of(piece, token))
        if not requests:
            return
        taken = self._engine.submit(requests)
        now = time.monotonic()
        for request in requests[:taken]:
            self._slots[request.token].begun = now
            self.stats.begin(request.operation, now)
        for request in reversed(requests[taken:]):  # last first, to keep their order
            self._schedule.put_back(self._take_slot(request.token).piece)

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

    def _take_slot(self, token: int) -> _Slot:
        self._tokens.append(token)
        return self._slots.pop(token)

    # -- results ------------------------------------------------------------------------------------------

    def _complete(self, token: int, result: int) -> None:
        slot = self._take_slot(token)
        piece, transfer = slot.piece, slot.piece.transfer
        is_sync = transfer.operation == "fsync"
        buffered = not is_sync and not piece.direct
        self.stats.end(transfer.operation, slot.begun, buffered=buffered)
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


def _pause_after(refusals: int) -> None:
    """The kernel is short of something. The whole queue pauses: more requests would not help it."""
    if refusals > _REFUSALS_AT_ONCE:
        time.sleep(min(1 << (refusals - _REFUSALS_AT_ONCE - 1), _PAUSE_MS_MAX) / 1000)
