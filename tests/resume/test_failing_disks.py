"""Disks that fill up, fail or lose power while a run trains and commits: the last commit is whole, and goes on."""

import contextlib
import errno
import random
import sys
from pathlib import Path

import pytest
from interrupted import die, remove
from kills import Loop, undisturbed

from offload import lifetime
from offload.errors import CheckpointError, OffloadError, StoreError, TransferError

sys.path.append(str(Path(__file__).parents[1] / "store"))
from power import Disk, PowerCut

MICRO_BATCHES = 6


def go_on(seed, swap_path, committed):
    """From the last commit, which must be there."""
    digests = undisturbed(seed, MICRO_BATCHES + 2)
    loop = Loop(seed, swap_path, resume=True)
    with contextlib.closing(loop.engine):
        place = loop.place
        assert place in (committed, committed + 1)
        assert loop.digest() == digests[place]
        loop.micro_batch()
        assert loop.digest() == digests[place + 1]
        loop.engine.save_checkpoint()


@pytest.mark.parametrize("seed", range(8))
def test_the_nth_transfer_fails_for_good(seed, swap_path, failing):
    """EIO or a full disk, at every transfer in turn: the engine stops, and the last commit goes on."""
    code = (errno.EIO, errno.ENOSPC)[seed % 2]
    hits = 0
    for n in range(1 + seed, 400, 23):
        failing.update(fail_at=n, fail_errno=code)
        committed, loop = -1, None
        try:
            loop = Loop(seed, swap_path, resume=False)
            for _ in range(MICRO_BATCHES):
                loop.engine.save_checkpoint()
                committed = loop.place
                loop.micro_batch()
            ended = True
        except OffloadError as error:
            ended = False
            assert isinstance(error, TransferError) or "nothing can be committed" in str(error), error
            with pytest.raises(OffloadError):
                if loop is not None:
                    loop.engine.save_checkpoint()
                else:
                    raise
        failing.clear()
        if loop is not None:
            loop.engine.close()
        if committed >= 0:
            hits += not ended
            go_on(seed, swap_path, committed)
        remove(swap_path)
        if ended:
            break
    assert hits, "transfers have failed when something was committed"


def test_no_room_for_the_tensors_of_a_commit_leaves_the_one_before(swap_path, monkeypatch):
    """Training may go on, and so may a later commit."""
    seed = 0  # with a buffer, and so with a file of tensors
    loop = Loop(seed, swap_path, resume=False)
    loop.micro_batch()
    loop.engine.save_checkpoint()
    loop.micro_batch()

    def full(*_args):
        raise TransferError(errno.ENOSPC, "write", "tensors", offset=0, size=1, done=0)

    with monkeypatch.context() as patch:
        patch.setattr("offload.store.tensors.write_file", full)
        with pytest.raises(StoreError, match="commit 2 failed"):
            loop.engine.save_checkpoint()
    assert loop.engine.commit_serial == 1
    loop.micro_batch()
    die(loop.engine)
    go_on(seed, swap_path, 1)
    loop = Loop(seed, swap_path, resume=True)
    loop.micro_batch()
    loop.engine.save_checkpoint()
    loop.engine.close()
    remove(swap_path)


def one_cut(seed, swap_path, monkeypatch):
    """Trains, commits and loses power up to three times; the place in the end, None where nothing was there."""
    rng = random.Random(seed)
    digests = undisturbed(seed, 60)
    disk = Disk(rng).install(monkeypatch)
    committed, place = -1, None
    for _ in range(3):
        disk.cut_at = disk.events + rng.randint(1, 250)
        loop = None
        try:
            loop = Loop(seed, swap_path, resume=place is not None)
            if place is not None:
                assert loop.digest() == digests[loop.place]
            while True:
                loop.engine.save_checkpoint()
                committed = loop.place
                loop.micro_batch()
        except PowerCut:
            if loop is None:  # before there was an engine: what is open is closed, and left where it is
                for resource in lifetime.opened():
                    resource.release()
            else:
                die(loop.engine)
        # What a prepare that was broken off has taken away again is gone.
        disk.planes = {path: content for path, content in disk.planes.items() if path.exists()}
        disk.pending = [entry for entry in disk.pending if entry[0] in disk.planes]
        disk.cut()
        disk.forget()
        try:
            loop = Loop(seed, swap_path, resume=True)
        except (CheckpointError, StoreError) as error:
            assert committed < 0, f"seed {seed}: commit {committed} is lost: {error}"
            break
        place = loop.place
        assert place in (committed, committed + 1), f"seed {seed}: {place} after {committed}"
        assert loop.digest() == digests[place], f"seed {seed}"
        die(loop.engine)
    remove(swap_path)
    return place


@pytest.mark.parametrize("batch", range(3))
def test_power_cuts(batch, tmp_path, monkeypatch):
    places = []
    for seed in range(5 * batch, 5 * batch + 5):
        swap = tmp_path / str(seed)
        swap.mkdir()
        with monkeypatch.context() as patch:
            places.append(one_cut(seed, swap, patch))
    assert any(places), "some cuts come when there is a commit"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_power_cuts(tmp_path, monkeypatch):
    for seed in range(100, 300):
        swap = tmp_path / str(seed)
        swap.mkdir()
        with monkeypatch.context() as patch:
            one_cut(seed, swap, patch)
