"""The host tier: anonymous mappings, cut into page-aligned pieces that are tensors.

A slab is mapped once with its exact size (no allocator that rounds to powers of two), asks for huge
pages, and takes memory only when a page is first touched. Every piece has a torch Storage of its own, so
that the number of tensors looking at it can be asked for (see ``mover``, Note [Who still looks]).
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from ..bytesize import MiB, align_up

HUGE_PAGE_BYTES = 2 * MiB


class HostTier:
    """Allocates host memory and knows what it is for."""

    def __init__(self) -> None:
        self.allocated: Counter[str] = Counter()
        """Bytes by purpose, as asked for."""

    def allocate(self, purpose: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        """One zero-filled slab, cut into pieces: uint8 tensors of ``sizes`` bytes, page-aligned.

        The memory goes back when the last tensor that looks at the slab is gone.
        """
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += align_up(size, mmap.PAGESIZE)
        if not end:
            return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        slab = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if end >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: only speed is lost
                slab.madvise(mmap.MADV_HUGEPAGE)
        self.allocated[purpose] += sum(sizes)
        return [
            torch.from_numpy(np.frombuffer(slab, np.uint8, size, offset))
            if size
            else torch.empty(0, dtype=torch.uint8)
            for size, offset in zip(sizes, offsets, strict=True)
        ]
