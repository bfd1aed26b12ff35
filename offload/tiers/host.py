"""The host tier: anonymous mappings, cut into page-aligned pieces that are tensors.

A slab is mapped once with its exact size (no allocator that rounds to powers of two), asks for huge
pages, and takes memory only when a page is first touched. Every piece has a torch Storage of its own, so
that the number of tensors looking at it can be asked for (see ``mover``, Note [Who still looks]).

Note [Pinned memory]
What an accelerator copies from and to is registered with it, slab by slab, as it is. Where the system refuses
(memlock limits, WSL), the slab stays ordinary memory, and copies go through a small staging buffer that could be
registered (see `links`): slower, and the same bytes.

A forked child (a worker that loads data) does not get what is pinned. Before Linux 5.12 a fork moved the page that
the parent wrote to next, while the device went on with the old one.
"""

from __future__ import annotations

import logging
import mmap
import resource
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from ..accel import Accelerator
from ..bytesize import align_up, format_bytes
from ..errors import OffloadError, PlanError
from ..slab import advise, map_slab

logger = logging.getLogger("offload")


class HostTier:
    """Allocates host memory and knows what it is for. :meth:`close` ends its registration."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.allocated: Counter[str] = Counter()
        """Bytes by purpose, as asked for."""
        self._accelerator = accelerator
        self._registered: list[torch.Tensor] = []
        self._mappings: dict[int, mmap.mmap] = {}  # of what is registered, by address
        self._warned = False

    def allocate(self, purpose: str, sizes: Sequence[int], *, pinned: bool = False) -> list[torch.Tensor]:
        """One zero-filled slab, cut into pieces: uint8 tensors of ``sizes`` bytes, page-aligned.

        The memory goes back when the last tensor that looks at the slab is gone.

        Args:
            pinned: an accelerator copies from or to it. See Note [Pinned memory].

        Raises:
            PlanError: the system does not map that much.
        """
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += align_up(size, mmap.PAGESIZE)
        if not end:
            return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        try:
            slab = map_slab(end)
        except OSError as error:
            raise PlanError(
                f"{format_bytes(end)} of host memory wanted for {purpose}: {error.strerror}; lower"
                " memory.host_bytes, or raise the limit of virtual memory (ulimit -v)"
            ) from error
        self.allocated[purpose] += sum(sizes)
        if pinned:
            self._pin(purpose, slab)
        return [
            torch.from_numpy(np.frombuffer(slab, np.uint8, size, offset))
            if size
            else torch.empty(0, dtype=torch.uint8)
            for size, offset in zip(sizes, offsets, strict=True)
        ]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the accelerator can copy from and to this memory by itself."""
        address = tensor.data_ptr()
        return any(slab.data_ptr() <= address < slab.data_ptr() + slab.numel() for slab in self._registered)

    def close(self) -> None:
        """Ends the registration of every slab. Idempotent."""
        while self._registered and self._accelerator is not None:
            slab = self._registered.pop()
            self._accelerator.unregister(slab)
            advise(self._mappings.pop(slab.data_ptr()), "MADV_DOFORK")

    def _pin(self, purpose: str, mapping: mmap.mmap) -> None:
        if self._accelerator is None:
            return
        slab = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        try:
            self._accelerator.register(slab)
        except OffloadError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s of host memory for %s cannot be pinned (%s): copies go through a small pinned buffer,"
                    " slower and with the same results; raise the limit of locked memory (ulimit -l, now %s)",
                    format_bytes(slab.numel()),
                    purpose,
                    str(error),  # a record may be kept, and an error keeps what its frames hold
                    _locked_memory_limit(),
                )
        else:
            self._registered.append(slab)
            self._mappings[slab.data_ptr()] = mapping
            advise(mapping, "MADV_DONTFORK")


def _locked_memory_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
