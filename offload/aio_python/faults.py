"""Test double: any engine, made worse. Same seed, same faults, by place and try, not by time."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .engines import Completion, Engine, Request

_BLOCK = 4096  # what an O_DIRECT transfer may be cut to
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """As ``FaultPlan`` in ``aio_csrc/io/faulty_backend.h``; 0 switches a fault off."""

    seed: int = 0
    short_one_in: int = 0
    eintr_one_in: int = 0
    eagain_one_in: int = 0
    fail_at: int = 0
    fail_errno: int = errno.EIO
    fail_count: int = 1
    sync_errno: int = 0
    delay_at: int = 0
    delay_ms: int = 0
    reorder: int = 0
    refuse_direct: int = 0
    submit_one: int = 0
    bytes_per_second: int = 0

    @classmethod
    def of(cls, faults: dict[str, int]) -> FaultPlan:
        """
        Raises:
            ValueError: a fault has no such name.
        """
        for name in faults:
            if name not in cls.__slots__:
                raise ValueError(f"no fault is called '{name}'")
        return cls(**faults)


class FaultyEngine:
    """Wraps an engine and does to its requests what the plan says."""

    def __init__(self, inner: Engine, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self.depth_max = inner.depth_max
        self._operations = 0
        self._inner_in_flight = 0
        self._reorder = _mix(plan.seed)
        self._tries: Counter[tuple[str, int]] = Counter()
        self._cut: dict[int, tuple[Request, int]] = {}
        self._delayed: set[int] = set()
        self._held: deque[Completion] = deque()
        self._next = 0.0

    def submit(self, requests: Sequence[Request]) -> int:
        if self._plan.submit_one:
            requests = requests[:1]
        for count, request in enumerate(requests):
            # Whether there is room must not change what is drawn, so that is asked first.
            if self._inner_in_flight >= self.depth_max:
                return count
            refusal, carried_out = self._alter(request)
            if refusal:
                self._held.append((request.token, -refusal))
            elif self._inner.submit([carried_out]) == 1:
                self._inner_in_flight += 1
            else:
                raise AssertionError("an engine with room takes a request")
        return len(requests)

    def _alter(self, request: Request) -> tuple[int, Request]:
        """The errno with which it is refused, or what is carried out of it."""
        plan = self._plan
        if request.operation == "fsync":
            return plan.sync_errno, request
        self._operations += 1
        place = (request.operation, request.offset)
        luck = _mix(plan.seed ^ _mix(request.offset ^ _mix(self._tries[place] * 2 + (place[0] == "write"))))
        self._tries[place] += 1
        if plan.delay_ms and plan.delay_at in (0, self._operations):
            self._delayed.add(request.token)
        direct = bool(fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT)
        if plan.fail_at and plan.fail_at <= self._operations < plan.fail_at + plan.fail_count:
            return plan.fail_errno, request
        if plan.refuse_direct and direct:
            return errno.EINVAL, request
        for code, one_in, salt in (
            (errno.EINTR, plan.eintr_one_in, 1),
            (errno.EAGAIN, plan.eagain_one_in, 2),
        ):
            if _hits(one_in, luck, salt):
                return code, request
        if request.size < 2 or not _hits(plan.short_one_in, luck, 3):
            return 0, request
        result = 1 + _mix(luck ^ 4) % (request.size - 1)
        carried_out = replace(request, size=-(-result // _BLOCK) * _BLOCK if direct else result)
        self._cut[request.token] = carried_out, result
        return 0, carried_out

    def reap(self, limit: int, *, wait: bool) -> list[Completion]:
        for token, result in self._inner.reap(64, wait=wait and not self._held):
            self._inner_in_flight -= 1
            self._held.append((token, self._shortened(token, result)))
        done: list[Completion] = []
        while len(done) < limit and self._held:
            if self._plan.reorder:
                self._reorder = _mix(self._reorder)
                self._held.rotate(-(self._reorder % len(self._held)))
                # Some are kept back while more are on their way: they are overtaken.
                if done and self._inner_in_flight and (self._reorder >> 32) % 2 == 0:
                    break
            token, result = self._held.popleft()
            if token in self._delayed:
                self._delayed.remove(token)
                time.sleep(self._plan.delay_ms / 1000)
            if self._plan.bytes_per_second and result > 0:
                self._keep_to_rate(result)
            done.append((token, result))
        return done

    def _shortened(self, token: int, result: int) -> int:
        """What was read beyond the result is junk, as after a read that stopped there."""
        request, limit = self._cut.pop(token, (None, result))
        if request is None or result <= limit:
            return result
        if request.operation == "read":
            ctypes.memset(request.address + limit, 0xA5, request.size - limit)
        return limit

    def _keep_to_rate(self, result: int) -> None:
        """A token bucket that holds next to nothing: a drive that was idle does not make up for it."""
        self._next = max(self._next, time.monotonic() - 0.005) + result / self._plan.bytes_per_second
        time.sleep(max(0.0, self._next - time.monotonic()))

    @property
    def cpu_seconds(self) -> float:
        return self._inner.cpu_seconds

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def _mix(value: int) -> int:
    """splitmix64: small, and good enough to draw faults from."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _hits(one_in: int, luck: int, salt: int) -> bool:
    return one_in != 0 and _mix(luck ^ salt) % one_in == 0
