"""Reads, writes and both at once on one path: the I/O core beside fio and DeepSpeed's aio handle, in turns.

    python -m benchmarks.io --path DIR --peer-python path/to/python/that/has/deepspeed --results

Everybody moves the same bytes of one file with direct I/O, in transfers of a step's size, several in flight:

- offload: every backend that works here, at several depths and request sizes; four transfers are pending;
- fio, where it is installed: its engines io_uring and libaio, at several depths and block sizes, with its
  buffers on huge pages like ours (glibc 2.35 or newer), without which it has half the speed;
- deepspeed, in the peer's interpreter: a handle for reads and one for writes, all transfers pending.

Mixed is half reads of one half of the file, half writes of the other. CPU time is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .harness import Answer, Contestant, Server, header, host, make_parser, serve, table, take_turns

MiB = 1 << 20
LOADS = ("read", "write", "mixed")
PENDING = 4
"""Transfers that we keep pending: chunks of a step."""
SHAPES = ((32, 1), (8, 4), (4, 16))
"""Depth and MiB of a request, of ours and of fio."""
PEER_SHAPES = ((1, 32, 1), (1, 32, 2), (8, 32, 2))
"""MiB of a block, depth and threads of DeepSpeed's handle."""
RESULTS = Path(__file__).parent / "results" / "io.md"
MARK = "<!-- tables below are written by `python -m benchmarks.io --results` -->\n"


@dataclass(frozen=True)
class Cell:
    """What everybody does in one comparison."""

    load: str
    chunk: int
    size: int

    def transfers(self) -> Iterator[tuple[str, int]]:
        """(operation, offset) of each transfer, in order."""
        for index in range(self.size // self.chunk):
            operation = ("read", "write")[index % 2] if self.load == "mixed" else self.load
            # Mixed: reads from the first half of the file, writes to the second, each in order.
            place = index // 2 + index % 2 * (self.size // self.chunk // 2) if self.load == "mixed" else index
            yield operation, place * self.chunk


def measured(move: Callable[[], None]) -> Answer:
    """Time on the clock, and CPU time of this process, the kernel's threads for its I/O included."""
    cpu, begin = time.process_time(), time.perf_counter()
    move()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "cpu": time.process_time() - cpu}


# ---- ours ----


def slab(size: int) -> np.ndarray:
    """Memory like that of the engine's slabs: private, and on huge pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = 1
    return array


def our_contestants(file: Path, cell: Cell, stack: ExitStack) -> Iterator[Contestant]:
    from offload import aio

    buffers = [slab(cell.chunk) for _ in range(PENDING)]
    for backend in aio.backends():
        for depth, request in SHAPES:
            threads = min(depth, 8)
            queue = stack.enter_context(
                aio.Queue(
                    file, backend=backend, queue_depth=depth, request_bytes=request * MiB, threads=threads
                )
            )
            shape = f"{threads} threads" if backend == "threads" else f"{depth}"
            yield Contestant(
                f"offload {backend} {shape} x {request} MiB",
                lambda queue=queue: measured(lambda: move_ours(queue, cell, buffers)),
            )


def move_ours(queue: Any, cell: Cell, buffers: Sequence[np.ndarray]) -> None:
    pending: deque[Any] = deque()
    for index, (operation, offset) in enumerate(cell.transfers()):
        if len(pending) == len(buffers):
            pending.popleft().wait()
        transfer = queue.read if operation == "read" else queue.write
        pending.append(transfer(buffers[index % len(buffers)], offset))
    for ticket in pending:
        ticket.wait()


# ---- fio ----


def fio_contestants(file: Path, cell: Cell) -> Iterator[Contestant]:
    for engine in ("io_uring", "libaio"):
        for depth, block in SHAPES:
            yield Contestant(
                f"fio {engine} {depth} x {block} MiB",
                lambda engine=engine, depth=depth, block=block: run_fio(file, cell, engine, depth, block),
            )


def run_fio(file: Path, cell: Cell, engine: str, depth: int, block_mib: int) -> Answer:
    kind = "rw" if cell.load == "mixed" else cell.load
    command = [
        "fio", "--name=job", f"--filename={file}", f"--size={cell.size}", f"--io_size={cell.size}",
        f"--rw={kind}", f"--bs={min(block_mib * MiB, cell.chunk)}", f"--iodepth={depth}",
        f"--ioengine={engine}", "--direct=1", "--allow_file_create=0", "--output-format=json",
    ]  # fmt: skip
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"seconds": seconds * cell.size / moved, "cpu": cpu * cell.size / moved}


# ---- the peer ----


def peer_contestants(peer: Server, cell: Cell) -> Iterator[Contestant]:
    for block, depth, threads in PEER_SHAPES:
        words = f"{cell.load} {cell.chunk} {cell.size} {block} {depth} {threads}"
        yield Contestant(
            f"deepspeed {threads} threads, {depth} x {block} MiB", lambda words=words: peer.step(words)
        )


def make_peer(file: Path) -> Callable[[str], Answer]:
    """In the peer's interpreter: one pass of what it is told."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load()
    made: dict[tuple[int, ...], Any] = {}
    memory: dict[int, list[torch.Tensor]] = {}

    def step(words: str) -> Answer:
        load, *numbers = words.split()
        chunk, size, block, depth, threads = map(int, numbers)
        shape = (block, depth, threads)
        if shape not in made:
            made[shape] = [
                library.aio_handle(
                    block_size=block * MiB,
                    queue_depth=depth,
                    single_submit=False,
                    overlap_events=True,
                    intra_op_parallelism=threads,
                )
                for _ in LOADS[:2]
            ]
        reader, writer = made[shape]
        cell = Cell(load, chunk, size)
        if chunk not in memory:  # locked, as its users have it: other memory would be copied first
            empty = torch.empty(0, dtype=torch.uint8)
            memory[chunk] = [reader.new_cpu_locked_tensor(chunk, empty) for _ in range(size // chunk)]

        def move() -> None:
            operations = [operation for operation, _ in cell.transfers()]
            for tensor, (operation, offset) in zip(memory[chunk], cell.transfers(), strict=True):
                if operation == "read":
                    reader.async_pread(tensor, str(file), offset)
                else:
                    writer.async_pwrite(tensor, str(file), offset)
            for handle, operation in ((reader, "read"), (writer, "write")):
                if operation in operations:
                    handle.wait()

        return measured(move)

    return step


# ---- report ----


def start_peer(options: argparse.Namespace, file: Path, stack: ExitStack) -> Server | None:
    """The peer's process, where it is asked for and starts."""
    if not options.peer_python:
        return None
    arguments = ["--serve-peer", str(file)]
    peer = stack.enter_context(closing(Server("benchmarks.io", arguments, python=options.peer_python)))
    try:
        peer.wait_ready()
    except RuntimeError as error:
        print(f"no peer: {error}", file=sys.stderr)
        return None
    return peer


def compare(file: Path, cell: Cell, peer: Server | None, rounds: int) -> list[dict[str, Any]]:
    """One cell: all contestants in turns; the rows of its table."""
    with ExitStack() as stack:
        contestants = list(our_contestants(file, cell, stack))
        if shutil.which("fio"):
            contestants += fio_contestants(file, cell)
        if peer is not None:
            contestants += peer_contestants(peer, cell)
        take_turns(contestants, rounds)
    return [row(contestant, cell) for contestant in contestants]


def row(contestant: Contestant, cell: Cell) -> dict[str, Any]:
    gigabytes = cell.size / 1e9
    return {
        "name": contestant.name,
        "gb_per_s": gigabytes / contestant.median,
        "gb_per_s_max": gigabytes / min(contestant.seconds),
        "gb_per_s_min": gigabytes / max(contestant.seconds),
        "cores_per_gb_per_s": statistics.median(a["cpu"] for a in contestant.answers) / gigabytes,
    }


def best(rows: Sequence[dict[str, Any]], family: str) -> float | None:
    """GB/s of the fastest of a family, by its median."""
    return max((row["gb_per_s"] for row in rows if row["name"].startswith(family)), default=None)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    families = {name: best(rows, name) for name in ("fio", "deepspeed")}
    shown = {f"x best {name}": value for name, value in families.items() if value is not None}
    columns = ["contestant", "GB/s", "min", "max", "cores per GB/s", *shown]
    cells = (
        [
            row["name"],
            *(f"{row[key]:.2f}" for key in ("gb_per_s", "gb_per_s_min", "gb_per_s_max")),
            f"{row['cores_per_gb_per_s']:.3f}",
            *(f"{row['gb_per_s'] / value:.2f}" for value in shown.values()),
        ]
        for row in sorted(rows, key=lambda row: -row["gb_per_s"])
    )
    return table(columns, cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--path", default=".", help="directory on the drive; the file is removed afterwards")
    parser.add_argument("--mib", type=int, default=512, help="bytes moved by each in each round, in MiB")
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 64], help="MiB of one transfer")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one that is not counted")
    parser.add_argument("--peer-python", help="an interpreter that can import deepspeed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", action="store_true", help="write the tables into the results file")
    parser.add_argument("--serve-peer", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every cell and prints the tables; see the top of the file."""
    options = parse(arguments)
    if options.serve_peer:
        serve(lambda: make_peer(Path(options.serve_peer)))
        return 0
    file = Path(options.path).resolve() / "offload-bench-io.bin"
    size = options.mib * MiB
    cells = [Cell(load, chunk * MiB, size) for load in options.loads for chunk in options.chunks]
    with ExitStack() as stack:
        stack.callback(file.unlink, missing_ok=True)
        with open(file, "wb") as out:
            for _ in range(options.mib):
                out.write(os.urandom(MiB))
            os.fsync(out.fileno())
        peer = start_peer(options, file, stack)
        results = [(cell, compare(file, cell, peer, options.rounds)) for cell in cells]
    described = host(options.path)
    if options.json:
        report = [{"load": cell.load, "chunk": cell.chunk, "rows": rows} for cell, rows in results]
        print(json.dumps({"host": described, "options": vars(options), "cells": report}, indent=1))
        return 0
    command = f"python -m benchmarks.io --mib {options.mib} --rounds {options.rounds}"
    text = header(command, described) + "".join(
        f"\n### {cell.load}, transfers of {cell.chunk // MiB} MiB\n\n{as_table(rows)}\n"
        for cell, rows in results
    )
    print(text)
    if options.results:
        kept = RESULTS.read_text().partition(MARK)[0]
        RESULTS.write_text(f"{kept}{MARK}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
