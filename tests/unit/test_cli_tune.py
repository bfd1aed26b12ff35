"""``offload tune``: small runs on a real file, everything that may be wrong before it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload import aio, machine
from offload.bytesize import MiB
from offload.cli import loads
from offload.cli import tune as cli_tune
from offload.cli.loads import LOADS, Rig, ScratchFile
from offload.cli.main import app
from offload.config import OffloadConfig
from offload.errors import StoreError, TransferError
from offload.metrics import mount_of

ROOT = Path(__file__).parents[2]
SMALL = ["--seconds", "1", "--max-write", "32MiB", "--quiet"]
DEFAULTS = machine.IoSettings("threads", 1 * MiB, 4, 4)


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv(machine.ENVIRONMENT, str(path))
    return path


@pytest.fixture
def drive(swap_path: Path) -> Path:
    """A directory on it, in which nothing may be left."""
    return swap_path


def tune(*arguments: str | Path, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def needs_a_drive(path: Path) -> None:
    if mount_of(path).is_memory:
        pytest.skip("the temporary directory is in memory, which is measured and not saved")


def test_a_small_run_writes_the_profile(drive: Path, profile: Path) -> None:
    needs_a_drive(drive)
    lines = tune(drive, *SMALL).output.splitlines()
    assert lines[0].startswith(f"{drive}: ")
    assert lines[1].startswith("  will write at most 32.0 MiB, ") and "600 TBW drive, in 1 s" in lines[1]
    assert [line for line in lines if line.startswith("  round 1/4, ")]
    (chosen,) = [line.split() for line in lines if line.startswith("  > ")]
    (entry,) = machine.load()
    assert entry.drive == machine.drive_of(drive) and entry.path == str(drive)
    assert chosen[1] == entry.settings.backend and int(chosen[4]) == entry.settings.queue_depth
    assert entry.settings in cli_tune.candidates(aio.backends())
    assert set(entry.gb_per_second) == set(LOADS) and entry.weight > 0
    assert lines[-1] == f'saved in {profile}: runs on this machine use it where aio says "auto"'
    shown = [line.replace(str(drive), "/mnt/nvme") for line in lines[:-1]]
    assert max(map(len, shown)) <= 80 and "\x1b" not in "".join(lines)


def test_json_has_everything_and_is_alone_on_stdout(drive: Path) -> None:
    result = tune(drive, *SMALL, "--json")
    data = json.loads(result.stdout)
    assert data["version"] == 1 and set(data["drives"][0]) == {
        "path", "filesystem", "source", "direct", "is_drive", "aio", "gb_per_second", "share_of_best",
        "cpu_seconds_per_gb", "weight", "seconds", "written_bytes", "complete", "measured",
    }  # fmt: skip
    (found,) = data["drives"]
    assert found["written_bytes"] <= 32 * MiB
    assert {"backend", "block_size", "queue_depth"} <= set(found["aio"])
    assert all({*LOADS, "block_size"} <= set(cell) for cell in found["measured"]) and found["measured"]
    assert "round 1/4" in result.stderr


def test_writes_stay_below_the_limit(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs = []

    class Counted(Rig):
        def __init__(self, file: ScratchFile) -> None:
            super().__init__(file)
            rigs.append(self)

    monkeypatch.setattr(cli_tune, "Rig", Counted)
    output = tune(drive, "--seconds", "20", "--max-write", "16MiB", "--quiet").output
    (rig,) = rigs
    assert 8 * MiB < rig.written_bytes <= 16 * MiB
    assert "ended early: --seconds or --max-write was used up" in output


def test_a_slow_drive_takes_no_longer(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 MB/s a measurement takes most of a second: there are fewer of them."""

    def open_slowly(file: ScratchFile, settings: machine.IoSettings) -> aio.Queue:
        return aio.Queue(file.path_for(), create=False, faults={"bytes_per_second": 40_000_000})

    monkeypatch.setattr(ScratchFile, "open", open_slowly)
    data = json.loads(tune(drive, "--seconds", "4", "--json").stdout)
    (found,) = data["drives"]
    assert not found["complete"] and 0 < len(found["measured"]) <= 12
    assert 0 < found["written_bytes"] < 400_000_000


def test_a_configuration_keeps_its_comments(drive: Path, tmp_path: Path, profile: Path) -> None:
    needs_a_drive(drive)
    path = tmp_path / "run.json"
    block = f'{{"device": "nvme", "nvme_path": "{drive}"}}  // the fast one'
    path.write_text(f'// mine\n{{\n  "zero_optimization": {{"offload_optimizer": {block}\n  }}\n}}\n')
    last = tune("--config", path, *SMALL).output.splitlines()[-1]  # the path is the configuration's
    text = path.read_text()
    assert text.startswith("// mine\n") and "// the fast one" in text
    found = OffloadConfig.from_file(path).aio
    assert "auto" not in (found.backend, found.block_size, found.queue_depth)
    assert last.startswith(f"written to {path}: aio ") and str(found.block_size) in last
    assert not profile.exists(), "the configuration is instead of the profile"


def test_a_configuration_that_is_not_there_yet(drive: Path, tmp_path: Path) -> None:
    needs_a_drive(drive)
    tune(drive, "--config", tmp_path / "new.json", *SMALL)
    assert list(json.loads((tmp_path / "new.json").read_text())) == ["aio"]


def test_several_paths_get_weights(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_drive(drive)
    first, second = drive / "first", drive / "second"
    first.mkdir(), second.mkdir()
    drives = {path: machine.DriveId("ext4", f"/dev/{path.name}", None, None) for path in (first, second)}
    monkeypatch.setattr(cli_tune, "drive_of", lambda path: drives[path])
    monkeypatch.setattr(cli_tune, "WEIGH_SECONDS", 0.1)
    path = tmp_path / "run.json"
    block = {"device": "nvme", "nvme_path": [str(first), {"path": str(second), "weight": 7}]}
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": block}}))
    output = tune(first, second, "--config", path, *SMALL).output
    assert re.search(rf"GB/s +\d+%  {first}", output) and "all paths at once: " in output
    weighted = OffloadConfig.from_file(path).zero_optimization.offload_optimizer.nvme_path
    assert [item.path for item in weighted] == [str(first), str(second)]
    assert all(item.weight is not None and 0 < item.weight != 7 for item in weighted)
    tune(first, second, *SMALL)
    assert [entry.drive for entry in machine.load()] == list(drives.values())
    first.rmdir(), second.rmdir()


def test_two_directories_on_one_drive_are_tuned_once(drive: Path) -> None:
    (drive / "a").mkdir(), (drive / "b").mkdir()
    output = tune(drive / "a", drive / "b", *SMALL).output
    assert output.count("will write at most") == 1 - mount_of(drive).is_memory
    (drive / "a").rmdir(), (drive / "b").rmdir()


def test_the_page_cache_is_not_measured(drive: Path, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio.Queue, "direct", property(lambda queue: False))
    output = tune(drive, *SMALL).output
    assert "direct I/O is refused: what is measured is the page cache, and is not saved" in output
    assert output.endswith("nothing is saved: no drive was measured\n") and not profile.exists()


def test_memory_is_not_a_drive(profile: Path, monkeypatch: pytest.MonkeyPatch, drive: Path) -> None:
    mount = SimpleNamespace(point="/", filesystem="tmpfs", source="tmpfs", is_memory=True)
    monkeypatch.setattr(cli_tune, "mount_of", lambda path: mount)
    output = tune(drive, *SMALL).output
    assert "tmpfs is memory; what is measured is RAM, and is not saved" in output and not profile.exists()


def test_the_picture(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots`")
    tune(drive, *SMALL, "--plot", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_needs_the_extra(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    result = tune(drive, *SMALL, "--plot", "map.png", status=2)
    assert re.fullmatch(r"error: --plot needs matplotlib .*pip install 'offload\[plots\]'`\n", result.output)


def _full(path: Any) -> Any:
    return SimpleNamespace(f_blocks=1000, f_bavail=60, f_frsize=MiB)


BAD: dict[str, tuple[list[str], str]] = {
    "missing": (["{drive}/missing"], "{drive}/missing: does not exist; make it, or mount the drive"),
    "file": (["{file}"], "{file}: is not a directory; give one on the drive"),
    "no path": ([], "no path: give directories on the drives, or --config FILE that names some"),
    "one of two": (["{drive}", "{drive}/missing"], "{drive}/missing: does not exist"),
    "max-write": (["{drive}", "--max-write", "much"], "--max-write: 'much' is not a number of bytes"),
    "little": (["{drive}", "--max-write", "1MiB"], "--max-write 1MiB: at least 16.0 MiB are needed"),
    "seconds": (["{drive}", "--seconds", "0.1"], "--seconds 0.1: at least 1 is needed"),
    "nan": (["{drive}", "--seconds", "nan"], "--seconds nan: at least 1 is needed"),
    "plot name": (["{drive}", "--plot", "map.doc"], "--plot map.doc: the name must end in one of"),
    "plot folder": (["{drive}", "--plot", "{drive}/no/map.png"], "is not a directory"),
    "config folder": (["{drive}", "--config", "{drive}/no/run.json"], "{drive}/no is not a directory"),
    "config": (["{drive}", "--config", "{file}"], "{file}: line 1, column 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(
    name: str, drive: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("no configuration")
    parts, expected = BAD[name]
    arguments = [part.format(drive=drive, file=file) for part in parts]
    result = tune(*arguments, status=2)
    (line,) = result.output.splitlines()
    assert line.startswith("error: ") and expected.format(drive=drive, file=file) in line


def test_an_unknown_option(drive: Path) -> None:
    assert "No such option" in tune(drive, "--fast", status=2).output


def test_no_place_for_the_result(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.ENVIRONMENT, "off")
    assert "nowhere to write the result; give --config FILE" in tune(drive, status=2).output


def test_a_result_that_could_not_be_written(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or Path(path) == drive)
    output = tune(drive, "--config", tmp_path / "run.json", status=2).output
    assert output.startswith(f"error: --config {tmp_path}: ") and "is not writable by this user" in output
    assert "the machine profile in " in tune(drive, status=2).output


def test_a_directory_that_may_not_be_written(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or Path(path) != drive)
    assert (
        tune(drive, status=2).output
        == f"error: {drive}: is not writable by this user; give another directory\n"
    )


def test_a_full_file_system(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", _full)
    output = tune(drive, status=2).output
    assert output == f"error: {drive}: 60.0 MiB free, and a test file needs 72.0 MiB; free some\n"


def test_little_space_makes_the_file_smaller(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=1, f_bavail=84, f_frsize=MiB))
    assert loads.size_that_fits(drive, 1 << 30) == 10 * MiB
    assert loads.size_that_fits(drive, 4 * MiB) == 4 * MiB


def test_a_drive_that_fails_is_named(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(queue: aio.Queue, size: int) -> None:
        raise TransferError(28, "fallocate", queue.path, offset=0, size=size, done=0)

    monkeypatch.setattr(aio.Queue, "preallocate", refuse)
    (line,) = [line for line in tune(drive, *SMALL, status=2).output.splitlines() if "error" in line]
    assert line.startswith(f"error: {drive}: fallocate failed: No space left on device")


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_the_file_has_no_name(drive: Path, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool) -> None:
    original = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not has_tmpfile:
            raise OSError(95, "Operation not supported")
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    with ScratchFile(drive, 8 * MiB) as file:
        assert list(drive.iterdir()) == []
        rig = Rig(file)
        with file.open(DEFAULTS) as queue:
            rig.fill(queue, seconds_max=10)
            samples = {load: rig.run(queue, load, 4 * MiB, seconds_max=10) for load in LOADS}
            stats = queue.stats()
        assert list(drive.iterdir()) == []
    moved = {load: (sample.read_bytes, sample.written_bytes) for load, sample in samples.items()}
    assert moved == {"read": (4 * MiB, 0), "write": (0, 4 * MiB), "mixed": (2 * MiB, 2 * MiB)}
    assert (stats.read.bytes, stats.write.bytes) == (6 * MiB, 14 * MiB), "as the queue counts"
    assert rig.written_bytes == 14 * MiB and all(sample.seconds > 0 for sample in samples.values())


def test_nothing_stays_open(drive: Path, nothing_left_behind: None) -> None:
    tune(drive, *SMALL)


def test_a_closed_file_cannot_be_made_where_there_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no file can be made"):
        ScratchFile(tmp_path / "missing", MiB)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_leaves_nothing(drive: Path, profile: Path, number: signal.Signals, status: int) -> None:
    """At `kill -9` too: the file has no name."""
    config = profile.parent / "run.json"
    config.write_text("{} // mine")
    command = [
        sys.executable,
        "-m",
        "offload",
        "tune",
        str(drive),
        "--config",
        str(config),
        "--max-write",
        "256MiB",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ.copy()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if "round 1/4" in line:
                break
        process.send_signal(number)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == status, errors
    assert list(drive.iterdir()) == [] and config.read_text() == "{} // mine" and errors == ""
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(number)
    if name is not None:
        last = output.splitlines()[-1]
        assert last == f"stopped by {name}: the test file is gone, and no setting was changed"


def test_torch_is_not_needed(drive: Path) -> None:
    script = (
        "import sys; from offload.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "tune", str(drive), *SMALL]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
