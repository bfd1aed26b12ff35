"""Makes what a store holds the state that the next start finds.

Note [Commit]
In this order: every write has ended; the swap files are brought to stable storage; the directories on the other paths
say whose they are (once); the manifest is written beside its place, brought to stable storage and renamed, and its
directory is too. A crash before the rename has reached the drive leaves the commit before, a later one this: the
data of both are there. Manifests have two names in turn, so the commit before stays readable, should the newest be
damaged: as much of its data as has not been written over since.
Where the last of these steps fails nobody knows which of the two a crash would leave. No extent may be written then
until a commit has succeeded. What had failed before, a write or its way to stable storage, cannot be mended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bytesize import KiB
from ..errors import CheckpointError, StoreError, TransferError
from ..links import Ticket
from ..untrusted import load_json, read_small_file
from .directory import MANIFEST_NAMES, MEMBER_NAME
from .drives import Drive
from .durable import put_in_place, sync_directory, write_beside
from .manifest import Manifest
from .reader import read_manifest, read_serial

logger = logging.getLogger("offload.store")

MEMBER_BYTES_MAX = 16 * KiB


class Commits:
    """The commits of one run. See Note [Commit]."""

    def __init__(self, drives: Sequence[Drive], run: str, *, serial: int = 0) -> None:
        """
        Args:
            serial: of the last commit; 0 where there is none.
        """
        self._drives = drives
        self.run, self.serial = run, serial
        self._writing: deque[Ticket] = deque()
        self._failure = ""
        self._is_in_doubt = False
        self._is_announced = False

    def track(self, write: Callable[[], Ticket]) -> Ticket:
        """Starts a write, for which the next commit waits.

        Raises:
            StoreError: nobody knows which extents count. See Note [Commit].
        """
        self._refuse_in_doubt()
        while self._writing and self._writing[0].done():
            self._end_write()
        try:
            ticket = write()
        except BaseException as error:  # it may have been begun
            self._failure = self._failure or str(error) or type(error).__name__
            raise
        self._writing.append(ticket)
        return ticket

    def _refuse_in_doubt(self) -> None:
        if self._is_in_doubt:
            raise StoreError(
                errno.EIO,
                f"commit {self.serial + 1} failed in its last moment, so nothing may be written; commit again, or"
                " restart from the last commit",
                str(self._manifest_path(self.serial + 1)),
            )

    def commit(self, manifest: Manifest, on_durable: Callable[[], None]) -> None:
        """Returns when the manifest, and all that it names, are on stable storage.

        Args:
            on_durable: called before anything may be written again.

        Raises:
            TransferError: a write had failed, or failed to reach stable storage: no later commit can succeed.
            StoreError: the manifest could not be written: the commit before stands, and another one may be tried.
        """
        if manifest.serial != self.serial + 1:
            raise AssertionError(f"commit {manifest.serial} after {self.serial}")
        path, data = self._manifest_path(manifest.serial), manifest.encode()
        self._sync_data()
        try:
            self._announce()
            write_beside(path, data)
            self._is_in_doubt = True
            put_in_place(path)
        except OSError as error:
            raise StoreError(
                error.errno, f"commit {manifest.serial} failed: {error.strerror}", str(path)
            ) from error
        on_durable()
        self.serial += 1
        self._is_in_doubt = False  # last: whatever comes in between, nothing that counts is written over

    def _manifest_path(self, serial: int) -> Path:
        return self._drives[0].directory.path / MANIFEST_NAMES[serial % 2]

    def _end_write(self) -> None:
        try:
            self._writing[0].wait()
        except TransferError as error:
            self._failure = self._failure or str(error)
        self._writing.popleft()

    def _sync_data(self) -> None:
        while self._writing:
            self._end_write()
        if not self._failure:
            try:
                for ticket in [drive.queue.sync() for drive in self._drives]:
                    ticket.wait()
            except TransferError as error:
                self._failure = str(error)
                raise
        if self._failure:
            raise StoreError(
                errno.EIO,
                f"nothing can be committed since a transfer failed ({self._failure}); restart from the last commit",
                str(self._drives[0].directory.path),
            )

    def _announce(self) -> None:
        """Makes the names of files and directories durable, and says on every path where the manifest is."""
        if self._is_announced:
            return
        first, *others = (drive.directory for drive in self._drives)
        for index, directory in enumerate(others, 1):
            member = {"run": self.run, "path": index, "manifest": str(first.path)}
            write_beside(directory.path / MEMBER_NAME, json.dumps(member).encode() + b"\n")
            put_in_place(directory.path / MEMBER_NAME)
        sync_directory(first.path)
        for root in {directory.root for directory in (first, *others)}:
            sync_directory(root)
        self._is_announced = True


@dataclass(frozen=True, slots=True)
class Found:
    """The commits in a swap directory."""

    newest: Manifest
    problems: list[str]
    """Why others that are newer cannot be read."""
    _older: Path | None

    def is_current(self, directory: Path) -> bool:
        """Whether nobody has committed there since these were read."""
        serials = []
        for name in MANIFEST_NAMES:
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                serials.append(read_serial(directory / name))
        return max(serials, default=0) == self.newest.serial

    def before(self) -> Manifest | None:
        """The commit before the newest one; None where it cannot be read."""
        if self._older is None:
            return None
        try:
            manifest = read_manifest(self._older)
        except (CheckpointError, FileNotFoundError):
            return None
        is_next = (manifest.run, manifest.serial + 1) == (self.newest.run, self.newest.serial)
        return manifest if is_next else None


def find_commits(directory: Path) -> Found:
    """The commits that can be read in a swap directory.

    Raises:
        CheckpointError: there is none.
    """
    serials: dict[int, Path] = {}
    problems = []
    for index, name in enumerate(MANIFEST_NAMES):
        try:
            serial = read_serial(directory / name)
            if serial % 2 == index:
                serials[serial] = directory / name
            else:
                problems.append(f"{directory / name}: commit {serial} has another name")
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            problems.append(str(error))
    paths = [path for _, path in sorted(serials.items(), reverse=True)]
    for index, path in enumerate(paths):
        try:
            return Found(read_manifest(path), problems, paths[1] if not index and len(paths) > 1 else None)
        except (CheckpointError, FileNotFoundError) as error:
            problems.append(str(error))
    if os.path.lexists(directory / MEMBER_NAME):
        problems.append(f"its manifest is in {_member(directory)[2]}")
    raise CheckpointError(
        f"{directory}: there is no commit; " + ("; ".join(problems) or "it has no manifest")
    )


def check_member(directory: Path, manifest: Manifest, path: int) -> None:
    """Raises CheckpointError unless a directory holds the part of a commit on path number ``path``."""
    run, index, _ = _member(directory)
    if (run, index) != (manifest.run, path):
        raise CheckpointError(f"{directory / MEMBER_NAME}: it is of path {index} of run {run}, not of {path}")


def _member(directory: Path) -> tuple[str, int, str]:
    """Whose a directory on another path is: run, number of the path, directory of the manifest."""
    path = directory / MEMBER_NAME
    try:
        member = load_json(read_small_file(path, MEMBER_BYTES_MAX))
        kinds = {"run": str, "path": int, "manifest": str}
        if type(member) is not dict or {name: type(value) for name, value in member.items()} != kinds:
            raise CheckpointError("it is damaged")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return ascii(member["run"])[1:-1], member["path"], ascii(member["manifest"])[1:-1]
