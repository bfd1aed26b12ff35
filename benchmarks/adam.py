"""CPU optimizer kernels: parameters per second, beside DeepSpeedCPUAdam and torch's fused AdamW.

    python -m benchmarks.adam --millions 100 --peer-python path/to/python/that/has/deepspeed

The peer runs in its own interpreter. Copy bandwidth is that of ``tensor.copy_``, counted as bytes read + written.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from .harness import Answer, Contestant, Server, header, host, serve, table, take_turns, timed

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def contestant(name: str, bytes_per_parameter: float, step: Callable[[], Answer]) -> Contestant:
    """Bytes are those read and written."""
    return Contestant(name, step, {"bytes_per_parameter": bytes_per_parameter})


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

    bf16_grad, fp32_grad = filled(torch.bfloat16), filled(torch.float32)
    bf16, fp32, residual = filled(torch.bfloat16), filled(torch.float32), zeros(torch.int16)
    fp32_moments = {name: zeros(torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    bf16_moments = {name: zeros(torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    codes = {
        "exp_avg": zeros(torch.int8),
        "exp_avg_sq": zeros(torch.uint8),
        "scale": allocate(2 * -(-numel // kernels.STATE_BLOCK), torch.float32, options.huge_pages),
    }
    split = {"weight": bf16, "residual": residual}
    formats = {
        "bf16": {**split, **fp32_moments, "grad": bf16_grad},
        "bf16, fp32 grad": {**split, **fp32_moments, "grad": fp32_grad},
        "bf16, bf16 state": {**split, **bf16_moments, "grad": bf16_grad},
        "bf16, int8 state": {**split, "residual": zeros(torch.int8), **codes, "grad": bf16_grad},
        "fp32": {"weight": fp32, "residual": None, **fp32_moments, "grad": fp32_grad},
        "fp32, bf16 state": {"weight": fp32, "residual": None, **bf16_moments, "grad": fp32_grad},
    }
    for threads in options.threads or sorted({1, kernels.default_threads()}):
        where = f"{threads} thread" + "s" * (threads > 1)
        for isa in options.isas or [isa for isa in kernels.isas() if isa != "scalar"] or ["scalar"]:
            for name, planes in formats.items():
                written = sum(p.nbytes for p in planes.values() if p is not None) - planes["grad"].nbytes
                yield contestant(
                    f"offload {name} {isa} {where}",
                    (2 * written + planes["grad"].nbytes) / numel,
                    timed(
                        lambda planes=planes, threads=threads, isa=isa: kernels.adam(
                            **planes, step=10, **HYPER, threads=threads, isa=isa
                        )
                    ),
                )
            yield contestant(
                f"offload norm bf16 {isa} {where}",
                2,
                timed(
                    lambda threads=threads, isa=isa: kernels.sum_of_squares(
                        bf16_grad, threads=threads, isa=isa
                    )
                ),
            )
    source, target = filled(torch.float32), zeros(torch.float32)
    yield contestant("copy", 8, timed(lambda: target.copy_(source)))


# ---- peers ----


def torch_fused(numel: int) -> Contestant:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"], fused=True)
    return contestant("torch AdamW fused fp32", 28, timed(optimizer.step))


PEERS = {"DeepSpeedCPUAdam fp32": torch.float32, "DeepSpeedCPUAdam bf16 params": torch.bfloat16}


def make_peer(numel: int) -> Callable[[str], Answer]:
    """In the peer's interpreter: one step of the DeepSpeedCPUAdam that is asked for."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    steps = {}
    for name, dtype in PEERS.items():
        param = torch.nn.Parameter(torch.randn(numel, dtype=dtype))
        param.grad = torch.randn(numel, dtype=dtype)
        optimizer = DeepSpeedCPUAdam([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])
        steps[name] = timed(optimizer.step)
    return lambda name: steps[name]()


def peer_contestants(peer: Server) -> Iterator[Contestant]:
    """Parameter and moments both ways, gradient read; with bf16 parameters its moments are bf16 too."""
    for name, dtype in PEERS.items():
        yield contestant(name, 7 * dtype.itemsize, lambda name=name: peer.step(name))


# ---- report ----


def rows(contestants: Sequence[Contestant], numel: int) -> list[dict[str, Any]]:
    by_name = {contestant.name: contestant for contestant in contestants}
    base = by_name.get("DeepSpeedCPUAdam fp32") or by_name["torch AdamW fused fp32"]

    def rate(c: Contestant) -> float:
        return c.details["bytes_per_parameter"] * numel / c.median / 1e9

    return [
        {
            "name": c.name,
            "median_seconds": c.median,
            "best_seconds": min(c.seconds),
            "gparam_per_s": numel / c.median / 1e9,
            "bytes_per_parameter": c.details["bytes_per_parameter"],
            "gb_per_s": rate(c),
            "of_copy_bandwidth": rate(c) / rate(by_name["copy"]),
            "ratio": base.median / c.median,
            "base": base.name,
        }
        for c in contestants
    ]


def as_table(results: Sequence[dict[str, Any]]) -> str:
    columns = ["contestant", "median s", "best s", "Gparam/s", "B/param", "GB/s", "of copy"]
    cells = (
        [
            row["name"],
            *(f"{row[key]:.4f}" for key in ("median_seconds", "best_seconds")),
            f"{row['gparam_per_s']:.2f}",
            f"{row['bytes_per_parameter']:.4g}",
            f"{row['gb_per_s']:.1f}",
            *(f"{row[key]:.2f}" for key in ("of_copy_bandwidth", "ratio")),
        ]
        for row in results
    )
    return table([*columns, f"x {results[0]['base']}"], cells)


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
        serve(lambda: make_peer(numel))
        return 0
    with ExitStack() as stack:
        contestants = [*our_contestants(numel, options), torch_fused(numel)]
        if options.peer_python:
            arguments = ["--serve-peer", f"--millions={options.millions}"]
            try:
                peer = stack.enter_context(
                    closing(Server("benchmarks.adam", arguments, python=options.peer_python))
                )
                peer.wait_ready()
                contestants += peer_contestants(peer)
            except RuntimeError as error:
                print(f"no peer: {error}", file=sys.stderr)
        take_turns(contestants, options.rounds)
    results = rows(contestants, numel)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "serve_peer"}
        print(json.dumps({"host": host(), "settings": settings, "rows": results}, indent=2))
    else:
        print(header(f"python -m benchmarks.adam --millions {options.millions:g}", host()))
        print(as_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
