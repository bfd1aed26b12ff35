"""``offload verify``: reads every byte that a swap store or a checkpoint names, and holds it against its sums."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from ..bytesize import format_bytes
from ..errors import CheckpointError, TransferError
from ..portable import scan as checkpoint_scan
from ..portable.saved import CheckpointFiles
from ..store import scan as store_scan
from ..store.commits import find_commits
from .failures import STATUS_FAILED
from .progress import make_display
from .stores import Held, held_in

VERSION = 1
"""Of the JSON."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    path: Path
    json: bool
    quiet: bool


@dataclass(slots=True)
class Result:
    """What was found in one store or checkpoint."""

    held: Held
    bytes_read: int = 0
    items: int = 0
    seconds: float = 0.0
    damage: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What cannot be read at all."""

    @property
    def is_intact(self) -> bool:
        return not self.damage and not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.held.kind,
            "path": str(self.held.path),
            "intact": self.is_intact,
            "bytes": self.bytes_read,
            "items": self.items,
            "seconds": round(self.seconds, 3),
            "damage": self.damage,
            "problems": self.problems,
        }


def run(request: Request) -> None:
    """Carries out the command. Exit status 1 where something is damaged.

    Raises:
        CheckpointError: there is nothing to verify.
    """
    display = make_display(quiet=request.quiet or request.json, to_stderr=request.json)
    results = []
    for held in held_in(request.path):
        result = Result(held)
        if request.json:
            verify(result, lambda _done, _total: None)
        else:
            with display.task(f"reading {held.path}") as advance:
                verify(result, advance)
            for line in lines(result):
                typer.echo(line)
        results.append(result)
    if request.json:
        typer.echo(json.dumps({"version": VERSION, "found": [each.to_dict() for each in results]}, indent=2))
    if not all(result.is_intact for result in results):
        sys.stdout.flush()
        raise typer.Exit(STATUS_FAILED)


def verify(result: Result, advance: Callable[[int, int], None]) -> None:
    """Scans one store or checkpoint."""
    begin = time.monotonic()
    try:
        total, scanned = _begin(result)
        for size, damage in scanned:
            result.items += size > 0
            result.bytes_read += size
            if damage is not None:
                result.damage.append(_damage(damage))
            advance(result.bytes_read, total)
    except CheckpointError as error:
        result.problems.append(str(error))
    except TransferError as error:
        result.damage.append(_damage(error))
    result.seconds = time.monotonic() - begin


def _begin(result: Result) -> tuple[int, Iterable[tuple[int, TransferError | None]]]:
    path = result.held.path
    if result.held.kind == "checkpoint":
        with CheckpointFiles(path) as files:
            total = checkpoint_scan.scanned_bytes(files)
        return total, checkpoint_scan.scan(path)
    commits = find_commits(path)
    result.problems += commits.problems
    scanned = ((item.size, item.damage) for item in store_scan.scan(path))
    return store_scan.committed_bytes(commits.newest), scanned


def _damage(error: TransferError) -> dict[str, Any]:
    return {"file": error.filename, "offset": error.offset, "bytes": error.size, "what": str(error.strerror)}


def lines(result: Result) -> Iterable[str]:
    """The outcome for people."""
    for problem in result.problems:
        yield f"damaged: {problem}"
    for damage in result.damage:
        yield f"damaged: {damage['file']}: {damage['what']}"
    rate = result.bytes_read / max(result.seconds, 1e-9) / 1e9
    read = f"{format_bytes(result.bytes_read)} in {result.items} pieces read at {rate:.2f} GB/s"
    if result.is_intact:
        yield f"{result.held.path}: {read}: intact"
    else:
        count = len(result.damage) + len(result.problems)
        yield f"{result.held.path}: {read}: {count} {'is' if count == 1 else 'are'} damaged"
