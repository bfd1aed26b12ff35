"""The compiled I/O core. Private: use :mod:`offload.aio`."""

from collections.abc import Callable
from typing import TypedDict, type_check_only

from typing_extensions import Buffer

class BackendError(OSError): ...

@type_check_only
class DirectionDict(TypedDict):
    bytes: int
    requests: int
    resumed: int
    retried: int
    buffered: int
    failed: int
    in_flight_max: int
    seconds_busy: float
    seconds_at_depth: dict[int, float]
    seconds_latency: float
    seconds_latency_p50: float
    seconds_latency_p90: float
    seconds_latency_p99: float
    seconds_latency_max: float

@type_check_only
class StatsDict(TypedDict):
    read: DirectionDict
    write: DirectionDict
    sync: DirectionDict
    cpu_seconds: float

class Ticket:
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def order(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class Queue:
    def __init__(
        self,
        *,
        path: str,
        backend: str,
        queue_depth: int,
        request_bytes: int,
        direct_io: str,
        threads: int,
        sqpoll: bool,
        create: bool,
        mode: int,
        bytes_pending_max: int,
        stall_seconds: float,
        timeout_seconds: float,
        on_stall: Callable[[str, float, str, tuple[str, int, int, float] | None], None],
        faults: dict[str, int] | None = None,
    ) -> None: ...
    def read(self, buffer: Buffer, offset: int, priority: int) -> Ticket: ...
    def write(self, buffer: Buffer, offset: int, priority: int) -> Ticket: ...
    def sync(self) -> Ticket: ...
    def register(self, buffer: Buffer) -> int: ...
    def unregister(self, buffer: Buffer) -> None: ...
    def preallocate(self, size: int) -> bool: ...
    def close(self, cancel: bool) -> bool: ...
    def stats(self) -> StatsDict: ...
    @property
    def alignment(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def direct_error(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def sqpoll(self) -> bool: ...
    @property
    def sqpoll_refused(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...

def backend_names() -> list[str]: ...
def probe(name: str) -> None: ...
