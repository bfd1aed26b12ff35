"""``offload bench adam``: the CPU optimizer kernel in every format, beside torch's fused AdamW and DeepSpeedCPUAdam.

All take turns, round after round, in one process. Bytes are those read and written by one step; copy bandwidth is that
of ``tensor.copy_``, counted likewise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import typer

from .. import metrics
from ..bytesize import format_bytes
from ..errors import ConfigError
from ..optim import kernels
from .adam_contestants import COPY, DEEPSPEED, TORCH, Contestant, copying, deepspeed, ours, torch_fused
from .progress import make_display

BYTES_PER_PARAMETER: Final = 64
"""Of memory: what all contestants hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line, as given."""

    millions: float
    rounds: int
    threads: Sequence[int]
    isas: Sequence[str]
    json: bool
    quiet: bool


def run(request: Request) -> None:
    """Carries out the command. See ``failures`` for how it ends when it does not succeed."""
    numel, isas, threads = check(request)
    display = make_display(quiet=request.quiet, to_stderr=request.json)
    with display.task("filling the planes"):
        contestants = [*ours(numel, isas=isas, threads=threads), torch_fused(numel), copying(numel)]
        try:
            contestants += [deepspeed(name, numel) for name in DEEPSPEED]
        except ImportError:
            display.say(
                "  deepspeed is not installed here; with it (`pip install deepspeed`) there is a yardstick"
            )
    turns, done = (request.rounds + 1) * len(contestants), 0
    with display.task(f"{request.rounds} rounds of {len(contestants)} contestants") as advance:
        for round_ in range(request.rounds + 1):
            for contestant in contestants:
                begin = time.perf_counter()
                contestant.step()
                if round_:  # the first does not count
                    contestant.seconds.append(time.perf_counter() - begin)
                done += 1
                advance(done, turns)
    found = rows(contestants, numel)
    if request.json:
        typer.echo(
            json.dumps({"version": 1, "parameters": numel, "rounds": request.rounds, "results": found})
        )
        return
    for line in table(found):
        display.say(line)


def check(request: Request) -> tuple[int, list[str], list[int]]:
    """Looks at every argument; gives parameters, instruction sets and thread counts.

    Raises:
        ConfigError: what is wrong, and the way out.
    """
    numel = int(request.millions * 1e6)
    wanted, free = numel * BYTES_PER_PARAMETER, metrics.memory_available_bytes()
    if wanted > free:
        raise ConfigError(
            f"--millions {request.millions:g} needs {format_bytes(wanted)} of memory and {format_bytes(free)} are"
            f" available; use --millions {free // BYTES_PER_PARAMETER // 1_000_000}"
        )
    if unknown := [isa for isa in request.isas if isa not in kernels.isas()]:
        raise ConfigError(f"--isa {unknown[0]}: this machine has {', '.join(kernels.isas())}")
    vector = [isa for isa in kernels.isas() if isa != "scalar"]
    threads = sorted({*request.threads}) or sorted({1, kernels.default_threads()})
    if threads[0] < 1 or threads[-1] > kernels.THREADS_MAX:
        raise ConfigError(f"--threads must be in 1..{kernels.THREADS_MAX}, got {request.threads}")
    return numel, [*request.isas] or vector or ["scalar"], threads


def rows(contestants: Sequence[Contestant], numel: int) -> list[dict[str, Any]]:
    """What was measured, for programs. ``ratio`` is to ``base`` in parameters per second; of whole steps to theirs."""
    by_name = {contestant.name: contestant for contestant in contestants}
    base = by_name.get("DeepSpeedCPUAdam fp32", by_name[TORCH])
    whole = by_name.get("DeepSpeedCPUAdam whole step", base)

    def bandwidth(c: Contestant) -> float:
        return c.bytes_per_parameter * numel / c.median / 1e9

    def row(c: Contestant) -> dict[str, Any]:
        against = whole if "whole step" in c.name else base
        return {
            "name": c.name,
            "median_seconds": c.median,
            "best_seconds": min(c.seconds),
            "gparam_per_s": numel / c.median / 1e9,
            "bytes_per_parameter": c.bytes_per_parameter,
            "gb_per_s": bandwidth(c),
            "of_copy_bandwidth": bandwidth(c) / bandwidth(by_name[COPY]),
            "ratio": against.median / c.median,
            "base": against.name,
        }

    return [row(contestant) for contestant in contestants]


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The same for people."""
    width = max(len(row["name"]) for row in found)
    yield f"  {'':{width}}  median ms  Gparam/s  B/param   GB/s  of copy  ratio"
    for row in found:
        yield (
            f"  {row['name']:{width}}{1e3 * row['median_seconds']:11.1f}{row['gparam_per_s']:10.2f}"
            f"{row['bytes_per_parameter']:9.4g}{row['gb_per_s']:7.1f}{row['of_copy_bandwidth']:9.2f}{row['ratio']:7.2f}"
        )
    yield f"  ratio: parameters per second, to {' or '.join(sorted({row['base'] for row in found}))}"
