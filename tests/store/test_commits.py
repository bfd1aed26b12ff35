"""What was committed is there after any end of the process; what was not is as it was before."""

import dataclasses
import errno
import functools
import itertools
import json
import logging
import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mirrored import PAGE, Mirrored, plan_of, shapes_for
from power import Disk, PowerCut

from offload import aio
from offload.config.schema import Aio
from offload.errors import CheckpointError, StoreError, TransferError
from offload.ledger import Ledger
from offload.optim.checksum import crc32c
from offload.store import checksums
from offload.store.commits import find_commits
from offload.store.crc import join
from offload.store.directory import SwapDirectory
from offload.store.layout import StoreLayout
from offload.store.recovery import recover


@pytest.fixture
def roots(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_a_whole_is_that_of_its_parts(seed):
    rng = random.Random(seed)
    data = torch.randint(0, 256, (rng.randint(0, 300_000),), dtype=torch.uint8)
    cuts = np.array(sorted({0, data.numel(), *(rng.randint(0, data.numel()) for _ in range(9))}), np.uint64)
    whole = crc32c(data, np.array([0, data.numel()], np.uint64))[0]
    assert join(crc32c(data, cuts).tolist(), np.diff(cuts).tolist()) == whole


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shares", [(1.0,), (0.3, 0.7)])
def test_both_generations_tile_the_files_that_the_plan_counts(precision, shares):
    plan = plan_of(precision, trained=(800_000, 100, 0), frozen=(3000, 0, 900_000), chunk=1 << 18)
    layout = StoreLayout(plan, shares, shares)
    for path, size in enumerate(layout.sizes):
        stripes = [s for extents in layout.generations for s in extents.all]
        extents = sorted((e for s in stripes for e in s.extents if e.path == path), key=lambda e: e.offset)
        end = 0
        for extent in extents:
            assert extent.offset == end and extent.size % PAGE == 0
            end += extent.size
        assert end == size
    assert sum(layout.sizes) == plan.bytes_total("nvme")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("verify", ["off", "resume", "always"])
def test_training_goes_on_from_every_commit(roots, precision, drives, verify, nothing_left_behind):
    run = Mirrored(roots[:drives], seed=drives, precision=precision)
    run.fill()
    run.check()
    for _ in range(4):
        run.commit()
        run.check()
        run.train(run.rng.randint(0, 3))
        run.check()
        run.die()
        run.recover(verify=verify)
        run.check()
        run.check()  # from sums that are known by now
        run.train(2)
    run.remove()
    assert not any(any(root.iterdir()) for root in roots)


@pytest.mark.usefixtures("every_drive")
def test_commits_on_every_backend_and_under_faults_that_must_not_show(roots):
    run = Mirrored(roots)
    run.fill()
    for _ in range(2):
        run.train(2)
        run.commit()
        run.check()
    run.train(1)
    run.settle()
    run.die()
    run.recover()
    run.check()
    run.remove()


@pytest.mark.parametrize("verify", ["off", "resume", "always"])
def test_opening_reads_no_plane_and_every_item_is_proven_once(roots, verify, monkeypatch):
    """So it takes as long as its manifest, whatever the size of the store."""
    run = Mirrored(roots)
    run.fill()
    run.train(1)
    run.commit()
    run.die()
    run.recover(verify=verify)
    assert not any(drive.queue.stats().read.requests for drive in run.store._drives)
    checked = []
    take = checksums.crc32c
    monkeypatch.setattr(
        checksums, "crc32c", lambda data, cuts: checked.append(len(cuts) - 1) or take(data, cuts)
    )
    run.check()
    once = len(checked)
    run.check()
    assert (once, len(checked) - once) == {
        "off": (0, 0), "resume": (len(run.plan.inventory.units) + len(run.plan.chunks), 0), "always": (once, once),
    }[verify]  # fmt: skip
    assert verify == "off" or once
    run.remove()


def test_what_has_not_changed_is_not_written_again(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.update(run.plan.chunks[1])
    run.store._ledger.moved.clear()
    run.commit()
    run.commit()
    assert not run.store._ledger.moved
    found = find_commits(run.path)
    before, now = found.before(), found.newest
    assert before.serial == 2 and now.serial == 3 and before.items == now.items
    run.remove()


def test_pages_written_by_user_code_move_their_whole_item_and_no_other(roots):
    run = Mirrored(roots, trained=(20_000,), frozen=(9000,))
    run.fill()
    run.commit()
    run.store._ledger.moved.clear()
    plane = run.weights[0]
    plane[PAGE : 2 * PAGE] = run.noise(PAGE)
    run.store.write_weight(0, plane.clone(), PAGE, 2 * PAGE).wait()
    assert run.store._ledger.moved == {("nvme_write", "weight"): 8192}
    run.store.write_weight(0, plane.clone(), PAGE, 2 * PAGE).wait()
    assert run.store._ledger.moved == {("nvme_write", "weight"): 8192 + PAGE}
    run.check()
    run.die()
    run.recover()
    run.check()
    run.remove()


def test_a_plane_of_several_generations_is_read_in_as_few_pieces_as_can_be(roots, monkeypatch):
    run = Mirrored(roots[:1], trained=(5 * 4096,), frozen=(0,))
    run.fill()
    run.commit()
    for index in (1, 2):
        run.update(run.plan.chunks[index])
    reads = []
    links = run.store._drives[0].links
    read = links.read

    def seen(piece, *more, **how):
        reads.append(piece.numel())
        return read(piece, *more, **how)

    monkeypatch.setattr(links, "read", seen)
    run.store.read_weight(0, torch.empty(run.weights[0].numel(), dtype=torch.uint8)).wait()
    assert reads == [8192, 2 * 8192, 2 * 8192]
    run.check()
    run.remove()


def test_frozen_weights_that_are_written_get_their_second_extent_then(roots, caplog):
    run = Mirrored(roots, trained=(100, 0), frozen=(9000, 20_000))
    run.fill()
    size = sum(run.store._layout.sizes)
    assert size == run.plan.bytes_total("nvme")
    run.commit()
    with caplog.at_level(logging.INFO):
        for unit in (1, 0, 1):
            plane = run.weights[unit]
            plane[-PAGE:] = run.noise(PAGE)
            run.store.write_weight(unit, plane.clone(), plane.numel() - PAGE, plane.numel()).wait()
    assert sum(run.store._layout.sizes) == size + 3 * PAGE + 5 * PAGE
    assert "frozen weights of blocks.1 are written: 20.0 KiB more on nvme than planned" in caplog.text
    run.check()
    run.die()
    run.recover()
    run.check()
    for _ in range(3):
        run.put(1)
        run.commit()
        run.die()
        run.recover()
        run.check()
    run.remove()


def test_a_residual_alone_does_not_move_a_chunk_that_has_moments(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    chunk = run.plan.chunks[0]
    part = run.noise(chunk.elements * 2)
    run.states[0][: part.numel()] = part
    run.store.write_residual(chunk, part).wait()
    run.update(chunk)
    run.check()
    run.commit()
    with pytest.raises(AssertionError, match="are not all of it"):
        run.store.write_residual(chunk, part)
    run.remove()


# -- who owns what is left --------------------------------------------------------------------------------


def test_a_commit_outlives_its_run_and_the_next_start(roots, caplog):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.store.close()
    directories = [next(root.iterdir()) for root in roots]
    kept = ("the last commit", "its part of a commit")
    for root, path, what in zip(roots, directories, kept, strict=True):
        with caplog.at_level(logging.WARNING):
            SwapDirectory(root).close()
        assert re.search(
            rf"{path} holds {what} of a run that has ended, [\d.]+ [KM]iB: go on from it, or remove it with"
            rf" `rm -r {path}`", caplog.text
        )  # fmt: skip
    (run.path / "owner.json").write_text(json.dumps({"pid": 1, "command": "x" * 500}))
    run.recover()
    assert json.loads((run.path / "owner.json").read_text())["pid"] == os.getpid()
    run.check()
    run.remove()


def test_without_a_commit_nothing_stays(roots):
    run = Mirrored(roots)
    run.fill()
    run.store.close()
    assert not any(any(root.iterdir()) for root in roots)
    run = Mirrored(roots)
    run.fill()
    run.die()
    SwapDirectory(roots[0]).close()
    with pytest.raises(StoreError):
        run.recover()
    SwapDirectory(roots[1]).close()
    assert not any(any(root.iterdir()) for root in roots)


def test_nobody_else_can_read_it(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    for root in roots:
        (directory,) = root.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        names = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
        assert len(names) == 3 and set(names.values()) == {0o600}
    run.remove()


def test_a_live_run_is_not_taken_over(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    with pytest.raises(StoreError, match=rf"in use by .*\"pid\": {os.getpid()}") as caught:
        recover(run.path, run.plan, run.shapes, Aio(), Ledger())
    assert "\n" not in str(caught.value)
    run.train(1)
    run.check()
    run.remove()


@pytest.mark.parametrize("what", ["empty", "file", "missing", "link", "no owner"])
def test_what_is_no_swap_directory_is_refused_and_left_alone(tmp_path, what):
    path = tmp_path / "offload-1-2-rank0"
    if what == "file":
        path.write_text("x")
    elif what == "link":
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "owner.json").write_text("{}")
        path.symlink_to(tmp_path / "real")
    elif what != "missing":
        path.mkdir()
        if what == "empty":
            (path / "owner.json").write_text("{}")
    before = {each: each.is_file() and each.read_bytes() for each in tmp_path.rglob("*")}
    plan = plan_of()
    with pytest.raises((StoreError, CheckpointError), match=str(path)) as caught:
        recover(path, plan, shapes_for(plan), Aio(), Ledger())
    assert "\n" not in str(caught.value)
    assert {each: each.is_file() and each.read_bytes() for each in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"precision": "fp32"}, "weights are bfloat16 there and float32 here"),
        (
            {"trained": (20_000, 100, 5001)},
            r"blocks.2.weight \[5000\] bfloat16 there, blocks.2.weight \[5001\] bfl",
        ),
        ({"frozen": (3000, 0, 0)}, "5 parameters there and 4 here"),
        ({"chunk": 8192}, "cut in another way"),
    ],
)
def test_another_model_is_refused_and_the_commit_stays(roots, other, message):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.die()
    plan = plan_of(**other)
    with pytest.raises(CheckpointError, match=message) as caught:
        recover(run.path, plan, shapes_for(plan), Aio(), Ledger())
    assert "\n" not in str(caught.value)
    run.recover()
    run.check()
    run.remove()


def test_a_model_whose_parameters_lie_in_another_order_is_refused(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.die()
    first, *others = run.shapes.units
    turned = dataclasses.replace(first.params[0], stride=(2,))
    shapes = dataclasses.replace(
        run.shapes, units=(dataclasses.replace(first, params=(turned, *first.params[1:])), *others)
    )
    with pytest.raises(CheckpointError, match=r"blocks\.0\.weight lies in another place or order"):
        recover(run.path, run.plan, shapes, Aio(), Ledger())
    run.recover()
    run.remove()


@pytest.mark.parametrize("loss", ["file", "short", "link", "directory", "member", "strange member"])
def test_a_path_that_has_lost_its_part_is_named(roots, loss):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.die()
    (other,) = roots[1].iterdir()
    planes, member = other / "planes.swap", other / "member.json"
    kept = {path: path.read_bytes() for path in (planes, member)}
    if loss == "file":
        planes.unlink()
    elif loss == "short":
        os.truncate(planes, 4096)
    elif loss == "link":
        (roots[1].parent / "elsewhere").write_bytes(kept[planes])
        planes.unlink()
        planes.symlink_to(roots[1].parent / "elsewhere")
    elif loss == "directory":
        other.rename(other.with_name("away"))
    elif loss == "member":
        member.unlink()
    else:
        member.write_text('{"run": "another", "path": 1, "manifest": "/x"}')
    with pytest.raises(CheckpointError, match=re.escape(str(other))) as caught:
        run.recover()
    assert "\n" not in str(caught.value)
    if loss == "directory":
        other.with_name("away").rename(other)
    for path, content in kept.items():
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    run.recover()
    run.check()
    run.remove()


def test_the_directory_of_another_path_says_where_the_manifest_is(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.die()
    (other,) = roots[1].iterdir()
    with pytest.raises(CheckpointError, match=f"there is no commit; its manifest is in {run.path}"):
        recover(other, run.plan, run.shapes, Aio(), Ledger())
    run.recover()
    run.remove()


# -- damage -----------------------------------------------------------------------------------------------


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def extent_of(run, kind, owner, at):
    """Where byte ``at`` of a plane or chunk is according to the last commit: path of the file, offset."""
    manifest = find_commits(run.path).newest
    for found, which, item in manifest.shapes.items().each():
        if (found, which) == (kind, owner) and item.begin <= at < item.end:
            stripes = manifest.extents[manifest.items[item.index].extent].of(kind, owner)
            ((_, _, extent),) = stripes.part(at, at + 1)
            begin = next(extent for _, _, extent in stripes.part(item.begin, item.end))
            directory = manifest.files[extent.path].directory
            return f"{directory}/planes.swap", extent.offset, begin.offset
    raise AssertionError


@pytest.mark.parametrize("drives", [1, 2])
def test_a_damaged_item_is_named_and_the_others_are_as_they_were(roots, drives):
    run = Mirrored(roots[:drives])
    run.fill()
    run.train(2)
    run.commit()
    run.die()
    path, at, begin = extent_of(run, "states", 2, 4096 * 2 + 5000)
    flip(path, at)
    run.recover()
    chunk = run.plan.chunks[2]
    buffer = torch.empty(run.plan.chunk_bytes(chunk), dtype=torch.uint8)
    with pytest.raises(TransferError, match="there is no commit before it") as caught:
        run.store.read_state(chunk, buffer).wait()
    assert caught.value.errno == errno.EBADMSG
    assert (caught.value.filename, caught.value.offset) == (path, begin)
    assert "chunk 2 of unit blocks.0 (blocks.0.weight)" in str(caught.value) and "\n" not in str(caught.value)
    flip(path, at)
    run.check()
    run.remove()


def test_a_damaged_weight_is_named_by_its_parameters(roots):
    run = Mirrored(roots[:1], trained=(4096,), frozen=(9000,))
    run.fill()
    run.commit()
    run.die()
    path, at, _ = extent_of(run, "weights", 0, 2 * 4096 + 100)
    flip(path, at)
    run.recover()
    with pytest.raises(TransferError, match=r"weight of unit blocks\.0 \(blocks\.0\.table\)"):
        run.check()
    run.remove()


def test_the_commit_before_is_offered_where_it_is_intact(roots):
    """Right after a commit all of the one before is there; once it is written over, that is said."""
    run = Mirrored(roots)
    run.fill()
    run.commit()
    for chunk in run.plan.chunks:
        run.update(chunk)
    run.step = 7
    run.commit()
    run.die()
    path, at, _ = extent_of(run, "states", 0, 0)
    flip(path, at)
    run.recover()
    with pytest.raises(
        TransferError,
        match="nothing of it was used; the commit before, number 1 of step 0, has it intact: go on",
    ):
        run.check()
    run.die()
    assert run.recover(previous=True).serial == 1
    run.check()
    run.train(1)
    run.commit()
    run.die()
    assert run.recover().serial == 2
    run.check()
    run.remove()


def test_the_commit_before_is_not_offered_once_it_is_written_over(roots):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.update(run.plan.chunks[0])
    run.commit()
    run.update(run.plan.chunks[0])
    run.die()
    path, at, _ = extent_of(run, "states", 0, 0)
    flip(path, at)
    run.recover()
    with pytest.raises(
        TransferError, match="the commit before, number 1 of step 0, has not got it any more either"
    ):
        run.check()
    run.die()
    run.recover(previous=True)
    with pytest.raises(TransferError, match="crc32c"):
        run.check()
    run.remove()


def test_a_damaged_manifest_gives_the_one_before(roots, caplog):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.train(1)
    run.commit()
    run.die()
    newest = run.path / "manifest-0.json"
    newest.write_bytes(newest.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        assert run.recover().serial == 1
    assert f"{newest}: it is cut short or damaged" in caplog.text
    run.check()
    with pytest.raises(CheckpointError, match="no commit before"):
        run.die()
        run.recover(previous=True)
    run.recover()
    run.train(1)
    run.commit()
    run.die()
    assert run.recover().serial == 2
    run.check()
    run.remove()


# -- a commit that does not get through -------------------------------------------------------------------


def attempt(roots, monkeypatch, seed, **when):
    """Commits twice, and lets the second one be interrupted."""
    disk = Disk(random.Random(seed)).install(monkeypatch)
    run = Mirrored(roots, seed=seed)
    run.fill()
    run.commit()
    run.train(2)
    disk.forget()
    for name, value in when.items():
        setattr(disk, name, value)
    return run, disk


@pytest.mark.parametrize("first", [False, True])
def test_a_cut_at_every_single_step_of_a_commit(tmp_path, monkeypatch, first):
    cut_at, serials = 1, []
    while True:
        roots = [tmp_path / f"{cut_at}{name}" for name in "ab"]
        for root in roots:
            root.mkdir()
        disk = Disk(random.Random(cut_at)).install(monkeypatch)
        run = Mirrored(roots, seed=cut_at)
        run.fill()
        if not first:
            run.commit()
            run.train(2)
        disk.forget()
        disk.cut_at = cut_at
        try:
            run.commit()
        except PowerCut:
            run.die()
        else:
            run.remove()
            break
        disk.cut()
        disk.forget()
        try:
            serials.append(run.recover().serial)
        except (CheckpointError, StoreError):
            assert first, "a commit is lost"
            serials.append(0)
        else:
            run.check()
            run.train(1)
            run.commit()
            run.check()
            run.remove()
        cut_at += 1
    assert cut_at > 15 and set(serials) == ({0, 1} if first else {1, 2}), serials
    assert serials[0] == min(serials) and serials[-1] == max(serials)


@pytest.mark.parametrize("again", [False, True])
def test_every_call_of_a_commit_that_fails(tmp_path, monkeypatch, again):
    """The error says so; whatever may still be done leads to a whole commit, and a crash to one of the two."""
    fail_at, outcomes = 1, []
    while True:
        roots = [tmp_path / f"{fail_at}{name}" for name in "ab"]
        for root in roots:
            root.mkdir()
        run, disk = attempt(roots, monkeypatch, fail_at, fail_at=fail_at)
        try:
            run.commit()
        except (StoreError, TransferError) as error:
            assert "\n" not in str(error)
        else:
            run.remove()
            break
        outcome = "stopped"
        if again:
            try:
                run.train(1)
                outcome = "mended"
            except StoreError as error:
                assert "commit again" in str(error)
                outcome = "in doubt"
                run.weights, run.states = (
                    [plane.clone() for plane in planes] for planes in run.commits[2][2:]
                )
            try:
                run.commit()
            except StoreError as error:
                assert "nothing can be committed" in str(error) and outcome == "mended"
                outcome = "stopped"
        outcomes.append(outcome)
        run.die()
        disk.cut()
        disk.forget()
        serial = run.recover().serial
        assert serial == 2 if outcome != "stopped" else serial in (1, 2)
        run.check()
        run.remove()
        fail_at += 1
    assert set(outcomes) == ({"stopped", "mended", "in doubt"} if again else {"stopped"})


class Interrupter:
    """Ctrl-C before one line of the modules that commit."""

    FILES = ("commits.py", "durable.py", "swap.py")

    def __init__(self, line):
        self.line = line

    def __call__(self, frame, event, _argument):
        path = Path(frame.f_code.co_filename)
        if path.parent.name != "store" or path.name not in self.FILES or "entr" in frame.f_code.co_name:
            return None
        if event == "line":
            self.line -= 1
            if self.line == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("goes_on", [False, True])
def test_ctrl_c_between_any_two_lines_of_a_commit(tmp_path, goes_on):
    """Whatever is done after it, and if the process dies then: the last commit is whole."""
    for line in itertools.count(1):
        root = tmp_path / str(line)
        root.mkdir()
        run = Mirrored([root], seed=line, trained=(5000,), frozen=(0,))
        run.fill()
        run.commit()
        run.train(1)
        interrupter = Interrupter(line)
        sys.settrace(interrupter)
        try:
            run.commit()
        except KeyboardInterrupt:
            sys.settrace(None)
        else:
            break
        finally:
            sys.settrace(None)
        try:
            run.train(1)
        except StoreError as error:
            assert "commit again" in str(error)
            run.weights, run.states = ([plane.clone() for plane in planes] for planes in run.commits[2][2:])
        if goes_on:
            run.commit()
        run.settle()
        serials = {run.store.serial} if goes_on else {1, 2}
        run.die()
        assert run.recover().serial in serials
        run.check()
        run.remove()
    assert interrupter.line > 0 and line > 40
    run.remove()


def test_a_write_that_failed_is_never_committed(roots, monkeypatch):
    run, _ = attempt(roots, monkeypatch, 1, fail_at=1)
    with pytest.raises(TransferError):
        run.update(run.plan.chunks[0])
    for chunk in run.plan.chunks:
        run.update(chunk)
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"nothing can be committed since a transfer failed \(.*write failed"
        ):
            run.commit()
    run.die()
    assert run.recover().serial == 1
    run.check()
    run.remove()


def test_writes_in_flight_that_fail_are_found_by_the_commit(roots, monkeypatch):
    run = Mirrored(roots)
    run.fill()
    run.commit()
    run.die()
    faulty = functools.partial(aio.Queue, faults={"fail_at": 3})
    monkeypatch.setattr("offload.store.drives.Queue", faulty)
    run.recover()
    for chunk in run.plan.chunks:
        run.update(chunk, wait=False)
    with pytest.raises(StoreError, match="since a transfer failed"):
        run.commit()
    monkeypatch.undo()
    run.die()
    assert run.recover().serial == 1
    run.check()
    run.remove()
