"""Counters of one queue, and what is in flight: written by its thread, read by any."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .engines import Operation, Request

# Latencies are counted in buckets of 3 %: percentiles come out within half of that.
_BUCKETS_PER_E = 33


@dataclass(slots=True)
class _Direction:
    counts: Counter[str] = field(default_factory=Counter)
    latencies: Counter[int] = field(default_factory=Counter)
    at_depth: dict[int, float] = field(default_factory=dict)
    seconds_latency: float = 0.0
    seconds_latency_max: float = 0.0
    in_flight: int = 0
    in_flight_max: int = 0
    changed: float = 0.0

    def depths(self, now: float) -> dict[int, float]:
        """Seconds at each depth, the time since the last change included."""
        if not self.in_flight:
            return dict(self.at_depth)
        depth = 1 << self.in_flight.bit_length() - 1
        return {**self.at_depth, depth: self.at_depth.get(depth, 0.0) + now - self.changed}

    def change(self, now: float, by: int) -> None:
        self.at_depth, self.changed = self.depths(now), now
        self.in_flight += by
        self.in_flight_max = max(self.in_flight_max, self.in_flight)

    def percentile(self, share: float) -> float:
        wanted, seen = share * self.latencies.total(), 0
        for bucket in sorted(self.latencies):
            seen += self.latencies[bucket]
            if seen >= wanted:
                return min(math.exp((bucket + 0.5) / _BUCKETS_PER_E), self.seconds_latency_max)
        return 0.0


class Stats:
    """See ``offload.aio.DirectionStats`` for what is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[Request, float]] = {}  # in flight, by token
        self._directions: dict[Operation, _Direction] = {
            "read": _Direction(), "write": _Direction(), "fsync": _Direction(),
        }  # fmt: skip

    def begin(self, request: Request, now: float) -> None:
        with self._lock:
            self._requests[request.token] = request, now
            self._directions[request.operation].change(now, 1)

    def end(self, token: int, *, buffered: bool) -> None:
        now = time.monotonic()
        with self._lock:
            request, begun = self._requests.pop(token)
            direction, latency = self._directions[request.operation], max(now - begun, 1e-9)
            direction.change(now, -1)
            direction.counts["requests"] += 1
            direction.counts["buffered"] += buffered
            direction.latencies[math.floor(math.log(latency) * _BUCKETS_PER_E)] += 1
            direction.seconds_latency += latency
            direction.seconds_latency_max = max(direction.seconds_latency_max, latency)

    def count(self, operation: Operation, name: str, number: int = 1) -> None:
        with self._lock:
            self._directions[operation].counts[name] += number

    def read(self, operation: Operation) -> dict[str, Any]:
        with self._lock:
            direction = self._directions[operation]
            depths = direction.depths(time.monotonic())
            names = ("bytes", "requests", "resumed", "retried", "buffered", "failed")
            return {
                **{name: direction.counts[name] for name in names},
                "in_flight_max": direction.in_flight_max,
                "seconds_busy": sum(depths.values()),
                "seconds_at_depth": depths,
                "seconds_latency": direction.seconds_latency,
                "seconds_latency_p50": direction.percentile(0.50),
                "seconds_latency_p90": direction.percentile(0.90),
                "seconds_latency_p99": direction.percentile(0.99),
                "seconds_latency_max": direction.seconds_latency_max,
            }

    def oldest(self) -> tuple[str, int, int, float] | None:
        """Operation, offset, size and age of the oldest request in flight."""
        with self._lock:
            if not self._requests:
                return None
            request, begun = min(self._requests.values(), key=lambda entry: entry[1])
            return request.operation, request.offset, request.size, time.monotonic() - begun
