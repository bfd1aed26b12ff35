"""Decides which unit to fetch next and which to drop. Knows the order of use; knows no tensor and no clock.

Note [Phases]
A training step is `micro_batches` times (forward, backward), then an update that may read the weights
again. Each phase has an order of units: at first the order of registration (reversed in backward), later
what the last pass through the phase showed. Entering a phase puts the position at its start, so an
exception, an evaluation or a skipped step can never leave the scheduler out of step: what it says is a
suggestion, and a unit that is used without having been announced is fetched on demand.

Note [No harm]
A fetch ahead of use may only drop a unit that is needed later than the one fetched. The scan over units
is cyclic, so the unit with the farthest next use is the right one to drop (Belady 1966), and the number
of fetches depends on the trace and the number of slots only, never on how fast the disk was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    FORWARD = auto()
    BACKWARD = auto()
    UPDATE = auto()


@dataclass(frozen=True, slots=True)
class Move:
    """Fetch `unit`; drop `evict` first where no slot is free."""

    unit: int
    evict: int | None


class PrefetchScheduler:
    """Follows the position in the trace and names the moves that pay. See Note [Phases], Note [No harm]."""

    def __init__(
        self, unit_count: int, *, micro_batches: int = 1, update_reads_weights: bool = False
    ) -> None:
        forward = tuple(range(unit_count))
        self.unit_count = unit_count
        self.micro_batches = micro_batches
        self._orders: dict[Phase, tuple[int, ...]] = {
            Phase.FORWARD: forward,
            Phase.BACKWARD: forward[::-1],
            Phase.UPDATE: forward if update_reads_weights else (),
        }
        self._phase = Phase.FORWARD
        self._training = True
        self._index = 0
        self._micro_batch = 0
        self._seen: list[int] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    def order(self, phase: Phase) -> tuple[int, ...]:
        """The order of units in a phase, as far as it is known."""
        return self._orders[phase]

    def enter(self, phase: Phase, *, training: bool = True) -> None:
        """Starts a phase. ``training=False``: a forward that no backward follows (evaluation, generation)."""
        self._adopt(phase)
        if self._phase is Phase.BACKWARD and phase is Phase.FORWARD and training:
            self._micro_batch = (self._micro_batch + 1) % self.micro_batches
        if phase is Phase.UPDATE:
            self._micro_batch = self.micro_batches - 1
        if self._phase is Phase.UPDATE and phase is not Phase.UPDATE:
            self._micro_batch = 0
        self._phase, self._training, self._index, self._seen = phase, training, 0, []

    def use(self, unit: int) -> None:
        """Says that a unit is used now; repeated uses in a row count once."""
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        order = self._orders[self._phase]
        if unit in order[self._index :]:
            self._index = order.index(unit, self._index) + 1

    def rewind(self) -> None:
        """Forgets the position: the next step starts from its beginning, with what was learned so far."""
        self._phase, self._training, self._index, self._micro_batch, self._seen = (
            Phase.FORWARD,
            True,
            0,
            0,
            [],
        )

    def upcoming(self) -> Iterator[int]:
        """Units in the order in which they will be used after the current one, one whole step ahead."""
        yield from self._orders[self._phase][self._index :]
        phase, micro_batch = self._phase, self._micro_batch
        for _ in range(2 * self.micro_batches + 2):
            phase, micro_batch = self._following(phase, micro_batch)
            yield from self._orders[phase]

    def next_uses(self, units: Collection[int]) -> dict[int, int]:
        """How many uses from now each unit is needed; a unit that is not foreseen comes last."""
        missing, distances = set(units), {}
        distance = 0
        for distance, unit in enumerate(self.upcoming()):
            if unit in missing:
                distances[unit] = distance
                missing.remove(unit)
                if not missing:
                    return distances
        return distances | {unit: distance + 1 + unit for unit in missing}

    def victim(self, evictable: Collection[int]) -> int | None:
        """The unit whose next use is farthest away."""
        if not evictable:
            return None
        distances = self.next_uses(evictable)
        return max(distances, key=lambda unit: distances[unit])

    def next_moves(
        self, *, present: Collection[int], evictable: Collection[int], free_slots: int, ahead_max: int
    ) -> list[Move]:
        """Fetches for the next `ahead_max` distinct units, in order of use. `evictable` is part of `present`."""
        wanted: dict[int, int] = {}
        for distance, unit in enumerate(self.upcoming()):
            if unit not in wanted:
                if len(wanted) == ahead_max:
                    break
                wanted[unit] = distance
        droppable = set(evictable)
        moves: list[Move] = []
        for unit, distance in wanted.items():
            if unit in present:
                continue
            if free_slots > 0:
                free_slots -= 1
                moves.append(Move(unit, None))
                continue
            distances = self.next_uses(droppable)
            farthest = max(distances, key=lambda other: distances[other], default=None)
            if farthest is None or distances[farthest] <= distance:
                break
            droppable.remove(farthest)
            moves.append(Move(unit, farthest))
        return moves

    def _adopt(self, entered: Phase) -> None:
        """Keeps the order just seen, where the phase was gone through to its end."""
        if not self._seen:
            return
        forward_done = self._phase is Phase.FORWARD and (entered is Phase.BACKWARD or not self._training)
        if forward_done or self._phase is Phase.BACKWARD:
            self._orders[self._phase] = tuple(self._seen)

    def _following(self, phase: Phase, micro_batch: int) -> tuple[Phase, int]:
        if not self._training:
            return Phase.FORWARD, 0
        if phase is Phase.FORWARD:
            return Phase.BACKWARD, micro_batch
        if phase is Phase.BACKWARD:
            if micro_batch + 1 < self.micro_batches:
                return Phase.FORWARD, micro_batch + 1
            return Phase.UPDATE, micro_batch
        return Phase.FORWARD, 0


def count_fetches(scheduler: PrefetchScheduler, *, slots: int, steps: int) -> list[list[int]]:
    """Which units are fetched in each step, found by going through the trace with the same decisions.

    Args:
        scheduler: a fresh one; it is advanced.
        slots: how many units fit at once.
        steps: how many steps, the first of which starts with nothing present.
    """
    present: set[int] = set()
    fetched: list[list[int]] = []
    for _ in range(steps):
        this_step: list[int] = []
        fetched.append(this_step)
        phases = [Phase.FORWARD, Phase.BACKWARD] * scheduler.micro_batches + [Phase.UPDATE]
        for phase in phases:
            scheduler.enter(phase)
            for unit in scheduler.order(phase):
                scheduler.use(unit)
                if unit not in present:
                    if len(present) == slots:
                        present.remove(_required(scheduler.victim(present)))
                    present.add(unit)
                    this_step.append(unit)
                moves = scheduler.next_moves(
                    present=present,
                    evictable=present - {unit},
                    free_slots=slots - len(present),
                    ahead_max=slots - 1,
                )
                for move in moves:
                    if move.evict is not None:
                        present.remove(move.evict)
                    present.add(move.unit)
                    this_step.append(move.unit)
    return fetched


def _required(unit: int | None) -> int:
    if unit is None:
        raise AssertionError("no unit to drop although all slots are taken")
    return unit


def steady_fetches(scheduler: PrefetchScheduler, *, slots: int, steps: int) -> list[Sequence[int]]:
    """As :func:`count_fetches` for any number of steps: the third step repeats for ever."""
    known: list[Sequence[int]] = list(count_fetches(scheduler, slots=slots, steps=min(steps, 3)))
    return known + [known[-1]] * (steps - len(known))
