"""The mover and the pipeline under a virtual clock: any order of completion, any failure, 300 seeds each."""

import random

import pytest
import torch
from stack import SimulatedRun, random_failure

from offload.errors import TransferError
from offload.schedule import Phase

SEEDS = 300

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("decade", range(0, SEEDS, 30))
def test_every_update_once_and_in_order_whatever_ends_when(decade):
    """Nothing read while it is written, no slot or buffer used twice, and the bytes are the plan's."""
    for seed in range(decade, decade + 30):
        run, steps = SimulatedRun(seed), 4
        for _ in range(steps):
            run.step()
        run.pipeline.settle()
        run.weights.settle()
        assert +run.ledger.moved == run.plan.bytes_moved(steps), f"{seed=}"
        run.settle()
        assert run.counts == [steps] * len(run.counts)
        run.close()


@pytest.mark.parametrize("decade", range(0, SEEDS, 50))
def test_any_order_of_use(decade):
    """Repeated, missing, shuffled units, evaluations, abandoned passes: never a wrong weight."""
    for seed in range(decade, decade + 50):
        run = SimulatedRun(seed)
        run.in_order = False
        rng, units = random.Random(seed), range(len(run.counts))
        for _ in range(4):
            if rng.random() < 0.5:  # an evaluation or a forward that an exception ends
                run.weights.enter(rng.choice(list(Phase)), training=rng.random() < 0.5)
                for unit in rng.choices(units, k=rng.randint(0, 8)):
                    run.use(unit)
            order = list(units)
            rng.shuffle(order)
            run.step(order=order)
            if rng.random() < 0.3:
                unit = rng.choice(units)
                run.pipeline.settle()
                hold = run.weights.lease_unannounced(unit)
                run.see(unit)
                hold.close()
        run.settle()
        run.close()


@pytest.mark.parametrize("decade", range(0, SEEDS, 50))
def test_failed_transfers(decade):
    """The error comes out, every slot and buffer is accounted for, and closing returns."""
    failures = 0
    for seed in range(decade, decade + 50):
        run = SimulatedRun(seed, fail=random_failure(seed))
        try:
            for _ in range(4):
                run.step()
            run.pipeline.settle()
            run.weights.settle()
        except TransferError as error:
            failures += 1
            assert error.filename == "virtual" and error.size > 0
        run.weights.mover.residency.verify()
        free = [buffer.data_ptr() for buffer in run.states._free]
        held = [job.buffer.data_ptr() for job in run.pipeline._jobs if job.buffer is not None]
        held += [writing.buffer.data_ptr() for writing in run.pipeline._writing]
        assert len({*free}) == len(free) and len({*held}) == len(held)
        assert not {*free} & {*held}
        run.holds.clear()
        run.close()
    assert failures >= 10


# -- one case each, written out ---------------------------------------------------------------------------


def test_a_chunk_is_not_read_while_it_is_written():
    """The bug: announced again right after its update, a chunk's old state was read over its write."""
    run = SimulatedRun(0, chunks_of=[1], update="backward", ring=3)
    run.weights.enter(Phase.BACKWARD)
    run.pipeline.enqueue(run.gradient(0), in_backward=True)
    run.pipeline.drain()
    run.queue.held = True
    writes = [ticket for ticket in run.queue.in_flight if ticket.operation == "write"]
    assert len(writes) == 2 or run.pipeline._writing == run.pipeline._writing.__class__()
    run.pipeline.announce(0)
    reads_before = len(run.queue.submitted)
    run.pipeline.run()
    if writes:
        assert len(run.queue.submitted) == reads_before, "read while its own write was in flight"
    run.queue.held = False
    run.pipeline.enqueue(run.gradient(0), in_backward=True)
    run.pipeline.settle()
    run.settle()
    run.close()
