"""Decides which unit to fetch next and which to drop. Knows the order of use; knows no tensor and no clock.

Note [Phases]
A training step is `micro_batches` times (forward, backward), then an update that may read the weights
again. Each phase has an order of units: at first the order of registration (reversed in backward), later
what the last pass through the phase showed. Entering a phase puts the position at its start, so an
exception, an evaluation or a skipped step can never leave the scheduler out of step: what it says is a
suggestion, and a unit that is used without having been announced is fetched on demand.

Note [Looking ahead]
Which units are fetched must not depend on how fast the disk was, or no plan could predict the bytes. So a
decision is taken once, at a fixed place in the trace, on a model of the slots: when a unit is used now, the
use that comes `ahead` later is played through on the model, and where its unit is missing there, it takes the
place of the unit that is then needed last (Belady 1966, the optimum for a known order), never of one that is
used between now and then. The moves that come out are carried out in this order, each as soon as its victim
may be dropped: a slow disk makes a fetch late, it never makes it another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

AHEAD_MAX = 2
"""Uses ahead: one would leave the disk idle from the end of a fetch to the next use."""


class Phase(Enum):
    FORWARD = auto()
    BACKWARD = auto()
    UPDATE = auto()


@dataclass(frozen=True, slots=True)
class Move:
    """Fetch `unit`; drop `evict` first where no slot is free."""

    unit: int
    evict: int | None


@dataclass(frozen=True, slots=True)
class _Position:
    """A place in the trace: the next use is number `index` in the order of the phase."""

    phase: Phase
    micro_batch: int
    index: int
    training: bool


class PrefetchScheduler:
    """Follows the trace and names the fetches that will be needed. See Note [Phases], Note [Looking ahead]."""

    def __init__(
        self,
        unit_count: int,
        slot_count: int,
        *,
        micro_batches: int = 1,
        backward: Sequence[int] | None = None,
        update: Sequence[int] = (),
        updated_by_compute: Collection[int] = (),
    ) -> None:
        """
        Args:
            backward: the order of units in backward, as far as it can be foreseen; the reverse of forward
                where it is None.
            update: units whose weights the update reads, in its order.
            updated_by_compute: those of them that are updated where compute finds weights, on an accelerator.
        """
        forward = tuple(range(unit_count))
        self.unit_count = unit_count
        self.micro_batches = micro_batches
        self.updated_by_compute = frozenset(updated_by_compute)
        self._slot_count, self._update = slot_count, tuple(update)
        self._ahead = max(1, min(AHEAD_MAX, slot_count // 2))
        self._orders: dict[Phase, tuple[int, ...]] = {
            Phase.FORWARD: forward,
            Phase.BACKWARD: forward[::-1] if backward is None else tuple(backward),
            Phase.UPDATE: self._update,
        }
        self._seen: list[int] = []
        self._now = self._next = _Position(Phase.FORWARD, 0, 0, training=True)
        self._current: int | None = None
        self._window: deque[int] = deque()  # the uses between now and the model
        self._model: set[int] = set()
        self._pending: deque[Move] = deque()  # decided on the model and not started yet
        self._restart(())

    def order(self, phase: Phase) -> tuple[int, ...]:
        """The order of units in a phase, as far as it is known."""
        return self._orders[phase]

    def enter(
        self,
        phase: Phase,
        present: Collection[int],
        *,
        training: bool = True,
        updated: Collection[int] | None = None,
    ) -> None:
        """Starts a phase.

        Args:
            present: units that hold a slot, for a new start where the phase was not the expected one.
            training: False for a forward that no backward follows (evaluation, generation).
            updated: of an update, the units that it changes, where those are not all: an idle expert is not.
        """
        changed = self._adopt(phase)
        if updated is not None:
            order = tuple(unit for unit in self._update if unit in updated)
            changed, self._orders[phase] = changed or order != self._orders[phase], order
        self._seen = []
        expected = self._normalised(self._now)
        self._now = _Position(phase, self._micro_batch(phase, training), 0, training)
        if changed or (self._orders[phase] and expected != self._now):
            self._restart(present)

    def use(self, unit: int, present: Collection[int]) -> None:
        """Says that a unit is used now; repeated uses in a row count once."""
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        self._current = unit
        now = self._now
        order = self._orders[now.phase]
        if unit not in order[now.index :]:
            return  # not foreseen: fetched on demand, and learned for the next pass
        index = order.index(unit, now.index) + 1
        self._now = _Position(now.phase, now.micro_batch, index, now.training)
        if index == now.index + 1 and self._window and self._window[0] == unit:
            self._window.popleft()
            self._play_one()
        else:
            self._restart(present)

    def next_moves(self, *, may_evict: Callable[[int], bool], free_slots: int) -> list[Move]:
        """The moves that can be started now, in their order; the caller starts them all."""
        moves: list[Move] = []
        while self._pending:
            move = self._pending[0]
            if (free_slots == 0) if move.evict is None else not may_evict(move.evict):
                break
            free_slots -= move.evict is None
            moves.append(self._pending.popleft())
        return moves

    def next_computed(self) -> list[int]:
        """The next uses by compute, as far ahead as fetches go, and no farther than the end of a backward."""
        now = self._now
        upcoming = list(self._orders[now.phase][now.index : now.index + self._ahead])
        if now.phase is Phase.UPDATE:
            return [unit for unit in upcoming if unit in self.updated_by_compute]
        if now.phase is Phase.FORWARD and now.training:
            upcoming += self._orders[Phase.BACKWARD][: self._ahead - len(upcoming)]
        return upcoming

    def is_pending(self, unit: int) -> bool:
        """Whether a fetch of the unit has been decided and not started."""
        return any(move.unit == unit for move in self._pending)

    def deviated(self, unit: int, present: Collection[int]) -> None:
        """A unit in use was fetched against the model: what is present is the truth from now on."""
        self._current = unit
        self._restart(present)

    def victim(self, evictable: Collection[int]) -> int | None:
        """The unit to drop for one that is needed at once and was not foreseen: the farthest."""
        return self._farthest(evictable, self._now)

    # -- the model ----------------------------------------------------------------------------------------

    def _restart(self, present: Collection[int]) -> None:
        """Starts the model anew from what is present."""
        self._model = set(present)
        self._pending.clear()
        self._window.clear()
        self._next = self._now
        for _ in range(self._ahead):
            self._play_one()

    def _play_one(self) -> None:
        """Plays the next use through on the model."""
        position = self._normalised(self._next)
        unit = self._orders[position.phase][position.index]
        self._next = _Position(position.phase, position.micro_batch, position.index + 1, position.training)
        kept = {*self._window, self._current}
        self._window.append(unit)
        if unit in self._model:
            return
        evict = None
        if len(self._model) >= self._slot_count:
            evict = self._farthest(self._model - kept, self._next)
            if evict is None:
                return  # more is in use than there are slots: fetched on demand
            self._model.remove(evict)
        self._model.add(unit)
        self._pending.append(Move(unit, evict))

    def _farthest(self, units: Collection[int], position: _Position) -> int | None:
        """The one of the units that is needed last after a position; a unit that is not foreseen comes last."""
        missing, last = set(units), None
        for order, begin in self._upcoming(position):
            found = [(order.index(unit, begin), unit) for unit in missing if unit in order[begin:]]
            if found:
                last = max(found)[1]
                missing.difference_update(unit for _, unit in found)
            if not missing:
                return last
        return max(missing)

    def _upcoming(self, position: _Position) -> Iterator[tuple[tuple[int, ...], int]]:
        """The uses after a position, one whole step ahead: of each phase their order, and where they begin."""
        yield self._orders[position.phase], position.index
        for _ in range(2 * self.micro_batches + 2):
            position = self._following(position)
            yield self._orders[position.phase], 0

    # -- positions ----------------------------------------------------------------------------------------

    def _normalised(self, position: _Position) -> _Position:
        """The same place, not at the end of a phase but at the begin of the next one that has a use."""
        while position.index >= len(self._orders[position.phase]):
            position = self._following(position)
        return position

    def _following(self, position: _Position) -> _Position:
        phase, micro_batch = Phase.FORWARD, 0
        if position.training and position.phase is Phase.FORWARD:
            phase, micro_batch = Phase.BACKWARD, position.micro_batch
        elif position.training and position.phase is Phase.BACKWARD:
            last = position.micro_batch + 1 >= self.micro_batches
            phase = Phase.UPDATE if last else Phase.FORWARD
            micro_batch = position.micro_batch + (not last)
        return _Position(phase, micro_batch, 0, position.training)

    def _micro_batch(self, phase: Phase, training: bool) -> int:
        """The number of the micro-batch in which a phase is entered now."""
        now = self._now
        if phase is Phase.UPDATE:
            return self.micro_batches - 1
        if phase is Phase.FORWARD and training and now.phase is Phase.BACKWARD:
            return (now.micro_batch + 1) % self.micro_batches
        return 0 if now.phase is Phase.UPDATE else now.micro_batch

    def _adopt(self, entered: Phase) -> bool:
        """Keeps the order just seen, where the phase was gone through to its end. Whether it is a new one."""
        now = self._now
        forward_done = now.phase is Phase.FORWARD and (entered is Phase.BACKWARD or not now.training)
        if not self._seen or not (forward_done or now.phase is Phase.BACKWARD):
            return False
        seen = tuple(self._seen)
        changed = seen != self._orders[now.phase]
        self._orders[now.phase] = seen
        return changed


@dataclass(frozen=True, slots=True)
class StepMoves:
    """What a step fetches, and what it lifts to an accelerator (see `lift`): units, as often as it happens."""

    fetched: tuple[int, ...]
    lifted: tuple[int, ...]
    """As a whole."""
    renewed: tuple[int, ...]
    """What an update has changed."""


def count_moves(
    scheduler: PrefetchScheduler, steps: int, *, updated_on_host: Collection[int] = ()
) -> list[StepMoves]:
    """What moves in each step of a run that follows the trace, with nothing present at first.

    Args:
        scheduler: a fresh one; it is advanced. A step's fetches include those that it makes for the next.
        updated_on_host: units whose device half an update leaves behind; one by compute leaves it fresh.
    """
    by_compute = scheduler.updated_by_compute
    units = range(scheduler.unit_count)
    on_device: set[int] = set()
    behind: set[int] = set()
    moved: list[StepMoves] = []
    for _ in range(steps):
        fetched: list[int] = []
        lifted: list[int] = []
        renewed: list[int] = []
        for phase in [Phase.FORWARD, Phase.BACKWARD] * scheduler.micro_batches + [Phase.UPDATE]:
            scheduler.enter(phase, ())
            for unit in scheduler.order(phase):
                scheduler.use(unit, ())
                for move in scheduler.next_moves(
                    may_evict=units.__contains__, free_slots=scheduler.unit_count
                ):
                    fetched.append(move.unit)
                    on_device -= {move.unit, move.evict}
                if phase is Phase.UPDATE and unit not in by_compute:
                    continue
                if unit not in on_device:
                    lifted.append(unit)
                elif unit in behind:
                    renewed.append(unit)
                on_device.add(unit)
                behind.discard(unit)
        behind.update(updated_on_host)
        moved.append(StepMoves(tuple(fetched), tuple(lifted), tuple(renewed)))
    return moved


def steady_moves(
    scheduler: PrefetchScheduler, steps: int, *, updated_on_host: Collection[int] = ()
) -> list[StepMoves]:
    """As :func:`count_moves` for any number of steps: from the third on, all are the same."""
    known = count_moves(scheduler, min(steps, 3), updated_on_host=updated_on_host)
    return known + [known[-1]] * (steps - len(known))
