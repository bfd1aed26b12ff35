"""What generality costs: the time that hooks and scheduling take of the thread that trains.

    python -m benchmarks.hooks --swap DIR

A model of 100 units with almost nothing to compute, trained plainly and by the engine. Counted are the CPU seconds
of the thread that runs the loop, which are those of Python and of handing out work: not what it waits for, nor what
the threads of the drives and of the kernels do. What the engine takes more than the plain loop is set against a step
of the 217 M GPT of `benchmarks.step`, plain, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload

from . import step as gpt
from .harness import Answer, Contestant, header, host, make_parser, table, take_turns, timed

WIDTH = 8
HOMES = {"cpu": ("cpu", "step"), "nvme": ("nvme", "step"), "nvme, update in backward": ("nvme", "backward")}


class Block(nn.Module):
    """A unit of three modules and five parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Answer]:
    """One step: CPU seconds of this thread, and on the clock."""
    x = torch.ones(1, WIDTH)

    def step() -> Answer:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.thread_time() - cpu_begin}

    return step


def offloaded(stack: ExitStack, units: int, swap: str, name: str) -> Callable[[], Answer]:
    device, update = HOMES[name]
    place = {"device": device, "nvme_path": swap}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": {**place, "update": update},
        },
    }
    model, optimizer = offload.prepare(Blocks(units), config)
    stack.enter_context(closing(optimizer.engine))
    if len(optimizer.engine.plan.inventory.units) != units:
        raise AssertionError("a block is a unit")
    return loop(model, optimizer)


def rows_of(contestants: Sequence[Contestant], gpt_seconds: float) -> list[dict[str, Any]]:
    """Of each its CPU seconds, and how much of a step of the GPT they are beyond those of the first."""
    rows: list[dict[str, Any]] = []
    for contestant in contestants:
        cpu = statistics.median(answer["cpu_seconds"] for answer in contestant.answers)
        more = cpu - rows[0]["cpu_seconds"] if rows else 0.0
        rows.append(
            {
                "name": contestant.name,
                "cpu_seconds": cpu,
                "seconds": contestant.median,
                "more_seconds": more,
                "share_of_gpt_step": more / gpt_seconds,
            }
        )
    return rows


def as_table(rows: Sequence[dict[str, Any]], units: int) -> str:
    columns = [
        "placement",
        "CPU ms a step",
        "more than plain",
        "us per unit",
        "of a step of the GPT",
        "ms a step",
    ]
    cells = (
        [
            row["name"],
            f"{row['cpu_seconds'] * 1e3:.1f}",
            f"{row['more_seconds'] * 1e3:.1f}",
            f"{row['more_seconds'] / units * 1e6:.0f}",
            f"{row['share_of_gpt_step']:.2%}",
            f"{row['seconds'] * 1e3:.1f}",
        ]
        for row in rows
    )
    return table(columns, cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--swap", default="/tmp/offload-swap", help="directory for swap files")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--gpt",
        default="--precision=fp32",
        help="which model of benchmarks.step is compared with: its arguments",
    )
    parser.add_argument("--gpt-rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds and prints the table; see the top of the file."""
    options = parse(arguments)
    Path(options.swap).mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        torch.set_num_threads(1)  # threads that spin between such small operations would be counted as work
        stack.callback(torch.set_num_threads, threads)
        model = Blocks(options.units)
        plain = loop(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        contestants = [Contestant("plain PyTorch", plain)]
        for name in HOMES:
            step = offloaded(stack, options.units, options.swap, name)
            contestants.append(Contestant(name, step))
        take_turns(contestants, options.rounds)
    gpt_options = gpt.parse(options.gpt.split())
    ids = torch.randint(gpt_options.vocabulary, (1, gpt_options.length))
    gpt_step = gpt.plain(gpt_options)
    whole = Contestant("GPT, plain PyTorch", timed(lambda: gpt_step(ids)))
    take_turns([whole], options.gpt_rounds)
    rows = rows_of(contestants, whole.median)
    described = host(options.swap)
    if options.json:
        print(json.dumps({"host": described, "gpt_step_seconds": whole.median, "rows": rows}, indent=1))
    else:
        print(header("python -m benchmarks.hooks", described))
        print(
            f"{options.units} units; a step of the GPT ({options.gpt}), plain, takes {whole.median:.2f} s.\n"
        )
        print(as_table(rows, options.units))
    return 0


if __name__ == "__main__":
    sys.exit(main())
