"""What `offload tune` has found out about this machine's drives, for settings that are "auto".

Note [Machine profile]
A JSON file with one entry for each drive: which it is, the settings that were the best, and what they gave. A drive
is recognised by its file system, the mounted device, and the device's model and size, so that an entry is not used for
another drive that now has the place of the first. Whatever is wrong with the profile is said once in the log, and
the defaults are used: a profile makes a run faster or does nothing.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import aio
from .blockdevice import device_under
from .config.kinds import SwapPath
from .config.schema import Aio
from .errors import ConfigError
from .metrics import mount_of

logger = logging.getLogger("offload")

ENVIRONMENT = "OFFLOAD_PROFILE"
"""Where the profile is, instead of the usual place; "off": there is none."""
VERSION = 1
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class DriveId:
    """Which drive a path is on. See Note [Machine profile]."""

    filesystem: str
    source: str
    """The mounted device; where that says nothing (tmpfs, overlay), with the mount point."""
    model: str | None
    size: int | None


@dataclass(frozen=True, slots=True)
class IoSettings:
    """How a swap file is read and written."""

    backend: str
    block_size: int
    queue_depth: int
    thread_count: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """One entry of the profile."""

    drive: DriveId
    path: str
    """As it was given to `offload tune`; for people."""
    settings: IoSettings
    gb_per_second: dict[str, float]
    """By load: "read", "write", "mixed"."""
    weight: float
    """GB/s beside the other drives that were tuned with it, all at work at once."""
    date: str


def drive_of(path: str | os.PathLike[str]) -> DriveId:
    """Which drive an existing path is on."""
    mount = mount_of(path)
    device = device_under(path, mount)
    source = mount.source if mount.source.startswith("/") else f"{mount.source} at {mount.point}"
    return DriveId(
        mount.filesystem, source, device.model if device else None, device.size if device else None
    )


def profile_path() -> Path | None:
    """Where the profile is or would be; None where there is to be none."""
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        return None if given.strip().lower() in ("", "off", "none", "0") else Path(given).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(home).expanduser() / "offload" / "machine.json"
    except RuntimeError:  # a user without a home, as in containers
        return None


def load(path: Path | None = None) -> list[Tuned]:
    """The entries of the profile (default: of this machine). Whatever cannot be read is left out and logged."""
    path = path or profile_path()
    if path is None:
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _ignore(path, f"cannot be read ({error})")
        return []
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        _ignore(path, f"is of version {found}, and this is for {VERSION}")
        return []
    entries = []
    drives = data.get("drives")
    for item in drives if isinstance(drives, list) else []:
        try:
            entries.append(_entry(item))
        except (KeyError, TypeError, ValueError) as error:
            _ignore(path, f"has an entry that is not one ({type(error).__name__}: {error})")
    return entries


def save(tuned: Sequence[Tuned]) -> Path:
    """Adds entries to the profile, in place of older ones for the same drives. Whole or not at all.

    Raises:
        ConfigError: there is to be no profile, or it cannot be written.
    """
    path = profile_path()
    if path is None:
        raise ConfigError(f"{ENVIRONMENT} is off; unset it, or write the result with --config FILE")
    kept = [entry for entry in load(path) if entry.drive not in [new.drive for new in tuned]]
    data = {"version": VERSION, "drives": [asdict(entry) for entry in [*kept, *tuned]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; set {ENVIRONMENT}=FILE, or give --config FILE"
        ) from error
    return path


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all. Links are followed, and the permissions of the old file kept."""
    path = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def resolve(settings: Aio, paths: Sequence[SwapPath]) -> tuple[Aio, tuple[SwapPath, ...]]:
    """Fills in what is "auto" from the profile: settings, and the weights of several paths.

    Where the drives have different settings, those with the most bytes in flight count: too few would starve the
    fastest drive, more only wait longer in the queue of another. Weights come from the profile if it has all
    drives; paths on one drive share what it gives.
    """
    numbers = (settings.backend, settings.block_size, settings.queue_depth, settings.thread_count)
    is_open = [path.weight is None for path in paths]
    weigh = len(paths) > 1 and all(is_open)
    if "auto" not in numbers and not weigh:
        return settings, tuple(paths)
    entries = load()
    if not entries:
        return settings, tuple(paths)
    found = [_find(entries, path.path) for path in paths]
    known = [entry for entry in found if entry is not None]
    usable = [entry.settings for entry in known if _fits(entry, settings)]
    if usable:
        settings = _filled(settings, max(usable, key=lambda one: one.block_size * one.queue_depth))
    if weigh and len(known) == len(paths):
        sharing = Counter(entry.drive for entry in known)
        paths = [
            path._replace(weight=entry.weight / sharing[entry.drive])
            for path, entry in zip(paths, known, strict=True)
        ]
    return settings, tuple(paths)


def _find(entries: Sequence[Tuned], path: str) -> Tuned | None:
    """The entry for the drive under a path, or under the directory in which it will be made."""
    place = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        drive = drive_of(next(folder for folder in (place, *place.parents) if folder.exists()))
    except OSError:  # whoever opens the path says what is wrong with it
        return None
    entry = next((entry for entry in entries if entry.drive == drive), None)
    if entry is None:
        other = next((entry for entry in entries if entry.drive.source == drive.source), None)
        if other is not None:
            _log_once(f"{path}: is on another drive than when it was tuned; run `offload tune {path}`")
    return entry


def _fits(entry: Tuned, settings: Aio) -> bool:
    """Whether the tuned settings mean something beside those that are given, and can be used here."""
    backend = entry.settings.backend
    if settings.backend not in ("auto", backend):
        _log_once(
            f"{entry.path}: tuned for {backend}, and aio.backend is {settings.backend}: the defaults count"
        )
        return False
    if backend not in aio.backends():
        _log_once(f"{entry.path}: tuned for {backend}, which does not work here now: the defaults count")
        return False
    return True


def _filled(settings: Aio, tuned: IoSettings) -> Aio:
    changes: dict[str, Any] = {
        name: value for name, value in asdict(tuned).items() if getattr(settings, name) == "auto"
    }
    logger.info("aio, from the machine profile: %s", ", ".join(f"{k} {v}" for k, v in changes.items()))
    return replace(settings, **changes)


def _entry(item: dict[str, Any]) -> Tuned:
    """One entry. Keys that are not known are a newer version's, and passed over."""
    drive, settings = item["drive"], item["settings"]
    tuned = Tuned(
        DriveId(str(drive["filesystem"]), str(drive["source"]), drive.get("model"), drive.get("size")),
        str(item["path"]),
        IoSettings(
            str(settings["backend"]),
            int(settings["block_size"]),
            int(settings["queue_depth"]),
            int(settings["thread_count"]),
        ),
        {str(load): float(rate) for load, rate in item.get("gb_per_second", {}).items()},
        float(item["weight"]),
        str(item.get("date", "")),
    )
    io = tuned.settings
    if io.block_size <= 0 or io.block_size % _ALIGNMENT or min(io.queue_depth, io.thread_count) < 1:
        raise ValueError(f"block_size {io.block_size}, queue_depth {io.queue_depth}")
    if not tuned.weight > 0:
        raise ValueError(f"weight {tuned.weight}")
    return tuned


def _ignore(path: Path, why: str) -> None:
    _log_once(f"the machine profile {path} {why}: ignored; `offload tune PATH` writes a new one")


_logged: set[str] = set()


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.warning("%s", text)
