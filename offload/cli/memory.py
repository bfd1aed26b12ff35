"""Keeps the process at what the plan says. For the command only: a library may not set this for its host.

glibc's malloc keeps what is freed. Its threshold for giving a block a mapping of its own, which goes back
when freed, rises to 32 MiB as soon as such a block is freed once, so activations then come from a heap that is
given back only from its end and never from its middle; and every thread gets another heap. The plan promises
the operating system's count, so the threshold is fixed, the heap is trimmed, and there are few heaps. The
price, zeroing pages again, was not measurable beside the arithmetic on the blocks.
"""

from __future__ import annotations

import ctypes
import gc

from ..bytesize import KiB, MiB

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

MMAP_THRESHOLD_BYTES = 512 * KiB
TRIM_THRESHOLD_BYTES = 2 * MiB
ARENAS = 2


def limit_hoarding() -> bool:
    """Sets the limits, for the whole process; call it before threads start. False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_ARENA_MAX, ARENAS),
    )
    return all(mallopt(name, value) for name, value in settings)


def give_back() -> None:
    """Frees what nothing refers to and returns the free ends and whole free pages of the heaps."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
