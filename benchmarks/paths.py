"""Several swap paths: whether the whole is the sum of its parts.

    python -m benchmarks.paths --swap DIR

Paths are directories under DIR whose queues are slowed down to a given rate by the fault decorator of the I/O core,
so that one drive (or a memory file system) can stand in for several: what is measured is the striping, not a drive.
For each set of rates, chunks of a step's size are read and written as the optimizer does, several in flight, with
shares from weights and with measured ones; the table has the throughput and its ratio to the sum of the rates.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from offload.aio import Queue
from offload.bytesize import MiB
from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.inventory import ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.placement import Placement, SwapPaths
from offload.plan import MemoryPlan
from offload.store import drives
from offload.store.swap import SwapStore

from .harness import make_parser

MB = 1_000_000
RATES = ((200,), (200, 200), (200, 200, 200, 200), (300, 100), (400, 200, 100, 100))
"""MB/s of each path."""
IN_FLIGHT = 3


def plan_of(chunk_bytes: int, chunks: int) -> MemoryPlan:
    params = [ParamInfo("blocks.0.weight", (chunk_bytes // 10 * chunks,), 2, trainable=True)]
    placement = Placement(
        precision="bf16",
        param_home="host",
        state_home="nvme",
        update="step",
        grad_itemsize=2,
        micro_batches=1,
        host_bytes=1 << 40,
        chunk_elements_max=chunk_bytes // 10 // 2048 * 2048,
    )
    return MemoryPlan.build(placement, build_inventory(params, weight_itemsize=2))


def run(root: Path, rates: Sequence[int], *, measured: bool, options: argparse.Namespace) -> float:
    """Bytes per second over all paths, reads and writes together."""
    paths = [root / f"path{index}" for index in range(len(rates))]
    for path in paths:
        path.mkdir(exist_ok=True)
    limit = {str(path): rate * MB for path, rate in zip(paths, rates, strict=True)}

    def slow_queue(path: Path, **settings: object) -> Queue:
        return Queue(path, faults={"bytes_per_second": limit[str(path.parent.parent)]}, **settings)  # type: ignore[arg-type]

    weights = [None if measured else float(rate) for rate in rates]
    swap_paths = tuple(SwapPath(str(path), weight) for path, weight in zip(paths, weights, strict=True))
    names = frozenset(path.path for path in swap_paths)
    plan = plan_of(options.chunk_mib * MiB, options.chunks)
    original, drives.Queue = drives.Queue, slow_queue  # type: ignore[assignment, misc]
    try:
        store = SwapStore.open(SwapPaths(swap_paths, names, names), plan, Aio(), Ledger())
    finally:
        drives.Queue = original  # type: ignore[misc]
    try:
        size = max(plan.chunk_bytes(chunk) for chunk in plan.chunks)
        ring = [torch.zeros(size, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
        for chunk in plan.chunks:
            store.write_state(chunk, ring[0]).wait()
        moved, flying = 0, deque()
        begin = time.perf_counter()
        for index, chunk in enumerate(plan.chunks * 2):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            buffer = ring[index % IN_FLIGHT]
            ticket = store.read_state(chunk, buffer) if index % 2 else store.write_state(chunk, buffer)
            flying.append(ticket)
            moved += plan.chunk_bytes(chunk)
        while flying:
            flying.popleft().wait()
        return moved / (time.perf_counter() - begin)
    finally:
        store.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--swap", default="/dev/shm/offload-paths", help="directory for the paths")
    parser.add_argument("--chunk-mib", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=8)
    options = parser.parse_args(arguments)
    root = Path(options.swap)
    root.mkdir(parents=True, exist_ok=True)
    print("| MB/s of each path | sum | by weight | ratio | measured | ratio |")
    print("|:--|--:|--:|--:|--:|--:|")
    for rates in RATES:
        by_weight, by_measure = (
            run(root, rates, measured=measured, options=options) / MB for measured in (False, True)
        )
        whole = sum(rates)
        print(
            f"| {', '.join(map(str, rates))} | {whole} | {by_weight:.0f} | {by_weight / whole:.3f}"
            f" | {by_measure:.0f} | {by_measure / whole:.3f} |",
            flush=True,
        )
    for path in root.iterdir():
        path.rmdir()
    root.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
