"""What a run ends with: a table for people and report.json for programs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__, metrics
from ..bytesize import format_bytes
from ..ledger import Ledger
from ..plan import MemoryPlan
from .progress import clock

MIXED_PRECISION_BYTES = 8
"""Of a parameter as it is usually held, beside 4 for each moment: 4 fp32 master, 2 weight, 2 gradient."""
LOSS_STEPS = 5
"""``loss_first`` and ``loss_last`` are means of so many steps."""
RSS_SHARE = 1.1
"""Peak memory may be this much of the plan, beside the interpreter."""


@dataclass
class Account:
    """What the command itself saw of a run."""

    steps: int
    tokens_per_step: int
    rss_start_bytes: int
    """Resident memory once torch was imported and nothing else was done."""
    losses: list[float]
    seconds: float = 0.0
    """From the first forward to the end of the last step."""
    storage_bytes: tuple[int, int] = (0, 0)
    """Read from and written to storage in the steps, by the kernel's count: a check of the ledger."""
    stopped_by: str | None = None
    """What ended the run early: a signal or an error."""
    first_step: int = 0
    """Steps that were made before, by processes that are gone on from."""


def build_report(account: Account, plan: MemoryPlan, ledger: Ledger, about: dict[str, Any]) -> dict[str, Any]:
    """Everything that report.json holds; ``about`` says what was run."""
    inventory, losses = plan.inventory, account.losses
    tokens = len(losses) * account.tokens_per_step
    host_bytes = plan.bytes_total("host")
    moved = ledger.to_dict()
    return {
        **about,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"offload": __version__, "python": platform.python_version(), **_versions()},
        "host": {"system": platform.platform(), "cpus": len(os.sched_getaffinity(0))},
        "interrupted": account.stopped_by is not None,
        "stopped_by": account.stopped_by,
        "parameters": inventory.parameters,
        "trainable_parameters": inventory.trainable_parameters,
        "state_bytes": (MIXED_PRECISION_BYTES + 4 * len(plan.placement.moments)) * inventory.parameters,
        "rule": plan.placement.rule,
        "state_format": plan.placement.state_format,
        "host_bytes": host_bytes,
        "host_budget_bytes": plan.placement.host_bytes,
        "nvme_bytes": plan.bytes_total("nvme"),
        "rss_start_bytes": account.rss_start_bytes,
        "rss_peak_bytes": metrics.rss_peak_bytes(),
        "rss_allowed_bytes": int(RSS_SHARE * host_bytes) + account.rss_start_bytes,
        "loss_first": _mean(losses[:LOSS_STEPS]),
        "loss_last": _mean(losses[-LOSS_STEPS:]),
        "loss_first_step": losses[0] if losses else None,
        "loss_last_step": losses[-1] if losses else None,
        "losses": losses,
        "steps": ledger.steps,
        "steps_asked": account.steps,
        "resumed_after_step": account.first_step,
        "skipped_steps": ledger.skipped_steps,
        "seconds": round(account.seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / account.seconds, 3) if account.seconds else None,
        "storage_read_bytes": account.storage_bytes[0],
        "storage_written_bytes": account.storage_bytes[1],
        **{key: moved[key] for key in ("links", "planes", "predicted", "setup", "stalls")},
    }


def _versions() -> dict[str, str]:
    import numpy
    import torch

    return {"torch": torch.__version__, "numpy": numpy.__version__}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines."""
    yield f"{report['steps']} steps in {clock(report['seconds'])}" + (
        f", {report['tokens_per_second']:,.0f} tokens/s" if report["tokens_per_second"] else ""
    )
    if report["skipped_steps"]:
        yield f"  {report['skipped_steps']} steps refused: a gradient was not finite"
    if report["losses"]:
        count = min(LOSS_STEPS, len(report["losses"]))
        yield (
            f"  loss         {report['loss_first']:.4f} -> {report['loss_last']:.4f}"
            f" (means of the first and last {count} steps)"
        )
    peak, allowed = report["rss_peak_bytes"], report["rss_allowed_bytes"]
    yield (
        f"  peak memory  {format_bytes(peak)}; planned {format_bytes(report['host_bytes'])} + 10 %"
        f" + interpreter {format_bytes(report['rss_start_bytes'])} = {format_bytes(allowed)}"
        + (f": {format_bytes(peak - allowed)} ABOVE THE PLAN" if peak > allowed else "")
    )
    yield from _bytes_table(report)
    stalls = {cause: seconds for cause, seconds in report["stalls"].items() if seconds >= 0.0005}
    if stalls:
        waited = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in stalls.items())
        share = sum(stalls.values()) / report["seconds"] if report["seconds"] else 0.0
        yield f"  stalls       {waited}: {share:.0%} of the time"


def _bytes_table(report: dict[str, Any]) -> Iterator[str]:
    measured, predicted = report["planes"], report["predicted"]
    keys = sorted({*measured, *predicted})
    if not keys:
        return
    yield f"  {'link':11} {'plane':11} {'moved':>10} {'predicted':>10}"
    for key in keys:
        link, _, plane = key.partition(".")
        moved, expected = measured.get(key, 0), predicted.get(key, 0)
        line = f"  {link:11} {plane:11} {format_bytes(moved):>10} {format_bytes(expected):>10}"
        # an interrupted step moves bytes that no whole number of steps accounts for
        differs = moved != expected and not report["interrupted"] and plane != "commit"
        yield line + (f"  differs by {moved - expected:+,} bytes" if differs else "")
    for link, numbers in report["links"].items():
        if rate := numbers["gb_per_second"]:
            yield f"  {link:11} {rate:.2f} GB/s while busy, {numbers['seconds']:.1f} s busy"
