"""The face of ``offload._aio``: a queue and its tickets.

Note [Waits that do not end]
A drive may stop answering. Every wait here goes in slices: it reports itself after ``stall_seconds`` (and after twice
that, four times that, ...), and is given up once both it and the oldest request of the queue are older than
``timeout_seconds``. The ticket then fails with ETIMEDOUT; its buffer stays alive, as the drive may still use it, and a
transfer to or from the same memory waits. A close that is given up leaves thread, file and buffers to the process.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .engines import Engine, Operation, make_engine
from .faults import FaultPlan, FaultyEngine
from .file import File
from .schedule import Transfer
from .worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OFFSET_MAX = (1 << 63) - 1
_SLICE_SECONDS = 0.05
_abandoned: list[Worker] = []
"""What a drive that does not answer has kept."""

OnStall: TypeAlias = Callable[[str, float, str, tuple[str, int, int, float] | None], None]
"""Told what is waited for, for how long, by which backend, and the oldest request in flight."""


class Ticket:
    """One transfer as its submitter sees it. One that is dropped early goes on, and keeps its buffer."""

    def __init__(self, queue: Queue, transfer: Transfer) -> None:
        self._queue, self._transfer = queue, transfer
        self._given_up = False

    def __del__(self) -> None:
        if not self._transfer.finished.is_set():
            self._queue._dropped.append(self._transfer)

    def done(self) -> bool:
        if self._given_up or self._transfer.finished.is_set():
            return True
        if self._queue._owned and self._queue._is_hopeless(self._transfer.seconds):
            self._give_up()
        return self._given_up

    def wait(self, timeout: float | None = None) -> bool:
        """False where the transfer is not over after ``timeout`` seconds."""
        if self.done():
            return True
        self._queue._require_owned()
        transfer = self._transfer
        if self._queue._wait(transfer.operation, transfer.finished.wait, timeout) == "given up":
            self._give_up()
        return self.done()

    def cancel(self) -> None:
        """Gives up what is not in flight."""
        if not self.done():
            self._queue._require_owned()
            self._queue._the_worker.cancel(self._transfer)

    def _give_up(self) -> None:
        self._given_up = not self._transfer.finished.is_set()  # unless it has ended after all
        if self._given_up:
            self._queue._dropped.append(self._transfer)

    @property
    def offset(self) -> int:
        return self._transfer.offset

    @property
    def size(self) -> int:
        return self._transfer.size

    @property
    def error(self) -> int:
        """0 or an errno; of use once done, as what follows."""
        return errno.ETIMEDOUT if self._given_up else self._transfer.error

    @property
    def bytes_done(self) -> int:
        return 0 if self._given_up else self._transfer.bytes_done

    @property
    def order(self) -> int:
        """Among all tickets of the queue, from 1."""
        return self._transfer.order

    @property
    def seconds(self) -> float:
        """From submission to the end, or to now."""
        return self._transfer.seconds


class Queue:
    """All transfers of one file, in the process that opened it."""

    backend = "python"
    sqpoll = False
    sqpoll_refused = 0

    def __init__(
        self,
        *,
        path: str,
        backend: str,
        queue_depth: int,
        request_bytes: int,
        direct_io: str,
        threads: int,
        sqpoll: bool,
        create: bool,
        mode: int,
        bytes_pending_max: int,
        stall_seconds: float,
        timeout_seconds: float,
        on_stall: OnStall,
        faults: dict[str, int] | None = None,
    ) -> None:
        """As ``offload.aio.Queue``, with every value given.

        Raises:
            OSError: the file cannot be opened; its text is the operation.
            BackendError: the system gives no threads.
            ValueError: a setting does not fit the file.
        """
        self._path, self._owner_pid = path, os.getpid()
        self._stall_seconds, self._timeout_seconds, self._on_stall = stall_seconds, timeout_seconds, on_stall
        self._worker: Worker | None = None
        self._is_abandoned = False
        self._dropped: list[Transfer] = []
        plan = FaultPlan.of(faults) if faults is not None else None
        file = File(path, direct_io=direct_io, create=create, mode=mode)
        self._file, self._file_lock = file, threading.Lock()
        engine: Engine | None = None
        try:
            if request_bytes % file.alignment:
                raise ValueError(
                    f"request_bytes must be a multiple of {file.alignment}, the alignment of {path};"
                    f" got {request_bytes}"
                )
            engine = make_engine(queue_depth, threads)
            if plan is not None:
                engine = FaultyEngine(engine, plan)
            worker = Worker(
                file,
                engine,
                depth=queue_depth,
                request_bytes=request_bytes,
                bytes_pending_max=bytes_pending_max,
            )
            worker.start()
        except BaseException:
            if engine is not None:
                engine.close()
            file.close()
            raise
        self._worker = worker

    def __del__(self) -> None:
        if self._worker is None:
            return
        if self._owned:
            self.close(cancel=True)
        else:
            self._file.close()  # this process's copies only

    # -- transfers ----------------------------------------------------------------------------------------

    def read(self, buffer: Buffer, offset: int, priority: int) -> Ticket:
        return self._add("read", self._view_of(buffer, written=True), offset, priority)

    def write(self, buffer: Buffer, offset: int, priority: int) -> Ticket:
        return self._add("write", self._view_of(buffer, written=False), offset, priority)

    def sync(self) -> Ticket:
        self._require_owned()
        return self._add("fsync", None, 0, 0)

    def _view_of(self, buffer: Buffer, *, written: bool) -> memoryview:
        self._require_owned()
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise BufferError("the buffer is not C-contiguous")
        if written and view.readonly:
            raise BufferError("the buffer is read-only, and a read fills it")
        return view

    def _add(self, operation: Operation, view: memoryview | None, offset: int, priority: int) -> Ticket:
        transfer = Transfer(operation, view, offset, priority)
        if offset > _OFFSET_MAX - min(transfer.size, _OFFSET_MAX):
            raise ValueError("the transfer ends beyond the largest file offset, 2**63 - 1")
        self._wait_for_dropped(transfer)
        ticket = Ticket(self, transfer)
        try:
            self._submit(transfer)
        except BaseException:
            if not transfer.number:  # it was not accepted
                transfer.finish(0)
            raise
        return ticket

    def _submit(self, transfer: Transfer) -> None:
        """Waits where there is no room for the bytes."""
        worker = self._the_worker
        added = worker.add_within(0, transfer)
        if added == "no room":

            def step(seconds: float) -> bool:
                nonlocal added
                added = worker.add_within(seconds, transfer)
                return added != "no room"

            try:
                if self._wait("room in the queue", step) == "given up":
                    raise OSError(errno.ETIMEDOUT, transfer.operation)
            except BaseException:
                worker.leave_line(transfer)
                raise
        if added == "closed":
            raise ValueError(f"the queue of {self._path} is closed")

    def _wait_for_dropped(self, transfer: Transfer) -> None:
        """What was dropped may still be under way in memory that is used anew: a late read would overwrite it,
        a late write would take its new bytes to the file."""
        if not self._dropped:
            return
        self._dropped = [other for other in self._dropped if not other.finished.is_set()]
        for other in [other for other in self._dropped if other.overlaps(transfer)]:
            if self._wait("memory that an earlier transfer uses", other.finished.wait) == "given up":
                raise OSError(errno.ETIMEDOUT, other.operation)

    def register(self, buffer: Buffer) -> int:
        """There is nothing to gain here."""
        self._view_of(buffer, written=True).release()
        return errno.ENOTSUP

    def unregister(self, buffer: Buffer) -> None:
        self._require_owned()
        raise ValueError("the buffer is not registered")

    def preallocate(self, size: int) -> bool:
        self._require_owned()
        with self._file_lock:  # nobody closes a descriptor that is in use
            return self._file.preallocate(size)

    # -- waits, and the end -------------------------------------------------------------------------------

    def _wait(
        self, what: str, step: Callable[[float], bool], timeout: float | None = None
    ) -> Literal["over", "timeout", "given up"]:
        """Waits for ``step`` (given seconds) to say true. See Note [Waits that do not end]."""
        begun, next_report = time.monotonic(), self._stall_seconds
        while True:
            waited = time.monotonic() - begun
            left = _SLICE_SECONDS if timeout is None else timeout - waited
            if step(max(0.0, min(left, _SLICE_SECONDS))):
                return "over"
            if timeout is not None and waited >= timeout:
                return "timeout"
            if self._is_hopeless(waited):
                return "given up"
            if waited >= next_report:
                next_report = 2 * waited
                self._on_stall(what, waited, self.backend, self._the_worker.stats.oldest())

    def _is_hopeless(self, seconds: float) -> bool:
        if seconds < self._timeout_seconds:
            return False
        oldest = self._the_worker.stats.oldest()
        return oldest is not None and oldest[3] >= self._timeout_seconds

    def close(self, cancel: bool) -> bool:
        """False where it was given up."""
        if not self._owned or self._is_abandoned:
            return True
        worker = self._the_worker
        worker.request_stop(cancel=cancel)
        try:
            given_up = self._wait("close", worker.join_within) == "given up"
        except BaseException:  # Ctrl-C: only what is in flight is still waited for
            worker.request_stop(cancel=True)
            self._finish_close(given_up=self._wait("close", worker.join_within) == "given up")
            raise
        return self._finish_close(given_up=given_up)

    def _finish_close(self, *, given_up: bool) -> bool:
        if given_up:
            self._is_abandoned = True
            _abandoned.append(self._the_worker)
            return False
        with self._file_lock:
            self._file.close()
        return True

    # -- what it is ---------------------------------------------------------------------------------------

    def stats(self) -> Any:
        self._require_owned()
        worker = self._the_worker
        sides = {"read": worker.stats.read("read"), "write": worker.stats.read("write")}
        return {**sides, "sync": worker.stats.read("fsync"), "cpu_seconds": worker.cpu_seconds()}

    @property
    def alignment(self) -> int:
        return self._file.alignment

    @property
    def direct(self) -> bool:
        return self._file.direct

    @property
    def direct_error(self) -> int:
        return self._file.direct_error

    @property
    def queue_depth(self) -> int:
        return self._the_worker.depth

    @property
    def _the_worker(self) -> Worker:
        if self._worker is None:
            raise AssertionError("a queue that was not opened")
        return self._worker

    @property
    def _owned(self) -> bool:
        return os.getpid() == self._owner_pid

    def _require_owned(self) -> None:
        if not self._owned:
            raise ValueError(
                f"the queue of {self._path} belongs to process {self._owner_pid}; open another one after the fork"
            )
