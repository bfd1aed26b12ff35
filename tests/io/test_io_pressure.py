"""Transfers that are given up before their turn, and submitters that wait for room."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import ConfigError, TransferError


def until(condition, limit: float = 20) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def slow_queue(path: str, backend: str, **settings) -> aio.Queue:
    """One request at a time, the first of them late."""
    faults = {"delay_at": 1, "delay_ms": 300}
    return aio.Queue(path, backend=backend, queue_depth=1, request_bytes=4096, faults=faults, **settings)


def test_cancel(path, backend):
    """A transfer that waits ends at once, one that has begun is cut short, the others do not notice."""
    data = random_bytes(64 * KiB, seed=1)
    with slow_queue(path, backend) as queue:
        begun = queue.write(data, 0)
        waiting = queue.write(data, 1 * MiB, priority=aio.PREFETCH)
        sync = queue.sync()
        last = queue.write(data, 2 * MiB, priority=aio.WRITE_BACK)
        until(lambda: queue.stats().write.seconds_busy > 0)
        for ticket in (sync, begun, waiting):
            ticket.cancel()
        for ticket in (sync, begun, waiting):
            with pytest.raises(TransferError, match="it was cancelled") as caught:
                ticket.wait()
            assert caught.value.errno == errno.ECANCELED
            assert ticket.done()
        with pytest.raises(TransferError) as caught:
            begun.wait()
        assert 0 < caught.value.done < data.size
        last.wait()
        last.cancel()
        last.wait()
        queue.sync().wait()  # nothing that was cancelled is still waited for
        target = page_aligned(data.size)
        queue.read(target, 2 * MiB).wait()
        np.testing.assert_array_equal(target, data)
        assert queue.stats().write.failed == 2


def test_cancel_of_what_is_entirely_in_flight_changes_nothing(path, backend):
    with slow_queue(path, backend) as queue:
        ticket = queue.write(b"x" * 100, 0)
        until(lambda: queue.stats().write.seconds_busy > 0)
        ticket.cancel()
        ticket.wait()
        assert queue.stats().write.bytes == 100


def test_cancel_after_close(path, backend):
    queue = aio.Queue(path, backend=backend)
    ticket = queue.write(b"x", 0)
    queue.close()
    ticket.cancel()
    ticket.wait()


def test_submitter_waits_for_room(path, backend):
    """Bytes accepted and not done stay below the limit; other threads run meanwhile; nothing is lost."""
    size, limit = 64 * KiB, 160 * KiB
    with aio.Queue(
        path,
        backend=backend,
        request_bytes=16 * KiB,
        bytes_pending_max=limit,
        faults={"bytes_per_second": 20 * MiB},
    ) as queue:
        data = random_bytes(24 * size, seed=2)
        tickets: list[aio.Ticket] = []
        ticks = 0
        done = threading.Event()

        def submit() -> None:
            for at in range(0, data.size, size):
                tickets.append(queue.write(data[at : at + size], at))
            done.set()

        thread = threading.Thread(target=submit)
        thread.start()
        pending_max = 0
        while not done.is_set():
            pending_max = max(pending_max, sum(size for ticket in list(tickets) if not ticket.done()))
            ticks += 1
            time.sleep(0.001)
        thread.join()
        for ticket in tickets:
            ticket.wait()
        assert size < pending_max <= limit
        assert ticks > 10
        target = page_aligned(data.size)
        queue.read(target, 0).wait()  # larger than all the room: accepted alone
        np.testing.assert_array_equal(target, data)


@pytest.mark.parametrize(("turn", "name"), [(2, "needed"), (4, "back")])
def test_the_needed_one_is_first_in_line(turn, name, path, backend):
    """Whose request was the second and the last is told by the one that fails, not by who says so first."""
    tickets: dict[str, aio.Ticket] = {}
    faults = {"delay_at": 1, "delay_ms": 600, "fail_at": turn}
    limits = {"queue_depth": 1, "request_bytes": 4096, "bytes_pending_max": 4096}
    with aio.Queue(path, backend=backend, faults=faults, **limits) as queue:

        def submit(name: str, priority: int) -> None:
            tickets[name] = queue.write(page_aligned(4096), 0, priority=priority)

        queue.write(page_aligned(4096), 0)
        threads = []
        for who, priority in (("back", aio.WRITE_BACK), ("ahead", aio.PREFETCH), ("needed", aio.NEEDED)):
            threads.append(threading.Thread(target=submit, args=(who, priority)))
            threads[-1].start()
            time.sleep(0.03)
        assert not tickets
        for thread in threads:
            thread.join()
        assert [who for who, ticket in tickets.items() if not succeeds(ticket)] == [name]


def succeeds(ticket: aio.Ticket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True


def test_close_ends_the_wait_for_room(path, backend):
    queue = slow_queue(path, backend, bytes_pending_max=4096)
    queue.write(page_aligned(4096), 0)
    raised: list[Exception] = []

    def submit() -> None:
        try:
            queue.write(page_aligned(4096), 0)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(0.05)
    queue.close()
    thread.join()
    assert "is closed" in str(raised[0])


INTERRUPTED = """
import os, signal, sys, threading, time
from offload import aio
queue = aio.Queue(
    sys.argv[1], backend=sys.argv[2], queue_depth=1, faults={"delay_ms": 2000}, bytes_pending_max=4096
)
first = queue.write(bytes(4096), 0)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    queue.write(bytes(4096), 0)
except KeyboardInterrupt:
    print("interrupted", first.done())
first.wait()
queue.write(bytes(100), 0).wait()  # who left the line holds nobody up
queue.close()
"""


def test_ctrl_c_while_waiting_for_room(path, backend, run_python):
    result = run_python(INTERRUPTED, path, backend)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted False\n", "")


def test_wrong_limit(path):
    with pytest.raises(ConfigError, match="bytes_pending_max must be 'auto' or a number from 1, got 0"):
        aio.Queue(path, bytes_pending_max=0)
