"""One file, open for direct and for buffered I/O.

O_DIRECT wants file offset, size and memory address aligned; callers may pass anything. What covers whole pages of
the file goes direct; heads and tails that cover parts of a page, and pieces whose address is odd, go through a
second, buffered descriptor, where the page cache keeps neighbours within one page apart. Why that is coherent:
``aio_csrc/io/file.h``, Note [Unaligned transfers].
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from typing import Final

_ALIGNMENT_MAX: Final = 64 * 1024
_WRITTEN_BACK_MAX: Final = 32
"""Buffered writes whose pages may still be dirty."""
_BLKSSZGET: Final = 0x1268
"""ioctl: the sector size of a block device."""


class File:
    """Descriptors, alignment, space and what of it is in the page cache."""

    def __init__(self, path: str, *, direct_io: str, create: bool, mode: int) -> None:
        """
        Raises:
            OSError: with the operation as its text.
        """
        self._policy = direct_io
        self._written_back: deque[tuple[int, int]] = deque()
        self._direct_fd = -1
        self.direct = False
        self.direct_error = 0
        self._buffered_fd = _open_buffered(path, create=create, mode=mode)
        try:
            self.alignment = _alignment(self._buffered_fd)
            if direct_io != "off":
                # No readahead: neighbours of a head or a tail would be stale in the cache, and what is read over
                # the end of a piece would not be dropped with it.
                os.posix_fadvise(self._buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)
                self._open_direct(path)
        except BaseException:
            self.close()
            raise

    def _open_direct(self, path: str) -> None:
        access = fcntl.fcntl(self._buffered_fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            self._direct_fd = os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
            self._try_direct()
        except OSError as error:
            self.direct_error = error.errno or errno.EIO
            if self._policy == "required":
                raise OSError(self.direct_error, "open with O_DIRECT") from None
            return
        self.direct = True

    def _try_direct(self) -> None:
        """Reads one block: some file systems open with O_DIRECT and then refuse transfers."""
        with mmap.mmap(-1, self.alignment) as block:
            try:
                os.preadv(self._direct_fd, [block], 0)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise

    def give_up_direct(self, code: int) -> bool:
        """Goes buffered for good where that is allowed."""
        if self._policy == "required":
            return False
        if self.direct:
            self.direct, self.direct_error = False, code
        return True

    def fd(self, *, direct: bool) -> int:
        return self._direct_fd if direct else self._buffered_fd

    def preallocate(self, size: int) -> bool:
        """Makes the file at least so long, its space reserved; False where it is long but sparse."""
        before = os.lseek(self._buffered_fd, 0, os.SEEK_END)
        code = _fallocate(self._buffered_fd, size)
        if code == 0:
            return True
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            if size > before:
                os.ftruncate(self._buffered_fd, size)
            return False
        if size > before:  # what was reserved before the space ran out is given back
            with contextlib.suppress(OSError):
                os.ftruncate(self._buffered_fd, before)
        raise OSError(code, "fallocate")

    def forget_cached(self, offset: int, size: int, *, written: bool) -> None:
        """Page cache is memory that no budget knows. A written range is told twice: the first time only begins
        to write it back."""
        if self._policy == "off" or size < self.alignment:
            return
        self._forget(offset, size)
        if written:
            self._written_back.append((offset, size))
        if len(self._written_back) > _WRITTEN_BACK_MAX:
            self._forget(*self._written_back.popleft())

    def forget_all_cached(self) -> None:
        if self._policy != "off":
            self._forget(0, 0)
            self._written_back.clear()

    def _forget(self, offset: int, size: int) -> None:
        os.posix_fadvise(self._buffered_fd, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._direct_fd, self._buffered_fd):
            if fd >= 0:
                os.close(fd)
        self._direct_fd = self._buffered_fd = -1


def _open_buffered(path: str, *, create: bool, mode: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if create or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, "open") from None


def _alignment(fd: int) -> int:
    """The page size, or the block size where that is larger: within one page all is direct, or all buffered."""
    about = os.fstat(fd)
    block = about.st_blksize
    if stat.S_ISBLK(about.st_mode):
        block = int.from_bytes(fcntl.ioctl(fd, _BLKSSZGET, bytes(4)), "little")
    usable = block & (block - 1) == 0 and 0 < block <= _ALIGNMENT_MAX
    return max(mmap.PAGESIZE, block) if usable else mmap.PAGESIZE


def _fallocate(fd: int, size: int) -> int:
    """0 or an errno. Not ``os.posix_fallocate``: where the file system cannot, that one writes every block."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0
