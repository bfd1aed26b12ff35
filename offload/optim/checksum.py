"""Checksums of blocks of bytes, on the kernels' threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..accel import native_watchers
from .kernels import default_threads  # first: it says what to do where the extension is missing

from .. import _adam  # isort: skip


def crc32c(
    data: torch.Tensor, cuts: npt.NDArray[np.uint64], *, threads: int | None = None, way: str = "auto"
) -> npt.NDArray[np.uint32]:
    """CRC-32C of each block ``[cuts[i], cuts[i + 1])`` of ``data`` (flat uint8, on the CPU).

    Args:
        cuts: ascending; the last is at most the size of ``data``.
        way: one of :func:`crc32c_ways`; the same sums whichever.
    """
    for watch in native_watchers:
        watch(data[int(cuts[0]) : int(cuts[-1])] if len(cuts) else data[:0], False)
    sums = np.empty(max(len(cuts) - 1, 0), np.uint32)
    _adam.crc32c(
        data.numpy(),
        cuts,
        sums,
        threads=default_threads() if threads is None else threads,
        way=crc32c_ways()[0] if way == "auto" else way,
    )
    return sums


def crc32c_ways() -> list[str]:
    """How checksums can be computed here, fastest first: by an instruction, and by ``"table"``."""
    return _adam.crc32c_ways()
