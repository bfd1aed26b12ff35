"""Commits that are ended while the next forward and backward run hold the state at the call."""

import copy
import errno
import os

import pytest
import torch
from interrupted import after, die, remove, running, start
from models import Placement, Training

import offload
from offload.errors import OffloadError, TransferError
from offload.store.commits import find_commits

TRAINING = Training(precision="bf16", steps=6, accumulation=2)
PLACES = [
    Placement("cpu", "cpu"),
    Placement("nvme", "cpu"),
    Placement("nvme", "nvme"),
    Placement("none", "cpu"),
]
BOTH = Placement("cpu", "cpu")


def go_on(training, placement, swap_path, first, last):
    """From the commit, which is of micro-batch ``first``, with the bits of a run without a break."""
    with running(training, placement, swap_path, resume=True) as run:
        assert run.place == first
        run.train(last - first)
        run.state().assert_same_bits(after(training, first, last))
    remove(swap_path)


@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_training_goes_on_until_the_next_update(placement, swap_path):
    with running(TRAINING, placement, swap_path) as run:
        run.train(4)
        directory = run.engine.save_checkpoint(background=True)
        assert run.engine.is_saving and run.engine.commit_serial == 0
        run.train(1)
        assert run.engine.is_saving and run.engine.commit_serial == 0
        run.train(1)
        assert not run.engine.is_saving and run.engine.commit_serial == 1
        assert find_commits(directory).newest.step == 2
        run.train(4)
        run.state().assert_same_bits(after(TRAINING, 0, 10))
    go_on(TRAINING, placement, swap_path, 4, 8)


@pytest.mark.parametrize(
    "placement", [Placement("cpu", "cpu", "backward"), Placement("nvme", "cpu", "backward")], ids=str
)
def test_it_ends_before_a_backward_that_updates(placement, swap_path):
    training = Training(precision="bf16", steps=6)
    with running(training, placement, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint(background=True)
        loss = run.model(training.batches()[2])
        assert run.engine.is_saving
        loss.backward()
        assert not run.engine.is_saving and run.engine.commit_serial == 1
        run.optimizer.step()
    go_on(training, placement, swap_path, 2, 4)


def test_state_is_written_meanwhile(swap_path):
    """Weights at the call; of state, each use of a unit starts a few writes."""
    with running(TRAINING, BOTH, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint()
        run.train(2)
        before = run.engine.ledger.moved["nvme_write", "commit"]
        run.engine.save_checkpoint(background=True)
        weights = run.engine.ledger.moved["nvme_write", "commit"] - before
        run.train(1)
        meanwhile = run.engine.ledger.moved["nvme_write", "commit"] - before
        run.engine.wait_for_checkpoint()
        whole = run.engine.ledger.moved["nvme_write", "commit"] - before
        plan = run.engine.plan
        assert weights == plan.inventory.elements * plan.inventory.weight_itemsize
        assert weights < meanwhile <= whole == weights + sum(map(plan.chunk_bytes, plan.chunks))
    remove(swap_path)


ENDS = {
    "wait": lambda run: run.engine.wait_for_checkpoint(),
    "settle": lambda run: run.engine.settle(),
    "the next": lambda run: run.engine.save_checkpoint(background=True),
    "a write": lambda run: write(run),
    "moments": lambda run: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
    "back": lambda run: run.engine.load_checkpoint(),
    "close": lambda run: run.engine.close(),
}


def write(run):
    weight = run.model.blocks[0].norm1.weight
    with offload.gather(weight, modify=True), torch.no_grad():
        weight.fill_(3.0)


@pytest.mark.parametrize("end", ENDS)
def test_whatever_changes_or_ends_something_ends_it_first(end, swap_path):
    with running(TRAINING, BOTH, swap_path) as run:
        run.train(2)
        directory = run.engine.save_checkpoint(background=True)
        ENDS[end](run)
        assert find_commits(directory).newest.step == 1
    go_on(TRAINING, BOTH, swap_path, 2, 4)


def test_weights_that_user_code_writes_in_memory_are_those_of_the_call(swap_path):
    with running(TRAINING, BOTH, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint(background=True)
        run.model.blocks[0].norm1.weight.data.fill_(3.0)
        run.engine.wait_for_checkpoint()
    go_on(TRAINING, BOTH, swap_path, 2, 4)


def test_a_process_that_dies_meanwhile_leaves_the_commit_before(swap_path):
    run = start(TRAINING, BOTH, swap_path)
    run.train(2)
    run.engine.save_checkpoint()
    run.train(2)
    run.engine.save_checkpoint(background=True)
    run.train(1)
    die(run.engine)
    go_on(TRAINING, BOTH, swap_path, 2, 6)


def test_a_forked_child_ends_nothing(swap_path):
    with running(TRAINING, BOTH, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint(background=True)
        child = os.fork()
        if child == 0:
            run.engine.close()
            os._exit(run.engine.is_saving or run.engine.commit_serial)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run.engine.is_saving and run.engine.commit_serial == 0
        run.train(2)
        assert run.engine.commit_serial == 1
    remove(swap_path)


def test_a_write_that_fails_stops_the_engine_and_leaves_the_commit_before(swap_path, failing):
    stopped = 0
    for n in range(20, 400, 37):
        failing.update(fail_at=n, fail_errno=errno.EIO)
        serial, failed = 0, False
        try:
            with running(TRAINING, BOTH, swap_path) as run:
                for _ in range(4):
                    run.train(2)
                    run.engine.save_checkpoint(background=True)
                    serial = run.engine.commit_serial
        except OffloadError as error:
            failed = isinstance(error, TransferError) or "nothing can be committed" in str(error)
            assert failed, error
        failing.clear()
        if serial:
            stopped += failed
            with running(TRAINING, BOTH, swap_path, resume=True) as run:
                steps = run.engine.global_steps
                assert steps in (serial, serial + 1)
                run.train(2)
                run.state().assert_same_bits(after(TRAINING, 2 * steps, 2 * steps + 2))
        remove(swap_path)
        if not failed:
            break
    assert stopped, "transfers have failed when something was committed"
