"""Ways to have several requests in flight: the kernel's AIO, or threads.

An engine takes requests and hands back results, and no more: cutting, short results, retries and errors are
the worker's. One thread calls ``submit`` and ``reap``; ``wake`` may be called by any.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol

logger = logging.getLogger("offload.aio")

Operation = Literal["read", "write", "fsync"]

DEPTH_MAX: Final = 4096
# The kernel cuts a request to 2 GiB less a page; the rest is a short result, which is continued.
_TRANSFER_MAX: Final = 1 << 30


class BackendError(OSError):
    """No engine can be made: errno and the call that was refused."""


@dataclass(slots=True)
class Request:
    operation: Operation
    fd: int
    address: int
    size: int
    offset: int
    token: int


Completion = tuple[int, int]
"""Token, and bytes transferred or -errno."""


class Engine(Protocol):
    depth_max: int

    def submit(self, requests: Sequence[Request]) -> int:
        """Takes as many from the front as fit; says how many. One at least where nothing is in flight."""

    def reap(self, limit: int, *, wait: bool) -> list[Completion]:
        """What has ended, ``limit`` at most. With ``wait`` sleeps until something has, or until ``wake``."""

    def wake(self) -> None: ...

    def cpu_seconds(self) -> float:
        """Of threads of its own. Before ``close`` only."""

    def close(self) -> None:
        """Returns when nothing is in flight any more."""


def cpu_seconds_of(thread: threading.Thread) -> float:
    """CPU time of a thread that is alive."""
    if thread.ident is None:
        raise AssertionError("a thread that was not started")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """A thread that is started here takes no signals: Ctrl-C belongs to the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread that takes no signals.

    Raises:
        BackendError: the system allows no more threads.
    """
    try:
        with signals_blocked():
            thread.start()
    except RuntimeError as refused:
        raise BackendError(errno.EAGAIN, "pthread_create") from refused


def memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes there, whether Python may write to them or not. Keeps nothing alive."""
    return (ctypes.c_char * size).from_address(address)


@cache
def libaio_refusal() -> str | None:
    """Why PyPI's libaio cannot be used here; None where it can."""
    try:
        import libaio
    except ImportError as missing:
        return f"PyPI's libaio is not installed ({missing}); `pip install libaio`"
    except OSError as missing:
        return f"PyPI's libaio needs the system's library: {missing}"
    try:
        libaio.AIOContext(1).close()
    except OSError as refused:
        return f"{refused.strerror}: {os.strerror(refused.errno or 0)}"
    return None


def make_engine(depth: int, threads: int) -> Engine:
    """The kernel's AIO where it can be had, else threads.

    Raises:
        BackendError: not even threads can be started.
    """
    refusal = libaio_refusal()
    if refusal is None:
        try:
            return LibaioEngine(depth)
        except OSError as error:
            refusal = f"{error.strerror}: {os.strerror(error.errno or 0)}"
            if error.errno == errno.EAGAIN:
                refusal += " (others have used up fs.aio-max-nr; see fs.aio-nr)"
    logger.info("the backend python goes through preadv on threads: %s", refusal)
    return PreadEngine(threads)


class LibaioEngine:
    """The kernel's AIO, through PyPI's libaio."""

    def __init__(self, depth: int) -> None:
        import libaio

        class Context(libaio.AIOContext):  # type: ignore[misc]  # it has no types
            """One that a forked child leaves alone: the kernel's side is its parent's."""

            owner_pid = os.getpid()

            def close(self) -> None:
                if os.getpid() == self.owner_pid:
                    super().close()

        self._block: Any = libaio.AIOBlock
        self._modes = {
            "read": libaio.AIOBLOCK_MODE_READ,
            "write": libaio.AIOBLOCK_MODE_WRITE,
            "fsync": libaio.AIOBLOCK_MODE_FDSYNC,
        }
        self.depth_max = min(max(depth, 1), DEPTH_MAX)
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._context = Context(self.depth_max)
        except BaseException:
            os.close(self._event_fd)
            raise
        self._in_flight = 0
        self._refused: deque[Completion] = deque()
        self._woken = False

    def submit(self, requests: Sequence[Request]) -> int:
        blocks = [self._block_of(request) for request in requests[: self.depth_max - self._in_flight]]
        taken = 0
        while taken < len(blocks):
            try:
                accepted = self._context.submit(blocks[taken:])
            except OSError as error:
                accepted, code = 0, error.errno or errno.EIO
            else:
                code = errno.EAGAIN
            self._in_flight += accepted
            taken += accepted
            if accepted or code == errno.EINTR:
                continue
            # The first of the rest was refused. EAGAIN: the kernel is short of memory, and gets back that of
            # those in flight. Everything else is the outcome of this one.
            if code == errno.EAGAIN and self._in_flight > 0:
                break
            self._refused.append((requests[taken].token, -code))
            self._in_flight += 1
            taken += 1
        return taken

    def _block_of(self, request: Request) -> Any:
        buffers = []
        if request.operation != "fsync":
            buffers = [memory(request.address, min(request.size, _TRANSFER_MAX))]
        block = self._block(
            self._modes[request.operation],
            target_file=request.fd,
            buffer_list=buffers,
            offset=request.offset,
            eventfd=self._event_fd,
        )
        block.token = request.token
        return block

    def reap(self, limit: int, *, wait: bool) -> list[Completion]:
        done = self._take(limit)
        while wait and not done and not self._woken:
            os.eventfd_read(self._event_fd)  # without the GIL, until a completion or a wake
            done = self._take(limit)
        if not done:
            self._woken = False
        self._in_flight -= len(done)
        return done

    def _take(self, limit: int) -> list[Completion]:
        done = [self._refused.popleft() for _ in range(min(limit, len(self._refused)))]
        if len(done) < limit:
            events = self._context.getEvents(min_nr=0, nr=limit - len(done), timeout=0)
            done += [(block.token, result) for block, result, _ in events]
        return done

    def wake(self) -> None:
        self._woken = True
        os.eventfd_write(self._event_fd, 1)

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self._context.close()
        os.close(self._event_fd)


class PreadEngine:
    """preadv, pwritev and fdatasync on a few threads."""

    def __init__(self, threads: int) -> None:
        self.depth_max = max(threads, 1)
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._results: SimpleQueue[Completion | None] = SimpleQueue()  # None: a wake
        self._in_flight = 0
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(self.depth_max):
                thread = threading.Thread(target=self._work, name="offload.aio", daemon=True)
                start_thread(thread)
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> int:
        taken = requests[: self.depth_max - self._in_flight]
        for request in taken:
            self._requests.put(request)
        self._in_flight += len(taken)
        return len(taken)

    def reap(self, limit: int, *, wait: bool) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < limit and (not self._results.empty() or (wait and not done)):
            result = self._results.get()
            if result is None:
                break
            done.append(result)
        self._in_flight -= len(done)
        return done

    def wake(self) -> None:
        self._results.put(None)

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds_of, self._threads))

    def close(self) -> None:
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            self._results.put((request.token, _carry_out(request)))


def _carry_out(request: Request) -> int:
    try:
        if request.operation == "fsync":
            os.fdatasync(request.fd)
            return 0
        transfer = os.preadv if request.operation == "read" else os.pwritev
        return transfer(request.fd, [memory(request.address, request.size)], request.offset)
    except OSError as error:
        return -(error.errno or errno.EIO)
