"""What ``offload doctor`` says: facts, whether each costs speed, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
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
