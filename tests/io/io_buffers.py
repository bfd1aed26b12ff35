"""Buffers of the I/O tests. Their oracle is a mirror of the file in memory."""

from __future__ import annotations

import mmap

import numpy as np


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def page_aligned(size: int) -> np.ndarray:
    """Zeroed bytes that start on a page: what direct I/O wants."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)[:size]
