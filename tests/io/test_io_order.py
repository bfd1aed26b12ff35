"""Priorities, syncs, and tickets that are waited for, timed out, or dropped."""

from __future__ import annotations

import errno
import gc
import threading
import weakref

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import TransferError


def completion_order(tickets: dict[str, aio.Ticket]) -> list[str]:
    for ticket in tickets.values():
        ticket.wait()
    return sorted(tickets, key=lambda name: tickets[name]._core.order)


def test_needed_overtakes_prefetch_overtakes_write_back(path):
    """One request at a time; while the first is held, others queue up; the order of completion is that of
    priority, then of submission."""
    faults = {"delay_at": 2, "delay_ms": 300}
    with aio.Queue(path, backend="threads", queue_depth=1, faults=faults) as queue:
        queue.write(page_aligned(64 * KiB), 0).wait()
        target = [page_aligned(4096) for _ in range(10)]
        tickets = {"held": queue.read(target[0], 0)}
        tickets["write 1"] = queue.write(target[1], 1 * MiB, priority=aio.WRITE_BACK)
        tickets["write 2"] = queue.write(target[2], 2 * MiB, priority=aio.WRITE_BACK)
        tickets["ahead 1"] = queue.read(target[3], 4096, priority=aio.PREFETCH)
        tickets["ahead 2"] = queue.read(target[4], 8192, priority=aio.PREFETCH)
        tickets["needed 1"] = queue.read(target[5], 0, priority=aio.NEEDED)
        tickets["needed 2"] = queue.read(target[6], 4096, priority=aio.NEEDED)
        assert not tickets["held"].done()
        assert completion_order(tickets) == [
            "held",
            "needed 1",
            "needed 2",
            "ahead 1",
            "ahead 2",
            "write 1",
            "write 2",
        ]


def test_needed_overtakes_the_rest_of_a_large_prefetch(path, backend):
    """A transfer is cut as it goes, so a needed read does not wait for what is left of one that has begun."""
    faults = {"delay_at": 2, "delay_ms": 200}
    with aio.Queue(path, backend=backend, queue_depth=1, request_bytes=4096, faults=faults) as queue:
        queue.preallocate(4 * MiB)
        queue.write(page_aligned(4096), 0).wait()
        large = queue.read(page_aligned(4 * MiB), 0, priority=aio.PREFETCH)
        needed = queue.read(page_aligned(4096), 0, priority=aio.NEEDED)
        assert completion_order({"large": large, "needed": needed}) == ["needed", "large"]


def test_slots_are_filled_from_the_next_transfers(path, backend):
    """Transfers of one request each keep as many in flight as one large transfer would."""
    faults = {"delay_at": 1, "delay_ms": 200}
    with aio.Queue(path, backend=backend, queue_depth=4, threads=4, faults=faults) as queue:
        tickets = [queue.write(page_aligned(4096), i * 4096) for i in range(12)]
        for ticket in tickets:
            ticket.wait()
        assert queue.stats().write.in_flight_max == 4
    with aio.Queue(path, backend=backend, queue_depth=4, threads=4) as queue:
        for i in range(12):
            queue.read(page_aligned(4096), i * 4096).wait()
        assert queue.stats().read.in_flight_max == 1


def test_sync_waits_for_earlier_writes_only(path, backend):
    faults = {"delay_at": 1, "delay_ms": 200}
    with aio.Queue(path, backend=backend, queue_depth=1, request_bytes=4096, faults=faults) as queue:
        tickets = {
            "before": queue.write(page_aligned(10 * 4096), 0, priority=aio.WRITE_BACK),
            "sync": queue.sync(),
            "after": queue.write(page_aligned(10 * 4096), 1 * MiB, priority=aio.WRITE_BACK),
        }
        assert completion_order(tickets) == ["before", "sync", "after"]
        assert queue.stats().sync.requests == 1


def test_sync_passes_reads_and_failed_writes(path, backend):
    """A sync waits until earlier writes have ended, well or not."""
    with aio.Queue(path, backend=backend, faults={"fail_at": 1, "fail_errno": errno.EIO}) as queue:
        failing = queue.write(b"x" * 100, 0)
        queue.sync().wait()
        assert failing.done()
        with pytest.raises(TransferError):
            failing.wait()


def test_wait_lets_other_threads_run(path, backend):
    with aio.Queue(path, backend=backend, faults={"delay_ms": 1000}) as queue:
        ticket = queue.write(b"x", 0)
        ran_while_waiting = threading.Event()

        def other() -> None:
            if not ticket.done():
                ran_while_waiting.set()

        thread = threading.Timer(0.05, other)
        thread.start()
        ticket.wait()
        thread.join()
        assert ran_while_waiting.is_set()


def test_wait_with_timeout(path, backend):
    with aio.Queue(path, backend=backend, faults={"delay_ms": 1500}) as queue:
        ticket = queue.write(b"x", 7)
        with pytest.raises(TimeoutError, match="write of 1 bytes at offset 7"):
            ticket.wait(0.02)
        with pytest.raises(TimeoutError):
            ticket.wait(0)
        assert not ticket.done()
        ticket.wait(30)
        assert ticket.done()
        assert ticket.seconds >= 1.5


def test_dropped_ticket_keeps_its_buffer(path, backend):
    """The kernel may write to the buffer until the transfer is over, so until then it lives."""
    with aio.Queue(path, backend=backend, faults={"delay_at": 2, "delay_ms": 300}) as queue:
        data = random_bytes(64 * KiB, seed=4)
        queue.write(data, 0).wait()
        buffer = np.zeros(data.size, dtype=np.uint8)
        alive = weakref.ref(buffer)
        queue.read(buffer, 0)
        del buffer
        gc.collect()
        assert alive() is not None
        queue.sync().wait()
        queue.read(bytearray(1), 0).wait()  # finished orphans are let go when the queue is used next
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("dropped", ["read", "write"])
def test_memory_of_a_dropped_ticket_is_used_anew_only_after_it(path, backend, dropped):
    """A late read would overwrite what the memory is used for now, a late write would store it."""
    old, new = random_bytes(64 * KiB, seed=5), random_bytes(64 * KiB, seed=6)
    with aio.Queue(path, backend=backend, faults={"delay_at": 3, "delay_ms": 300}) as queue:
        queue.write(old, 0).wait()
        queue.write(new, 64 * KiB).wait()
        buffer = old.copy()
        getattr(queue, dropped)(buffer, 0 if dropped == "read" else 128 * KiB)  # the third, late
        queue.read(buffer[4 * KiB :], 68 * KiB).wait()
        queue.sync().wait()
        assert (buffer[4 * KiB :] == new[4 * KiB :]).all()
        if dropped == "write":
            queue.read(buffer, 128 * KiB).wait()
        assert (buffer[: 4 * KiB] == old[: 4 * KiB]).all()


def test_dropped_ticket_and_queue(path, backend):
    """Everything is dropped in the middle of a transfer; the buffer outlives the transfer."""
    queue = aio.Queue(path, backend=backend, size=1 * MiB, faults={"delay_ms": 50}, request_bytes=64 * KiB)
    buffer = np.zeros(1 * MiB, dtype=np.uint8)
    alive = weakref.ref(buffer)
    ticket = queue.read(buffer, 0)
    del buffer, queue, ticket
    gc.collect()
    assert alive() is None


def test_use_from_many_threads(path, backend):
    size, workers = 20_000, 8
    with aio.Queue(path, backend=backend, queue_depth=4, request_bytes=4096) as queue:
        wrong: list[int] = []

        def work(index: int) -> None:
            for turn in range(20):
                source = random_bytes(size, seed=index * 100 + turn)
                target = page_aligned(size)
                queue.write(source, index * size).wait()
                queue.read(target, index * size).wait()
                if not np.array_equal(source, target):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert queue.stats().read.bytes == size * workers * 20
