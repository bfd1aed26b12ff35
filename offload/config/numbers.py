"""Which values count as a number, the same for every setting.

A number, or a string that spells one (``"10"``, ``"5e8"``), is a number. A boolean is not. Infinite and
undefined values are refused. Where a whole number is meant, ``1e9`` and ``1000000000.0`` are whole; a
fraction is refused for counts, and rounded down for sizes, which programs compute (``0.1 * hidden *
hidden``). Beyond 2**63 - 1 a whole number means "all there is" and is clamped.
"""

from __future__ import annotations

import math
import re
from typing import Final

from .report import UnfitError, show

WHOLE_MAX: Final = (1 << 63) - 1
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE | re.ASCII)
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,30}", re.ASCII)


def check_filled_in(text: str) -> None:
    """Refuse text that a shell or a template should have replaced."""
    if "$" in text:
        raise UnfitError(f"{show(text)} holds a shell variable that nothing filled in; write its value")


def number(value: object) -> int | float:
    """``value`` as a finite number."""
    if isinstance(value, bool):
        raise UnfitError(f"{show(value)} is not a number; write a number")
    if isinstance(value, str):
        check_filled_in(value)
        text = value.strip()
        if _WHOLE.fullmatch(text):
            return int(text)
        if not _NUMBER.fullmatch(text):
            raise UnfitError(f"{show(value)} is not a number; write the number itself")
        value = float(text)
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, float):
        raise UnfitError(f"{show(value)} is not a number; write a number")
    if not math.isfinite(value):
        raise UnfitError(f"{value} is not finite; write a finite number")
    return value


def real(value: object) -> float:
    """``value`` as a float."""
    try:
        return float(number(value))
    except OverflowError:
        raise UnfitError("the number is too large; write a smaller one") from None


def whole(value: object, *, round_down: bool) -> int:
    """``value`` as an int, clamped to what 64 bits hold."""
    found = number(value)
    if found != found // 1 and not round_down:
        raise UnfitError(
            f"{show(value)} is not a whole number; write {math.floor(found)} or {math.ceil(found)}"
        )
    return max(-WHOLE_MAX, min(WHOLE_MAX, math.floor(found)))
