"""The mover and the pipeline under a virtual clock: any order of completion, any failure, 300 seeds each."""

import random

import pytest
from stack import SimulatedRun, random_failure

from offload.errors import TransferError
from offload.links import DoneTicket
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


def in_flight(run, operation):
    return [ticket for ticket in run.queue.in_flight if ticket.operation == operation]


def test_a_chunk_is_not_read_while_it_is_written():
    """Announced again right after its update, a chunk waits for its write before it is read."""
    run = SimulatedRun(0, chunks_of=[1], update="backward", ring=3)
    run.queue.held = True
    run.pipeline.enqueue(run.gradient(0), in_backward=True)
    run.pipeline.drain()
    assert len(in_flight(run, "write")) == 2  # state and weights
    run.pipeline.announce(0)
    run.pipeline.run()
    assert not in_flight(run, "read")
    while run.queue.in_flight:
        run.queue.run_until(run.queue.in_flight[0])
    run.pipeline.run()
    assert len(in_flight(run, "read")) == 1
    run.pipeline.enqueue(run.gradient(0), in_backward=True)
    run.settle()
    run.close()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_unit_is_not_updated_again_before_it_is_home(update):
    """The next gradient may come while the unit's last write is still on its way: the update waits."""
    run = SimulatedRun(0, chunks_of=[2], update=update, ring=5)
    for _ in range(3):
        run.queue.held = True
        run.pipeline.enqueue(run.gradient(0), in_backward=update == "backward")
        run.pipeline.drain()
        assert in_flight(run, "write")
    run.queue.held = False
    run.settle()
    run.close()


def test_gradients_against_the_announced_order_do_not_stop_the_ring():
    """The ring is full of chunks of one unit when another, announced earlier, gets its gradient."""
    run = SimulatedRun(0, chunks_of=[2, 2, 2], update="backward", ring=2, weight_slots=3)
    run.in_order = False
    for _ in range(2):  # from the second round on, moments are read
        for unit in (2, 1, 0):
            run.pipeline.announce(unit)
        run.queue.held = True
        for unit in (0, 1, 2):
            run.pipeline.enqueue(run.gradient(unit), in_backward=True)
            run.pipeline.run()
        run.queue.held = False
        run.pipeline.drain()
        run.pipeline.settle()
    run.settle()
    run.close()


def test_a_finished_write_lets_the_next_read_start():
    """Giving way twice in a row: the first wait frees a buffer, the second one must use it."""
    run = SimulatedRun(0, chunks_of=[3], update="backward", ring=1)
    run.queue.held = True
    for _ in range(2):
        run.pipeline.enqueue(run.gradient(0), in_backward=True)
        while run.pipeline.give_way():
            pass
        assert not run.pipeline.pending and not run.queue.in_flight
    run.queue.held = False
    run.settle()
    run.close()


class ArrivesAtQuestion(DoneTicket):
    """A gradient that is there when it is asked for the n-th time."""

    def __init__(self, number):
        self.left = number

    def done(self):
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("number", range(1, 9))
def test_a_gradient_that_arrives_between_two_questions(number):
    run = SimulatedRun(0, chunks_of=[1], update="step")
    run.weights.enter(Phase.UPDATE)
    update = run.gradient(0)
    update.arrived = ArrivesAtQuestion(number)
    run.pipeline.enqueue(update)
    run.pipeline.drain()
    run.settle()
    run.close()
