"""The directories and files of a run: checked first, made late, and taken away if the run does not start."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import ConfigError

REPORT_FILE = "report.json"
CACHE_DIR = "cache"


class OutDirectory:
    """``--out``: report.json, and the tokenised text in ``cache/``. Nothing is made before :meth:`make`."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the directory cannot be made or written to.
        """
        self.path = path
        self.cache = path / CACHE_DIR
        self._made: list[Path] = []
        check_writable(path, "--out")

    def make(self) -> None:
        """Makes the directory and the one for the tokenised text."""
        missing = [folder for folder in (self.cache, *self.cache.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)

    def undo(self) -> None:
        """The run did not start: takes away what :meth:`make` made and the tokens in it."""
        if self.cache in self._made:
            shutil.rmtree(self.cache, ignore_errors=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: someone else's work is in it by now
                folder.rmdir()
        self._made.clear()

    def write_report(self, report: dict[str, Any]) -> Path:
        """Writes report.json, whole or not at all. Numbers that JSON cannot hold become null."""
        path = self.path / REPORT_FILE
        text = json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"
        handle, name = tempfile.mkstemp(dir=self.path, prefix=f".{REPORT_FILE}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def check_export(path: Path, option: str = "--export") -> None:
    """Raises ConfigError where a model cannot be written to ``path``, given as ``option``."""
    check_writable(path, option)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{option} {path}: exists and is not empty; give another directory")


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError where the directory ``path``, which may not be there yet, cannot be written to."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(f"{option} {path}: {existing} is not a directory; give another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {existing} is not writable by this user; give another directory")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
