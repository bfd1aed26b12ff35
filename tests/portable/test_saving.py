"""Where checkpoints lie, and what becomes of them when saving ends early: the one before, whole, or the new one."""

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from leftovers import assert_same, saved, values_of

import offload
from offload.errors import CheckpointError, ConfigError, OffloadError, StoreError, TransferError
from offload.portable import directory as places
from offload.portable.reader import read_checkpoint
from offload.portable.saved import CheckpointFiles, read_master
from offload.portable.scan import scan


@pytest.fixture
def small():
    """A model of two layers that trains in memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model, optimizer = offload.prepare(model, {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}})

    def step():
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with contextlib.closing(optimizer.engine):
        yield SimpleNamespace(model=model, optimizer=optimizer, engine=optimizer.engine, step=step)


def assert_whole(folder):
    """It can be read, every byte of it, and nothing else lies there."""
    assert not any(item.damage for item in scan(folder))
    named = {file.name for file in read_checkpoint(folder).files}
    assert {path.name for path in folder.iterdir()} == {*named, "checkpoint.json"}


class Killed(BaseException):
    """The process ends: whatever it would do from now on, nobody sees."""


CALLS = ("open", "pwrite", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")


def dies_at(monkeypatch, moment, happened):
    """The process is killed before the call to the system of number ``moment``, counted in the calls that change."""
    at = 0

    def wrapped(name, call):
        def counted(*args, **more):
            nonlocal at
            if name == "open" and not args[1] & (os.O_CREAT | os.O_WRONLY):
                return call(*args, **more)
            at += 1
            happened.append(name)
            if at > moment:
                raise Killed
            return call(*args, **more)

        return counted

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))


@pytest.mark.parametrize("tag", ["one", "two"])
def test_k02_a_save_that_is_killed_at_any_moment_leaves_the_one_before(small, tmp_path, monkeypatch, tag):
    """In place of it, or beside it; and the next one takes away what was left."""
    saved(small.optimizer, tmp_path / "before", "one")
    weights = {1: values_of(small.model, small.optimizer)}
    small.step()
    weights[2] = values_of(small.model, small.optimizer)
    kinds, steps = set(), []
    for moment in range(1000):
        root, happened = tmp_path / str(moment), []
        shutil.copytree(tmp_path / "before", root)
        is_complete = False
        with monkeypatch.context() as patches, contextlib.suppress(Killed):
            dies_at(patches, moment, happened)
            saved(small.optimizer, root, tag, keep_last=1)
            is_complete = True
        kinds |= {*happened}
        found = places.find(root)
        assert not any(item.damage for item in scan(found))
        with CheckpointFiles(found) as files:
            steps.append(files.step)
            for param in files.params:
                master = read_master(files, param, 0, param.numel).view(param.shape)
                assert torch.equal(master, weights[files.step]["master", param.name])
        saved(small.optimizer, root, tag, keep_last=1)
        assert_whole(root / tag)
        left = [path for path in root.iterdir() if not path.is_dir() or any(path.iterdir())]
        assert sorted(path.name for path in left) == ["latest", tag]
        if is_complete:
            break
    assert is_complete and sorted(steps) == steps and steps.count(1) > 10 and steps.count(2) > 1
    assert kinds >= {"open", "pwrite", "write", "fsync", "rename", "unlink"}


def test_files_are_on_stable_storage_before_they_are_named(small, tmp_path, monkeypatch):
    """Whatever was not flushed may be lost with the power: the data first, then the manifest, then `latest`."""
    names, dirty, renamed = {}, set(), []
    calls = {name: getattr(os, name) for name in CALLS}

    def opened(path, flags, *args, **more):
        fd = calls["open"](path, flags, *args, **more)
        names[fd] = os.path.realpath(f"/proc/self/fd/{fd}")
        if flags & os.O_CREAT:
            dirty.update({names[fd], str(Path(names[fd]).parent)})
        return fd

    def written(name, fd, *args):
        dirty.add(names[fd])
        return calls[name](fd, *args)

    def flushed(fd):
        calls["fsync"](fd)
        dirty.discard(names[fd])

    def moved(source, target, **more):
        folder = names[more["src_dir_fd"]]
        renamed.append((target, {Path(path).name for path in dirty - {folder}}))
        calls["rename"](source, target, **more)
        dirty.add(folder)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", lambda *args: written("pwrite", *args))
    monkeypatch.setattr(os, "write", lambda *args: written("write", *args))
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", moved)
    saved(small.optimizer, tmp_path / "out", "one")
    assert [target for target, _ in renamed] == ["checkpoint.json", "latest"]
    assert not any(unsafe for _, unsafe in renamed) and not dirty & {str(tmp_path / "out")}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename"])
def test_k01_a_drive_that_fails_ends_the_save_and_not_the_run(small, tmp_path, monkeypatch, call, code):
    saved(small.optimizer, tmp_path / "out", "one")
    before = {path: path.read_bytes() for path in (tmp_path / "out" / "one").iterdir()}
    small.step()
    for tag in ("one", "two"):
        real = getattr(os, call)

        def fails(*args, real=real, **more):
            is_ours = call != "open" or (args[1] & os.O_CREAT and "safetensors" in str(args[0]))
            if is_ours:
                raise OSError(code, os.strerror(code))
            return real(*args, **more)

        with monkeypatch.context() as patches:
            patches.setattr(os, call, fails)
            with pytest.raises(StoreError, match=r"saving failed") as caught:
                saved(small.optimizer, tmp_path / "out", tag)
        assert caught.value.errno == code and str(tmp_path / "out" / tag) in str(caught.value)
        assert {path: path.read_bytes() for path in (tmp_path / "out" / "one").iterdir()} == before
        assert not (tmp_path / "out" / "two").exists()
    small.step()
    saved(small.optimizer, tmp_path / "out", "two")
    assert places.find(tmp_path / "out").name == "two"


def test_k01_space_is_checked_first(small, tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=1, f_bavail=3, f_frsize=real(path).f_frsize)
    )
    with pytest.raises(StoreError, match=r"the checkpoint needs 1\.01 MiB and 12\.0 KiB are free; free some"):
        saved(small.optimizer, tmp_path / "out", "one")
    assert not (tmp_path / "out" / "one").exists()


def test_rotation_keeps_the_last_ones_and_touches_nothing_else(small, tmp_path):
    root = tmp_path / "out"
    saved(small.optimizer, root, "kept", keep_last=1)
    (root / "kept").rename(root / "by_hand")
    (root / "foreign").mkdir()
    (root / "foreign" / "file").touch()
    (root / "link").symlink_to(root / "by_hand")
    for number in range(5):
        small.step()
        saved(small.optimizer, root, f"step{number}", keep_last=3)
    assert {path.name for path in root.iterdir()} == {"latest", "foreign", "link", "step2", "step3", "step4"}
    assert (root / "foreign" / "file").exists() and (root / "latest").read_text() == "step4\n"
    (root / "step2" / "notes").touch()
    small.engine.load_checkpoint(root, "step2")
    saved(small.optimizer, root, "step2", keep_last=1)
    assert {path.name for path in root.iterdir()} == {"latest", "foreign", "link", "step2"}
    assert (root / "step2" / "notes").exists()
    saved(small.optimizer, root, "extra", latest=False)
    assert places.find(root).name == "step2"


def test_one_saves_at_a_time(small, tmp_path):
    saved(small.optimizer, tmp_path / "out", "one")
    fd = os.open(tmp_path / "out" / "one", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="another process is saving there"):
        saved(small.optimizer, tmp_path / "out", "one")
    os.close(fd)
    saved(small.optimizer, tmp_path / "out", "one")


def test_links_are_not_followed(small, tmp_path):
    """Nothing is written or read through a link that somebody has planted."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    root = tmp_path / "out"
    saved(small.optimizer, root, "one")
    (root / "two").symlink_to(elsewhere)
    with pytest.raises(StoreError, match=r"two.*symbolic link|symbolic link.*two|Not a directory"):
        saved(small.optimizer, root, "two")
    with pytest.raises(CheckpointError, match="there is no such checkpoint; there is one"):
        small.engine.load_checkpoint(root, "two")
    (root / "latest").unlink()
    (root / "latest").symlink_to(elsewhere / "file")
    (root / ".latest.new").symlink_to(elsewhere / "file")
    with pytest.raises(CheckpointError, match=r"latest: .*symbolic link"):
        small.engine.load_checkpoint(root)
    with pytest.raises(StoreError, match="symbolic link"):
        saved(small.optimizer, root, "one")
    (root / ".latest.new").unlink()
    saved(small.optimizer, root, "one")
    assert not (root / "latest").is_symlink() and [*elsewhere.iterdir()] == [elsewhere / "file"]
    assert (elsewhere / "file").read_text() == "precious"
    (weights,) = (root / "one").glob("weights-*")
    weights.rename(elsewhere / "weights")
    weights.symlink_to(elsewhere / "weights")
    with pytest.raises(CheckpointError, match="symbolic link"):
        small.engine.load_checkpoint(root)


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "../x", "latest", ".hidden", "-x", "a" * 201, "a\n", "\x00", "é", 3]
)
def test_a_tag_is_a_name(small, tmp_path, tag):
    with pytest.raises(ConfigError, match="a tag is a name"):
        saved(small.optimizer, tmp_path / "out", tag)
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


def test_what_is_there_instead_is_said(small, tmp_path):
    engine = small.engine
    (tmp_path / "zero" / "global_step3").mkdir(parents=True)
    (tmp_path / "zero" / "latest").write_text("global_step3")
    (tmp_path / "zero" / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    (tmp_path / "broken" / "one").mkdir(parents=True)
    (tmp_path / "broken" / "latest").write_text("one\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "latest").write_text("../../etc")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "latest").write_text("one")
    before = values_of(small.model, small.optimizer)
    for name, message in (
        ("zero", "a checkpoint of DeepSpeed ZeRO is made of pickles"),
        ("broken", "it has no checkpoint.json: saving broke off"),
        ("odd", "'../../etc' is no tag"),
        ("gone", "there is no such checkpoint; there is none"),
        ("nothing", "nothing was saved there"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            engine.load_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert_same(values_of(small.model, small.optimizer), before)
    small.step()


def test_damage_stops_before_anything_changes_or_stops_the_engine(small, tmp_path):
    folder = saved(small.optimizer, tmp_path / "out", "one")
    (state,) = folder.glob("state-*")
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(
        TransferError, match=r"residual of 1\.bias: crc32c .* take another checkpoint"
    ) as caught:
        small.engine.load_checkpoint(tmp_path / "out")
    assert caught.value.filename == str(state)
    with pytest.raises(OffloadError, match="the engine stopped"):
        small.step()
