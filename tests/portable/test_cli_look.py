"""``offload inspect`` and ``offload verify``: what they say is what is there, and they change nothing."""

import json
import os
import re
import shutil
import threading

import pytest
from leftovers import TRAINING, committed_run, saved
from models import Placement, Training, prepared, steps
from typer.testing import CliRunner

from offload.bytesize import format_bytes
from offload.cli.main import app
from offload.cli.stores import is_locked
from offload.store.commits import find_commits
from offload.store.scan import committed_bytes


def invoke(*arguments, status=0):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def snapshot(folder):
    """All names, contents and times of a directory."""
    return {
        path: (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def run(swap_path):
    with committed_run(TRAINING, swap_path) as run:
        yield run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two tags, the second without frozen weights."""
    root = tmp_path_factory.mktemp("saved")
    swap = tmp_path_factory.mktemp("swap")
    with prepared(TRAINING, Placement("cpu", "nvme"), swap) as (model, optimizer):
        steps(model, optimizer, TRAINING.batches()[:1])
        saved(optimizer, root / "out", "one", client_state={"epoch": 3, "best": 0.5})
        steps(model, optimizer, TRAINING.batches()[1:2])
        saved(optimizer, root / "out", "two", exclude_frozen=True)
    return root / "out"


def test_a_store_is_described_beside_its_run_and_after_it(run, swap_path):
    before = snapshot(swap_path)
    for is_alive in (True, False):
        found = json.loads(invoke("inspect", run.path, "--json"))
        (facts,) = found["found"]
        text = invoke("inspect", swap_path, "--params")  # the path that holds it
        assert (
            found["version"] == 1 and facts["kind"] == "swap store" and facts["owner"]["is_alive"] == is_alive
        )
        assert facts["owner"]["pid"] == os.getpid()
        assert (facts["commit"], facts["step"], facts["commit_before"]["step"]) == (2, 3, 2)
        listed = {param["name"]: param for param in facts["params"]}
        stored = {each.name: each for each in run.engine.partition.of_param.values()}
        assert listed.keys() == stored.keys()
        for name, each in stored.items():
            shape, trained = list(each.placed.info.shape), each.trainable
            assert (listed[name]["shape"], listed[name]["trained"]) == (shape, trained)
            assert f"    {name}" in text
        assert listed["tokens.weight"]["aliases"] == ["head.weight"] and "also head.weight" in text
        assert facts["elements"] == run.engine.plan.inventory.parameters
        manifest = find_commits(run.path).newest
        assert sum(facts["plane_bytes"].values()) == facts["bytes"] == committed_bytes(manifest)
        assert set(facts["plane_bytes"]) == {"weight", "residual", "exp_avg", "exp_avg_sq"}
        assert facts["training"] == {
            "learning_rates": [1e-3], "skipped_steps": 0, "parts": [], "client_state": ["epoch"]
        }  # fmt: skip
        assert ("goes on" if is_alive else "has ended") in text
        assert "commit 2 of step 3" in text and "the commit before: 1 of step 2" in text
        assert before == snapshot(swap_path)
        if is_alive:
            run.engine.close()
            before = snapshot(swap_path)


def test_checkpoints_are_described(checkpoint):
    found = json.loads(invoke("inspect", checkpoint, "--json"))
    one, two = found["found"]
    assert (one["tag"], one["step"], two["tag"], two["step"]) == ("one", 1, "two", 2)
    frozen = [param["name"] for param in two["params"] if not param["trained"]]
    assert two["left_out"] == frozen and len(frozen) > 10 and one["left_out"] == []
    assert one["training"]["client_state"] == ["best", "epoch"]
    assert one["bytes"] == sum(file.stat().st_size for file in (checkpoint / "one").glob("*.safetensors"))
    text = invoke("inspect", checkpoint / "two")
    assert "checkpoint of step 2" in text and f"{len(frozen)} frozen weights were left out" in text
    assert f"and {len(two['params']) - 12} more: --params shows all" in text
    assert f"weight {format_bytes(two['plane_bytes']['weight'])}" in text


def test_a_manifest_that_is_damaged_is_named_and_the_other_shown(run):
    newest = max(run.path.glob("manifest-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-20])
    text = invoke("inspect", run.path)
    assert "commit 1 of step 2" in text and f"cannot be read: {newest}: it is cut short" in text
    assert f"damaged: {newest}: it is cut short" in invoke("verify", run.path, status=1)
    for path in run.path.glob("manifest-*"):
        path.write_bytes(b"x")
    for command in ("inspect", "verify"):
        output = invoke(command, run.path, status=2 if command == "inspect" else 1)
        (line,) = [line for line in output.splitlines() if "no manifest" in line]
        assert str(run.path) in line


def test_verify_reads_everything_and_names_what_is_damaged(run):
    manifest = find_commits(run.path).newest
    output = invoke("verify", run.path, "--quiet")
    assert f"{format_bytes(committed_bytes(manifest))} in " in output and output.endswith("intact\n")
    found = json.loads(invoke("verify", run.path, "--json"))["found"][0]
    assert found["intact"] and found["bytes"] == committed_bytes(manifest) and found["damage"] == []
    run.engine.close()
    number = next(index for index, unit in enumerate(manifest.shapes.units) if unit.name == "blocks.1")
    item = manifest.shapes.items().weights[number][0]
    extent = manifest.extents[manifest.items[item.index].extent].weights[number].extents[0]
    with open(run.path / "planes.swap", "r+b") as file:
        file.seek(extent.offset + 4097)
        byte = file.read(1)
        file.seek(extent.offset + 4097)
        file.write(bytes([byte[0] ^ 1]))
    found = json.loads(invoke("verify", run.path, "--json", status=1))["found"][0]
    (damage,) = found["damage"]
    assert damage["file"] == str(run.path / "planes.swap") and damage["offset"] == extent.offset
    assert re.search(r"weight of unit blocks\.1 \(blocks\.1\.norm1\.weight", damage["what"])
    text = invoke("verify", run.path, status=1)
    assert f"damaged: {run.path}/planes.swap: read failed" in text and text.endswith("1 is damaged\n")


def test_verify_reads_checkpoints(checkpoint, tmp_path):
    found = json.loads(invoke("verify", checkpoint, "--json"))["found"]
    size = [
        sum(file.stat().st_size for file in (checkpoint / tag).glob("*.safetensors"))
        for tag in ("one", "two")
    ]
    assert [each["bytes"] for each in found] == size and all(each["intact"] for each in found)
    shutil.copytree(checkpoint, tmp_path / "copy")
    for pattern, at, what in (
        ("weights-*", -3, "weight of "),
        ("weights-*", 9, "the header"),
        ("state-*", -3, "residual of "),
        ("state-*", 100_000, "exp_avg"),
    ):
        (file,) = (tmp_path / "copy" / "one").glob(pattern)
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        intact = file.read_bytes()
        file.write_bytes(data)
        one, two = json.loads(invoke("verify", tmp_path / "copy", "--json", status=1))["found"]
        (damage,) = one["damage"]
        assert damage["file"] == str(file) and what in damage["what"] and two["intact"]
        at %= len(data)
        assert damage["offset"] <= at < damage["offset"] + damage["bytes"]
        file.write_bytes(intact)
    file.write_bytes(intact[:-1])
    text = invoke("verify", tmp_path / "copy" / "one", status=1)
    assert f"damaged: {file}: it is no file of the {len(intact)} bytes" in text
    file.unlink()
    assert f"damaged: {file}: No such file" in invoke("verify", tmp_path / "copy" / "one", status=1)
    file.symlink_to(tmp_path / "elsewhere")
    assert f"damaged: {file}: it is a symbolic link" in invoke("verify", tmp_path / "copy" / "one", status=1)


def test_verify_beside_a_run_that_commits(run):
    """It goes on with the newest commit; nothing of the run waits for it."""
    stop = threading.Event()
    batch = TRAINING.batches()[0]

    def train():
        while not stop.is_set():
            steps(run.model, run.optimizer, [batch])
            run.engine.save_checkpoint()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            invoke("verify", run.path, "--quiet")
            invoke("inspect", run.path)
    finally:
        stop.set()
        trainer.join()
    assert run.engine.commit_serial > 3


def test_what_is_none_of_ours_is_refused_in_one_line(tmp_path, swap_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero" / "global_step1").mkdir(parents=True)
    (tmp_path / "zero" / "zero_to_fp32.py").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "member").mkdir()
    (tmp_path / "member" / "member.json").write_text('{"run": "x", "path": 1, "manifest": "/elsewhere"}')
    with prepared(Training(), Placement("nvme", "nvme"), swap_path):
        (unsaved,) = swap_path.iterdir()
        cases = {
            tmp_path / "none": "there is no such directory",
            tmp_path / "empty": "there is no swap store and no checkpoint in it",
            tmp_path / "zero": "a checkpoint of DeepSpeed",
            tmp_path / "model": "a model of transformers",
            unsaved: "nothing was committed",
            swap_path: "its swap directories hold no commit",
        }
        for path, message in cases.items():
            for command in ("inspect", "verify"):
                (line,) = invoke(command, path, status=2).splitlines()
                assert line.startswith(f"error: {path}: ") and message in line
    (line,) = invoke("inspect", tmp_path / "member", status=2).splitlines()
    assert "its manifest is in /elsewhere" in line


def test_a_lock_is_seen_without_taking_it(tmp_path):
    file = tmp_path / "owner.json"
    file.touch()
    locks = tmp_path / "locks"
    inode = file.stat().st_ino
    locks.write_text(
        f"1: POSIX  ADVISORY  WRITE 7 00:31:{inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 7 00:31:{inode}1 0 EOF\n"
    )
    assert not is_locked(file, locks)
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 00:31:{inode} 0 EOF\n")
    assert is_locked(file, locks)
