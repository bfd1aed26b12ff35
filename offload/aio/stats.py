"""What a queue says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DirectionStats:
    """What one direction of a queue has done since it was opened."""

    bytes: int
    """Bytes transferred, each once."""
    requests: int
    """Requests that the kernel has answered, refused and short ones included."""
    resumed: int
    """Of them: short, and continued where they stopped."""
    retried: int
    """Of them: refused for the moment (EINTR, EAGAIN), and tried again."""
    buffered: int
    """Of them: through the page cache."""
    failed: int
    """Tickets that ended with an error."""
    in_flight_max: int
    """Requests in flight at once, at most: whether the queue depth was ever reached."""
    seconds_busy: float
    """Time during which at least one request of this direction was in flight."""
    seconds_latency: float
    """Sum over the requests of the time each was in flight."""
    seconds_latency_max: float
    """The longest that one request was in flight."""
    seconds_latency_p50: float = 0.0
    """Half of the requests were in flight no longer than this; percentiles are right within 3 %."""
    seconds_latency_p90: float = 0.0
    seconds_latency_p99: float = 0.0
    seconds_at_depth: Mapping[int, float] = field(default_factory=dict)
    """Parts of ``seconds_busy``, by requests in flight in powers of two: 8 stands for 8 to 15."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    read: DirectionStats
    write: DirectionStats
    sync: DirectionStats
    cpu_seconds: float = 0.0
    """CPU time of the queue's own threads, the kernel's work on their behalf included."""
