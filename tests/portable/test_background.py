"""Checkpoints that are saved in the background: the state at the call, whatever training does meanwhile."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from leftovers import assert_same, values_of
from models import Placement, Training, prepared, steps

import offload
from offload import aio
from offload.errors import ConfigError, OffloadError, StoreError
from offload.portable import background, directory
from offload.portable.files import Writer
from offload.portable.reader import read_checkpoint
from offload.portable.scan import scan

TRAINING = Training("bf16", steps=6, frozen="blocks.0 blocks.2.norm", tied=True)
ON_NVME = Placement("nvme", "nvme", "backward", chunk=4096)


@contextlib.contextmanager
def running(training, placement, swap_path, *, paths=None, behind=1, **durability):
    """A run with two generations, and steps behind it; nothing of it stays."""
    config = training.config(placement, swap_path)
    if paths is not None:
        for what in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][what]["nvme_path"] = paths
    config["durability"] = {"generations": 2, **durability}
    model = training.model()
    model.register_buffer("counts", torch.arange(3.0))
    model, optimizer = offload.prepare(model, config)
    engine, batches = optimizer.engine, iter(training.batches())

    def step(count=1):
        model.counts += 1
        losses = []
        for _ in range(count * training.accumulation):
            loss = model(next(batches)) / training.accumulation
            loss.backward()
            losses.append(loss.item())
            if len(losses) % training.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    run = SimpleNamespace(model=model, optimizer=optimizer, engine=engine, batches=batches, step=step)
    try:
        step(behind)
        yield run
    finally:
        if engine.is_open:
            with contextlib.suppress(StoreError):
                engine.wait_for_checkpoint()
            engine.discard()


class Gate:
    """Holds up the thread that saves, at its second write, until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()
        self._writes = 0

    def pass_through(self):
        if threading.current_thread().name == "offload-save":
            self._writes += 1
            if self._writes > 1:
                self.reached.set()
                assert self.opened.wait(60)

    def open_later(self, seconds=0.3):
        timer = threading.Timer(seconds, self.opened.set)
        timer.start()
        return timer


@pytest.fixture
def gate(monkeypatch):
    gate, write = Gate(), Writer.write

    def written(self, *args):
        gate.pass_through()
        write(self, *args)

    monkeypatch.setattr(Writer, "write", written)
    yield gate
    gate.opened.set()


def content_of(folder):
    """All files but for what differs from saving to saving: names have a nonce, and the manifest a time."""
    checkpoint = read_checkpoint(folder)
    files = {re.sub("-[0-9a-f]{8}-", "-", path.name): path.read_bytes() for path in folder.iterdir()}
    about = json.loads(files.pop("checkpoint.json").splitlines()[1])
    about["files"] = [[file.size, file.header_bytes, file.header_crc32c] for file in checkpoint.files]
    assert about.pop("time") > 0
    assert not any(item.damage for item in scan(folder))
    assert len(files) == len(checkpoint.files)  # and nothing else lies there
    return {**files, "checkpoint.json": about}


KINDS = [
    (replace(TRAINING, state_format="int8"), ON_NVME, Placement("cpu", "cpu"), False),
    (Training("fp32", "bf16", steps=6, accumulation=2), Placement("cpu", "nvme", chunk=2048), None, False),
    (Training("bf16", steps=6, frozen="blocks.1 positions", groups=True), Placement(), ON_NVME, True),
]


@pytest.mark.parametrize(("training", "placement", "other", "exclude_frozen"), KINDS)
def test_it_is_what_the_foreground_saves(
    training, placement, other, exclude_frozen, swap_path, tmp_path, gate, the_cpu_computes
):
    """Byte for byte, though training goes on between its first write and its second; and it goes on anywhere."""
    how = {"client_state": {"epoch": 3}, "exclude_frozen": exclude_frozen}
    with running(training, placement, swap_path) as run:
        if training.accumulation > 1:  # gradients wait
            (run.model(next(run.batches)) / 2).backward()
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one", **how)
        expected = values_of(run.model, run.optimizer)
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True, **how)
        assert here == tmp_path / "background" / "one" and gate.reached.wait(60)
        if training.accumulation > 1:
            (run.model(next(run.batches)) / 2).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        losses = run.step(3)
        assert run.engine.is_saving and not (here / "checkpoint.json").exists()
        gate.opened.set()
        run.engine.wait_for_checkpoint()
        assert not run.engine.is_saving
        assert content_of(here) == content_of(there)
    if other is None:
        return
    model = (training if exclude_frozen else replace(training, seed=5)).model()
    model.register_buffer("counts", torch.zeros(3))
    with prepared(training, other, swap_path, model) as (model, optimizer):
        _, client_state = optimizer.engine.load_checkpoint(tmp_path / "background")
        assert client_state == {"epoch": 3}
        assert_same(values_of(model, optimizer), expected)
        assert steps(model, optimizer, training.batches()[1:4]) == losses


def test_on_an_accelerator(swap_path, tmp_path, gate, monkeypatch):
    """A device that is simulated: what is at home there is in the commit, and the thread touches nothing of it."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "simulated:3")
    with running(TRAINING, Placement("nvme", "none"), swap_path) as run:
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one")
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True)
        run.step(2)
        gate.opened.set()
        run.engine.wait_for_checkpoint()
        assert content_of(here) == content_of(there)


def test_over_several_paths_and_with_frozen_weights_that_change(swap_path, tmp_path, gate):
    """The swap file grows meanwhile: what is frozen has one extent until somebody writes it."""
    paths = [{"path": str(swap_path / name), "weight": 1} for name in ("first", "second")]
    for path in paths:
        Path(path["path"]).mkdir()
    with running(TRAINING, ON_NVME, swap_path, paths=paths) as run:
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one")
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True)
        assert gate.reached.wait(60)
        files = [*swap_path.glob("*/*/planes.swap")]
        before = sum(file.stat().st_size for file in files)
        run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})
        run.step()
        assert len(files) == 2 and sum(file.stat().st_size for file in files) > before
        gate.opened.set()
        run.engine.wait_for_checkpoint()
        assert content_of(here) == content_of(there)
        again = run.engine.save_checkpoint(tmp_path / "background", "two", background=True)
        run.engine.wait_for_checkpoint()
        assert content_of(again) == content_of(run.engine.save_checkpoint(tmp_path / "foreground", "two"))
    for path in paths:
        Path(path["path"]).rmdir()


def test_what_was_never_written_is_zeros(swap_path, tmp_path):
    """Before the first step no moment is, and the memory that they are read to has had other things in it."""
    with running(TRAINING, ON_NVME, swap_path, behind=0) as run:
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one")
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True)
        run.step()
        run.engine.wait_for_checkpoint()
        assert content_of(here) == content_of(there)


NEXT = {
    "commit": lambda run, _folder: run.engine.save_checkpoint(),
    "save in the background": lambda run, folder: run.engine.save_checkpoint(folder, "two", background=True),
    "load": lambda run, _folder: run.engine.load_checkpoint(),
    "close": lambda run, _folder: run.engine.close(),
    "discard": lambda run, _folder: run.engine.discard(),
}


@pytest.mark.parametrize("what", NEXT)
def test_what_would_change_the_commit_waits(what, swap_path, tmp_path, gate, caplog, monkeypatch):
    """Without that, the steps after the next commit would write over what is still to be read."""
    monkeypatch.setattr(background, "MOMENT_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "offload")
    with running(TRAINING, ON_NVME, swap_path) as run:
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one")
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True)
        assert gate.reached.wait(60)
        run.step()
        timer = gate.open_later()
        NEXT[what](run, tmp_path / "background")
        assert gate.opened.is_set()
        if run.engine.is_open:
            run.step(2)
        assert content_of(here) == content_of(there)
        assert caplog.text.count(f"waiting for the checkpoint {here}, which is saved in the background") == 1
        timer.join()
        directories = [*swap_path.iterdir()]
        assert len(directories) == (what != "discard")
        if what == "close":
            shutil.rmtree(directories[0])


def fails_to_write(monkeypatch, _folder):
    write = os.pwrite

    def full(fd, *args):
        if threading.current_thread().name == "offload-save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, *args)

    monkeypatch.setattr(os, "pwrite", full)


def vanishes(monkeypatch, folder):
    shutil.rmtree(folder)


def changes(monkeypatch, _folder):
    monkeypatch.setattr(background, "sum_of", lambda data: 1)


def fails_to_read(monkeypatch):
    faults = {"fail_at": 5, "fail_count": 1000}
    monkeypatch.setattr("offload.store.drives.Queue", partial(aio.Queue, faults=faults))


@pytest.mark.parametrize(
    ("begins", "goes_on", "reason"),
    [
        (None, fails_to_write, r"No space left on device; free space or give another directory \(.*two"),
        (None, vanishes, "No such file or directory"),
        (None, changes, r"Bad message.* \(tokens\.weight\): crc32c .*planes\.swap"),
        (fails_to_read, None, r"read failed: Input/output error.*planes\.swap"),
    ],
    ids=["full", "vanishes", "damage", "read"],
)
def test_an_error_is_raised_by_the_next_call_and_harms_nothing(
    begins, goes_on, reason, swap_path, tmp_path, gate, monkeypatch, nothing_left_behind, caplog
):
    with running(TRAINING, ON_NVME, swap_path) as run:
        root = tmp_path / "out"
        before = content_of(run.engine.save_checkpoint(root, "one"))
        with monkeypatch.context() as patches:
            if begins is not None:
                begins(patches)
            here = run.engine.save_checkpoint(root, "two", background=True)
            assert gate.reached.wait(60)
            if goes_on is not None:
                goes_on(patches, here)
            gate.opened.set()
            while run.engine.is_saving:
                time.sleep(0.01)
        run.step()
        with pytest.raises(StoreError, match=reason) as caught:
            run.engine.save_checkpoint()
        assert caught.value.filename == str(here) and "nothing of the run has changed" in str(caught.value)
        assert str(caught.value) in caplog.text and "\n" not in str(caught.value)
        assert content_of(root / "one") == before and directory.find(root).name == "one"
        assert sorted(path.name for path in root.iterdir()) == ["latest", "one"]
        run.step()
        run.engine.save_checkpoint(root, "two", background=True)
        run.engine.wait_for_checkpoint()
        assert content_of(root / "two") == content_of(run.engine.save_checkpoint(tmp_path, "two"))


def test_what_is_wrong_at_once_is_said_at_once(swap_path, tmp_path, monkeypatch):
    with running(TRAINING, ON_NVME, swap_path) as run:
        serial = run.engine.commit_serial
        with pytest.raises(ConfigError, match="a tag is a name"):
            run.engine.save_checkpoint(tmp_path / "out", "../one", background=True)
        assert run.engine.commit_serial == serial
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="no checkpoint can be written there"):
            run.engine.save_checkpoint(tmp_path / "file", background=True)
        space = SimpleNamespace(f_blocks=1, f_bavail=3, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: space)
        with pytest.raises(StoreError, match=r"the checkpoint needs .* are free; free some"):
            run.engine.save_checkpoint(tmp_path / "out", "one", background=True)
        assert not (tmp_path / "out" / "one").exists() and not run.engine.is_saving
        path = run.engine.save_checkpoint(background=True)
        assert path == run.engine.commits_to == run.engine.save_checkpoint(swap_path, background=True)


def test_it_needs_what_is_committed(swap_path, tmp_path):
    nowhere = r"set durability\.generations = 2 and an nvme_path, or leave background=True out"
    in_place = r"one generation.* durability\.generations = 2, or leave background=True out"
    for placement, message in ((Placement(), nowhere), (ON_NVME, in_place)):
        config = TRAINING.config(placement, swap_path)
        if placement is ON_NVME:
            config["durability"] = {"generations": 1}
        _, optimizer = offload.prepare(TRAINING.model(), config)
        with contextlib.closing(optimizer.engine), pytest.raises(ConfigError, match=message):
            optimizer.engine.save_checkpoint(tmp_path / "out", background=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at_the_end", ["close", "discard"])
def test_the_end_says_what_went_wrong(
    at_the_end, swap_path, tmp_path, gate, monkeypatch, nothing_left_behind
):
    """Closing when all is closed; what was committed is not thrown away where it is all that there is."""
    with running(TRAINING, ON_NVME, swap_path) as run:
        here = run.engine.save_checkpoint(tmp_path / "out", "one", background=True)
        assert gate.reached.wait(60)
        fails_to_write(monkeypatch, here)
        gate.open_later(0.1).join()
        with pytest.raises(StoreError, match="No space left"):
            getattr(run.engine, at_the_end)()
        assert run.engine.is_open == (at_the_end == "discard") and not here.exists()
        (left,) = swap_path.iterdir()
        run.engine.close()
        assert left.exists()
        shutil.rmtree(left)


@pytest.mark.parametrize("what", ["commit", "close"])
def test_ctrl_c_while_it_is_waited_for(what, swap_path, tmp_path, gate, nothing_left_behind):
    """A commit then has not begun; closing closes, and gives the checkpoint up."""
    with running(TRAINING, ON_NVME, swap_path) as run:
        before = content_of(run.engine.save_checkpoint(tmp_path, "one"))
        run.step()
        here = run.engine.save_checkpoint(tmp_path, "one", background=True)
        assert gate.reached.wait(60)
        serial = run.engine.commit_serial
        interrupt = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        interrupt.start()
        opening = gate.open_later(0.5) if what == "close" else None
        with pytest.raises(KeyboardInterrupt):
            NEXT[what](run, tmp_path)
        interrupt.join()
        if what == "commit":
            assert run.engine.commit_serial == serial and run.engine.is_saving
            run.step()
            gate.opened.set()
            run.engine.save_checkpoint()
            assert content_of(here) != before
        else:
            opening.join()
            assert not run.engine.is_open and content_of(here) == before
            shutil.rmtree(*swap_path.glob("offload-*"))


def test_a_forked_child_has_nothing_to_do_with_it(swap_path, tmp_path, gate):
    """It waits for nothing, and holds nothing up: not even a saving to the same place while it lives."""
    with running(TRAINING, ON_NVME, swap_path) as run:
        here = run.engine.save_checkpoint(tmp_path, "one", background=True)
        assert gate.reached.wait(60)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            run.engine.wait_for_checkpoint()
            is_saving = run.engine.is_saving
            run.engine.close()
            os.close(writing)
            os.read(reading, 1)  # lives until its parent says so
            os._exit(7 if is_saving else 0)
        gate.opened.set()
        run.engine.wait_for_checkpoint()
        before = content_of(here)
        run.step()
        run.engine.save_checkpoint(tmp_path, "one", background=True)
        run.engine.wait_for_checkpoint()
        assert content_of(here) != before
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        os.close(reading)


def test_rotation_and_latest(swap_path, tmp_path):
    with running(TRAINING, ON_NVME, swap_path) as run:
        for number in range(4):
            run.engine.save_checkpoint(tmp_path / "out", f"step{number}", keep_last=2, background=True)
            run.step()
        run.engine.save_checkpoint(tmp_path / "out", background=True, latest=False)
        run.engine.wait_for_checkpoint()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"latest", "step2", "step3", "global_step5"}
    assert directory.find(tmp_path / "out").name == "step3"


def test_its_pace_is_that_of_the_configuration(swap_path, tmp_path):
    with running(TRAINING, ON_NVME, swap_path, write_bytes_per_second=4_000_000) as run:
        began = time.monotonic()
        here = run.engine.save_checkpoint(tmp_path / "out", background=True)
        run.step()
        assert run.engine.is_saving
        run.engine.wait_for_checkpoint()
        size = sum(file.size for file in read_checkpoint(here).files)
        assert time.monotonic() - began > 0.9 * (size - 100_000) / 4_000_000 > 0.2


SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import offload
from models import Placement, Training, steps
from offload.portable.files import Writer

training = Training("bf16", steps=6, frozen="blocks.0 blocks.2.norm", tied=True)
config = training.config(Placement("nvme", "nvme", "backward", chunk=4096), {swap!r})
config["durability"] = {{"generations": 2}}
model, optimizer = offload.prepare(training.model(), config)
steps(model, optimizer, training.batches()[:1])
engine = optimizer.engine
engine.save_checkpoint({out!r}, "one")
steps(model, optimizer, training.batches()[1:2])
write, left = Writer.write, {writes}
stepped = threading.Event()
def counted(self, *args):
    global left
    stepped.wait()
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, *args)
Writer.write = counted
engine.save_checkpoint({out!r}, "one", background=True)
steps(model, optimizer, training.batches()[2:3])
stepped.set()
if {writes} >= 0:
    threading.Event().wait()  # the end comes
"""


def test_kill_9_leaves_the_commit_and_the_checkpoint_before(swap_path, tmp_path, run_forked):
    out = tmp_path / "out"
    ended = run_forked(SCRIPT.format(swap=str(swap_path), out=str(out), writes=20))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert read_checkpoint(out / "one").step == 1 and not any(item.damage for item in scan(out / "one"))
    assert len([*(out / "one").iterdir()]) > 1 + len(read_checkpoint(out / "one").files)
    with prepared(TRAINING, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        steps(model, optimizer, TRAINING.batches()[:2])
        expected = values_of(model, optimizer)
    config = TRAINING.config(ON_NVME, swap_path)
    config["durability"] = {"generations": 2}
    model, optimizer = offload.prepare(replace(TRAINING, seed=3).model(), config, resume=True)
    assert optimizer.engine.global_steps == 2
    assert_same(values_of(model, optimizer), expected)
    optimizer.engine.save_checkpoint(out, "one", background=True)
    optimizer.engine.wait_for_checkpoint()
    assert content_of(out / "one")["checkpoint.json"]["step"] == 2
    optimizer.engine.discard()


def test_a_program_that_ends_ends_when_it_is_written(swap_path, tmp_path, run_forked):
    out = tmp_path / "out"
    ended = run_forked(SCRIPT.format(swap=str(swap_path), out=str(out), writes=-1))
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert content_of(out / "one")["checkpoint.json"]["step"] == 2
    shutil.rmtree(*swap_path.glob("offload-*"))


def test_an_engine_that_has_stopped_does_not_stop_it(swap_path, tmp_path, gate):
    with running(TRAINING, ON_NVME, swap_path) as run:
        there = run.engine.save_checkpoint(tmp_path / "foreground", "one")
        here = run.engine.save_checkpoint(tmp_path / "background", "one", background=True)
        run.engine.stop(RuntimeError("a drive"))
        gate.opened.set()
        with pytest.raises(OffloadError, match="the engine stopped"):
            run.engine.save_checkpoint()
        run.engine.close()
        assert content_of(here) == content_of(there)
        shutil.rmtree(*swap_path.glob("offload-*"))
