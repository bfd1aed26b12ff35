"""``offload plan``: what a run would need, computed from names and shapes alone.

No torch, unless an accelerator has to be asked for its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import typer

from ..bytesize import format_bytes
from ..config import OffloadConfig
from ..durability import choose_generations
from ..errors import ConfigError
from ..placement import placement_of, refuse_unbuilt
from ..plan import MemoryPlan
from .device import device_free_bytes
from .sources import check_seq, inventory_of, open_source, plan_notes

DRIVE_LIFE_BYTES = 600e12
"""What a consumer drive of 1 TB is warranted to take (600 TBW)."""


def show_plan(
    config_path: Path, model: str, *, steps: int, seq: int, gb_per_second: float | None = None
) -> None:
    """Prints the plan of a run of ``steps`` steps.

    Raises:
        ConfigError, CheckpointError, PlanError: as the run itself would.
    """
    if gb_per_second is not None and not gb_per_second > 0:
        raise ConfigError(f"--gb-per-second must be above 0, got {gb_per_second:g}")
    config = OffloadConfig.from_file(config_path)
    refuse_unbuilt(config)
    batch = config.resolve_batch(1)
    source = open_source(model)
    check_seq(source, seq)
    placement = placement_of(config, device_free_bytes=device_free_bytes(config, is_here=False))
    inventory = inventory_of(config, source, source.shapes(), seq)
    placement, chosen = choose_generations(config, placement, inventory)
    plan = MemoryPlan.build(placement, inventory)
    tokens = batch.train * seq
    typer.echo(
        f"{source.name} with {config_path}:"
        f" {steps} steps of {batch.micro} x {batch.accumulation} sequences of {seq} tokens"
    )
    typer.echo(plan.report())
    for line in (
        *filter(None, [chosen]),
        *plan_notes(plan.inventory),
        *_units(plan),
        *_drive(plan, steps, tokens, gb_per_second),
    ):
        typer.echo(line)


def _units(plan: MemoryPlan) -> Iterator[str]:
    """Every unit; neighbours of equal size share a line."""
    yield "units, in the order of use"
    for (elements, weight_bytes), group in groupby(
        plan.inventory.units, key=lambda unit: (unit.elements, unit.weight_bytes)
    ):
        units = list(group)
        names = units[0].name if len(units) == 1 else f"{len(units)} x {units[0].name} ... {units[-1].name}"
        state = plan.state_bytes(units[:1])
        yield (
            f"  {names}: {elements / 1e6:.2f} M elements, weights {format_bytes(weight_bytes)},"
            f" state {format_bytes(state)}"
        )


def _drive(plan: MemoryPlan, steps: int, tokens: int, gb_per_second: float | None) -> Iterator[str]:
    moved = plan.bytes_moved(steps) + plan.bytes_at_start()
    written = sum(size for (link, _), size in moved.items() if link == "nvme_write")
    if not written:
        return
    yield (
        f"{steps} steps write {written / 1e12:.3f} TB, {written / DRIVE_LIFE_BYTES:.3%} of the life of a"
        f" drive of 600 TBW; such a drive takes {int(DRIVE_LIFE_BYTES / written * steps):,} steps"
    )
    if gb_per_second is not None:
        steady = plan.bytes_moved(4) - plan.bytes_moved(3)
        seconds = steady.total() / (gb_per_second * 1e9)
        yield (
            f"at {gb_per_second:g} GB/s, reads and writes together, a step's I/O takes {seconds:.2f} s,"
            f" {steps} steps' {(moved.total()) / (gb_per_second * 1e9):,.0f} s:"
            f" at most {tokens / seconds:,.0f} tokens/s"
        )
