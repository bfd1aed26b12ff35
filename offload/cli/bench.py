"""``offload bench io``: what the engine gets out of a drive at the loads of a step, beside fio where there is one."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from .. import aio, machine
from ..bytesize import MiB, format_bytes
from ..config.kinds import SwapPath
from ..config.schema import Aio
from ..machine import IoSettings
from ..metrics import mount_of
from .failures import Stopped, StopSignals
from .fio import Fio
from .loads import (
    FILE_BYTES,
    LOADS,
    Rig,
    Sample,
    ScratchFile,
    check_directory,
    default_settings,
    max_write_of,
    settings_text,
    size_that_fits,
)
from .progress import Display, make_display

SECONDS = 0.5
"""Of one measurement."""
SIZE_BYTES = (64 * MiB, 2048 * MiB)
"""Least and most of one measurement."""
WARM_BYTES = 64 * MiB
OURS = "offload"

Contestant = Callable[[str, int], Sample]
"""Runs a load, moving so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line, as given."""

    path: Path
    rounds: int
    max_write: str
    json: bool
    quiet: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of all contestants."""

    path: Path
    settings: IoSettings
    is_direct: bool
    fio_version: str | None
    rounds: int
    size: int
    """Bytes of one measurement."""
    written_bytes: int
    samples: dict[tuple[str, str], list[Sample]]
    """By contestant and load."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.samples))

    def rate(self, name: str, load: str) -> float:
        """Median GB/s."""
        return statistics.median(sample.gb_per_second for sample in self.samples[name, load])

    def cpu(self, name: str, load: str) -> float:
        """Median of CPU seconds for each GB."""
        return statistics.median(sample.cores_per_gb for sample in self.samples[name, load])


def run(request: Request) -> None:
    """Carries out the command. See ``failures`` for how it ends when it does not succeed."""
    max_write = check(request)
    display = make_display(quiet=request.quiet, to_stderr=request.json)
    fio = Fio.find()
    with StopSignals():
        try:
            result = measure(request.path, fio, display, rounds=request.rounds, max_write=max_write)
        except Stopped as stopped:
            display.say(f"stopped by {stopped.name}: the test file is gone")
            raise
    if request.json:
        typer.echo(to_json(result))
        return
    for line in table(result):
        display.say(line)


def check(request: Request) -> int:
    """Looks at every argument; gives the bytes that may be written.

    Raises:
        ConfigError: what is wrong, and the way out.
    """
    max_write = max_write_of(request.max_write)
    check_directory(request.path)
    return max_write


def settings_here(path: Path) -> IoSettings:
    """As a run would have them: from the machine profile, or the defaults."""
    found, _ = machine.resolve(Aio(), [SwapPath(str(path))])
    default = default_settings(aio.backends()[0] if found.backend == "auto" else found.backend)
    block = default.block_size if found.block_size == "auto" else found.block_size
    depth = default.queue_depth if found.queue_depth == "auto" else found.queue_depth
    threads = default.thread_count if found.thread_count == "auto" else found.thread_count
    return IoSettings(default.backend, block, depth, threads)


def measure(path: Path, fio: Fio | None, display: Display, *, rounds: int, max_write: int) -> Result:
    """All contestants in turns, round after round, after one round that does not count.

    Raises:
        OffloadError: the drive, or fio, failed.
    """
    settings = settings_here(path)
    with ScratchFile(path, size_that_fits(path, min(FILE_BYTES, max_write // 8 // MiB * MiB))) as file:
        rig = Rig(file)
        with display.task("writing the test file"), file.open(settings) as queue:
            is_direct = queue.direct
            rig.fill(queue, seconds_max=10)
            warm = rig.run(queue, "mixed", min(WARM_BYTES, max_write // 8), seconds_max=2)
        contestants = _contestants(rig, fio, settings)
        turns = (rounds + 1) * len(contestants)
        left = max_write - rig.written_bytes
        wanted = max(min(warm.gb_per_second * 1e9 * SECONDS, SIZE_BYTES[1]), SIZE_BYTES[0])
        size = int(min(wanted, left / (1.5 * turns)) // MiB * MiB) or MiB
        samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        done = 0
        with display.task(f"{rounds} rounds of {format_bytes(size)}") as advance:
            for round_ in range(rounds + 1):
                for load in LOADS:
                    for name in _rotated(list(contestants), round_):
                        sample = contestants[name](load, size)
                        if round_:
                            samples[name, load].append(sample)
                        done += 1
                        advance(done, turns * len(LOADS))
        by_fio = (len(contestants) - 1) * (rounds + 1) * (size + size // 2)  # of write, and half of mixed
        written = rig.written_bytes + by_fio
    version = fio.version if fio is not None else None
    ordered = {(name, load): samples[name, load] for name in contestants for load in LOADS}
    return Result(path, settings, is_direct, version, rounds, size, written, ordered)


def _contestants(rig: Rig, fio: Fio | None, settings: IoSettings) -> dict[str, Contestant]:
    def ours(load: str, size: int) -> Sample:
        with rig.file.open(settings) as queue:
            return rig.run(queue, load, size, seconds_max=60)

    def peer(engine: str, fio: Fio) -> Contestant:
        return lambda load, size: fio.run(rig.file, engine, settings, load, size)

    found: dict[str, Contestant] = {OURS: ours}
    if fio is not None:
        found.update({f"fio {engine}": peer(engine, fio) for engine in fio.engines})
    return found


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def table(result: Result) -> Iterator[str]:
    """Medians of each contestant at each load."""
    mount = mount_of(result.path)
    yield f"{result.path}: {mount.filesystem} on {mount.source}, {settings_text(result.settings)}"
    if not result.is_direct:
        yield "  warning: direct I/O is refused: this is the page cache"
    elif mount.is_memory:
        yield f"  warning: {mount.filesystem} is memory: this is no drive"
    yield f"  medians of {result.rounds} rounds of {format_bytes(result.size)}, in turns"
    yield ""
    yield f"  {'GB/s':16}" + "".join(f"{load:>10}" for load in LOADS) + f"{'CPU s/GB':>12}"
    for name in result.names:
        rates = "".join(f"{result.rate(name, load):10.2f}" for load in LOADS)
        yield f"  {name:16}{rates}{result.cpu(name, 'mixed'):12.3f}"
    peers = [name for name in result.names if name != OURS]
    if peers:
        shares = (result.rate(OURS, load) / max(result.rate(peer, load) for peer in peers) for load in LOADS)
        yield f"  {'of the best fio':16}" + "".join(f"{100 * share:8.0f} %" for share in shares)
    else:
        yield "  fio is not installed; with it (`apt install fio`) this has a yardstick"


def to_json(result: Result) -> str:
    """The same for programs, with the spread."""
    rows: list[dict[str, Any]] = []
    for (name, load), samples in result.samples.items():
        rates = [sample.gb_per_second for sample in samples]
        rows.append(
            {
                "name": name,
                "load": load,
                "gb_per_second": round(statistics.median(rates), 4),
                "min": round(min(rates), 4),
                "max": round(max(rates), 4),
                "cpu_seconds_per_gb": round(result.cpu(name, load), 5),
            }
        )
    data = {
        "version": 1,
        "path": str(result.path),
        "filesystem": mount_of(result.path).filesystem,
        "direct": result.is_direct,
        "settings": asdict(result.settings),
        "fio": result.fio_version,
        "rounds": result.rounds,
        "bytes": result.size,
        "written_bytes": result.written_bytes,
        "results": rows,
    }
    return json.dumps(data, indent=2)
