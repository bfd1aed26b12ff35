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
    tear_at: int = 0
    tear_one_in: int = 0
    tear_silently_at: int = 0
    tear_silently_one_in: int = 0
    lose_at: int = 0
    lose_one_in: int = 0
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


@dataclass(frozen=True, slots=True)
class _Altered:
    """What is carried out of a request, and the result that is told: at most that, or, torn, just that."""

    request: Request
    result: int
    torn: bool


class FaultyEngine:
    """Wraps an engine and does to its requests what the plan says."""

    def __init__(self, inner: Engine, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self.depth_max = inner.depth_max
        self._operations = 0
        self._inner_in_flight = 0
        self._reorder = _mix(plan.seed)
        self._tries: Counter[tuple[str, int]] = Counter()
        self._altered: dict[int, _Altered] = {}
        self._lost: set[int] = set()
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
            if request.operation == "fsync":
                if self._plan.sync_errno:
                    self._held.append((request.token, -self._plan.sync_errno))
                else:
                    self._start(request)
            elif refusal := self._begin(request):
                self._held.append((request.token, -refusal))
        return len(requests)

    def _begin(self, request: Request) -> int:
        """Starts what is carried out of a read or write; or the errno with which it is refused."""
        plan = self._plan
        self._operations += 1
        place = (request.operation, request.offset)
        luck = _mix(plan.seed ^ _mix(request.offset ^ _mix(self._tries[place] * 2 + (place[0] == "write"))))
        self._tries[place] += 1
        if plan.delay_ms and plan.delay_at in (0, self._operations):
            self._delayed.add(request.token)
        direct = bool(fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT)
        if plan.fail_at and plan.fail_at <= self._operations < plan.fail_at + plan.fail_count:
            return plan.fail_errno
        if plan.refuse_direct and direct:
            return errno.EINVAL
        for code, one_in, salt in (
            (errno.EINTR, plan.eintr_one_in, 1),
            (errno.EAGAIN, plan.eagain_one_in, 2),
        ):
            if _hits(one_in, luck, salt):
                return code
        if plan.lose_at == self._operations or _hits(plan.lose_one_in, luck, 5):
            self._lost.add(request.token)
        altered = self._torn(request, luck, direct=direct) or self._short(request, luck, direct=direct)
        if altered is None:
            self._start(request)
        elif altered.request.size == 0:  # torn before its first byte
            self._held.append((request.token, altered.result))
        else:
            self._altered[request.token] = altered
            self._start(altered.request)
        return 0

    def _torn(self, request: Request, luck: int, *, direct: bool) -> _Altered | None:
        plan = self._plan
        fails = plan.tear_at == self._operations or _hits(plan.tear_one_in, luck, 6)
        silent = plan.tear_silently_at == self._operations or _hits(plan.tear_silently_one_in, luck, 7)
        if request.operation != "write" or not (fails or silent):
            return None
        size = _mix(luck ^ 8) % request.size
        part = replace(request, size=size - size % _BLOCK if direct else size)
        return _Altered(part, -plan.fail_errno if fails else request.size, torn=True)

    def _short(self, request: Request, luck: int, *, direct: bool) -> _Altered | None:
        if request.size < 2 or not _hits(self._plan.short_one_in, luck, 3):
            return None
        result = 1 + _mix(luck ^ 4) % (request.size - 1)
        part = replace(request, size=-(-result // _BLOCK) * _BLOCK if direct else result)
        return _Altered(part, result, torn=False)

    def _start(self, request: Request) -> None:
        if self._inner.submit([request]) != 1:
            raise AssertionError("an engine with room takes a request")
        self._inner_in_flight += 1

    def reap(self, limit: int, *, wait: bool) -> list[Completion]:
        for token, result in self._inner.reap(64, wait=wait and not self._held):
            self._inner_in_flight -= 1
            result = self._told(token, result)
            if token not in self._lost:
                self._held.append((token, result))
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

    def _told(self, token: int, result: int) -> int:
        """What was read beyond a short result is junk, as after a read that stopped there."""
        altered = self._altered.pop(token, None)
        if altered is None or result < 0 or (result <= altered.result and not altered.torn):
            return result
        request, kept = altered.request, altered.result
        if request.operation == "read":
            ctypes.memset(request.address + kept, 0xA5, request.size - kept)
        return kept

    def _keep_to_rate(self, result: int) -> None:
        """A token bucket that holds next to nothing: a drive that was idle does not make up for it."""
        self._next = max(self._next, time.monotonic() - 0.005) + result / self._plan.bytes_per_second
        time.sleep(max(0.0, self._next - time.monotonic()))

    def wake(self) -> None:
        self._inner.wake()

    def cpu_seconds(self) -> float:
        return self._inner.cpu_seconds()

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
