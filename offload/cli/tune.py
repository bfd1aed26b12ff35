"""``offload tune``: finds how the swap files on a drive are read and written fastest, and writes it down."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

from .. import aio, machine
from ..bytesize import MiB, format_bytes
from ..config import OffloadConfig
from ..errors import ConfigError
from ..machine import DriveId, IoSettings, Tuned, drive_of
from ..metrics import mount_of
from .failures import Stopped, StopSignals
from .loads import (
    FILE_BYTES,
    LOADS,
    Rig,
    Sample,
    ScratchFile,
    check_directory,
    default_settings,
    max_write_of,
    size_that_fits,
)
from .outputs import check_writable
from .plan import DRIVE_LIFE_BYTES
from .progress import Display, make_display
from .search import ROUNDS, OutOfBudget, Search, candidates
from .tune_output import save_config, save_profile, table, to_json

DEFAULT_SECONDS = 25.0
"""For each path: with what comes before and after it, less than 30."""
ALL_SECONDS = 54.0
"""For all paths together."""
SECONDS_MIN = 1.0
FILL_SHARE = 0.15
"""Of the time, for the first pass over the file."""
SEARCH_SHARE = 0.7
"""Of the time, at least, for the search itself."""
TRIAL_BYTES = (32 * MiB, 256 * MiB)
"""Least and most of one measurement: with less, what is in flight at its end counts too much."""
WEIGH_SECONDS = 1.5
WEIGH_FILE_BYTES = 256 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line, as given."""

    paths: tuple[Path, ...]
    config: Path | None
    plot: Path | None
    max_write: str
    seconds: float | None
    quiet: bool
    json: bool


@dataclass
class Outcome:
    """What was found out about one drive."""

    path: Path
    drive: DriveId
    best: IoSettings
    search: Search
    is_direct: bool
    is_memory: bool
    seconds: float = 0.0
    written_bytes: int = 0
    cores_per_gb: float = 0.0
    """CPU seconds for each GB, of the best settings at the mixed load."""
    weight: float = 0.0
    """GB/s at the mixed load, with all drives at work at once."""

    @property
    def is_drive(self) -> bool:
        """Whether what was measured was a drive: not memory, and not the page cache."""
        return self.is_direct and not self.is_memory

    def tuned(self) -> Tuned:
        """As the machine profile keeps it."""
        rates = {load: round(self.search.median(self.best, load) or 0.0, 3) for load in LOADS}
        return Tuned(
            self.drive, str(self.path), self.best, rates, round(self.weight, 3), time.strftime("%Y-%m-%d")
        )


@dataclass
class _Budget:
    """What a search may still use."""

    deadline: float
    write_bytes: int
    samples: dict[tuple[IoSettings, str], list[Sample]] = field(default_factory=dict)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


def run(request: Request) -> None:
    """Carries out the command. See ``failures`` for how it ends when it does not succeed."""
    max_write, paths = check(request)
    display = make_display(quiet=request.quiet, to_stderr=request.json)
    with StopSignals():
        try:
            outcomes = _tune_all(request, paths, max_write, display)
        except Stopped as stopped:
            display.say(f"stopped by {stopped.name}: the test file is gone, and no setting was changed")
            raise
    for line in table(outcomes):
        display.say(line)
    saved = save_config(request.config, outcomes) if request.config else save_profile(outcomes)
    for line in saved:
        display.say(line)
    if request.plot is not None:
        from .tune_plot import draw

        draw(outcomes, request.plot)
        display.say(f"picture: {request.plot}")
    if request.json:
        typer.echo(to_json(outcomes))


def check(request: Request) -> tuple[int, list[Path]]:
    """Looks at every argument before anything is written: the bytes that may be, and one path for each drive.

    Raises:
        ConfigError: what is wrong, and the way out.
    """
    max_write = max_write_of(request.max_write)
    if request.seconds is not None and not request.seconds >= SECONDS_MIN:
        raise ConfigError(f"--seconds {request.seconds:g}: at least {SECONDS_MIN:g} is needed")
    paths = list(request.paths)
    if request.config is not None:
        paths = paths or _paths_in(request.config)
        _check_config(request.config)
    elif (profile := machine.profile_path()) is None:
        raise ConfigError(
            f"there is no machine profile ({machine.ENVIRONMENT} is off, or no home directory): nowhere to write"
            " the result; give --config FILE"
        )
    else:
        check_writable(profile.parent, "the machine profile in")
    if not paths:
        raise ConfigError("no path: give directories on the drives, or --config FILE that names some")
    if request.plot is not None:
        from .tune_plot import check_plot

        check_plot(request.plot)
    by_drive: dict[DriveId, Path] = {}
    for path in paths:
        path = path.expanduser()
        check_directory(path)
        size_that_fits(path, FILE_BYTES)
        by_drive.setdefault(drive_of(path), path)
    return max_write, list(by_drive.values())


def _paths_in(config: Path) -> list[Path]:
    """The swap paths that a configuration names."""
    if not config.exists():
        return []
    zero = OffloadConfig.from_file(config).zero_optimization
    named = (*zero.offload_param.nvme_path, *zero.offload_optimizer.nvme_path)
    return [Path(path.path) for path in dict.fromkeys(named)]


def _check_config(config: Path) -> None:
    if config.exists():
        OffloadConfig.from_file(config)
        check_writable(Path(os.path.realpath(config)).parent, "--config")
    elif not config.absolute().parent.is_dir():
        raise ConfigError(f"--config {config}: {config.absolute().parent} is not a directory")


def _tune_all(request: Request, paths: Sequence[Path], max_write: int, display: Display) -> list[Outcome]:
    seconds = request.seconds or min(DEFAULT_SECONDS, ALL_SECONDS / len(paths))
    outcomes = []
    for path in paths:
        for line in _announce(path, max_write, seconds):
            display.say(line)
        # With several paths a part is kept for `weigh`.
        for_search = max_write if len(paths) == 1 else max_write * 3 // 4
        outcomes.append(tune_path(path, display, seconds=seconds, max_write=for_search))
    if len(outcomes) > 1:
        with display.task("all paths at once"):
            weigh(outcomes, max_write)
    return outcomes


def _announce(path: Path, max_write: int, seconds: float) -> Iterator[str]:
    """What will be done to the drive, before it is."""
    mount, drive = mount_of(path), drive_of(path)
    model = f" ({drive.model})" if drive.model else ""
    yield f"{path}: {mount.filesystem} on {mount.source}{model}"
    if mount.is_memory:
        yield f"  warning: {mount.filesystem} is memory; what is measured is RAM, and is not saved"
        return
    yield (
        f"  will write at most {format_bytes(max_write)}, {100 * max_write / DRIVE_LIFE_BYTES:.2g} % of the"
        f" life of a 600 TBW drive, in {seconds:.0f} s"
    )


def tune_path(path: Path, display: Display, *, seconds: float, max_write: int) -> Outcome:
    """Searches the settings for one drive.

    Raises:
        StoreError: the drive refused.
    """
    begin = time.monotonic()
    budget = _Budget(begin + seconds, max_write)
    default = default_settings(_backends()[0])
    size = size_that_fits(path, min(FILE_BYTES, max_write // 8 // MiB * MiB))
    with ScratchFile(path, size) as file:
        rig = Rig(file)
        with display.task("  writing the test file"), file.open(default) as queue:
            is_direct = queue.direct
            rig.fill(queue, seconds_max=FILL_SHARE * seconds)
            # Once before anything counts: pages, the drive and its queue are warm then.
            warm_bytes = min(TRIAL_BYTES[0], max_write // 8)
            warm = rig.run(queue, "mixed", warm_bytes, seconds_max=0.05 * seconds)
        if not is_direct:
            display.say(
                "  warning: direct I/O is refused: what is measured is the page cache, and is not saved"
            )
        # Where the file took long (a busy machine, a slow drive), the search still has its time.
        budget.deadline = max(budget.deadline, time.monotonic() + SEARCH_SHARE * seconds)
        settings = candidates(_backends())
        trial_bytes = _trial_bytes(budget, rig, warm, len(settings))

        def measure(one: IoSettings, load: str) -> float:
            writes = {"read": 0, "write": trial_bytes, "mixed": trial_bytes // 2}[load]
            if budget.seconds_left() <= 0 or rig.written_bytes + writes > budget.write_bytes:
                raise OutOfBudget
            with file.open(one) as queue:
                sample = rig.run(queue, load, trial_bytes, seconds_max=max(budget.seconds_left(), 0.1))
            budget.samples.setdefault((one, load), []).append(sample)
            return sample.gb_per_second

        with display.search() as show:
            search = Search(settings, default, measure, seconds_left=budget.seconds_left, show=show)
            search.expect(trial_bytes / max(warm.gb_per_second * 1e9, 1.0))
            best = search.run()
        written = rig.written_bytes
    mixed = budget.samples.get((best, "mixed"), [warm])
    return Outcome(
        path=path,
        drive=drive_of(path),
        best=best,
        search=search,
        is_direct=is_direct,
        is_memory=mount_of(path).is_memory,
        seconds=time.monotonic() - begin,
        written_bytes=written,
        cores_per_gb=sum(sample.cores_per_gb for sample in mixed) / len(mixed),
        weight=search.median(best, "mixed") or warm.gb_per_second,
    )


def _backends() -> list[str]:
    """Those to choose among: the one in Python is for machines where the others cannot be built."""
    usable = aio.backends()
    return [name for name in usable if name != "python"] or usable


def _trial_bytes(budget: _Budget, rig: Rig, warm: Sample, settings: int) -> int:
    """Of each measurement, such that all of them fit the time and the writes."""
    trials = sum(round_.trials(settings) for round_ in ROUNDS)
    writes = sum(
        round_.trials(settings)
        / len(round_.loads)
        * sum({"read": 0.0, "write": 1.0, "mixed": 0.5}[load] for load in round_.loads)
        for round_ in ROUNDS
    )
    in_time = warm.gb_per_second * 1e9 * budget.seconds_left() / trials
    low, high = TRIAL_BYTES
    allowed = (budget.write_bytes - rig.written_bytes) / writes
    return int(max(min(max(in_time, low), high, allowed), MiB) // MiB * MiB)


def weigh(outcomes: Sequence[Outcome], max_write: int) -> None:
    """Measures all drives at work at once, as a step uses them: what they share, they share here too.

    Args:
        max_write: to each drive, what the search has written included.

    Raises:
        StoreError: a drive refused.
    """
    failures: list[BaseException] = []

    def work(outcome: Outcome, rig: Rig) -> None:
        try:
            with rig.file.open(outcome.best) as queue:
                left = max_write - outcome.written_bytes - rig.written_bytes
                sample = rig.run(queue, "mixed", 2 * left, seconds_max=WEIGH_SECONDS)
                outcome.weight = sample.gb_per_second
        except BaseException as error:  # told of in the main thread
            failures.append(error)

    rigs = []
    try:
        for outcome in outcomes:
            size = min(WEIGH_FILE_BYTES, (max_write - outcome.written_bytes) // 4 // MiB * MiB)
            file = ScratchFile(outcome.path, size_that_fits(outcome.path, size))
            rigs.append(Rig(file))
            with file.open(outcome.best) as queue:
                rigs[-1].fill(queue, seconds_max=1.0)
        threads = [
            threading.Thread(target=work, args=pair, daemon=True) for pair in zip(outcomes, rigs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for outcome, rig in zip(outcomes, rigs, strict=False):
            outcome.written_bytes += rig.written_bytes
            rig.file.close()
    if failures:
        raise failures[0]
