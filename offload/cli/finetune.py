"""``offload finetune``: everything that can be wrong is looked at first, then `training` does it.

Up to the end of :func:`check` nothing has been created, and torch has not been imported unless there may be an
accelerator to ask for its memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from .. import machine, metrics
from ..config import BatchSizes, OffloadConfig
from ..durability import choose_generations
from ..errors import ConfigError
from ..models.documents import find_files
from ..placement import Placement, placement_of, refuse_unbuilt, swap_paths_of
from ..plan import MemoryPlan
from .commits import SAVE_EVERY, RunRecord, check_record
from .device import device_free_bytes
from .failures import StopSignals
from .memory import limit_hoarding
from .outputs import OutDirectory, check_export
from .progress import make_display
from .sources import CheckpointSource, ModelSource, check_seq, inventory_of, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line, as given."""

    config_path: Path
    model: str
    data: Path
    steps: int
    seq: int
    out: Path | None
    export: Path | None
    field: str
    tokenizer: Path | None
    seed: int
    quiet: bool
    save_every: int = SAVE_EVERY
    resume: bool = False
    restart: bool = False
    previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has been checked."""

    request: Request
    config: OffloadConfig
    """As given, but for the bytes of `memory`, which are numbers: "auto" is asked of the machine once."""
    config_digest: str
    """Of the configuration as given."""
    batch: BatchSizes
    source: ModelSource
    tokenizer: Path | None
    placement: Placement
    out: OutDirectory
    going_on: Path | None
    """The swap directory of the run that is gone on with; None for a new one."""
    generations: str
    """Why there is one generation, or why there are two; empty where the configuration says so."""

    @property
    def record(self) -> RunRecord:
        """Where the run says in which swap directory it is committed."""
        return RunRecord(self.out.path)

    @property
    def tokens_per_step(self) -> int:
        return self.batch.train * self.request.seq


def run(request: Request) -> None:
    """Carries out the command. See ``failures`` for how it ends when it does not succeed."""
    limit_hoarding()
    # Workers that wait for one another by spinning take the cores from the threads that move and update
    # chunks, and from everything else on the machine. Read by libgomp when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with StopSignals() as signals:
        job = check(request)
        _show_warnings()
        display = make_display(quiet=request.quiet, steps_per_line=job.config.steps_per_print)
        if not request.quiet:
            display.say(f"configuration {request.config_path} ({job.config_digest})")
            for line in job.config.describe():
                display.say(f"  {line}")
            for line in _tuned(job.config):
                display.say(line)
            for note in (*job.config.notes, *filter(None, [job.generations])):
                display.say(f"note: {note}")
        import torch  # noqa: F401  # the two seconds it takes are spent when the command is known to make sense

        rss_start_bytes = metrics.rss_bytes()
        from .training import finetune

        finetune(job, display, signals, rss_start_bytes=rss_start_bytes)


def check(request: Request) -> Job:
    """Looks at every argument and computes the plan, from names and shapes.

    Raises:
        ConfigError, CheckpointError, PlanError: what is wrong, and the way out.
    """
    config = OffloadConfig.from_file(request.config_path)
    refuse_unbuilt(config)
    batch = config.resolve_batch(1)
    source = open_source(request.model)
    check_seq(source, request.seq)
    tokenizer = request.tokenizer
    if tokenizer is None and isinstance(source, CheckpointSource):
        tokenizer = source.checkpoint.path
    if tokenizer is not None and not tokenizer.exists():
        raise ConfigError(f"--tokenizer {tokenizer}: does not exist; give a tokenizer.json or its directory")
    if not any(file.size for file in find_files(request.data)):
        raise ConfigError(f"data {request.data} is empty; give a file or folder with text in it")
    out = OutDirectory(request.out or Path("runs", request.config_path.stem))
    going_on = check_record(out.path, resumes=request.resume, restarts=request.restart)
    if request.previous and not request.resume:
        raise ConfigError("--previous says from which commit --resume goes on; give both")
    if request.export is not None:
        check_export(request.export)
    placement = placement_of(config, device_free_bytes=device_free_bytes(config, is_here=True))
    memory = replace(config.memory, host_bytes=placement.host_bytes)
    if placement.device_bytes is not None:
        memory = replace(memory, device_bytes=placement.device_bytes)
    inventory = inventory_of(config, source, source.shapes(), request.seq)
    placement, chosen = choose_generations(config, placement, inventory)
    durability = replace(config.durability, generations=placement.generations)
    if going_on is not None:
        chosen, durability = "", replace(durability, generations=2)
    known = replace(config, memory=memory, durability=durability)
    MemoryPlan.build(placement, inventory)
    return Job(
        request=request,
        config=known,
        config_digest=config.digest(),
        batch=batch,
        source=source,
        tokenizer=tokenizer,
        placement=placement,
        out=out,
        going_on=going_on,
        generations=chosen,
    )


def _tuned(config: OffloadConfig) -> Iterator[str]:
    """What the machine profile fills in."""
    paths = swap_paths_of(config)
    if paths is None:
        return
    settings, weighted = machine.resolve(config.aio, paths.all)
    if settings != config.aio or weighted != paths.all:
        parts = [f"{settings.backend}, block_size {settings.block_size}, queue_depth {settings.queue_depth}"]
        parts += [f"{path.path} has the weight {path.weight:g}" for path in weighted if path.weight]
        yield f"  aio from {machine.profile_path()}: {', '.join(parts)}"


class _WarningLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"warning: {record.getMessage()}", err=True)


def _show_warnings() -> None:
    """The library logs and never prints; what it warns of is for the user of this command."""
    handler = _WarningLines(logging.WARNING)
    logger = logging.getLogger("offload")
    if not any(isinstance(known, _WarningLines) for known in logger.handlers):
        logger.addHandler(handler)
        logger.propagate = False
