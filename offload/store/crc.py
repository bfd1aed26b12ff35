"""The CRC-32C of a whole from those of its parts. Pure numpy."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # reflected
_POWERS_MAX = 48


def join(sums: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint64]) -> int:
    """The CRC-32C of parts that follow each other, each given by its own and its size in bytes.

    A sum is moved over the bytes behind its part by a linear map for each bit of their number.
    """
    behind = np.uint64(sizes.sum()) - np.cumsum(sizes, dtype=np.uint64)
    moved = sums.astype(np.uint32)
    for power in range(int(behind[0]).bit_length() if len(behind) else 0):
        chosen = np.flatnonzero(behind >> np.uint64(power) & np.uint64(1))
        moved[chosen] = _apply(_table(power), moved[chosen])
    return int(np.bitwise_xor.reduce(moved)) if len(moved) else 0


def _apply(table: npt.NDArray[np.uint32], sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    found: npt.NDArray[np.uint32] = table[0][sums & 0xFF]
    for byte in (1, 2, 3):
        found = found ^ table[byte][sums >> np.uint32(8 * byte) & np.uint32(0xFF)]
    return found


@functools.lru_cache(_POWERS_MAX)
def _table(power: int) -> npt.NDArray[np.uint32]:
    """The map over 2**power bytes, for each byte of a sum and each value of it."""
    images = _images(power)
    table = np.zeros((4, 256), np.uint32)
    for bit, image in enumerate(images):
        byte, low = divmod(bit, 8)
        table[byte, 1 << low : 2 << low] = table[byte, : 1 << low] ^ np.uint32(image)
    return table


@functools.lru_cache(_POWERS_MAX)
def _images(power: int) -> tuple[int, ...]:
    """Where the map over 2**power bytes takes each bit: the map over half of them, twice."""
    if power == 0:
        images: tuple[int, ...] = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # over one bit
        for _ in range(3):
            images = tuple(_image(images, image) for image in images)
        return images
    half = _images(power - 1)
    return tuple(_image(half, image) for image in half)


def _image(images: tuple[int, ...], value: int) -> int:
    found = 0
    for bit, image in enumerate(images):
        if value >> bit & 1:
            found ^= image
    return found
