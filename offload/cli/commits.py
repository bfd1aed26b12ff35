"""What ``offload finetune`` keeps of a run: where it is committed, when, and what becomes of it.

Note [Runs and their directories]
A run is known by its ``--out``: a small file there says in which swap directory it is committed, from before its first
commit on. ``--resume`` goes on from there. A new run in the same place would leave the old one's state without anybody
who knows of it, so it is refused, unless ``--restart`` gives the old one up. At the end of a run whose model has been
exported nothing is kept; else the state is the only thing that is left of it, and stays.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, OffloadError, StoreError
from ..store.directory import MANIFEST_NAMES, SwapDirectory

if TYPE_CHECKING:
    from ..saving import SavedEngine

logger = logging.getLogger("offload")

RECORD_FILE = "committed.json"
SAVE_EVERY = 10
"""Steps between commits, where nothing else is asked for."""


class RunRecord:
    """The file in ``--out`` that says where the run is committed. See Note [Runs and their directories]."""

    def __init__(self, out: Path) -> None:
        self._path = out / RECORD_FILE

    def directory(self) -> Path | None:
        """The swap directory of the run that was here; None where there was none, or nothing is left of it.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            directory = Path(record["swap_directory"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._path} cannot be read ({type(error).__name__}); remove it, or give another --out"
            ) from None
        has_commit = any(os.path.lexists(directory / name) for name in MANIFEST_NAMES)
        return directory if has_commit else None

    def write(self, directory: Path) -> None:
        """Says where the run is, whole or not at all."""
        beside = self._path.with_name(f".{RECORD_FILE}.new")
        beside.write_text(json.dumps({"swap_directory": str(directory)}) + "\n", encoding="utf-8")
        beside.replace(self._path)

    def remove(self) -> None:
        """The run is over, and nothing is left to go on from."""
        self._path.unlink(missing_ok=True)


def check_record(out: Path, *, resumes: bool, restarts: bool) -> Path | None:
    """The swap directory to go on from; None for a new run.

    Raises:
        ConfigError: there is none to go on from, or one that nobody has given up.
    """
    if resumes and restarts:
        raise ConfigError("--resume goes on with the run and --restart gives it up; give one of them")
    directory = RunRecord(out).directory()
    if resumes and directory is None:
        raise ConfigError(
            f"--resume: {out} holds no run that was committed; give its --out, or begin it without --resume"
        )
    if directory is not None and not resumes and not restarts:
        raise ConfigError(
            f"--out {out} holds a run that is committed in {directory}: go on with --resume, give it up with"
            " --restart, or give another --out"
        )
    return directory if resumes else None


def give_up(out: Path) -> None:
    """Removes what the run in ``out`` has committed.

    Raises:
        StoreError: it still runs.
    """
    from ..store.commits import find_commits

    record = RunRecord(out)
    directory = record.directory()
    if directory is None:
        return
    others: list[Path] = []
    try:
        others = [Path(entry.directory) for entry in find_commits(directory).newest.files[1:]]
    except OffloadError as error:
        logger.warning("swap directories of that run on other paths are left where they are: %s", error)
    for path in (directory, *others):
        taken = SwapDirectory.take(path)
        taken.remove()
        taken.close()
    record.remove()


class Commits:
    """Commits a run every so many steps, and after its last one."""

    def __init__(self, engine: SavedEngine, *, every: int, last: int) -> None:
        """
        Args:
            every: steps between commits; 0 is never.
            last: number of the last step.
        """
        self._engine, self._last = engine, last
        self._every = every if engine.commits_to is not None else 0
        self.step: int | None = engine.global_steps if engine.commit_serial else None
        """Steps that the last commit has; None where nothing is committed."""

    def after(self, step: int) -> None:
        """A step is done."""
        if not self._every or (step % self._every and step != self._last):
            return
        try:
            self._engine.save_checkpoint()
        except StoreError as error:  # the commit before stands
            logger.warning(
                "nothing was committed after step %d: %s: %s", step, error.filename, error.strerror
            )
        else:
            self.step = self._engine.global_steps
