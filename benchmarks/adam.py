"""CPU optimizer kernels: parameters per second, beside DeepSpeedCPUAdam and torch's fused AdamW.

    python -m benchmarks.adam --millions 100 --peer-python path/to/python/that/has/deepspeed

Contestants take turns, one step each, round after round, so that a busy neighbour or a change of clock meets
all of them; medians over the rounds are compared, and the best shows what a quiet machine would give. The
peer runs in its own interpreter as a server that makes one step per line on its standard input. Copy
bandwidth is that of ``tensor.copy_``, counted as bytes read + written.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
REPLY = "seconds "  # starts the peer's answers; its libraries print too


@dataclass
class Contestant:
    name: str
    bytes_per_parameter: int  # read + written
    run: Callable[[], float]  # one step; returns its seconds
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def timed(step: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


# ---- ours ----


def allocate(numel: int, dtype: torch.dtype, huge_pages: bool) -> torch.Tensor:
    """Zeroed memory, on huge pages where the system has them: the engine's slabs are allocated like this."""
    memory = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel).zero_()


def our_contestants(numel: int, options: argparse.Namespace) -> Iterator[Contestant]:
    from offload.optim import kernels

    def filled(dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype, options.huge_pages).normal_()

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype, options.huge_pages)

    m, v = zeros(torch.float32), zeros(torch.float32)
    bf16_grad, fp32_grad = filled(torch.bfloat16), filled(torch.float32)
    formats = {
        "bf16": (filled(torch.bfloat16), zeros(torch.int16), m, v, bf16_grad),
        "bf16, fp32 grad": (filled(torch.bfloat16), zeros(torch.int16), m, v, fp32_grad),
        "fp32": (filled(torch.float32), None, m, v, fp32_grad),
    }
    for threads in options.threads or sorted({1, kernels.default_threads()}):
        where = f"{threads} thread" + "s" * (threads > 1)
        for isa in options.isas or [isa for isa in kernels.isas() if isa != "scalar"] or ["scalar"]:
            for name, planes in formats.items():
                written = sum(plane.itemsize for plane in planes[:-1] if plane is not None)
                yield Contestant(
                    f"offload {name} {isa} {where}",
                    2 * written + planes[-1].itemsize,
                    timed(
                        lambda planes=planes, threads=threads, isa=isa: kernels.adam(
                            *planes, step=10, **HYPER, threads=threads, isa=isa
                        )
                    ),
                )
            yield Contestant(
                f"offload norm bf16 {isa} {where}",
                2,
                timed(
                    lambda threads=threads, isa=isa: kernels.sum_of_squares(
                        bf16_grad, threads=threads, isa=isa
                    )
                ),
            )
    source, target = filled(torch.float32), zeros(torch.float32)
    yield Contestant("copy", 8, timed(lambda: target.copy_(source)))


# ---- peers ----


def torch_fused(numel: int) -> Contestant:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"], fused=True)
    return Contestant("torch AdamW fused fp32", 28, timed(optimizer.step))


def serve_peer(numel: int) -> None:
    """In the peer's interpreter: one step of DeepSpeedCPUAdam per line read."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    steps = []
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.randn(numel, dtype=dtype))
        param.grad = torch.randn(numel, dtype=dtype)
        steps.append(
            timed(DeepSpeedCPUAdam([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"]).step)
        )
    for line in sys.stdin:
        print(f"{REPLY}{steps[int(line)]()}", flush=True)


@contextmanager
def peer_contestants(python: str, numel: int) -> Iterator[list[Contestant]]:
    """DeepSpeedCPUAdam with fp32 and with bf16 parameters; nothing where it cannot be imported."""
    tools = (
        f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}"  # its compiler driver is there
    )
    environment = {**os.environ, "PATH": tools, "DS_ACCELERATOR": "cpu"}
    found = subprocess.run(
        [python, "-c", "import deepspeed"], env=environment, capture_output=True, check=False
    )
    if found.returncode != 0:
        print(f"no peer: {python} cannot import deepspeed", file=sys.stderr)
        yield []
        return
    command = [python, __file__, "--serve-peer", "--millions", str(numel / 1e6)]
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:

        def step(index: int) -> float:
            if server.stdin is None or server.stdout is None:
                raise AssertionError("the peer was started without pipes")
            server.stdin.write(f"{index}\n")
            server.stdin.flush()
            for line in server.stdout:
                if line.startswith(REPLY):
                    return float(line[len(REPLY) :])
            raise RuntimeError("the peer ended without an answer; run it by hand with --serve-peer")

        # Parameter and moments both ways, gradient read; with bf16 parameters its moments are bf16 too.
        yield [
            Contestant("DeepSpeedCPUAdam fp32", 28, lambda: step(0)),
            Contestant("DeepSpeedCPUAdam bf16 params", 14, lambda: step(1)),
        ]
        if server.stdin is not None:
            server.stdin.close()


# ---- report ----


def rows(contestants: Sequence[Contestant], numel: int) -> list[dict[str, Any]]:
    by_name = {contestant.name: contestant for contestant in contestants}
    copy_rate = by_name["copy"].bytes_per_parameter / by_name["copy"].median
    base = by_name.get("DeepSpeedCPUAdam fp32") or by_name["torch AdamW fused fp32"]
    return [
        {
            "name": c.name,
            "median_seconds": c.median,
            "best_seconds": min(c.seconds),
            "gparam_per_s": numel / c.median / 1e9,
            "bytes_per_parameter": c.bytes_per_parameter,
            "gb_per_s": c.bytes_per_parameter * numel / c.median / 1e9,
            "of_copy_bandwidth": c.bytes_per_parameter / c.median / copy_rate,
            "ratio": base.median / c.median,
            "base": base.name,
        }
        for c in contestants
    ]


def print_table(table: list[dict[str, Any]]) -> None:
    base = table[0]["base"]
    print(f"| {'contestant':38} | median s | best s | Gparam/s | B/param | GB/s | of copy | x {base} |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for row in table:
        seconds = f"{row['median_seconds']:8.4f} | {row['best_seconds']:6.4f}"
        rates = f"{row['gparam_per_s']:8.2f} | {row['bytes_per_parameter']:7d} | {row['gb_per_s']:4.1f}"
        ratios = f"{row['of_copy_bandwidth']:7.2f} | {row['ratio']:.2f}"
        print(f"| {row['name']:38} | {seconds} | {rates} | {ratios} |")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=float, default=100, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds, after one that is not counted")
    parser.add_argument("--threads", type=int, nargs="*", help="default: 1 and all")
    parser.add_argument("--isas", nargs="*", help="default: all vector instruction sets of this machine")
    parser.add_argument(
        "--huge-pages", action=argparse.BooleanOptionalAction, default=True, help="for our planes"
    )
    parser.add_argument("--peer-python", help="an interpreter that can import deepspeed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    numel = int(options.millions * 1e6)
    if options.serve_peer:
        serve_peer(numel)
        return 0
    with ExitStack() as stack:
        contestants = [*our_contestants(numel, options), torch_fused(numel)]
        if options.peer_python:
            contestants += stack.enter_context(peer_contestants(options.peer_python, numel))
        for round_ in range(options.rounds + 1):
            for contestant in contestants:
                seconds = contestant.run()
                if round_ > 0:
                    contestant.seconds.append(seconds)
    table = rows(contestants, numel)
    if options.json:
        host = {"machine": platform.machine(), "system": platform.release(), "cpus": os.cpu_count()}
        settings = {key: value for key, value in vars(options).items() if key != "serve_peer"}
        print(
            json.dumps(
                {"host": host, "torch": torch.__version__, "settings": settings, "rows": table}, indent=2
            )
        )
    else:
        print_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
