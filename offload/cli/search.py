"""Finds the best settings among many by successive halving. Knows neither drives nor clocks but what it is given.

Note [Successive halving]
Every setting is measured once, on the load that matters most; the better third once on all loads; the best of these
again; and the last few often enough to trust a median. So most of the time goes to settings that are close to each
other. Within a round the order is random, and every setting has its turn before one has its second, so that a
neighbour who comes and goes meets all of them. The defaults stay in to the end, to be compared with.

Settings are as good as the load they are worst at, in parts of the best that any reached at it. Where the defaults
are within 1 % of the best, they are kept.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from ..bytesize import KiB, MiB
from ..machine import IoSettings
from .loads import LOADS

BLOCKS: Final = (256 * KiB, 512 * KiB, 1 * MiB, 2 * MiB, 4 * MiB, 8 * MiB)
DEPTHS: Final = (2, 4, 8, 16, 32, 64)
THREADS_MAX: Final = 32
IN_FLIGHT_BYTES: Final = (2 * MiB, 64 * MiB)
"""Least and most that settings may keep in flight: less starves every NVMe drive, more is a whole step's."""
EQUAL_SHARE: Final = 0.99

_T = TypeVar("_T")


class OutOfBudget(Exception):  # noqa: N818  # nothing went wrong
    """The time, or the bytes that may be written, are used up: the search ends with what it knows."""


@dataclass(frozen=True, slots=True)
class Round:
    """Of how many settings, on which loads, and how often each."""

    keep: int | None
    loads: tuple[str, ...]
    times: int

    def trials(self, candidates: int) -> int:
        """Measurements, when so many settings are there to begin with."""
        return min(self.keep or candidates, candidates) * len(self.loads) * self.times


ROUNDS: Final = (
    Round(None, ("mixed",), 1),
    Round(24, LOADS, 1),
    Round(8, LOADS, 2),
    Round(3, LOADS, 4),
)

Measure = Callable[[IoSettings, str], float]
"""GB/s of a setting at a load. Raises OutOfBudget."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search is."""

    round: int
    rounds: int
    settings: int
    """That take part in the round."""
    share: float
    """Of the whole search, by trials or by time, whichever is further."""
    best: IoSettings | None
    best_rate: float
    """At the mixed load."""


def candidates(backends: Iterable[str]) -> list[IoSettings]:
    """All settings that are worth a try."""
    low, high = IN_FLIGHT_BYTES
    return [
        IoSettings(backend, block, depth, depth if backend == "threads" else 1)
        for backend in backends
        for block in BLOCKS
        for depth in DEPTHS
        if low <= block * depth <= high and (backend != "threads" or depth <= THREADS_MAX)
    ]


class Search:
    """One search; what was measured stays in ``rates``."""

    def __init__(
        self,
        settings: Sequence[IoSettings],
        default: IoSettings,
        measure: Measure,
        *,
        rounds: Sequence[Round] = ROUNDS,
        seed: int = 0,
        seconds_left: Callable[[], float] = lambda: float("inf"),
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """
        Args:
            seconds_left: of the time for the search; rounds take fewer settings where it would not do.
        """
        self._settings, self.default, self._measure = [*dict.fromkeys([default, *settings])], default, measure
        self._rounds, self._seconds_left, self._show = rounds, seconds_left, show
        self._random = random.Random(seed)
        self._done, self._seconds, self._seconds_all = 0, 0.0, 1.0
        self.rates: dict[tuple[IoSettings, str], list[float]] = defaultdict(list)
        self.finalists: list[IoSettings] = []
        """Of the last round that all took part in, the best first."""
        self.complete = False
        """Whether no budget ended it early."""

    def run(self) -> IoSettings:
        """The best settings."""
        self._seconds_all = max(self._seconds_left(), 1e-9)
        field = [self.default, *self._shuffled(self._settings[1:])]
        try:
            for number, round_ in enumerate(self._rounds):
                keep, times = self._affordable(number, len(field))
                field = field[:keep]
                if self.default not in field:
                    field.append(self.default)
                self._run_round(number, replace(round_, times=times), field)
                field = self._ranked(field, round_.loads)
                self.finalists = field
            self.complete = True
        except OutOfBudget:
            known = [one for one in self._settings if self._loads_of(one)]
            most = max((len(self._loads_of(one)) for one in known), default=0)
            field = [one for one in known if len(self._loads_of(one)) == most]
            self.finalists = self._ranked(field, self._loads_of(field[0])) if field else [self.default]
        self.finalists = self.finalists[: self._rounds[-1].keep]
        return self._preferred(self.finalists)

    def median(self, settings: IoSettings, load: str) -> float | None:
        """GB/s; None where it was not measured."""
        rates = self.rates.get((settings, load))
        return statistics.median(rates) if rates else None

    def spread(self) -> float:
        """How far measurements of one and the same thing lie apart, at worst: the largest by the smallest."""
        repeated = [rates for rates in self.rates.values() if len(rates) > 2]
        return max((max(rates) / max(min(rates), 1e-9) for rates in repeated), default=1.0)

    def share(self, settings: IoSettings, loads: Sequence[str] = LOADS) -> float:
        """Of the best that any of the finalists reached, at the load that these settings are worst at."""
        return self._score(settings, loads, {*self.finalists, self.default})

    def _run_round(self, number: int, round_: Round, field: Sequence[IoSettings]) -> None:
        later = sum(r.trials(len(field)) for r in self._rounds[number + 1 :])
        total = self._done + len(field) * len(round_.loads) * round_.times + later
        before = self._seconds_left()
        trials = 0

        def tell() -> None:
            best = max(field, key=lambda one: self.median(one, "mixed") or 0.0)
            rate = self.median(best, "mixed")
            by_time = (
                1 - self._seconds_left() / self._seconds_all if self._seconds_all < float("inf") else 0.0
            )
            share = min(max(self._done / total, by_time), 1.0)
            self._show(
                Progress(
                    number + 1, len(self._rounds), len(field), share, best if rate else None, rate or 0.0
                )
            )

        tell()
        for _ in range(round_.times):
            for settings, load in self._shuffled([(one, load) for one in field for load in round_.loads]):
                self.rates[settings, load].append(self._measure(settings, load))
                self._done += 1
                trials += 1
                tell()
        self._seconds = (before - self._seconds_left()) / max(trials, 1)

    def _affordable(self, number: int, candidates: int) -> tuple[int, int]:
        """How many settings in a round the time allows, and how often each, when later rounds get their part."""
        round_ = self._rounds[number]
        wanted = min(round_.keep or candidates, candidates)
        left = self._seconds_left()
        if not self._seconds > 0 or left == float("inf"):
            return wanted, round_.times
        planned = [r.trials(candidates) for r in self._rounds[number:]]
        trials = left / self._seconds * planned[0] / sum(planned) / len(round_.loads)
        keep = max(min(wanted, int(trials / round_.times)), min(wanted, 3))
        return keep, max(min(int(trials / keep), round_.times), 1)

    def expect(self, seconds: float) -> None:
        """Says how long a trial will take, before there has been one."""
        self._seconds = seconds

    def _ranked(self, field: Sequence[IoSettings], loads: Sequence[str]) -> list[IoSettings]:
        everyone = set(field)
        scores = {one: self._score(one, loads, everyone) for one in field}
        return sorted(field, key=lambda one: -scores[one])

    def _score(self, settings: IoSettings, loads: Sequence[str], among: Iterable[IoSettings]) -> float:
        shares = []
        for load in loads:
            best = max((self.median(one, load) or 0.0 for one in among), default=0.0)
            shares.append((self.median(settings, load) or 0.0) / best if best > 0 else 1.0)
        return min(shares, default=1.0)

    def _preferred(self, ranked: Sequence[IoSettings]) -> IoSettings:
        loads = self._loads_of(ranked[0])
        scores = {one: self._score(one, loads, ranked) for one in ranked}
        best = max(ranked, key=lambda one: scores[one])
        of_default = self._score(self.default, loads, ranked)
        return self.default if of_default >= scores[best] * EQUAL_SHARE else best

    def _loads_of(self, settings: IoSettings) -> tuple[str, ...]:
        return tuple(load for load in LOADS if self.rates.get((settings, load)))

    def _shuffled(self, items: Sequence[_T]) -> list[_T]:
        return self._random.sample(items, len(items))
