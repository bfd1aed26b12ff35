"""Where a configuration's problems and notes are collected, so that all of them are told at once."""

from __future__ import annotations

import json
import re

from ..errors import ConfigError

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_\-]+")


class UnfitError(ValueError):
    """A value that a setting cannot take. Its text is "what is wrong; what to do", without the path."""


class Report:
    """Problems and notes of one configuration, in the order they were found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._bad_paths: set[str] = set()

    def problem(self, path: str, text: str) -> None:
        self._bad_paths.add(path)
        self.problems.append(f"{path or 'configuration'}: {text}")

    def note(self, path: str, text: str) -> None:
        self.notes.append(f"{path or 'configuration'}: {text}")

    def is_clean(self, *paths: str) -> bool:
        """No problem at these paths or around them: a check that needs their values may run."""
        return not any(
            path == bad or path.startswith(bad + ".") or bad == ""
            for path in paths
            for bad in self._bad_paths
        )

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def join(path: str, key: str) -> str:
    """``("aio", "queue_depth")`` -> ``aio.queue_depth``. A key with odd characters is quoted: one line stays
    one line."""
    shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
    return f"{path}.{shown}" if path else shown


def show(value: object) -> str:
    """A value as JSON writes it, on one line and short enough to read."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."
