"""Counters of one queue: written by its thread, read by any."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from .engines import Operation

_BUCKETS_PER_OCTAVE = 16


@dataclass(slots=True)
class _Direction:
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("bytes", "requests", "resumed", "retried", "buffered", "failed", "in_flight_max"), 0
        )
    )
    seconds_latency: float = 0.0
    seconds_latency_max: float = 0.0
    latencies: Counter[int] = field(default_factory=Counter)
    """Requests by logarithm of the time they took."""
    at_depth: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, by requests in flight."""
    in_flight: int = 0
    since: float = 0.0
    """When ``in_flight`` last changed."""

    def settle(self, now: float) -> None:
        self.at_depth[self.in_flight] += now - self.since
        self.since = now

    def seconds_at_depth(self) -> dict[int, float]:
        """By powers of two of requests in flight."""
        buckets: defaultdict[int, float] = defaultdict(float)
        for depth, seconds in self.at_depth.items():
            if depth:
                buckets[1 << depth.bit_length() - 1] += seconds
        return dict(sorted(buckets.items()))

    def percentile(self, part: float) -> float:
        wanted = math.ceil(part * self.latencies.total())
        for bucket in sorted(self.latencies):
            wanted -= self.latencies[bucket]
            if wanted <= 0:
                return min(2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) / 1e9, self.seconds_latency_max)
        return 0.0


class Stats:
    """See ``offload.aio.DirectionStats`` for what is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directions: dict[Operation, _Direction] = {
            "read": _Direction(), "write": _Direction(), "fsync": _Direction(),
        }  # fmt: skip

    def begin(self, operation: Operation, now: float) -> None:
        with self._lock:
            direction = self._directions[operation]
            direction.settle(now)
            direction.in_flight += 1
            peak = max(direction.totals["in_flight_max"], direction.in_flight)
            direction.totals["in_flight_max"] = peak

    def end(self, operation: Operation, begun: float, *, buffered: bool) -> None:
        now = time.monotonic()
        with self._lock:
            direction = self._directions[operation]
            direction.totals["requests"] += 1
            direction.totals["buffered"] += buffered
            direction.seconds_latency += now - begun
            direction.seconds_latency_max = max(direction.seconds_latency_max, now - begun)
            nanoseconds = max((now - begun) * 1e9, 1.0)
            direction.latencies[math.floor(math.log2(nanoseconds) * _BUCKETS_PER_OCTAVE)] += 1
            direction.settle(now)
            direction.in_flight -= 1

    def count(self, operation: Operation, name: str, number: int = 1) -> None:
        with self._lock:
            self._directions[operation].totals[name] += number

    def read(self, operation: Operation) -> dict[str, Any]:
        with self._lock:
            direction = self._directions[operation]
            direction.settle(time.monotonic())
            at_depth = direction.seconds_at_depth()
            return {
                **direction.totals,
                "seconds_busy": sum(at_depth.values()),
                "seconds_at_depth": at_depth,
                "seconds_latency": direction.seconds_latency,
                "seconds_latency_p50": direction.percentile(0.5),
                "seconds_latency_p90": direction.percentile(0.9),
                "seconds_latency_p99": direction.percentile(0.99),
                "seconds_latency_max": direction.seconds_latency_max,
            }
