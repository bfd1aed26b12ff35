"""The power goes at any moment, and the process is killed at any moment: the last commit is there, whole."""

import random
import signal
from pathlib import Path

import pytest
from mirrored import Mirrored
from power import Disk, PowerCut

from offload.errors import CheckpointError, StoreError
from offload.store.directory import SwapDirectory

SEEDS_EACH = 20


@pytest.mark.parametrize("batch", range(10))
def test_two_hundred_power_cuts(tmp_path, monkeypatch, batch):
    found = [one_cut(tmp_path, monkeypatch, batch * SEEDS_EACH + seed) for seed in range(SEEDS_EACH)]
    assert sum(found) >= SEEDS_EACH // 2, "most cuts come when there is a commit"


def one_cut(tmp_path, monkeypatch, seed):
    """Trains, commits, and loses power up to three times; whether anything was there at the end."""
    rng = random.Random(seed)
    roots = [tmp_path / f"{seed}-{index}" for index in range(rng.randint(1, 2))]
    for root in roots:
        root.mkdir()
    disk = Disk(rng).install(monkeypatch)
    run = Mirrored(
        roots, seed=seed, precision=rng.choice(["bf16", "fp32"]), trained=(9000, 100), frozen=(3000, 0)
    )
    done, fresh = 0, True
    for _ in range(3):
        disk.cut_at = disk.events + rng.randint(1, 150)
        try:
            if fresh:
                run.fill()
            while True:
                run.train(rng.randint(0, 2))
                run.commit()
                done = run.store.serial
        except PowerCut:
            run.die()
        disk.cut()
        disk.forget()
        try:
            manifest = run.recover()
        except (CheckpointError, StoreError) as error:
            assert not done, f"seed {seed}: commit {done} is lost"
            assert "there is no commit" in str(error) or not run.path.exists(), f"seed {seed}: {error}"
            return False
        assert manifest.serial in (done, done + 1), f"seed {seed}: {manifest.serial} after {done}"
        run.check()
        done, fresh = manifest.serial, False
    run.remove()
    return True


KILLED = """
import signal, sys
sys.path.insert(0, {folder!r})
from mirrored import Mirrored
from offload.config.schema import Aio
run = Mirrored([{root!r}], seed={seed}, aio=Aio(backend="threads"))
run.fill()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.setitimer(signal.ITIMER_REAL, {seconds})
while True:
    run.commit()
    print(run.store.serial, run.path, flush=True)
    run.train(2)
"""


def kill_and_recover(tmp_path, run_forked, seed):
    """A process ends between any two instructions, as by kill -9; what it had committed is compared with a replay."""
    rng = random.Random(seed)
    root, other = tmp_path / f"killed{seed}", tmp_path / f"replayed{seed}"
    root.mkdir()
    other.mkdir()
    seconds = rng.uniform(0.0005, 0.15)
    code = KILLED.format(folder=str(Path(__file__).parent), root=str(root), seed=seed, seconds=seconds)
    result = run_forked(code)
    assert result.returncode == -signal.SIGALRM, result.stderr
    lines = result.stdout.splitlines()
    done = len(lines)
    run = Mirrored([other], seed=seed)
    run.fill()
    for _ in range(done + 1):
        run.commit()
        run.train(2)
    run.settle()
    run.remove()
    (run.path,) = root.iterdir()
    try:
        serial = run.recover().serial
    except CheckpointError:
        assert not done
        SwapDirectory(root).close()
    else:
        assert serial in (done, done + 1)
        run.check()
        run.train(1)
        run.commit()
        run.check()
        run.remove()
    assert not any(root.iterdir())
    return done


@pytest.mark.parametrize("batch", range(4))
def test_forty_kills(tmp_path, run_forked, batch):
    done = [kill_and_recover(tmp_path, run_forked, 10 * batch + seed) for seed in range(10)]
    assert max(done) > min(done)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_kills(tmp_path, run_forked):
    for seed in range(1000):
        kill_and_recover(tmp_path, run_forked, 1000 + seed)
