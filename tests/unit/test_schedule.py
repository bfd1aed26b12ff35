"""The scheduler against brute force: its fetches are the fewest possible, whatever the trace."""

import itertools
import random

import pytest

from offload.schedule import Phase, PrefetchScheduler, count_fetches


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


@pytest.mark.parametrize("units", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize(("micro_batches", "update"), [(1, False), (1, True), (3, True)])
def test_as_few_fetches_as_belady(units, slots, micro_batches, update):
    steps = 4
    scheduler = PrefetchScheduler(units, micro_batches=micro_batches, update_reads_weights=update)
    counted = count_fetches(scheduler, slots=slots, steps=steps)
    forward = list(range(units))
    one_step = (forward + forward[::-1]) * micro_batches + (forward if update else [])
    # A fetch ahead of the next step is counted in the step that made it, so the reference has a forward
    # to spare. Where the update sweeps upwards before an upward forward, fetching ahead takes slots that
    # the optimum, which waits for every fetch, would keep: at most the slots, twice a step.
    spare = 2 * slots * steps if update else 0
    total = sum(len(step) for step in counted)
    assert fewest_fetches(one_step * steps, slots) <= total
    assert total <= fewest_fetches(one_step * steps + forward, slots) + spare
    assert len(counted[-1]) == len(counted[-2])


def test_fetch_is_announced_before_use():
    scheduler = PrefetchScheduler(6)
    scheduler.enter(Phase.FORWARD)
    scheduler.use(0)
    moves = scheduler.next_moves(present={0}, evictable=set(), free_slots=2, ahead_max=2)
    assert [(m.unit, m.evict) for m in moves] == [(1, None), (2, None)]


def test_no_harm():
    """With the turn ahead, what backward needs next is kept, and nothing is fetched in its place."""
    scheduler = PrefetchScheduler(5)
    scheduler.enter(Phase.FORWARD)
    for unit in range(5):
        scheduler.use(unit)
    assert scheduler.next_moves(present={2, 3, 4}, evictable={2, 3}, free_slots=0, ahead_max=3) == []
    assert scheduler.victim({2, 3, 4}) == 2


def test_order_is_learned_and_survives_an_exception():
    scheduler = PrefetchScheduler(4)
    for _ in range(2):
        scheduler.enter(Phase.FORWARD)
        for unit in (0, 2, 1, 3, 0):
            scheduler.use(unit)
        scheduler.enter(Phase.BACKWARD)
    assert scheduler.order(Phase.FORWARD) == (0, 2, 1, 3, 0)
    scheduler.enter(Phase.FORWARD)
    scheduler.use(0)  # and then an exception: the next batch starts a new forward
    scheduler.enter(Phase.FORWARD)
    assert scheduler.order(Phase.FORWARD) == (0, 2, 1, 3, 0)
    scheduler.use(0)
    assert next(scheduler.upcoming()) == 2


def test_evaluation_foresees_another_forward():
    scheduler = PrefetchScheduler(3)
    scheduler.enter(Phase.FORWARD, training=False)
    scheduler.use(2)
    assert list(itertools.islice(scheduler.upcoming(), 4)) == [0, 1, 2, 0]


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_use_is_survived(seed):
    """Random uses in random phases: no move names a present unit, drops one in use or overfills."""
    rng = random.Random(seed)
    units, slots = rng.randint(1, 9), rng.randint(2, 4)
    update, micro_batches = rng.random() < 0.5, rng.randint(1, 3)
    scheduler = PrefetchScheduler(units, micro_batches=micro_batches, update_reads_weights=update)
    present: set[int] = set()
    for _ in range(300):
        if rng.random() < 0.1:
            scheduler.enter(rng.choice(list(Phase)), training=rng.random() < 0.8)
        unit = rng.randrange(units)
        scheduler.use(unit)
        if unit not in present:
            if len(present) == slots:
                present.remove(scheduler.victim(present))
            present.add(unit)
        moves = scheduler.next_moves(
            present=present, evictable=present - {unit}, free_slots=slots - len(present), ahead_max=slots - 1
        )
        for move in moves:
            assert move.unit not in present
            assert move.evict is None or (move.evict in present and move.evict != unit)
            present.discard(move.evict)
            present.add(move.unit)
        assert len(present) <= slots and unit in present
