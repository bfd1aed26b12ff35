"""CPU optimizer kernels: parameters per second, beside DeepSpeedCPUAdam and torch's fused AdamW.

    python -m benchmarks.adam --millions 100 --peer-python path/to/python/that/has/deepspeed

`offload bench adam`, with DeepSpeed in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from offload.cli import adam_contestants

from .harness import (
    Answer,
    Contestant,
    Server,
    header,
    host,
    make_parser,
    serve,
    table,
    take_turns,
    timed,
)


def of_this_process(contestant: adam_contestants.Contestant) -> Contestant:
    details = {"bytes_per_parameter": contestant.bytes_per_parameter}
    return Contestant(contestant.name, timed(contestant.step), details)


def make_peer(numel: int) -> Callable[[str], Answer]:
    """In the peer's interpreter: one step of the DeepSpeedCPUAdam that is asked for."""
    steps = {name: timed(adam_contestants.deepspeed(name, numel).step) for name in adam_contestants.DEEPSPEED}
    return lambda name: steps[name]()


def peer_contestants(peer: Server) -> list[Contestant]:
    return [
        Contestant(name, partial(peer.step, name), {"bytes_per_parameter": size})
        for name, size in adam_contestants.DEEPSPEED.items()
    ]


def rows(contestants: Sequence[Contestant], numel: int) -> list[dict[str, Any]]:
    from offload.cli import bench_adam

    measured = [
        adam_contestants.Contestant(c.name, c.details["bytes_per_parameter"], c.step, c.seconds)
        for c in contestants
    ]
    return bench_adam.rows(measured, numel)


def as_table(results: Sequence[Mapping[str, Any]]) -> str:
    columns = ["contestant", "median s", "best s", "Gparam/s", "B/param", "GB/s", "of copy", "ratio", "to"]
    cells = (
        [
            row["name"],
            *(f"{row[key]:.4f}" for key in ("median_seconds", "best_seconds")),
            f"{row['gparam_per_s']:.2f}",
            f"{row['bytes_per_parameter']:.4g}",
            f"{row['gb_per_s']:.1f}",
            *(f"{row[key]:.2f}" for key in ("of_copy_bandwidth", "ratio")),
            row["base"],
        ]
        for row in results
    )
    return table(columns, cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--millions", type=float, default=100, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds, after one that is not counted")
    parser.add_argument("--threads", type=int, nargs="*", default=[], help="default: 1 and all")
    parser.add_argument(
        "--isas", nargs="*", default=[], help="default: all vector instruction sets of this machine"
    )
    parser.add_argument("--peer-python", help="an interpreter that can import deepspeed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.serve_peer:
        serve(lambda: make_peer(int(options.millions * 1e6)))
        return 0
    from offload.cli import bench_adam

    request = bench_adam.Request(
        millions=options.millions,
        rounds=options.rounds,
        threads=options.threads,
        isas=options.isas,
        json=options.json,
        quiet=True,
    )
    numel, isas, threads = bench_adam.check(request)
    ours = adam_contestants.ours(numel, isas=isas, threads=threads)
    others = adam_contestants.torch_fused(numel), adam_contestants.copying(numel)
    contestants = [of_this_process(contestant) for contestant in (*ours, *others)]
    with ExitStack() as stack:
        if options.peer_python:
            serving = ["--serve-peer", f"--millions={options.millions}"]
            try:
                peer = stack.enter_context(
                    closing(Server("benchmarks.adam", serving, python=options.peer_python))
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
