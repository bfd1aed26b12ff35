"""The loads of a training step on a file of one's own: what `offload tune` and `offload bench io` measure with.

Note [Loads]
A step reads and writes chunks of tens of MiB, several in flight, through one queue for each path. `read` is what
forward does with weights on NVMe. `mixed` is the update: chunk k + 2 is read, chunk k is in memory, and is written
back where it came from. `write` is the first pass, which brings the model to its home. Transfers have four sizes
from 16 to 64 MiB and follow each other through the file.

Note [A file without a name]
The file has no name (O_TMPFILE, or unlinked at once), so it goes with the process, even at `kill -9`. Its
descriptor can still be opened again under /proc, with or without the page cache. It is filled before anything is
read: blocks that were only reserved are not read from the drive, and random bytes are not compressed on the way.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .. import metrics
from ..aio import PREFETCH, QUEUE_DEPTH, REQUEST_BYTES, THREADS, WRITE_BACK, Queue, Ticket
from ..bytesize import PAGE_BYTES, GiB, KiB, MiB, format_bytes, parse_bytes
from ..errors import ConfigError, StoreError, TransferError
from ..machine import IoSettings
from ..slab import map_slab

LOADS: Final = ("read", "write", "mixed")
TRANSFER_BYTES_MAX: Final = 64 * MiB
TRANSFER_PARTS: Final = (0.25, 0.625, 1.0, 0.375)
"""Sizes of transfers, in turn, of the largest."""
SLOTS: Final = 4
"""Buffers in turn: as many transfers are in flight, at most."""
READ_AHEAD: Final = 2
"""Chunks that are read ahead of the one that is written."""
FILE_BYTES: Final = 1 * GiB
"""Of a test file where nothing speaks against it: larger than what drives keep in their own memory."""
FIRST_BYTES: Final = 16 * MiB
"""Of a file, are written to see how fast the drive is."""
FILE_BYTES_MIN: Final = 4 * MiB
WRITE_MIN: Final = 16 * MiB
"""Writes, at least, without which nothing is measured."""
SPACE_LEFT_BYTES: Final = 64 * MiB
"""Of a file system's free space, stays free."""
_NO_TMPFILE: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    read_bytes: int
    written_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_second(self) -> float:
        """Read and written together."""
        return (self.read_bytes + self.written_bytes) / max(self.seconds, 1e-9) / 1e9

    @property
    def cores_per_gb(self) -> float:
        """CPU seconds for each GB moved: cores at 1 GB/s."""
        return self.cpu_seconds * 1e9 / max(self.read_bytes + self.written_bytes, 1)


def check_directory(path: Path) -> None:
    """Raises ConfigError where no file can be made in ``path``."""
    if not path.exists():
        raise ConfigError(f"{path}: does not exist; make it, or mount the drive")
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a directory; give one on the drive")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: is not writable by this user; give another directory")


def size_that_fits(path: Path, wanted: int) -> int:
    """Bytes of a test file: as wanted, or less where little space is free.

    Raises:
        ConfigError: there is next to none.
    """
    status = os.statvfs(path)
    if not status.f_blocks:
        return wanted  # no size to tell
    free = status.f_bavail * status.f_frsize
    size = min(wanted, (free - SPACE_LEFT_BYTES) // 2) // MiB * MiB
    if size < min(wanted, FILE_BYTES_MIN):
        need = FILE_BYTES_MIN * 2 + SPACE_LEFT_BYTES
        raise ConfigError(
            f"{path}: {format_bytes(free)} free, and a test file needs {format_bytes(need)}; free some"
        )
    return size


class ScratchFile:
    """A file in a directory. See Note [A file without a name]."""

    def __init__(self, directory: Path, size: int) -> None:
        """
        Raises:
            StoreError: it cannot be made.
        """
        self.directory, self.size = directory, size
        self.filled = 0
        """Bytes from the start that have been written: only these are read."""
        try:
            self._fd = _open_nameless(directory)
        except OSError as error:
            raise StoreError(error.errno, f"no file can be made: {error.strerror}", str(directory)) from error

    def path_for(self, pid: int | str = "self") -> str:
        """By which a process opens it: this one, or another one that this one started."""
        return f"/proc/{pid}/fd/{self._fd}"

    def open(self, settings: IoSettings) -> Queue:
        """A queue of its own on the file."""
        return Queue(
            self.path_for(),
            backend=settings.backend,
            queue_depth=settings.queue_depth,
            request_bytes=settings.block_size,
            threads=settings.thread_count,
            create=False,
        )

    def close(self) -> None:
        """The file is gone with its last descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _open_nameless(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    handle, name = tempfile.mkstemp(dir=directory, prefix=".offload-tune-")
    Path(name).unlink()
    return handle


class Rig:
    """Runs loads on a file, through a queue that the caller opens."""

    def __init__(self, file: ScratchFile) -> None:
        self.file = file
        room = min(file.size // (2 * SLOTS), metrics.memory_available_bytes() // (4 * SLOTS))
        self.transfer_bytes = max(min(TRANSFER_BYTES_MAX, room) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
        self._slots = [memoryview(_buffer(self.transfer_bytes)) for _ in range(SLOTS)]
        self._offset = 0
        self.written_bytes = 0
        """By all loads together, the first pass over the file included."""

    def fill(self, queue: Queue, *, seconds_max: float) -> None:
        """Writes the file once, or as much of it as the time allows: the rest is not used.

        Raises:
            StoreError: the drive refused, or is full.
        """
        with _told_of(self.file):
            queue.preallocate(self.file.size)
        self.file.filled, self._offset = self.file.size, 0
        first = self.run(queue, "write", min(FIRST_BYTES, self.file.size), seconds_max=seconds_max)
        in_time = first.gb_per_second * 1e9 * (seconds_max - first.seconds)
        rest = max(min(self.file.size - first.written_bytes, int(in_time)), 0)
        second = self.run(queue, "write", rest, seconds_max=seconds_max)
        self.file.filled, self._offset = first.written_bytes + second.written_bytes, 0

    def run(self, queue: Queue, load: str, size: int, *, seconds_max: float) -> Sample:
        """Moves ``size`` bytes, read and written together, or stops early when the time is over.

        Raises:
            StoreError: the drive refused.
        """
        mixed = load == "mixed"
        cpu, begin = time.process_time(), time.perf_counter()
        pieces = self._pieces(size // 2 if mixed else size, begin + seconds_max)
        with _told_of(self.file):
            moved = self._update(queue, pieces) if mixed else self._one_way(queue, load, pieces)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        written = 0 if load == "read" else moved
        self.written_bytes += written
        return Sample(0 if load == "write" else moved, written, seconds, cpu)

    def _one_way(self, queue: Queue, load: str, pieces: Iterator[tuple[memoryview, int]]) -> int:
        flying: deque[Ticket] = deque()
        moved = 0
        for buffer, offset in pieces:
            if len(flying) == SLOTS:
                flying.popleft().wait()
            flying.append(queue.read(buffer, offset) if load == "read" else queue.write(buffer, offset))
            moved += len(buffer)
        while flying:
            flying.popleft().wait()
        return moved

    def _update(self, queue: Queue, pieces: Iterator[tuple[memoryview, int]]) -> int:
        """Reads ahead, writes behind. See Note [Loads]."""
        reads: deque[tuple[Ticket, memoryview, int]] = deque()
        writes: deque[Ticket] = deque()
        moved = 0

        def write_back() -> None:
            ticket, buffer, offset = reads.popleft()
            ticket.wait()
            writes.append(queue.write(buffer, offset, priority=WRITE_BACK))

        for buffer, offset in pieces:
            if len(reads) == READ_AHEAD:
                write_back()
            if len(writes) == SLOTS - READ_AHEAD + 1:
                writes.popleft().wait()  # the slot is read into next
            reads.append((queue.read(buffer, offset, priority=PREFETCH), buffer, offset))
            moved += len(buffer)
        while reads:
            write_back()
        while writes:
            writes.popleft().wait()
        return moved

    def _pieces(self, size: int, deadline: float) -> Iterator[tuple[memoryview, int]]:
        """Buffers and places of transfers, ``size`` bytes in all, one after another through the file."""
        number = 0
        while size > 0 and (number == 0 or time.perf_counter() < deadline):
            part = int(self.transfer_bytes * TRANSFER_PARTS[number % len(TRANSFER_PARTS)])
            part = max(min(part, size) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
            if self._offset + part > self.file.filled:
                self._offset = 0
            part = min(part, self.file.filled)
            yield self._slots[number % SLOTS][:part], self._offset
            self._offset += part
            size -= part
            number += 1


class _told_of:  # noqa: N801  # reads as a phrase
    """Errors of transfers name the directory, as the file has no name."""

    def __init__(self, file: ScratchFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TransferError):
            raise StoreError(error.errno, error.strerror, str(self._file.directory)) from error


def _buffer(size: int) -> mmap.mmap:
    """Memory as the engine's: page-aligned, in huge pages where there are some; random bytes."""
    buffer = map_slab(size)
    noise = os.urandom(min(size, 8 * MiB))
    for begin in range(0, size, len(noise)):
        buffer[begin : begin + len(noise)] = noise[: size - begin]
    return buffer


def max_write_of(text: str) -> int:
    """The bytes that ``--max-write`` allows.

    Raises:
        ConfigError: it is no size, or too small to measure anything.
    """
    try:
        max_write = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-write: {error}") from None
    if max_write < WRITE_MIN:
        raise ConfigError(f"--max-write {text}: at least {format_bytes(WRITE_MIN)} are needed")
    return max_write


def default_settings(backend: str) -> IoSettings:
    """What a queue takes for "auto". The backend `threads` has as many requests in flight as threads."""
    if backend == "threads":
        return IoSettings(backend, REQUEST_BYTES, THREADS, THREADS)
    return IoSettings(backend, REQUEST_BYTES, QUEUE_DEPTH, 1)


def settings_text(settings: IoSettings) -> str:
    """``io_uring 1 MiB x 32``."""
    return f"{settings.backend} {size_text(settings.block_size)} x {settings.queue_depth}"


def size_text(size: int) -> str:
    """A size of requests, which is a round number: ``4 MiB``, ``256 KiB``."""
    return f"{size // MiB} MiB" if size % MiB == 0 else f"{size // KiB} KiB"
