"""The scheduler against brute force: nearly as few fetches as possible, the same however late they are made."""

import itertools
import random

import pytest

from offload.schedule import Phase, PrefetchScheduler, count_moves, steady_moves


def fewest_fetches(trace, slots):
    """Belady's optimal replacement, straight from its definition, starting with nothing present."""
    present, fetches = set(), 0
    for position, unit in enumerate(trace):
        if unit in present:
            continue
        fetches += 1
        if len(present) == slots:
            rest = trace[position:]
            present.remove(max(present, key=lambda u: rest.index(u) if u in rest else len(rest) + u))
        present.add(unit)
    return fetches


def make(units, slots, micro_batches=1, update=False):
    order = range(units) if update else ()
    return PrefetchScheduler(units, slots, micro_batches=micro_batches, update=order)


def one_step(units, micro_batches, update):
    forward = list(range(units))
    return (forward + forward[::-1]) * micro_batches + (forward if update else [])


@pytest.mark.parametrize("units", [1, 2, 3, 5, 9, 24])
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize(("micro_batches", "update"), [(1, False), (1, True), (3, True)])
def test_nearly_as_few_fetches_as_belady(units, slots, micro_batches, update):
    """Looking ahead protects what is used meanwhile, so that much less of the slots is left for keeping."""
    steps, trace = 4, one_step(units, micro_batches, update)
    counted = count_moves(make(units, slots, micro_batches, update), steps)
    total = sum(len(step.fetched) for step in counted)
    spare = units if slots < units else 0  # what the last step fetches for the one after it
    assert fewest_fetches(trace * steps, slots) <= total
    turns = steps * (2 * micro_batches + update)
    assert total <= fewest_fetches(trace * steps, max(slots - 2, 1)) + spare + turns
    assert counted[-1] == counted[-2]
    assert steady_moves(make(units, slots, micro_batches, update), 7)[6] == counted[-1]


@pytest.mark.parametrize("seed", range(40))
def test_the_same_fetches_however_late(seed):
    """Moves that are started late, in their order, are the moves that were decided: no clock comes in."""
    rng = random.Random(seed)
    units, slots, micro_batches = rng.randint(3, 9), rng.randint(2, 4), rng.randint(1, 2)
    update = rng.random() < 0.5
    counted = count_moves(make(units, slots, micro_batches, update), 3)
    expected = list(itertools.chain(*(step.fetched for step in counted)))
    scheduler, present, fetched = make(units, slots, micro_batches, update), set(), []

    def start(evictable):
        for move in scheduler.next_moves(may_evict=evictable.__contains__, free_slots=slots - len(present)):
            present.discard(move.evict)
            present.add(move.unit)
            fetched.append(move.unit)

    for _ in range(3):
        for phase in [Phase.FORWARD, Phase.BACKWARD] * micro_batches + [Phase.UPDATE]:
            scheduler.enter(phase, present)
            for unit in scheduler.order(phase):
                scheduler.use(unit, present)
                if rng.random() < 0.7 or unit not in present:  # otherwise nothing could be dropped just now
                    start(present - {unit})
                assert unit in present and len(present) <= slots
    start(present)
    assert fetched == expected


def test_fetch_is_announced_before_use():
    scheduler = PrefetchScheduler(6, 4)
    scheduler.enter(Phase.FORWARD, ())
    scheduler.use(0, {0})
    moves = scheduler.next_moves(may_evict=().__contains__, free_slots=4)
    assert [(move.unit, move.evict) for move in moves] == [(0, None), (1, None), (2, None)]


def test_what_backward_needs_first_is_kept_at_the_turn():
    scheduler = PrefetchScheduler(6, 4)
    scheduler.enter(Phase.FORWARD, ())
    for unit in range(6):
        scheduler.use(unit, ())
    moves = scheduler.next_moves(may_evict=range(6).__contains__, free_slots=6)
    assert [(move.unit, move.evict) for move in moves[-2:]] == [(4, 0), (5, 1)]
    scheduler.enter(Phase.BACKWARD, {2, 3, 4, 5})
    for unit in (5, 4, 3):
        scheduler.use(unit, {2, 3, 4, 5})
    moves = scheduler.next_moves(may_evict=range(6).__contains__, free_slots=0)
    assert [(move.unit, move.evict) for move in moves] == [(1, 5)], "the one used last comes next time last"


def test_a_move_waits_for_its_own_victim():
    scheduler = PrefetchScheduler(3, 2)
    scheduler.enter(Phase.FORWARD, ())
    scheduler.use(0, {0, 1})
    scheduler.use(1, {0, 1})
    moves = scheduler.next_moves(may_evict={0}.__contains__, free_slots=2)
    assert [move.unit for move in moves] == [0, 1, 2]
    scheduler.use(2, {1, 2})
    scheduler.enter(Phase.BACKWARD, {1, 2})
    scheduler.use(2, {1, 2})
    scheduler.use(1, {1, 2})
    assert scheduler.is_pending(0)
    assert scheduler.next_moves(may_evict={1}.__contains__, free_slots=0) == [], "2 was chosen, and is in use"
    assert [(m.unit, m.evict) for m in scheduler.next_moves(may_evict={2}.__contains__, free_slots=0)] == [
        (0, 2)
    ]


def test_order_is_learned_and_survives_an_exception():
    scheduler = PrefetchScheduler(4, 3)
    for _ in range(2):
        scheduler.enter(Phase.FORWARD, ())
        for unit in (0, 2, 1, 3, 0):
            scheduler.use(unit, ())
        scheduler.enter(Phase.BACKWARD, ())
    assert scheduler.order(Phase.FORWARD) == (0, 2, 1, 3, 0)
    scheduler.enter(Phase.FORWARD, ())
    scheduler.use(0, {0})  # and then an exception: the next batch starts a new forward
    scheduler.enter(Phase.FORWARD, {0})
    assert scheduler.order(Phase.FORWARD) == (0, 2, 1, 3, 0)
    scheduler.use(0, {0})
    assert [move.unit for move in scheduler.next_moves(may_evict=().__contains__, free_slots=2)] == [2]


def test_evaluation_foresees_another_forward():
    """With two slots, the unit fetched at the last use is the one that comes next."""
    for training, following in ((True, {3, 4}), (False, {4, 0})):
        scheduler = PrefetchScheduler(5, 2)
        scheduler.enter(Phase.FORWARD, (), training=training)
        for unit in range(5):
            scheduler.use(unit, ())
        present = set()
        for move in scheduler.next_moves(may_evict=range(5).__contains__, free_slots=2):
            present = (present - {move.evict}) | {move.unit}
        assert present == following


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_use_is_survived(seed):
    """Random uses in random phases: no move names a present unit, drops an absent one or overfills."""
    rng = random.Random(seed)
    units, slots = rng.randint(1, 9), rng.randint(2, 4)
    scheduler = make(units, slots, rng.randint(1, 3), rng.random() < 0.5)
    present: set[int] = set()
    for _ in range(300):
        if rng.random() < 0.1:
            scheduler.enter(rng.choice(list(Phase)), present, training=rng.random() < 0.8)
        unit = rng.randrange(units)
        scheduler.use(unit, present)
        for move in scheduler.next_moves(
            may_evict=(present - {unit}).__contains__, free_slots=slots - len(present)
        ):
            assert move.unit not in present and (move.evict is None or move.evict in present)
            assert move.evict != unit
            present.discard(move.evict)
            present.add(move.unit)
        if unit not in present:
            if len(present) == slots:
                present.remove(scheduler.victim(present))
            present.add(unit)
            scheduler.deviated(unit, present)
        assert len(present) <= slots
