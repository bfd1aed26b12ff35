"""What ``offload doctor`` says: facts, whether each costs speed, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "slow", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line."""

    name: str
    value: str
    state: State = "ok"
    """slow: it costs speed, or safety; bad: the engine does not work so."""
    hint: str | None = None
    """What to do; commands stand in backquotes."""

    @classmethod
    def unknown(cls, name: str, why: str = "unknown") -> Fact:
        return cls(name, why, "unknown")


def read(path: Path) -> str | None:
    """The text of a file of /proc or /sys; None where it cannot be had."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """As :func:`read`, for a file that holds one number."""
    text = read(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def read_table(path: Path) -> dict[str, str]:
    """The ``key: value`` lines of a file; the first of equal keys counts."""
    table: dict[str, str] = {}
    for line in (read(path) or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            table.setdefault(key.strip(), value.strip())
    return table
