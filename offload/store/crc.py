"""The CRC-32C of a whole from those of its parts. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable

_POLYNOMIAL = 0x82F63B78  # reflected
_Table = tuple[tuple[int, ...], ...]


def join(sums: Iterable[int], sizes: Iterable[int]) -> int:
    """The CRC-32C of parts that follow each other, each given by its own and its size in bytes.

    The sum so far is moved over the next part: a linear map for each bit of its size.
    """
    total = 0
    for part, size in zip(sums, sizes, strict=True):
        for power in _powers(size) if total else ():
            one, two, three, four = _table(power)
            total = one[total & 0xFF] ^ two[total >> 8 & 0xFF] ^ three[total >> 16 & 0xFF] ^ four[total >> 24]
        total ^= part
    return total


@functools.lru_cache(4096)
def _powers(size: int) -> tuple[int, ...]:
    return tuple(power for power in range(size.bit_length()) if size >> power & 1)


@functools.cache
def _table(power: int) -> _Table:
    """The map over 2**power bytes, for each byte of a sum and each value of it."""
    images = _images(power)
    return tuple(tuple(_apply(images, value << shift) for value in range(256)) for shift in (0, 8, 16, 24))


@functools.cache
def _images(power: int) -> tuple[int, ...]:
    """Where the map over 2**power bytes takes each bit: the map over half of them, twice."""
    if power == 0:
        images: tuple[int, ...] = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # over one bit
        for _ in range(3):
            images = tuple(_apply(images, image) for image in images)
        return images
    half = _images(power - 1)
    return tuple(_apply(half, image) for image in half)


def _apply(images: tuple[int, ...], value: int) -> int:
    found = 0
    for bit, image in enumerate(images):
        if value >> bit & 1:
            found ^= image
    return found
