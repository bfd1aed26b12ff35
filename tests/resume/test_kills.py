"""Whatever ends a process, the next one goes on from the last commit, bit for bit: kill -9 at any moment, SIGTERM."""

import random
import signal
from pathlib import Path

import pytest
from interrupted import remove
from kills import Loop, undisturbed

from offload.errors import NoCheckpointError

MICRO_BATCHES = 40
"""More than any process gets to."""

PROCESS = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from kills import train
signal.signal(signal.SIGALRM, {on_alarm})
signal.setitimer(signal.ITIMER_REAL, {seconds})
train({seed}, {swap!r}, resume={resume}, say=lambda text: print(text, flush=True), last={last})
signal.pause()
"""


ENDS = {
    signal.SIGALRM: "signal.SIG_DFL",  # between any two instructions, as by kill -9
    signal.SIGTERM: "lambda *_: os.kill(os.getpid(), signal.SIGTERM)",  # which closes the engine
}


def end_and_go_on(swap_path, run_forked, seed, *, kills, number=signal.SIGALRM, seconds_max=0.6):
    """Several processes, one after the other, each ended; then the state is that of the undisturbed run."""
    rng = random.Random(seed)
    committed = -1
    for _ in range(kills):
        code = PROCESS.format(
            folder=str(Path(__file__).parent), seconds=rng.uniform(0.02, seconds_max), seed=seed,
            swap=str(swap_path), resume=committed >= 0, last=MICRO_BATCHES, on_alarm=ENDS[number],
        )  # fmt: skip
        result = run_forked(code)
        assert result.returncode == -number, result.stderr
        before, committed = committed, max([committed, *map(int, result.stdout.split())])
        assert committed >= before
    digests = undisturbed(seed, MICRO_BATCHES + 3)  # first: it draws random numbers
    try:
        loop = Loop(seed, swap_path, resume=True)
    except NoCheckpointError:
        assert committed < 0, f"commit {committed} is lost"
        return 0
    place = loop.place
    assert place in (committed, committed + 1), "the last commit, or one whose end nobody has heard of"
    assert loop.digest() == digests[place], "as it was"
    for index in range(3):
        loop.micro_batch()
        assert loop.digest() == digests[place + index + 1], f"{index + 1} later"
    loop.engine.save_checkpoint()
    loop.engine.close()
    remove(swap_path)
    return place


@pytest.mark.parametrize("batch", range(4))
def test_kills(batch, tmp_path, run_forked):
    places = []
    for seed in range(4 * batch, 4 * batch + 4):
        swap = tmp_path / str(seed)
        swap.mkdir()
        places.append(end_and_go_on(swap, run_forked, seed, kills=3))
    assert max(places) > 0


def test_sigterm(tmp_path, run_forked):
    places = []
    for seed in range(60, 65):
        swap = tmp_path / str(seed)
        swap.mkdir()
        places.append(end_and_go_on(swap, run_forked, seed, kills=2, number=signal.SIGTERM))
    assert max(places) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_kills(tmp_path, run_forked):
    for seed in range(1000, 1250):
        swap = tmp_path / str(seed)
        swap.mkdir()
        end_and_go_on(swap, run_forked, seed, kills=4)
