"""What a directory that was named to a command holds: swap stores of runs, or checkpoints. Changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import metrics
from ..errors import CheckpointError
from ..portable import directory as checkpoints
from ..portable.manifest import NAME as CHECKPOINT_NAME
from ..store.directory import OWNER_FILE, PREFIX, is_committed
from ..untrusted import read_small_file

Kind = Literal["swap store", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Held:
    """One store or checkpoint."""

    kind: Kind
    path: Path


def held_in(directory: Path) -> list[Held]:
    """Everything in a directory: itself, the checkpoints of its tags, or the swap directories in it.

    Raises:
        CheckpointError: it is none of ours; says what it is where that can be told.
    """
    directory = Path(os.path.abspath(directory.expanduser()))
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory")
    try:
        found = [*_held(directory)]
        if not found:
            raise CheckpointError(f"{directory}: {_what_else(directory)}")
    except PermissionError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from None
    return found


def _held(directory: Path) -> Iterator[Held]:
    if os.path.lexists(directory / CHECKPOINT_NAME):
        yield Held("checkpoint", directory)
        return
    if is_committed(directory):
        yield Held("swap store", directory)
        return
    for path in sorted(directory.iterdir()):
        if checkpoints.is_folder(path):
            if os.path.lexists(path / CHECKPOINT_NAME):
                yield Held("checkpoint", path)
            elif path.name.startswith(PREFIX) and is_committed(path):
                yield Held("swap store", path)


def _what_else(directory: Path) -> str:
    names = {path.name for path in directory.iterdir()}
    if os.path.lexists(directory / OWNER_FILE):
        return "a swap directory in which nothing was committed: its run can only start anew"
    if checkpoints.is_of_deepspeed(directory):
        return "a checkpoint of DeepSpeed, which is made of pickles and not read"
    if "config.json" in names:
        return "a model of transformers: no run has left its state there"
    if any(name.startswith(PREFIX) for name in names):
        return "its swap directories hold no commit"
    return "there is no swap store and no checkpoint in it"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a swap directory is."""

    pid: int | None
    host: str
    started: str


def owner_of(directory: Path) -> Owner:
    """Whose a swap directory is, as it says."""
    try:
        owner = json.loads(read_small_file(directory / OWNER_FILE, 4096))
        pid, texts = owner["pid"], (owner["host"], owner["started"])
        if type(pid) is not int or any(type(text) is not str or not text.isprintable() for text in texts):
            raise ValueError
        host, started = (text[:255] for text in texts)
        return Owner(pid, host, started)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return Owner(None, "", "")


def is_locked(path: Path, locks: Path = Path("/proc/locks")) -> bool:
    """Whether some process holds a lock of flock(2) on a file, as the kernel lists them: without taking it."""
    try:
        inode = os.lstat(path).st_ino
    except OSError:
        return False  # it is gone
    for line in (metrics.read(locks) or "").splitlines():
        fields = line.split()
        if "FLOCK" in fields and any(field.endswith(f":{inode}") for field in fields):
            return True
    return False
