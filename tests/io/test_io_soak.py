"""Many random transfers against a mirror in memory, and many openings: what rare orders of events would break."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from io_buffers import page_aligned

from offload import aio, metrics
from offload.bytesize import KiB, MiB
from offload.errors import TransferError

THREADS = 4
REGION = 2 * MiB
"""Of the file, for each thread; not a multiple of a page, so that neighbours share one."""
FAULTS = {"short_one_in": 9, "eintr_one_in": 13, "eagain_one_in": 17, "tear_one_in": 150, "reorder": 1}


@dataclass
class Flying:
    ticket: aio.Ticket
    buffer: np.ndarray
    offset: int
    cancelled: bool


class Walker:
    """Random transfers within one region of the file, several in flight, no two of which share a byte."""

    def __init__(self, queue: aio.Queue, begin: int, seed: int) -> None:
        self.queue, self.begin = queue, begin
        self.random = np.random.default_rng(seed)
        self.mirror = self.random.integers(0, 256, REGION + 77, dtype=np.uint8)
        self.slab = page_aligned(8 * MiB)
        self.registered = seed % 2 == 0 and queue.register(self.slab)
        with open(queue.path, "r+b") as file:
            file.seek(begin)
            file.write(self.mirror)

    def run(self, count: int) -> None:
        while count > 0:
            batch = min(count, int(self.random.integers(1, 7)))
            flying, used = [], 0
            for offset, size in self.places(batch):
                flying.append(self.submit(offset, size, used))
                used += (size + 4096) // 4096 * 4096 + 8192
            for transfer in flying:
                self.settle(transfer)
            count -= len(flying)
        whole = page_aligned(self.mirror.size)
        self.queue.read(whole, self.begin).wait()
        np.testing.assert_array_equal(whole, self.mirror)

    def places(self, count: int) -> Iterator[tuple[int, int]]:
        """Disjoint in bytes, in random order, about half of them aligned."""
        cuts = np.sort(self.random.choice(self.mirror.size, 2 * count, replace=False))
        for index in self.random.permutation(count):
            begin, end = self.begin + int(cuts[2 * index]), self.begin + int(cuts[2 * index + 1])
            end = min(end, begin + int(2 ** self.random.uniform(0, 20)))
            aligned = -(-begin // 4096) * 4096, end // 4096 * 4096
            if self.random.random() < 0.5 and aligned[0] < aligned[1]:
                begin, end = aligned
            yield begin - self.begin, end - begin

    def submit(self, offset: int, size: int, at: int) -> Flying:
        shift = int(self.random.choice([0, 0, 1, 64, 512, 4095]))
        buffer = self.slab[at + shift : at + shift + size]
        priority = int(self.random.integers(0, 3))
        if self.random.random() < 0.5:
            buffer[:] = self.random.integers(0, 256, size, dtype=np.uint8)
            ticket = self.queue.write(buffer, self.begin + offset, priority=priority)
        else:
            ticket = self.queue.read(buffer, self.begin + offset, priority=priority)
        cancelled = bool(self.random.random() < 0.1)
        if cancelled:
            ticket.cancel()
        return Flying(ticket, buffer, offset, cancelled)

    def settle(self, transfer: Flying) -> None:
        part = self.mirror[transfer.offset : transfer.offset + transfer.buffer.size]
        try:
            transfer.ticket.wait()
        except TransferError as error:
            assert error.errno == errno.EIO or (error.errno == errno.ECANCELED and transfer.cancelled)
            if transfer.ticket.operation == "write":
                self.accept(transfer, part)
            return
        if transfer.ticket.operation == "write":
            part[:] = transfer.buffer
        else:
            np.testing.assert_array_equal(transfer.buffer, part)

    def accept(self, transfer: Flying, part: np.ndarray) -> None:
        """Of a write that failed every byte is old or new; from now on those of the file count."""
        with open(self.queue.path, "rb") as file:
            file.seek(self.begin + transfer.offset)
            found = np.frombuffer(file.read(part.size), dtype=np.uint8)
        assert ((found == part) | (found == transfer.buffer)).all()
        part[:] = found


@pytest.mark.parametrize(
    "transfers", [pytest.param(800, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.soak)]
)
def test_random_transfers_from_many_threads(path, backend, transfers):
    with aio.Queue(
        path,
        backend=backend,
        request_bytes=64 * KiB,
        queue_depth=12,
        bytes_pending_max=3 * MiB,
        faults={"seed": transfers, **FAULTS},
    ) as queue:
        failures: list[BaseException] = []

        def walk(index: int) -> None:
            try:
                Walker(queue, index * (REGION + 77), seed=index).run(transfers // THREADS)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=walk, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        stats = queue.stats()
    assert min(stats.read.resumed, stats.write.resumed, stats.read.retried, stats.write.retried) > 0
    assert stats.write.failed > 0


def held() -> dict[str, int]:
    """What must not grow."""
    status = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        status[name] = value
    kib = {name: int(status[name].split()[0]) * 1024 for name in ("VmLck", "VmPin")}
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        **kib,
    }


@pytest.mark.parametrize(
    "cycles", [pytest.param(80, id="short"), pytest.param(2_000, id="long", marks=pytest.mark.soak)]
)
def test_open_transfer_close(path, backend, cycles):
    """Descriptors, threads, locked and resident bytes as at the start, whichever way a queue ends."""
    slab = page_aligned(256 * KiB)

    def cycle(turn: int) -> None:
        queue = aio.Queue(path, backend=backend, queue_depth=8, threads=2)
        queue.register(slab)
        ticket = queue.write(slab, 0, priority=turn % 3)
        if turn % 4 == 1:
            ticket.cancel()
        elif turn % 4 == 2:
            queue.read(slab[1:], 1)
        if turn % 3:
            queue.close(cancel=turn % 5 == 0)

    def settled() -> tuple[dict[str, int], int]:
        gc.collect()
        return held(), metrics.rss_bytes()

    for turn in range(60):
        cycle(turn)
    before, resident = settled()
    for turn in range(cycles):
        cycle(turn)
    after, resident_after = settled()
    assert after == before
    assert resident_after - resident < 4 * MiB
