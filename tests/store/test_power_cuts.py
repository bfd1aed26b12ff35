"""The power goes at any moment, and the process is killed at any moment: the last commit is there, whole."""

import random

import pytest
from mirrored import Mirrored
from power import Disk, PowerCut

from offload.errors import CheckpointError, StoreError

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
        except (CheckpointError, StoreError):
            assert not done, f"seed {seed}: commit {done} is lost"
            return False
        assert manifest.serial in (done, done + 1), f"seed {seed}: {manifest.serial} after {done}"
        run.check()
        done, fresh = manifest.serial, False
    run.remove()
    return True
