"""Counts what moved and who waited: bytes per link and plane, seconds per link, stalls by cause."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """The account of a run. Counts start anew at :meth:`start_steps`; what came before is kept in `setup`."""

    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by (link, plane)."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which a link was busy."""
    stalls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which compute waited, by cause: `weights`, `state`, `gradients`, `write`."""
    setup: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by (link, plane) before step 1."""
    steps: int = 0
    """Steps whose update was applied."""
    skipped_steps: int = 0
    """Steps refused because a gradient was not finite."""
    step_seconds: float = 0.0
    """Seconds from the first forward to now, evaluation and the user's own work included."""
    predicted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What the plan says the links had to move in `steps` steps."""

    def count(self, link: str, plane: str, size: int) -> None:
        self.moved[link, plane] += size

    @contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Counts the time inside as waiting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stalls[cause] += time.perf_counter() - begin

    def start_steps(self) -> None:
        """Ends the set-up: what moved until now is set aside."""
        self.setup, self.moved = self.moved, Counter()
        self.seconds.clear()
        self.stalls.clear()

    def link_bytes(self) -> Counter[str]:
        """Bytes by link."""
        sums: Counter[str] = Counter()
        for (link, _), size in self.moved.items():
            sums[link] += size
        return sums

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the keys of links and planes are joined as ``nvme_read.weight``."""
        links = {
            link: {
                "bytes": size,
                "seconds": round(self.seconds[link], 6),
                "gb_per_second": round(size / self.seconds[link] / 1e9, 3) if self.seconds[link] else None,
            }
            for link, size in sorted(self.link_bytes().items())
        }
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "seconds": round(self.step_seconds, 6),
            "links": links,
            "planes": {f"{link}.{plane}": size for (link, plane), size in sorted(self.moved.items())},
            "predicted": {f"{link}.{plane}": size for (link, plane), size in sorted(self.predicted.items())},
            "setup": {f"{link}.{plane}": size for (link, plane), size in sorted(self.setup.items())},
            "stalls": {cause: round(seconds, 6) for cause, seconds in sorted(self.stalls.items())},
        }
