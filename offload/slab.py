"""Anonymous memory as transfers like it best: private pages, huge ones where there are some."""

from __future__ import annotations

import contextlib
import mmap

from .bytesize import MiB

HUGE_PAGE_BYTES = 2 * MiB


def map_slab(size: int) -> mmap.mmap:
    """Maps ``size`` bytes, not 0; zero, and taken from the system page by page when they are first touched.

    A drive fills huge pages up to twice as fast as small shared ones, which is what ``mmap.mmap(-1, size)`` gives.

    Raises:
        OSError: the system does not map that much.
    """
    slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES:
        advise(slab, "MADV_HUGEPAGE")
    return slab


def advise(slab: mmap.mmap, advice: str) -> None:
    """madvise(2), by the name of the advice; nothing where the kernel does not know it: only speed is lost."""
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            slab.madvise(getattr(mmap, advice))
