"""Byte counts as people write and read them."""

from __future__ import annotations

import re
from typing import Final

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

PAGE_BYTES: Final = 4096
"""What direct I/O moves at least, wherever we have met it: extents start and end on it."""

_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1 << 40,
}
_PATTERN: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """``"8GiB"``, ``"1.5e9"``, ``4096`` -> bytes. ValueError for anything else, half a byte included."""
    if isinstance(text, bool):
        raise ValueError(f"{text} is not a number of bytes")
    match = _PATTERN.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes; write 4096, '8GiB' or '8GB'")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_bytes(size: float) -> str:
    """Binary units, three digits: ``1.07 GiB``, ``512 B``. Below 1 KiB nothing is rounded."""
    if abs(size) < KiB:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= KiB
        if abs(size) < 999.5 or unit == "TiB":
            digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
            return f"{size:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def round_up_bytes(size: int) -> str:
    """A number for a configuration, at least ``size`` and at most 2 % (or 1 KiB) above it: ``1100MiB``."""
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= 50 * KiB * unit:
            return f"{-(-size // unit)}{name}"
    return f"{-(-size // GiB)}GiB"


def align_up(size: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``size``."""
    return -(-size // alignment) * alignment
