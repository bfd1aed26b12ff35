"""The face of ``offload._aio``: a queue and its tickets."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from .engines import Engine, Operation, make_engine
from .faults import FaultPlan, FaultyEngine
from .file import File
from .schedule import Transfer
from .worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OFFSET_MAX = (1 << 63) - 1


class Ticket:
    """One transfer as its submitter sees it. One that is dropped early goes on, and keeps its buffer."""

    def __init__(self, queue: Queue, transfer: Transfer) -> None:
        self._queue, self._transfer = queue, transfer

    def __del__(self) -> None:
        if not self._transfer.finished.is_set():
            self._queue._dropped.append(self._transfer)

    def done(self) -> bool:
        return self._transfer.finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """False where the transfer is not over after ``timeout`` seconds."""
        if self.done():
            return True
        self._queue._require_owned()
        return self._transfer.finished.wait(timeout)

    @property
    def offset(self) -> int:
        return self._transfer.offset

    @property
    def size(self) -> int:
        return self._transfer.size

    @property
    def error(self) -> int:
        """0 or an errno; of use once done, as what follows."""
        return self._transfer.error

    @property
    def bytes_done(self) -> int:
        return self._transfer.bytes_done

    @property
    def order(self) -> int:
        """Among all tickets of the queue, from 1."""
        return self._transfer.order

    @property
    def seconds(self) -> float:
        """From submission to the end, or to now."""
        transfer = self._transfer
        return (transfer.ended if self.done() else time.monotonic()) - transfer.begun


class Queue:
    """All transfers of one file, in the process that opened it."""

    backend = "python"
    sqpoll, sqpoll_refused = False, 0
    """There is no such thing here."""

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
        faults: dict[str, int] | None = None,
    ) -> None:
        """As ``offload.aio.Queue``, with every value given.

        Raises:
            OSError: the file cannot be opened; its text is the operation.
            BackendError: the system gives no threads.
            ValueError: a setting does not fit the file.
        """
        self._path, self._owner_pid = path, os.getpid()
        self._worker: Worker | None = None
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
            worker = Worker(file, engine, depth=queue_depth, request_bytes=request_bytes)
            worker.start()
        except BaseException:
            if engine is not None:
                engine.close()
            file.close()
            raise
        self._worker = worker

    def __del__(self) -> None:
        if self._worker is not None:
            self.close(cancel=True)

    def read(self, buffer: Buffer, offset: int, priority: int) -> Ticket:
        view = self._view_of(buffer)
        if view.readonly:
            raise BufferError("the buffer is read-only, and a read fills it")
        return self._add("read", view, offset, priority)

    def write(self, buffer: Buffer, offset: int, priority: int) -> Ticket:
        return self._add("write", self._view_of(buffer), offset, priority)

    def sync(self) -> Ticket:
        self._require_owned()
        return self._add("fsync", None, 0, 0)

    def register(self, buffer: Buffer) -> int:
        """Says that memory is used as it is."""
        self._require_owned()
        return errno.ENOTSUP

    def unregister(self, buffer: Buffer) -> None:
        self._require_owned()

    def _view_of(self, buffer: Buffer) -> memoryview:
        self._require_owned()
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise BufferError("the buffer is not C-contiguous")
        return view

    def _add(self, operation: Operation, view: memoryview | None, offset: int, priority: int) -> Ticket:
        transfer = Transfer(operation, view, offset, priority)
        if offset > _OFFSET_MAX - min(transfer.size, _OFFSET_MAX):
            raise ValueError("the transfer ends beyond the largest file offset, 2**63 - 1")
        self._wait_for_dropped(transfer)
        ticket = Ticket(self, transfer)
        if not self._the_worker.add(transfer):
            transfer.finish(0)
            raise ValueError(f"the queue of {self._path} is closed")
        return ticket

    def _wait_for_dropped(self, transfer: Transfer) -> None:
        """What was dropped may still be under way in memory that is used anew: a late read would overwrite it,
        a late write would take its new bytes to the file."""
        if not self._dropped:
            return
        self._dropped = [other for other in self._dropped if not other.finished.is_set()]
        for other in [other for other in self._dropped if other.overlaps(transfer)]:
            other.finished.wait()

    def preallocate(self, size: int) -> bool:
        self._require_owned()
        with self._file_lock:  # nobody closes a descriptor that is in use
            return self._file.preallocate(size)

    def close(self, cancel: bool) -> None:
        if os.getpid() != self._owner_pid:
            return
        worker = self._the_worker
        worker.request_stop(cancel=cancel)
        try:
            worker.join()
        except BaseException:  # Ctrl-C: only what is in flight is still waited for
            worker.request_stop(cancel=True)
            worker.join()
            raise
        finally:
            if worker.exited.is_set():
                with self._file_lock:
                    self._file.close()

    def stats(self) -> dict[str, Any]:
        self._require_owned()
        stats = self._the_worker.stats
        return {
            "read": stats.read("read"),
            "write": stats.read("write"),
            "sync": stats.read("fsync"),
            "cpu_seconds": self._the_worker.cpu_seconds,
        }

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

    def _require_owned(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ValueError(
                f"the queue of {self._path} belongs to process {self._owner_pid}; open another one after the fork"
            )
