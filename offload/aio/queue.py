"""A queue: all transfers of one file. A ticket: one of them."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import resource
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from ..bytesize import MiB, format_bytes
from ..errors import ConfigError, OffloadError, TransferError
from .refusals import BackendErrors, candidates, explain, log_once, memlock_hint, name_of, open_core
from .stats import DirectionStats, QueueStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .. import _aio, aio_python

logger = logging.getLogger("offload.aio")

NEEDED: Final = 0
"""Priority of a transfer that somebody waits for."""
PREFETCH: Final = 1
WRITE_BACK: Final = 2

QUEUE_DEPTH: Final = 32
REQUEST_BYTES: Final = 1 * MiB
# Beside a queue depth of 32 this many threads already keep one NVMe drive busy with 1 MiB requests.
THREADS: Final = 8
STALL_SECONDS: Final = ("OFFLOAD_IO_STALL_SECONDS", 30.0)
TIMEOUT_SECONDS: Final = ("OFFLOAD_IO_TIMEOUT_SECONDS", 600.0)
_OFFSET_MAX: Final = (1 << 63) - 1


class Ticket:
    """One transfer in flight. Made by :class:`Queue`.

    A ticket may be dropped: the transfer goes on, its buffer stays alive, a later transfer of the queue to or
    from the same memory waits for it, and an error only shows in ``Queue.stats()``.
    """

    __slots__ = ("_cancelled", "_core", "_queue", "operation")

    def __init__(self, core: _aio.Ticket | aio_python.Ticket, queue: Queue, operation: str) -> None:
        self._core, self._queue = core, queue
        self._cancelled = False
        self.operation = operation
        """``"read"``, ``"write"`` or ``"fsync"``."""

    @property
    def offset(self) -> int:
        return self._core.offset

    @property
    def size(self) -> int:
        """Bytes asked for."""
        return self._core.size

    @property
    def seconds(self) -> float:
        """From submission to the end; to now while in flight."""
        return self._core.seconds

    def done(self) -> bool:
        """Whether the transfer is over, well or not. Never blocks, never raises."""
        return self._core.done()

    def cancel(self) -> None:
        """Give up what is not in flight of the transfer, which then ends with ECANCELED. Does not wait.

        A transfer that is in flight as a whole, or done, ends as if nothing had been said.
        """
        self._cancelled = True
        self._core.cancel()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is over. Lets other Python threads run; Ctrl-C interrupts it.

        Raises :class:`TransferError` if the transfer failed, every time it is called, and ``TimeoutError`` if
        it is not over after ``timeout`` seconds; it may then be waited for again.
        """
        if not self._core.wait(timeout):
            raise TimeoutError(
                f"{self.operation} of {self.size} bytes at offset {self.offset} of {self._queue.path} "
                f"is not over after {timeout} s"
            )
        self._queue._warn_if_not_direct()
        if self._core.error != 0:
            raise self._queue._failure(
                self._core.error,
                self.operation,
                self.offset,
                self.size,
                done=self._core.bytes_done,
                cancelled=self._cancelled,
            )

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._core.error else "done"
        return (
            f"<Ticket: {self.operation} of {self.size} bytes at {self.offset} of {self._queue.path}, {state}>"
        )


class Queue:
    """All transfers of one file.

    Requests of at most ``request_bytes`` are kept in flight, ``queue_depth`` of them, across transfers. Of
    what is pending, the highest priority goes first (:data:`NEEDED`, :data:`PREFETCH`, :data:`WRITE_BACK`),
    and within one priority what was submitted first. Methods may be called from any thread.

    A queue belongs to the process that opened it: in a forked child every call raises ``ValueError``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        queue_depth: int | Literal["auto"] = "auto",
        request_bytes: int | Literal["auto"] = "auto",
        direct_io: Literal["auto", "required", "off"] = "auto",
        threads: int | Literal["auto"] = "auto",
        sqpoll: bool = False,
        bytes_pending_max: int | Literal["auto"] = "auto",
        stall_seconds: float | Literal["auto"] = "auto",
        timeout_seconds: float | Literal["auto"] = "auto",
        size: int | None = None,
        create: bool = True,
        mode: int = 0o600,
        faults: Mapping[str, int] | None = None,
    ) -> None:
        """Open ``path``.

        backend: one of :func:`backends`; ``auto`` takes the first that works and logs why one was refused.
            ``python`` needs no compiler, and takes twice the CPU time.
        queue_depth: requests in flight at most (auto: 32; ``threads`` has as many as threads).
        request_bytes: a multiple of :attr:`alignment` (auto: 1 MiB).
        direct_io: ``auto`` bypasses the page cache where the file system lets it; elsewhere it warns once and
            keeps the cache small. ``required`` fails there. ``off`` uses the page cache as it is.
        threads: of the ``threads`` backend (auto: 8, but no more than ``queue_depth``).
        sqpoll: of ``io_uring``: a thread of the kernel picks requests up, and needs a core for it while there are
            any. Where that is refused the log says so once, and all goes on without.
        bytes_pending_max: bytes accepted and not done, at most; what exceeds them blocks the submitter, the
            highest priority goes first when there is room again (auto: no limit).
        stall_seconds: a wait that lasts longer is reported by a warning that names the oldest request in
            flight, and goes on (auto: ``OFFLOAD_IO_STALL_SECONDS``, or 30).
        timeout_seconds: a transfer that is older fails with ETIMEDOUT, if a request of the queue has been in
            flight for so long, too (auto: ``OFFLOAD_IO_TIMEOUT_SECONDS``, or 600). Its buffer stays alive.
        size: preallocate this much, as :meth:`preallocate` does.
        create: make the file, with ``mode``, if it is not there. With ``create=False`` a file that may not be
            written is opened for reading only.
        faults: for tests; the faults of ``FaultPlan`` in ``aio_csrc/io/faulty_backend.h``.
        """
        self.path: Final = os.fspath(path)
        self._closed = False
        self._direct_warned = False
        if direct_io not in ("auto", "required", "off"):
            raise ConfigError(f"direct_io must be 'auto', 'required' or 'off', got {direct_io!r}")
        depth = _at_least_one("queue_depth", queue_depth, QUEUE_DEPTH)
        self._timeout: Final = _seconds("timeout_seconds", timeout_seconds, TIMEOUT_SECONDS)
        self._core = self._open(
            candidates(backend),
            queue_depth=depth,
            request_bytes=_at_least_one("request_bytes", request_bytes, REQUEST_BYTES),
            direct_io=direct_io,
            threads=_at_least_one("threads", threads, min(THREADS, depth)),
            sqpoll=sqpoll,
            bytes_pending_max=_at_least_one("bytes_pending_max", bytes_pending_max, 0),
            stall_seconds=_seconds("stall_seconds", stall_seconds, STALL_SECONDS),
            timeout_seconds=self._timeout,
            on_stall=functools.partial(_log_stall, self.path),
            create=create,
            mode=mode,
            faults=dict(faults) if faults is not None else None,
        )
        _open_queues.add(self)
        self._warn_if_not_direct()
        if sqpoll and not self._core.sqpoll:
            code = self._core.sqpoll_refused
            why = (
                f"{name_of(code)}: {os.strerror(code)}"
                if code
                else f"backend {self.backend} has no such thing"
            )
            log_once("sqpoll", f"submission by a kernel thread is refused ({why}); going on without")
        if size is not None:
            try:
                self.preallocate(size)
            except BaseException:
                self.close()
                raise

    def _open(self, names: list[str], **settings: Any) -> _aio.Queue | aio_python.Queue:
        for name, instead in zip(names, [*names[1:], None], strict=True):
            try:
                return open_core(name, self.path, **settings)
            except BackendErrors as error:
                if instead is None:
                    raise OffloadError(f"I/O backend {name!r} cannot be used: {explain(error)}") from error
                log_once(name, f"I/O backend {name} is refused: {explain(error)}; using {instead}")
            except ValueError as error:
                raise ConfigError(str(error)) from None
            except OSError as error:
                raise self._failure(error.errno or 0, error.strerror or "open", 0, 0, done=0) from None
        raise AssertionError("no backend to choose from")

    def read(self, buffer: Buffer, offset: int, *, priority: int = NEEDED) -> Ticket:
        """Fill ``buffer`` with the bytes at ``offset``. The file ending early is an error."""
        self._check(offset, priority)
        try:
            core = self._core.read(buffer, offset, priority)
        except OSError as error:
            raise self._not_accepted(error, "read", buffer, offset) from None
        return Ticket(core, self, "read")

    def write(self, buffer: Buffer, offset: int, *, priority: int = NEEDED) -> Ticket:
        """Write ``buffer`` at ``offset``. It must not change until the ticket is done."""
        self._check(offset, priority)
        try:
            core = self._core.write(buffer, offset, priority)
        except OSError as error:
            raise self._not_accepted(error, "write", buffer, offset) from None
        return Ticket(core, self, "write")

    def sync(self) -> Ticket:
        """Bring all writes submitted so far to stable storage. Their errors are in their own tickets."""
        self._check(0, NEEDED)
        try:
            core = self._core.sync()
        except OSError as error:
            raise self._not_accepted(error, "fsync", b"", 0) from None
        return Ticket(core, self, "fsync")

    def preallocate(self, size: int) -> None:
        """Make the file at least ``size`` bytes long, with its space reserved. Raises if there is too little.

        A file system that cannot reserve gets a sparse file, and the log says so.
        """
        self._check(size, NEEDED)
        if size == 0:
            return
        try:
            reserved = self._core.preallocate(size)
        except OSError as error:
            raise self._failure(error.errno or 0, "fallocate", 0, size, done=0) from None
        if not reserved:
            logger.warning(
                "%s: the file system cannot reserve space (fallocate: EOPNOTSUPP); the file is sparse, "
                "and a write may still run out of space",
                self.path,
            )

    def register(self, buffer: Buffer) -> bool:
        """Prepare writable memory, best a whole slab, for transfers to and from any part of it.

        With ``io_uring`` such a transfer costs half the CPU time. The memory is locked, and kept alive, until
        :meth:`unregister` or the end of :meth:`close`; a ``fork`` meanwhile copies it. False where it stays
        as it was: with other backends, and over the limit on locked memory, which is logged once.
        """
        self._check(0, NEEDED)
        code = self._core.register(buffer)
        if code not in (0, errno.ENOTSUP):
            size = format_bytes(memoryview(buffer).nbytes)
            why = memlock_hint() if code == errno.ENOMEM else os.strerror(code)
            log_once(
                "register",
                f"memory is not registered with io_uring: {name_of(code)} for {size} ({why}); "
                "transfers go on without, at more CPU time",
            )
        return code == 0

    def unregister(self, buffer: Buffer) -> None:
        """Unlock and let go of what :meth:`register` was given."""
        self._check(0, NEEDED)
        self._core.unregister(buffer)

    def stats(self) -> QueueStats:
        stats = self._core.stats()
        return QueueStats(
            read=DirectionStats(**stats["read"]),
            write=DirectionStats(**stats["write"]),
            sync=DirectionStats(**stats["sync"]),
            cpu_seconds=stats["cpu_seconds"],
        )

    @property
    def alignment(self) -> int:
        """Transfers whose offset, size and buffer address are multiples of this go direct as a whole."""
        return self._core.alignment

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._core.direct

    @property
    def backend(self) -> str:
        """The backend in use; never ``auto``."""
        return self._core.backend

    @property
    def queue_depth(self) -> int:
        """Requests in flight at most; the backend may have lowered it."""
        return self._core.queue_depth

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, *, cancel: bool = False) -> None:
        """End all transfers, stop the thread and close the file. Idempotent.

        What is pending is carried out; with ``cancel`` only what is in flight is, and the rest ends with
        ECANCELED. Ctrl-C during close turns it into ``cancel``; a queue that is dropped is closed so.
        """
        self._closed = True
        if not self._core.close(cancel):
            logger.error(
                "%s: closed with requests that were not answered within %g s; a thread, the file and the "
                "buffers concerned stay until the process ends",
                self.path,
                self._timeout,
            )

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "direct" if self.direct else "buffered"
        return f"<Queue of {self.path}: {self.backend}, {state}>"

    def _check(self, offset: int, priority: int) -> None:
        if self._closed:
            raise ValueError(f"the queue of {self.path} is closed")
        if not 0 <= offset <= _OFFSET_MAX:
            raise ValueError(f"an offset or size in a file lies in [0, 2**63), got {offset}")
        if priority not in (NEEDED, PREFETCH, WRITE_BACK):
            raise ValueError(f"priority must be {NEEDED}, {PREFETCH} or {WRITE_BACK}, got {priority}")

    def _warn_if_not_direct(self) -> None:
        code = self._core.direct_error
        if code == 0 or self._direct_warned:
            return
        self._direct_warned = True
        logger.warning(
            "%s: direct I/O is refused (%s: %s); going through the page cache, which costs speed and memory "
            "(direct_io='required' makes this an error)",
            self.path,
            name_of(code),
            os.strerror(code),
        )

    def _not_accepted(self, error: OSError, operation: str, buffer: Buffer, offset: int) -> TransferError:
        return self._failure(error.errno or 0, operation, offset, memoryview(buffer).nbytes, done=0)

    def _failure(
        self, code: int, operation: str, offset: int, size: int, *, done: int, cancelled: bool = False
    ) -> TransferError:
        hint = "it was cancelled" if cancelled and code == errno.ECANCELED else self._hint(code, operation)
        return TransferError(code, operation, self.path, offset=offset, size=size, done=done, hint=hint)

    def _hint(self, code: int, operation: str) -> str:
        if code in (errno.ENOSPC, errno.EDQUOT):
            return _free_space(self.path)
        if code == errno.EFBIG:
            soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if soft != resource.RLIM_INFINITY:
                return f"RLIMIT_FSIZE is {format_bytes(soft)}; raise `ulimit -f`"
            return "the file system allows no file of that size"
        if code == errno.ENODATA and operation == "read":
            with contextlib.suppress(OSError):
                return f"the file ends at {Path(self.path).stat().st_size} bytes"
        if code == errno.ETIMEDOUT:
            return (
                f"a request has not been answered for {self._timeout:g} s; is the drive still there? "
                "The memory stays in use"
            )
        if code == errno.ECANCELED:
            return "the queue was closed before it was its turn"
        if code == errno.EBADF and operation == "write":
            return "the file is open for reading only"
        if code == errno.EINVAL and operation == "open with O_DIRECT":
            return "the file system has no direct I/O; direct_io='auto' goes through the page cache"
        return ""


def _at_least_one(name: str, value: int | Literal["auto"], auto: int) -> int:
    if value == "auto":
        return auto
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be 'auto' or a number from 1, got {value!r}")
    return value


def _seconds(name: str, value: float | Literal["auto"], auto: tuple[str, float]) -> float:
    variable, default = auto
    given = os.environ.get(variable, default) if value == "auto" else value
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        source = variable if value == "auto" else name
        raise ConfigError(f"{source} must be a number of seconds above 0, got {given!r}")
    return seconds


def _log_stall(
    path: str, what: str, seconds: float, backend: str, oldest: tuple[str, int, int, float] | None
) -> None:
    request = "nothing is in flight"
    if oldest is not None:
        operation, offset, size, age = oldest
        request = f"the oldest request is a {operation} of {size} bytes at offset {offset}, for {age:.1f} s"
    logger.warning(
        "%s: waiting for %s since %.1f s; %s (%s); still waiting", path, what, seconds, request, backend
    )


def _free_space(path: str) -> str:
    with contextlib.suppress(OSError):
        about = os.statvfs(path)
        return f"{format_bytes(about.f_bavail * about.f_frsize)} free on its file system"
    return ""


# Threads and descriptors are gone before the interpreter takes its modules apart.
_open_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for queue in list(_open_queues):
        queue.close(cancel=True)
