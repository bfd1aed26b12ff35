"""What a queue says of itself: depth over time, latencies, CPU time."""

from __future__ import annotations

import os
import statistics
import time

import pytest
from io_buffers import page_aligned

from offload import aio
from offload.bytesize import KiB, MiB


def test_seconds_at_depth(path, backend):
    """Answers come one by one and late: most of the time all four slots are taken. Then one at a time."""
    with aio.Queue(path, backend=backend, queue_depth=4, threads=4, faults={"delay_ms": 30}) as queue:
        for ticket in [queue.write(page_aligned(4096), i * 4096) for i in range(12)]:
            ticket.wait()
        write = queue.stats().write
        assert set(write.seconds_at_depth) <= {1, 2, 4}
        assert write.seconds_at_depth[4] >= 6 * 0.03
        assert sum(write.seconds_at_depth.values()) == pytest.approx(write.seconds_busy)
        for i in range(5):
            queue.read(page_aligned(4096), i * 4096).wait()
        read = queue.stats().read
    assert set(read.seconds_at_depth) == {1}
    assert read.seconds_at_depth[1] == pytest.approx(read.seconds_busy) == pytest.approx(read.seconds_latency)


def test_a_request_that_is_still_in_flight_counts(path, backend):
    with aio.Queue(path, backend=backend, faults={"delay_ms": 1500}) as queue:
        ticket = queue.write(b"x", 0)
        time.sleep(0.15)
        stats = queue.stats().write
        assert 0 < stats.seconds_busy == sum(stats.seconds_at_depth.values()) < 1.5
        assert stats.requests == 0 == stats.seconds_latency_p50
        ticket.wait()


def test_latency_percentiles(path, backend):
    """Of twenty requests one is late: only the tail shows it."""
    faults = {"delay_at": 11, "delay_ms": 500}
    with aio.Queue(path, backend=backend, faults=faults) as queue:
        for i in range(20):
            queue.write(b"x", i).wait()
        stats = queue.stats().write
    assert stats.seconds_latency_p50 <= stats.seconds_latency_p90 < 0.25
    assert stats.seconds_latency_p99 == pytest.approx(stats.seconds_latency_max, rel=0.05)
    assert stats.seconds_latency_max >= 0.5
    assert stats.seconds_latency_p99 <= stats.seconds_latency_max


def test_percentiles_are_as_fine_as_promised(path, backend):
    """The median is that of the requests, which their tickets tell a little later."""
    with aio.Queue(path, backend=backend, faults={"delay_ms": 60}) as queue:
        seconds = []
        for i in range(7):
            ticket = queue.write(b"x", i)
            ticket.wait()
            seconds.append(ticket.seconds)
        stats = queue.stats().write
    assert 0.06 * 0.97 <= stats.seconds_latency_p50 <= statistics.median(seconds) * 1.06


def test_cpu_seconds(path, backend):
    """Of our threads, those of the backend included; it stays known after close, and idle costs nothing."""
    before = sum(os.times()[:2])
    queue = aio.Queue(path, backend=backend, request_bytes=64 * KiB, direct_io="off")
    buffer = page_aligned(32 * MiB)
    for _ in range(4):
        queue.write(buffer, 0).wait()
    busy = queue.stats().cpu_seconds
    assert busy > 0.001
    time.sleep(0.3)
    assert queue.stats().cpu_seconds - busy < 0.05
    queue.close()
    after = queue.stats().cpu_seconds
    assert busy <= after <= sum(os.times()[:2]) - before + 0.05
    time.sleep(0.05)
    assert queue.stats().cpu_seconds == after
