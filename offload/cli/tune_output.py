"""What ``offload tune`` has found: as a table, as JSON, in a configuration, in the machine profile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import machine
from ..bytesize import format_bytes
from ..config import OffloadConfig
from ..config.edit import with_settings
from ..config.parse import parse
from ..errors import ConfigError
from ..machine import IoSettings
from .loads import LOADS, size_text

if TYPE_CHECKING:
    from .tune import Outcome

BUSY_SPREAD = 2.0
"""Factor between measurements of the same settings from which on somebody else must have used the drive."""
_BLOCKS = ("offload_param", "offload_optimizer")


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The last settings of each search beside the defaults, GB/s at each load."""
    for outcome in outcomes:
        search = outcome.search
        yield ""
        yield f"{outcome.path}: {_how_far(outcome)}"
        yield f"{'GB/s':>45}"
        yield f"    {'backend':9} {'request':>8} {'depth':>6}   {'read':>6} {'write':>6} {'mixed':>6}   {'weakest':>7}"
        rows = [outcome.best, *(one for one in search.finalists if one != outcome.best)]
        if search.default not in rows:
            rows.append(search.default)
        for settings in rows:
            mark = ">" if settings == outcome.best else " "
            rates = " ".join(_rate(search.median(settings, load)) for load in LOADS)
            note = "   the defaults" if settings == search.default else ""
            yield (
                f"  {mark} {settings.backend:9} {size_text(settings.block_size):>8} {settings.queue_depth:>6}"
                f"   {rates}   {_share(outcome, settings):>7}{note}"
            )
        yield "    weakest: part of the best, at the load where the settings reach least of it"
        if not search.complete:
            yield "    ended early: --seconds or --max-write was used up"
        if search.spread() > BUSY_SPREAD:
            yield (
                f"    equal measurements differ by a factor of {search.spread():.1f}:"
                " tune again on a quiet drive"
            )
    if len(outcomes) > 1:
        total = sum(outcome.weight for outcome in outcomes)
        yield ""
        yield f"all paths at once: {total:.2f} GB/s"
        for outcome in outcomes:
            yield f"    {outcome.weight:6.2f} GB/s  {outcome.weight / total:4.0%}  {outcome.path}"


def _how_far(outcome: Outcome) -> str:
    search = outcome.search
    tried = len({settings for settings, _ in search.rates})
    trials = sum(map(len, search.rates.values()))
    return (
        f"{tried} setting{'s' * (tried != 1)}, {trials} measurement{'s' * (trials != 1)} in {outcome.seconds:.0f} s,"
        f" {format_bytes(outcome.written_bytes)} written"
    )


def _share(outcome: Outcome, settings: IoSettings) -> str:
    """Unknown where the time has not been enough for every load."""
    search = outcome.search
    if any(search.median(settings, load) is None for load in LOADS):
        return "-"
    return f"{100 * search.share(settings):.0f} %"


def _rate(rate: float | None) -> str:
    return f"{'-':>6}" if rate is None else f"{rate:6.2f}"


def settings_for(outcomes: Sequence[Outcome]) -> IoSettings:
    """For all paths, as a configuration has one set: those with the most bytes in flight. See `machine.resolve`."""
    return max((outcome.best for outcome in outcomes), key=lambda one: one.block_size * one.queue_depth)


def aio_block(settings: IoSettings) -> dict[str, Any]:
    """The keys of ``aio``. Threads count for their backend only."""
    block: dict[str, Any] = {
        "backend": settings.backend,
        "block_size": settings.block_size,
        "queue_depth": settings.queue_depth,
    }
    return {**block, "thread_count": settings.thread_count} if settings.backend == "threads" else block


def save_profile(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Writes the machine profile; says so."""
    drives = [outcome for outcome in outcomes if outcome.is_drive]
    if not drives:
        yield "nothing is saved: no drive was measured"
        return
    path = machine.save([outcome.tuned() for outcome in drives])
    yield f'saved in {path}: runs on this machine use it where aio says "auto"'


def save_config(path: Path, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Writes the settings, and with several paths their weights, into a configuration, whole or not at all.

    Raises:
        ConfigError: it cannot be written, or is none.
    """
    outcomes = [outcome for outcome in outcomes if outcome.is_drive]
    if not outcomes:
        yield f"{path} is as it was: no drive was measured"
        return
    try:
        text = path.read_bytes().decode("utf-8") if path.exists() else "{\n}\n"
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    block = aio_block(settings_for(outcomes))
    text = with_settings(text, ("aio",), block, str(path))
    weights = {str(outcome.path): round(outcome.weight, 3) for outcome in outcomes}
    weighted = False
    if len(outcomes) > 1:
        text, weighted = _with_weights(text, weights, path)
    OffloadConfig.from_dict(parse(text, str(path)))
    try:
        machine.replace_text(path, text)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be written: {error.strerror}") from error
    yield f"written to {path}: aio {json.dumps(block)}" + (
        " and the weights of nvme_path" if weighted else ""
    )
    if len(outcomes) > 1 and not weighted:
        paths = [{"path": name, "weight": weight} for name, weight in weights.items()]
        yield f'for all of them: "nvme_path": {json.dumps(paths)}'


def _with_weights(text: str, weights: dict[str, float], path: Path) -> tuple[str, bool]:
    """The text with weights for lists of paths that were all tuned, and whether there were such."""
    zero = parse(text, str(path)).get("zero_optimization")
    found = False
    for block in _BLOCKS:
        inner = zero.get(block) if isinstance(zero, dict) else None
        listed = inner.get("nvme_path") if isinstance(inner, dict) else None
        if not isinstance(listed, list) or len(listed) < 2:
            continue
        names = [str(item["path"] if isinstance(item, dict) else item) for item in listed]
        known = {str(Path(name).expanduser()): weight for name, weight in weights.items()}
        if all(str(Path(name).expanduser()) in known for name in names):
            value = [{"path": name, "weight": known[str(Path(name).expanduser())]} for name in names]
            text = with_settings(text, ("zero_optimization", block), {"nvme_path": value}, str(path))
            found = True
    return text, found


def to_json(outcomes: Sequence[Outcome]) -> str:
    """Everything that was measured."""
    drives = []
    for outcome in outcomes:
        search = outcome.search
        measured = list(dict.fromkeys(settings for settings, _ in search.rates))
        drives.append(
            {
                "path": str(outcome.path),
                "filesystem": outcome.drive.filesystem,
                "source": outcome.drive.source,
                "direct": outcome.is_direct,
                "is_drive": outcome.is_drive,
                "aio": aio_block(outcome.best),
                "gb_per_second": {load: _rounded(search.median(outcome.best, load)) for load in LOADS},
                "share_of_best": _rounded(search.share(outcome.best)),
                "cpu_seconds_per_gb": round(outcome.cores_per_gb, 4),
                "weight": round(outcome.weight, 3),
                "seconds": round(outcome.seconds, 1),
                "written_bytes": outcome.written_bytes,
                "complete": search.complete,
                "measured": [
                    {**aio_block(one), **{load: _rounded(search.median(one, load)) for load in LOADS}}
                    for one in measured
                ],
            }
        )
    return json.dumps({"version": 1, "drives": drives}, indent=2)


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 4)
