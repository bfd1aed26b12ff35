"""The machine profile: what is written is found again for the same drive, and for no other."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offload import machine
from offload.bytesize import MiB
from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.errors import ConfigError
from offload.machine import IoSettings, Tuned

SETTINGS = IoSettings("threads", 2 * MiB, 16, 12)


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile" / "machine.json"
    monkeypatch.setenv(machine.ENVIRONMENT, str(path))
    monkeypatch.setattr(machine, "_logged", set())
    return path


def tuned(path: Path, **changes: Any) -> Tuned:
    entry = Tuned(
        machine.drive_of(path),
        str(path),
        SETTINGS,
        {"read": 3.0, "write": 2.0, "mixed": 2.5},
        2.5,
        "2026-11-30",
    )
    return dataclasses.replace(entry, **changes)


def swap(*paths: Path | str, weight: float | None = None) -> list[SwapPath]:
    return [SwapPath(str(path), weight) for path in paths]


def test_round_trip(tmp_path: Path, profile: Path) -> None:
    entry = tuned(tmp_path)
    assert machine.load() == []
    assert machine.save([entry]) == profile
    assert machine.load() == [entry]
    other = tuned(tmp_path, drive=dataclasses.replace(entry.drive, source="/dev/other"))
    machine.save([other])
    assert machine.load() == [entry, other], "a drive that was not tuned again stays"
    better = tuned(tmp_path, weight=9.0)
    machine.save([better])
    assert machine.load() == [other, better], "one for each drive"
    assert [path.name for path in profile.parent.iterdir()] == ["machine.json"]


def test_auto_is_filled_in_and_what_is_given_stays(tmp_path: Path) -> None:
    machine.save([tuned(tmp_path)])
    settings, paths = machine.resolve(Aio(), swap(tmp_path / "not" / "made" / "yet"))
    assert settings == Aio(backend="threads", block_size=2 * MiB, queue_depth=16, thread_count=12)
    assert paths == (SwapPath(str(tmp_path / "not" / "made" / "yet"), None),), "one path needs no weight"
    given = Aio(block_size=1 * MiB, direct_io="required")
    settings, _ = machine.resolve(given, swap(tmp_path))
    assert settings == dataclasses.replace(given, backend="threads", queue_depth=16, thread_count=12)


def test_without_a_profile_nothing_changes(tmp_path: Path, profile: Path) -> None:
    given, paths = Aio(queue_depth=4), swap(tmp_path / "a", tmp_path / "b")
    assert machine.resolve(given, paths) == (given, tuple(paths))
    assert not profile.parent.exists()


@pytest.mark.parametrize("word", ["off", "OFF", "", "none"])
def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    machine.save([tuned(tmp_path)])
    monkeypatch.setenv(machine.ENVIRONMENT, word)
    assert machine.profile_path() is None and machine.resolve(Aio(), swap(tmp_path))[0] == Aio()
    with pytest.raises(ConfigError, match="OFFLOAD_PROFILE is off; unset it"):
        machine.save([tuned(tmp_path)])


def test_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.ENVIRONMENT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert machine.profile_path() == tmp_path / "xdg" / "offload" / "machine.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.profile_path() == tmp_path / ".config" / "offload" / "machine.json"


def test_weights_come_from_the_profile_if_it_has_all_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.drive_of(tmp_path)
    second = dataclasses.replace(first, source="/dev/second")
    monkeypatch.setattr(machine, "drive_of", lambda path: second if "second" in str(path) else first)
    for name in ("a", "b", "second"):
        (tmp_path / name).mkdir()
    paths = swap(tmp_path / "a", tmp_path / "second")
    larger = IoSettings("threads", 4 * MiB, 16, 16)
    machine.save([tuned(tmp_path, drive=first, weight=3.0)])
    settings, weighted = machine.resolve(Aio(), paths)
    assert weighted == tuple(paths) and settings.block_size == 2 * MiB
    machine.save([tuned(tmp_path, drive=second, weight=1.0, settings=larger)])
    settings, weighted = machine.resolve(Aio(), paths)
    assert [path.weight for path in weighted] == [3.0, 1.0]
    assert (settings.block_size, settings.queue_depth) == (4 * MiB, 16), "the most bytes in flight"
    three = swap(tmp_path / "a", tmp_path / "b", tmp_path / "second")
    assert [path.weight for path in machine.resolve(Aio(), three)[1]] == [1.5, 1.5, 1.0], "two share a drive"
    given = [SwapPath(str(tmp_path / "a"), 2.0), SwapPath(str(tmp_path / "second"), None)]
    assert machine.resolve(Aio(), given)[1] == tuple(given), "weights that are given count as they are"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(machine.ENVIRONMENT)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    assert machine.profile_path() is None and machine.load() == []


def test_a_path_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.save([tuned(tmp_path)])

    def refuse(path: Path) -> machine.DriveId:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "drive_of", refuse)
    assert machine.resolve(Aio(), swap(tmp_path))[0] == Aio()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "is of version None"),
        ('{"version": 2, "drives": []}', "is of version 2"),
        ('{"version": 1, "drives": [{}]}', "has an entry that is not one"),
        ('{"version": 1, "drives": [7]}', "has an entry that is not one"),
        ('{"version": 1, "drives": 7}', ""),
    ],
)
def test_a_bad_profile_is_ignored_with_one_line(
    tmp_path: Path, profile: Path, caplog: pytest.LogCaptureFixture, text: str, says: str
) -> None:
    profile.parent.mkdir()
    profile.write_text(text)
    for _ in range(3):
        assert machine.resolve(Aio(), swap(tmp_path))[0] == Aio()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(says) and all(says in line and str(profile) in line for line in lines)


@pytest.mark.parametrize(
    ("key", "value"), [("block_size", 1000), ("block_size", 0), ("queue_depth", 0), ("thread_count", "x")]
)
def test_one_bad_entry_leaves_the_others(tmp_path: Path, profile: Path, key: str, value: object) -> None:
    machine.save([tuned(tmp_path)])
    data = json.loads(profile.read_text())
    bad = json.loads(json.dumps(data["drives"][0]))
    bad["settings"][key] = value
    data["drives"] = [bad, {**data["drives"][0], "of a newer version": True}]
    profile.write_text(json.dumps(data))
    assert machine.load() == [tuned(tmp_path)]


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        (Aio(backend="io_uring"), {}, "tuned for threads, and aio.backend is io_uring"),
        (
            Aio(),
            {"settings": dataclasses.replace(SETTINGS, backend="gone")},
            "tuned for gone, which does not work",
        ),
        (Aio(), {"drive": "other size"}, "is on another drive than when it was tuned"),
    ],
)
def test_what_does_not_fit_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: Aio, changes: dict[str, Any], says: str
) -> None:
    entry = tuned(tmp_path)
    if "drive" in changes:
        changes = {"drive": dataclasses.replace(entry.drive, size=12345)}
    machine.save([dataclasses.replace(entry, **changes)])
    for _ in range(3):
        assert machine.resolve(given, swap(tmp_path))[0] == given
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert says in record.getMessage()


def test_a_profile_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(machine.ENVIRONMENT, str(tmp_path / "file" / "machine.json"))
    with pytest.raises(
        ConfigError, match=r"cannot be written: .*OFFLOAD_PROFILE=FILE, or give --config FILE"
    ):
        machine.save([tuned(tmp_path)])


def test_replacing_a_file_keeps_link_and_permissions(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    machine.replace_text(link, "new\r\n")
    assert link.is_symlink() and real.read_bytes() == b"new\r\n" and real.stat().st_mode & 0o777 == 0o640
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        machine.replace_text(tmp_path / "folder", "text")
    assert len(list(tmp_path.iterdir())) == 3, "the temporary file is gone"


def test_prepare_opens_its_queues_as_the_profile_says(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import offload
    from offload.store import drives

    machine.save([tuned(swap_path)])
    opened = []

    class Watched(drives.Queue):  # type: ignore[name-defined, misc]
        def __init__(self, path: Path, **settings: Any) -> None:
            opened.append(settings)
            super().__init__(path, **settings)

    monkeypatch.setattr(drives, "Queue", Watched)
    states = {"device": "nvme", "nvme_path": str(swap_path)}
    config = {"zero_optimization": {"offload_optimizer": states}, "memory": {"host_bytes": "1GiB"}}
    _, optimizer = offload.prepare(torch.nn.Linear(64, 64), config)
    optimizer.engine.close()
    (settings,) = opened
    assert settings["backend"] == "threads" and settings["request_bytes"] == 2 * MiB
    assert (settings["queue_depth"], settings["threads"]) == (16, 12)


def test_finetune_says_what_the_profile_fills_in(tmp_path: Path) -> None:
    from offload.cli.finetune import _tuned
    from offload.config import OffloadConfig

    states = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = OffloadConfig.from_dict({"zero_optimization": {"offload_optimizer": states}})
    assert list(_tuned(config)) == []
    machine.save([tuned(tmp_path)])
    (line,) = _tuned(config)
    assert line == f"  aio from {machine.profile_path()}: threads, block_size 2097152, queue_depth 16"
    assert list(_tuned(OffloadConfig())) == [], "nothing is on nvme"
