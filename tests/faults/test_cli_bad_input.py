"""Every bad input ends in one line that names the thing and the way out, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STATUS_USER = 2
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def config(swap: Path | str, **changes: Any) -> dict[str, Any]:
    """Everything on nvme, fp32; ``changes`` replace whole blocks."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(swap)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(swap), "update": "backward"},
        },
        "memory": {"host_bytes": "200MiB"},
        **changes,
    }


class Folder:
    """A folder with a configuration and data, in which commands are run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.swap = path / "swap"
        (path / "data.txt").write_text("A line of text to train on.\n" * 400)
        self.configure(config(self.swap))

    def configure(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        (self.path / "run.json").write_text(text)

    def arguments(self, **options: str) -> list[str]:
        given = {"model": "preset:10m", "data": "data.txt", "steps": "2", "seq": "32", **options}
        return ["finetune", "run.json", *(part for name in given for part in (f"--{name}", given[name]))]

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "offload", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.path, env=ENVIRONMENT, **pipes)

    def files(self) -> set[str]:
        return {path.relative_to(self.path).as_posix() for path in self.path.rglob("*")}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


COMMAND = """
import os, resource, signal, sys
from offload.cli.main import app
limit = {limit}
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    app({arguments})
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)  # without taking torch apart, which takes longer than the command
"""

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(folder: Folder, run_forked: Callable[..., Any]) -> Run:
    """Runs a command in the folder: its exit status, and its lines on stderr."""

    def call(arguments: list[str], limit: int = 0) -> tuple[int, list[str]]:
        result = run_forked(COMMAND.format(arguments=arguments, limit=limit), folder.path)
        return result.returncode, result.stderr.splitlines()

    return call


@pytest.fixture
def check_refused(folder: Folder, run: Run) -> Callable[..., None]:
    """Runs the command and asserts that it is refused as this module says."""

    def check(
        *expected: str, statuses: tuple[int, ...] = (STATUS_USER,), limit: int = 0, **options: str
    ) -> None:
        before = folder.files()
        status, lines = run(folder.arguments(**options), limit)
        assert status in statuses, lines
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        for pattern in expected:
            assert re.search(pattern, lines[0]), (pattern, lines[0])
        assert folder.files() == before

    return check


def _zero(**blocks: Any) -> dict[str, Any]:
    return {"stage": 3, **blocks}


NVME_WITHOUT_PATH = {"zero_optimization": _zero(offload_param={"device": "nvme"})}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"gradient_cliping": 1.0}, ("gradient_cliping", "did you mean .*gradient_clipping")),
    "contradictory batch": (
        {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
        ("train_batch_size", "3 does not divide by .* 2", "leave one"),
    ),
    "nvme without a path": (NVME_WITHOUT_PATH, ("offload_param", "nvme_path")),
    "budget too small": (
        {"memory": {"host_bytes": "4MiB"}},
        (
            r"memory\.host_bytes is 4.00 MiB",
            r"needs at least .* = .* weight slots \+ ",
            r'host_bytes = "\d+MiB"$',
        ),
    ),
    "nvme budget too small": (
        {"memory": {"host_bytes": "200MiB", "nvme_bytes": "20MiB"}},
        (r"memory\.nvme_bytes is 20.0 MiB", r'nvme_bytes = "\d+MiB"$'),
    ),
    "not built yet": ({"micro_batching": "per_unit"}, ("micro_batching", "not built yet", "use 'per_step'")),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configuration(folder: Folder, check_refused: Callable[..., None], name: str) -> None:
    changes, expected = BAD_CONFIGS[name]
    folder.configure(config(folder.swap, **changes))
    check_refused(*expected)


def test_all_problems_of_a_configuration_are_told(folder: Folder, run: Run) -> None:
    folder.configure(config(folder.swap, nonsense=1, optimizer={"type": "AdamW", "params": {"lr": "fast"}}))
    status, lines = run(folder.arguments())
    assert status == STATUS_USER
    assert [line.split(":")[0] for line in lines] == ["error", "error"]
    assert any("nonsense" in line for line in lines) and any("optimizer.params.lr" in line for line in lines)


BAD_ARGUMENTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "data missing": ({"data": "gone.txt"}, ("gone.txt", "No such file", "give")),
    "data empty": ({"data": "empty.txt"}, ("empty.txt is empty", "give")),
    "folder without text": ({"data": "nothing"}, ("nothing", "no readable text file")),
    "unknown preset": ({"model": "preset:10n"}, ("10n", "did you mean '10m'")),
    "preset without prefix": ({"model": "10m"}, ("10m", "did you mean --model preset:10m")),
    "no model there": ({"model": "nothing"}, ("config.json",)),
    "sequence too long": ({"seq": "4096"}, ("--seq 4096", "give --seq 2048")),
    "export in the way": ({"export": "full"}, ("--export full", "not empty", "another directory")),
    "out is a file": ({"out": "data.txt"}, ("--out data.txt", "not a directory")),
    "tokenizer missing": ({"tokenizer": "gone.json"}, ("--tokenizer gone.json", "does not exist")),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_argument(folder: Folder, check_refused: Callable[..., None], name: str) -> None:
    (folder.path / "empty.txt").touch()
    (folder.path / "nothing").mkdir()
    (folder.path / "full").mkdir()
    (folder.path / "full" / "precious").touch()
    options, expected = BAD_ARGUMENTS[name]
    check_refused(*expected, **options)


def test_configuration_file_missing(folder: Folder, check_refused: Callable[..., None]) -> None:
    (folder.path / "run.json").unlink()
    check_refused(r"run\.json: cannot be read: No such file")


def test_data_shorter_than_one_sequence(folder: Folder, check_refused: Callable[..., None]) -> None:
    (folder.path / "data.txt").write_text("short")
    check_refused(r"data\.txt gives 6 tokens", "sequence of 32", "at most 6")


def test_swap_path_missing(folder: Folder, check_refused: Callable[..., None]) -> None:
    folder.configure(config(folder.path / "no" / "such" / "mount"))
    check_refused("no/such/mount", "does not exist", "make it, or mount the drive")


def test_swap_path_is_a_file(folder: Folder, check_refused: Callable[..., None]) -> None:
    folder.configure(config(folder.path / "data.txt"))
    check_refused(r"data\.txt", "nvme_path is not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_swap_path_unwritable(folder: Folder, check_refused: Callable[..., None]) -> None:
    folder.swap.mkdir(mode=0o500)
    check_refused("swap", "not writable by this user")


def test_no_room_for_the_swap_file(check_refused: Callable[..., None]) -> None:
    """The limit is below the swap file's size and far above that of anything else that is written."""
    check_refused("swap", "File too large", limit=50 << 20, statuses=(1, STATUS_USER))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_in_the_middle_of_a_step(folder: Folder, number: signal.Signals) -> None:
    """The process ends as the signal says, without swap files, with a report of the steps that were done."""
    arguments = folder.arguments(steps="100000", out="out", seq="16")
    with folder.start([*arguments, "--quiet", "--save-every", "0"]) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        assert list(folder.swap.glob("offload-*")), "the swap files are where the configuration says"
        time.sleep(0.3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert errors == ""
    assert not folder.swap.exists()
    name = "Ctrl-C" if number is signal.SIGINT else "SIGTERM"
    assert re.search(rf"^stopped by {name} after \d+ of 100000 steps; .* lost, .* removed; ", output, re.M)
    report = json.loads((folder.path / "out" / "report.json").read_text())
    assert report["interrupted"] is True and report["stopped_by"] == name
    assert 1 <= report["steps"] < 100000 and len(report["losses"]) in (report["steps"], report["steps"] + 1)
    assert {path.name for path in (folder.path / "out").iterdir()} == {"cache", "report.json"}


def test_signal_before_the_first_step_leaves_nothing(folder: Folder) -> None:
    folder.configure(config(folder.swap, memory={"host_bytes": "1500MiB"}))
    before = folder.files()
    with folder.start([*folder.arguments(model="preset:350m"), "--quiet"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("moving"):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, (output, errors)
    assert "stopped by SIGTERM before the first step; nothing is left behind" in output
    assert folder.files() == before
