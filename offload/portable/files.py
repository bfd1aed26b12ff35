"""The files of a checkpoint while they are written, and the thread that sums and writes them.

Note [Past the page cache]
Buffered writes of a checkpoint fill the cache with pages that nobody reads, and took two to five times as long as
direct ones where it was measured. So whole pages of a file are written directly, from where they lie or through a
small buffer where that is not on a page, and what is left at their ends through the cache: never both to one page.
Tensors that are whole pages come first in a file, so that most of it is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from ..bytesize import PAGE_BYTES, MiB
from ..errors import StoreError
from ..links import buffer_of
from ..slab import map_slab
from ..store.committed import sum_of
from ..store.crc import join
from .layout import FilePlan
from .manifest import FileEntry, Place

PIECE_BYTES = 8 * MiB
"""Of one write, and of the buffer of those that need one."""


def wait_for(writes: list[Future[None]]) -> None:
    """Waits for writes, and raises what went wrong."""
    for write in writes:
        write.result()


class Writer:
    """The files of a checkpoint that is being written, and the thread that writes them."""

    def __init__(self, folder: Path, plan: FilePlan) -> None:
        self._folder, self._plan = folder, plan
        self._fds: list[int] = []
        self._direct: list[int] = []  # -1 where the file system knows no direct I/O
        self._buffer = torch.frombuffer(map_slab(PIECE_BYTES), dtype=torch.uint8)
        self._sums: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._headers: list[int] = []
        self._thread = ThreadPoolExecutor(1, "offload-save")
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Writer:
        try:
            for file in self._plan.files:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fds.append(os.open(self._folder / file.name, flags, 0o600))
                self._direct.append(self._open_direct(file.name))
                header = torch.frombuffer(bytearray(file.layout.header), dtype=torch.uint8)
                self._headers.append(sum_of(header))
                self._write(len(self._fds) - 1, 0, header)
        except OSError as error:
            self.__exit__()
            raise self._failed(error, "make", len(self._fds)) from error
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for fd in (*self._fds, *self._direct):
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
        self._direct.clear()

    def _open_direct(self, name: str) -> int:
        with suppress(OSError):
            return os.open(self._folder / name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        return -1

    def put(self, param: str, plane: str, at: int, values: torch.Tensor) -> list[Future[None]]:
        """Writes values to byte ``at`` of a plane, after those before them. They must not change until then."""
        flat = values.reshape(-1).view(torch.uint8)
        begun = [
            self._thread.submit(self.write, param, plane, at + first, flat[first : first + PIECE_BYTES])
            for first in range(0, flat.numel(), PIECE_BYTES)
        ]
        self._writes += begun
        return begun

    def write(self, param: str, plane: str, at: int, data: torch.Tensor) -> None:
        """As :meth:`put`, of flat bytes, in the calling thread: they are written when it returns."""
        place = self._plan.places.get((param, plane))
        sums, sizes = self._sums.setdefault((param, plane), ([], []))
        sums.append(sum_of(data))
        sizes.append(data.numel())
        if place is not None:
            self._write(place[0], place[1] + at, data)

    def drain(self) -> None:
        """Waits for all writes, and raises what went wrong."""
        wait_for(self._writes)
        self._writes.clear()

    def finish(self) -> None:
        """Everything is on stable storage; its pages in the cache are given up."""
        self.drain()
        for number, fd in enumerate(self._fds):
            try:
                os.fsync(fd)
            except OSError as error:
                raise self._failed(error, "flush", number) from error
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def entries(self) -> Iterator[FileEntry]:
        """The files, as the checkpoint names them."""
        for file, crc in zip(self._plan.files, self._headers, strict=True):
            yield FileEntry(file.name, file.layout.size, len(file.layout.header), crc)

    def place(self, param: str, plane: str) -> Place:
        """Where a plane was written, and the sum of its bytes."""
        total = join(*self._sums.get((param, plane), ((), ())))
        file, offset = self._plan.places.get((param, plane), (None, 0))
        return Place(file, offset, total)

    def _write(self, file: int, offset: int, data: torch.Tensor) -> None:
        """See Note [Past the page cache]."""
        head = min(-offset % PAGE_BYTES, data.numel())
        body = (data.numel() - head) // PAGE_BYTES * PAGE_BYTES
        self._pwrite(file, offset, data[:head])
        for first in range(head, head + body, PIECE_BYTES):
            piece = data[first : min(first + PIECE_BYTES, head + body)]
            if not self._pwrite_direct(file, offset + first, piece):
                self._pwrite(file, offset + first, piece)
        self._pwrite(file, offset + head + body, data[head + body :])

    def _pwrite(self, file: int, offset: int, data: torch.Tensor) -> None:
        view, done = memoryview(buffer_of(data)), 0
        while done < len(view):
            try:
                done += os.pwrite(self._fds[file], view[done:], offset + done)
            except OSError as error:
                raise self._failed(error, f"write byte {offset + done} of", file) from error

    def _pwrite_direct(self, file: int, offset: int, data: torch.Tensor) -> bool:
        """Whether it could be written so."""
        fd = self._direct[file]
        if fd < 0:
            return False
        if data.data_ptr() % PAGE_BYTES:
            aligned = self._buffer[: data.numel()]
            np.copyto(aligned.numpy(), data.numpy())  # torch would start threads in every thread that copies
            data = aligned
        try:
            return os.pwrite(fd, memoryview(buffer_of(data)), offset) == data.numel()
        except OSError as error:
            if error.errno == errno.EINVAL:  # the file system says so only now
                return False
            raise self._failed(error, f"write byte {offset} of", file) from error

    def _failed(self, error: OSError, what: str, file: int) -> StoreError:
        """The drive that is written failed, and not one of the engine's: training can go on."""
        if isinstance(error, StoreError):
            return error
        hint = "; free space or give another directory" if error.errno == errno.ENOSPC else ""
        name = self._plan.files[min(file, len(self._plan.files) - 1)].name
        return StoreError(
            error.errno, f"saving failed: cannot {what} it: {error.strerror}{hint}", str(self._folder / name)
        )
