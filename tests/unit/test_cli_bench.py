"""``offload bench io``: the engine's rates, beside fio where there is one, and JSON that stays as it is."""

from __future__ import annotations

import json
import mmap
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offload import aio, machine
from offload.bytesize import MiB
from offload.cli import bench as cli_bench
from offload.cli.bench import settings_here
from offload.cli.fio import Fio
from offload.cli.loads import LOADS, Rig, ScratchFile, default_settings
from offload.cli.main import app
from offload.machine import IoSettings

SMALL = ["--rounds", "2", "--max-write", "64MiB", "--quiet"]
FIO = """#!{python}
import json, os, sys
if "--version" in sys.argv:
    print("fio-9.9")
elif "--enghelp" in sys.argv:
    print("Available IO engines:\\n\\tsync\\n\\tlibaio\\n\\tio_uring")
else:
    options = dict(part.lstrip("-").split("=") for part in sys.argv[1:] if "=" in part)
    with open(os.path.dirname(__file__) + "/calls", "a") as calls:
        calls.write(json.dumps(options) + "\\n")
    size, rw = int(options["io_size"]), options["rw"]
    assert os.stat(options["filename"]).st_size >= int(options["size"])
    read = {{"read": size, "write": 0, "rw": size // 2}}[rw]
    of = lambda moved: {{"io_bytes": moved, "runtime": 1000 * bool(moved)}}
    job = {{"read": of(read), "write": of(size - read), "usr_cpu": 1.0, "sys_cpu": 2.0}}
    print("note: fio says things first")
    print(json.dumps({{"jobs": [job]}}))
"""


@pytest.fixture
def drive(swap_path: Path) -> Path:
    """A directory on it, in which nothing may be left."""
    return swap_path


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.fixture
def fake_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fio").write_text(FIO.format(python=sys.executable))
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder / "fio"


def bench(*arguments: str | Path, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["bench", "io", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.mark.usefixtures("no_fio")
def test_json_without_fio(drive: Path) -> None:
    data = json.loads(bench(drive, *SMALL, "--json").stdout)
    assert set(data) == {
        "version", "path", "filesystem", "direct", "settings", "fio", "rounds", "bytes", "written_bytes", "results",
    }  # fmt: skip
    assert (data["version"], data["path"], data["fio"], data["rounds"]) == (1, str(drive), None, 2)
    assert set(data["settings"]) == {"backend", "block_size", "queue_depth", "thread_count"}
    assert [(row["name"], row["load"]) for row in data["results"]] == [("offload", load) for load in LOADS]
    for row in data["results"]:
        assert set(row) == {"name", "load", "gb_per_second", "min", "max", "cpu_seconds_per_gb"}
        assert 0 < row["min"] <= row["gb_per_second"] <= row["max"] and row["cpu_seconds_per_gb"] >= 0
    assert 0 < data["written_bytes"] <= 64 * MiB


@pytest.mark.usefixtures("no_fio")
def test_the_table_without_fio(drive: Path) -> None:
    lines = bench(drive, *SMALL).output.splitlines()
    row = next(line for line in lines if line.startswith("  offload "))
    assert len(row.split()) == 1 + len(LOADS) + 1
    assert lines[-1] == "  fio is not installed; with it (`apt install fio`) this has a yardstick"


def test_beside_fio_on_the_same_file_with_the_same_bytes(drive: Path, fake_fio: Path) -> None:
    result = bench(drive, *SMALL, "--json")
    data = json.loads(result.stdout)
    rows = {(row["name"], row["load"]): row for row in data["results"]}
    assert data["fio"] == "fio-9.9"
    assert list(rows) == [
        (name, load) for name in ("offload", "fio io_uring", "fio libaio") for load in LOADS
    ]
    for load in LOADS:
        assert rows["fio libaio", load]["gb_per_second"] == pytest.approx(data["bytes"] / 1e9, abs=1e-4)
        assert rows["fio libaio", load]["cpu_seconds_per_gb"] == pytest.approx(
            0.03e9 / data["bytes"], rel=1e-3
        )
    calls = [json.loads(line) for line in (fake_fio.parent / "calls").read_text().splitlines()]
    assert len(calls) == 2 * len(LOADS) * 3, "two engines, three loads, two rounds and one before them"
    assert {call["bs"] for call in calls} == {str(data["settings"]["block_size"])}
    assert {call["iodepth"] for call in calls} == {str(data["settings"]["queue_depth"])}
    assert {call["direct"] for call in calls} == {"1"}
    engines = [call["ioengine"] for call in calls if call["rw"] == "read"]
    assert engines != sorted(engines) and engines != sorted(engines, reverse=True), "they take turns"
    assert data["written_bytes"] <= 64 * MiB


def test_the_table_beside_fio(drive: Path, fake_fio: Path) -> None:
    lines = bench(drive, *SMALL).output.splitlines()
    table = lines[lines.index("") + 1 :]
    assert [line[2:18].strip() for line in table] == [
        "GB/s", "offload", "fio io_uring", "fio libaio", "of the best fio",
    ]  # fmt: skip
    assert max(map(len, table)) <= 80
    assert table[-1].count("%") == len(LOADS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo broken >&2; exit 3", "error: fio with io_uring failed: broken"),
        ("echo no JSON", "error: fio with io_uring failed: "),
    ],
)
def test_a_fio_that_fails_is_said_in_one_line(drive: Path, fake_fio: Path, body: str, says: str) -> None:
    script = f'#!/bin/sh\ncase "$*" in --version) echo fio-9;; --enghelp) echo io_uring;; *) {body};; esac\n'
    fake_fio.write_text(script)
    result = CliRunner().invoke(app, ["bench", "io", str(drive), *SMALL])
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("error")]
    assert line.startswith(says)


def test_a_fio_that_does_not_run_is_none(fake_fio: Path) -> None:
    fake_fio.write_text("#!/bin/sh\nexit 1\n")
    assert Fio.find() is None


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_fio_moves_what_it_is_told(drive: Path) -> None:
    fio = Fio.find()
    assert fio is not None and fio.engines
    settings = IoSettings("threads", MiB, 4, 4)
    with ScratchFile(drive, 8 * MiB) as file:
        rig = Rig(file)
        with file.open(settings) as queue:
            rig.fill(queue, seconds_max=20)
        for load in LOADS:
            sample = fio.run(file, fio.engines[-1], settings, load, 8 * MiB)
            assert sample.read_bytes + sample.written_bytes == 8 * MiB, load
            assert (sample.read_bytes > 0, sample.written_bytes > 0) == (load != "write", load != "read")


def test_settings_are_those_of_a_run(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = settings_here(drive)
    assert default == default_settings(aio.backends()[0])
    monkeypatch.setenv(machine.ENVIRONMENT, str(tmp_path / "profile.json"))
    tuned = IoSettings("threads", 2 * MiB, 6, 6)
    machine.save([machine.Tuned(machine.drive_of(drive), str(drive), tuned, {}, 1.0, "2026-11-30")])
    assert settings_here(drive) == tuned


@pytest.mark.parametrize("backend", aio.backends())
def test_the_defaults_are_those_of_a_queue(drive: Path, backend: str) -> None:
    settings, buffer = default_settings(backend), mmap.mmap(-1, 4 * MiB)
    with ScratchFile(drive, 8 * MiB) as file, aio.Queue(file.path_for(), backend=backend) as queue:
        assert queue.queue_depth == settings.queue_depth
        queue.write(buffer, 0).wait()
        assert queue.stats().write.requests == -(-len(buffer) // settings.block_size)


@pytest.mark.usefixtures("no_fio")
def test_direct_io_that_is_refused_is_said(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio.Queue, "direct", property(lambda queue: False))
    assert "warning: direct I/O is refused: this is the page cache" in bench(drive, *SMALL).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{drive}/missing"], "does not exist; make it, or mount the drive"),
        (["{drive}", "--max-write", "1MiB"], "at least 16.0 MiB are needed"),
        (["{drive}", "--max-write", "x"], "is not a number of bytes"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(drive: Path, arguments: list[str], says: str) -> None:
    (line,) = bench(*(part.format(drive=drive) for part in arguments), status=2).output.splitlines()
    assert line.startswith("error: ") and says in line


def test_turns_rotate() -> None:
    assert [cli_bench._rotated(["a", "b", "c"], by) for by in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_bench_alone_shows_what_there_is() -> None:
    assert "io " in CliRunner().invoke(app, ["bench"]).output
