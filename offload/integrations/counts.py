"""What DeepSpeed's engine counts, as a part of what is saved."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError

_COUNTS = {
    "global_steps": "global_steps",
    "global_samples": "global_samples",
    "micro_steps": "micro_steps",
    "pending": "_pending",
    "seen": "_seen",
    "forwards": "_forwards",
}
"""By the name under which it is saved, the attribute of the engine."""


class EngineCounts:
    """The counts of a training engine, its window of micro-batches among them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """All counts, and who says where a window ends."""
        counts = {name: getattr(self._engine, attribute) for name, attribute in _COUNTS.items()}
        return {**counts, "boundary": self._engine._boundary}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the counts those of ``state``.

        Raises:
            CheckpointError: it is damaged.
        """
        counts = {attribute: state.get(name) for name, attribute in _COUNTS.items()}
        boundary = state.get("boundary")
        if any(type(count) is not int or count < 0 for count in counts.values()) or (
            boundary is not None and type(boundary) is not bool
        ):
            raise CheckpointError("counts: they are damaged")
        for attribute, count in counts.items():
            setattr(self._engine, attribute, count)
        self._engine._boundary = boundary
