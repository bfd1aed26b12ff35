"""An accelerator in CPU memory that finds ordering faults: for tests, and to see how work overlaps.

Note [What is simulated]
- Compute runs when it is issued, as on any CPU; that it has ended is reported late.
- Copies run as late as the rules allow: when somebody waits for an event behind them, or after a seeded
  number of questions whether they are done. What reads too early finds old bytes, or poison.
- Memory is poisoned (NaN in every floating-point type) when it is allocated and when it is forgotten.

Note [What is checked]
Every access to device memory, and to registered host memory by torch operations and copies, is an event of one
actor: the host, the compute stream, or a copy stream. Each actor has a vector clock (Lamport 1978, Mattern 1989):
issuing work makes the host's past known to a stream, waiting for an event makes the past of the event known to
the waiter. Two accesses to one memory of which one is a write must be ordered by these clocks, as in FastTrack
(Flanagan and Freund, PLDI 2009); if not, the access raises :class:`OrderingError`. So a missing event is found in
the first step that lacks it, whatever the delays are. Compute is watched by a ``TorchDispatchMode``, which sees
the operations of user code and of autograd alike; kernels and file I/O, which torch does not see, tell
``accel.native_watchers``. Both ends of a copy must live until it has run, and its source must not have changed.
What operations make is not followed: what is copied to the host from other memory counts as made by the last one.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import OffloadError
from . import Event, Stream, native_watchers

HOST, COMPUTE = "host", "compute"
DEVICE = "device memory"
POISON = 0xFF
QUESTIONS_MAX = 3
"""Times that an event is reported as not done before it is."""

_USERS_OF_AN_ALIAS = 2
"""Users of a storage that only an alias, and the object that asks, look at."""

Clock = dict[str, int]


class OrderingError(AssertionError):
    """Two accesses to one memory that no event orders."""


@dataclass
class _Memory:
    """What is known of one allocation, or of one registered slab."""

    name: str
    begin: int
    end: int
    writes: list[tuple[int, int, str, int]] = field(default_factory=list)
    """Bytes [begin, end), actor and time of the last writes."""
    reads: list[tuple[int, int, str, int]] = field(default_factory=list)
    """Reads since the last write."""


@dataclass(frozen=True)
class Span:
    """One piece of work on the time line of an actor. See `SimulatedAccelerator.spans`."""

    actor: str
    name: str
    begin: float
    end: float


class SimulatedEvent:
    """A point in a stream, and what its actor knew there."""

    def __init__(self, stream: SimulatedStream, position: int, clock: Clock, questions: int) -> None:
        self.stream, self.position, self.clock = stream, position, clock
        self.time = stream.time
        self._questions = questions

    def done(self) -> bool:
        if self.stream.owner.is_timed:
            is_late = self.time > self.stream.owner.host_time
        else:
            self._questions -= 1
            is_late = self._questions >= 0
        if not is_late:
            self.wait()
        return not is_late

    def wait(self) -> None:
        self._questions = 0
        self.stream.run_to(self.position)
        self.stream.owner.learn(HOST, self.clock)
        self.stream.owner.host_time = max(self.stream.owner.host_time, self.time)


class SimulatedStream:
    """Work that has been issued and, but for compute, has not run yet."""

    def __init__(self, owner: SimulatedAccelerator, name: str) -> None:
        self.owner, self.name = owner, name
        self.time = 0.0
        """When everything issued so far will have ended, in simulated seconds."""
        self._work: deque[Callable[[], None]] = deque()
        self._issued = self._run = 0

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(
            self,
            self._issued,
            dict(self.owner.clocks[self.name]),
            self.owner.random.randint(0, QUESTIONS_MAX),
        )

    def wait(self, event: Event) -> None:
        known = cast(SimulatedEvent, event)
        self.time = max(self.time, known.time)
        self.owner.learn(self.name, known.clock)
        self.issue(lambda: known.stream.run_to(known.position))
        if self.name == COMPUTE:  # what comes next runs at once
            self.run_to(self._issued)

    def issue(self, work: Callable[[], None]) -> None:
        """Queues work, and runs some of what is queued if the dice say so."""
        self._work.append(work)
        self._issued += 1
        if self.owner.random.random() < self.owner.eagerness:
            self.run_to(self.owner.random.randint(self._run, self._issued))

    def run_to(self, position: int) -> None:
        """Runs what was issued before a position."""
        while self._run < position:
            self._run += 1
            self._work.popleft()()

    def drain(self) -> None:
        self.run_to(self._issued)


class SimulatedAccelerator:
    """See Note [What is simulated] and Note [What is checked]."""

    name = "simulated"
    device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, memory_bytes: int = 64 << 30) -> None:
        """
        Args:
            memory_bytes: of the device; :meth:`allocate` beyond it fails as a device does.
        """
        self.random = random.Random(seed)
        self.eagerness = self.random.choice((0.0, 0.1, 0.5))
        """How often a copy runs earlier than it must."""
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.spans: list[Span] = []
        """The time line, where :attr:`seconds_of` gives durations: what ran when, by actor."""
        self.seconds_of: Callable[[str, int], float] | None = None
        """Duration of a copy (stream, bytes) or of a compute operation ("compute", bytes touched)."""
        self.label, self.copy_label = "", ""
        """What compute and copies are called on the time line, from now on."""
        self.host_time = 0.0
        """What the host has waited for; its own work takes no time."""
        self.register_bytes_max: int | None = None
        """Registering more than this at once fails, as under a memlock limit."""
        self.registered_bytes = 0
        self._streams: dict[str, SimulatedStream] = {COMPUTE: SimulatedStream(self, COMPUTE)}
        self._memory_bytes, self._allocated, self._peak = memory_bytes, 0, 0
        self._memories: list[_Memory] = []  # by address
        self._begins: list[int] = []  # their addresses
        self._is_open = True
        _Watch.add(self)

    # -- the interface ------------------------------------------------------------------------------------

    @property
    def compute(self) -> SimulatedStream:
        return self._streams[COMPUTE]

    def stream(self, name: str) -> SimulatedStream:
        return self._streams.setdefault(name, SimulatedStream(self, name))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        queue = cast(SimulatedStream, stream)
        self.begin_access(queue.name)
        self.access(queue.name, source, is_write=False)
        self.access(queue.name, destination, is_write=True)
        if not (self.knows(source) or self.is_device(destination)):
            self._check_made(queue.name)
        queue.time = self._span(queue.name, self.copy_label, queue.time, source.nbytes)
        with _disable_current_modes():  # aliases: the use count shows whether the owners are still there
            to, origin = destination.detach(), source.detach()
        version = origin._version

        def run() -> None:
            for end, tensor in (("source", origin), ("destination", to)):
                if _users(tensor.untyped_storage()) <= _USERS_OF_AN_ALIAS:
                    raise OrderingError(f"{queue.name}: the {end} of a copy was given up before the copy ran")
            if not self.knows(origin) and origin._version != version:
                raise OrderingError(f"{queue.name}: the source of a copy was changed before the copy ran")
            with _disable_current_modes():
                to.copy_(origin)

        queue.issue(run)

    def allocate(self, size: int) -> torch.Tensor:
        if self._allocated + size > self._memory_bytes:
            raise torch.OutOfMemoryError(f"{size} bytes wanted of a simulated device")
        self._allocated += size
        self._peak = max(self._peak, self._allocated)
        memory = torch.full((size,), POISON, dtype=torch.uint8)
        self._note_memory(DEVICE, memory)
        return memory

    def forget(self, memory: torch.Tensor) -> None:
        with _disable_current_modes():
            memory.fill_(POISON)

    def register(self, slab: torch.Tensor) -> None:
        if self.register_bytes_max is not None and slab.numel() > self.register_bytes_max:
            raise OffloadError(f"simulated device: cannot register {slab.numel()} bytes (memlock)")
        self.registered_bytes += slab.numel()
        self._note_memory("registered host memory", slab)

    def unregister(self, slab: torch.Tensor) -> None:
        self.registered_bytes -= slab.numel()
        self._keep([memory for memory in self._memories if memory.begin != slab.data_ptr()])

    def memory(self) -> tuple[int, int]:
        return self._memory_bytes - self._allocated, self._memory_bytes

    def peak_bytes(self) -> int:
        return self._peak

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        raise RuntimeError("a simulated device draws from the CPU's generator")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                for stream in self._streams.values():
                    stream.drain()
            finally:
                _Watch.remove(self)
                self._keep([])

    # -- clocks -------------------------------------------------------------------------------------------

    def learn(self, actor: str, clock: Clock) -> None:
        """The actor knows from now on what the clock says has happened."""
        own = self.clocks[actor]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def begin_access(self, actor: str) -> None:
        """Work is issued to an actor: it knows what the host has done, and its time goes on."""
        self.learn(actor, self.clocks[HOST])
        self.clocks[actor][actor] = self.clocks[actor].get(actor, 0) + 1

    def access(self, actor: str, tensor: torch.Tensor, *, is_write: bool) -> None:
        """Checks one access against those before it. See Note [What is checked]."""
        memory = self._memory_of(tensor)
        if memory is None or not tensor.numel():
            return
        begin = tensor.data_ptr()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (span + 1) * tensor.element_size()
        clock = self.clocks[actor]
        for others, other_is_write in ((memory.writes, True), (memory.reads, False)):
            if not is_write and not other_is_write:
                continue
            for first, last, other, time in others:
                if first < end and begin < last and other != actor and clock.get(other, 0) < time:
                    raise OrderingError(
                        f"{actor} {'writes' if is_write else 'reads'} bytes {begin - memory.begin} to"
                        f" {end - memory.begin} of {memory.name}, which {other}"
                        f" {'writes' if other_is_write else 'reads'}: no event orders them"
                    )
        now = (begin, end, actor, clock[actor])
        if is_write:
            memory.writes = [old for old in memory.writes if not _covers(now, old)] + [now]
            memory.reads = [old for old in memory.reads if not _covers(now, old)]
        else:
            memory.reads = [old for old in memory.reads if old[2] != actor or not _covers(now, old)] + [now]

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in device memory."""
        memory = self._memory_of(tensor)
        return memory is not None and memory.name == DEVICE

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in device memory or in registered host memory."""
        return self._memory_of(tensor) is not None

    def _check_made(self, actor: str) -> None:
        """A source in neither memory is taken for what compute has made last, like a gradient."""
        if self.clocks[actor].get(COMPUTE, 0) < self.clocks[COMPUTE].get(COMPUTE, 0):
            raise OrderingError(f"{actor} reads what compute may still have to make: no event orders them")

    def computes(self, accesses: Sequence[tuple[torch.Tensor, bool]]) -> None:
        """An operation, or native code, reads and writes (True) tensors: compute, where one is on the device."""
        watched = [
            (tensor, is_write, memory)
            for tensor, is_write in accesses
            if (memory := self._memory_of(tensor)) is not None
        ]
        on_host = watched and all(memory.name != DEVICE for _, _, memory in watched)
        actor = HOST if on_host else COMPUTE
        if accesses:
            self.begin_access(actor)
        for tensor, is_write, _ in watched:
            self.access(actor, tensor, is_write=is_write)
        if actor == COMPUTE and self.seconds_of is not None:
            size = sum(tensor.nbytes for tensor, _ in accesses)
            self.compute.time = self._span(COMPUTE, self.label, self.compute.time, size)

    # -- time line ----------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Whether events answer by the time line, and not by chance."""
        return self.seconds_of is not None

    def _span(self, actor: str, name: str, ready: float, size: int) -> float:
        if self.seconds_of is None:
            return 0.0
        begin = max(ready, self.host_time)
        end = begin + self.seconds_of(actor, size)
        self.spans.append(Span(actor, name, begin, end))
        return end

    def _note_memory(self, name: str, memory: torch.Tensor) -> None:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        live = [old for old in self._memories if old.end <= begin or end <= old.begin]  # others were freed
        self._keep([*live, _Memory(name, begin, end)])

    def _keep(self, memories: list[_Memory]) -> None:
        self._memories = sorted(memories, key=lambda memory: memory.begin)
        self._begins = [memory.begin for memory in self._memories]

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        address = tensor.untyped_storage().data_ptr()
        index = bisect_right(self._begins, address)
        if index and address < self._memories[index - 1].end:
            return self._memories[index - 1]
        return None


class _Watch(TorchDispatchMode):
    """Sees every torch operation of the thread, those of autograd included; one for all open accelerators."""

    owners: ClassVar[list[SimulatedAccelerator]] = []
    _entered: ClassVar[_Watch | None] = None
    sees_engine = True  # what the engine does in hooks is what it is there to judge

    @classmethod
    def add(cls, owner: SimulatedAccelerator) -> None:
        cls.owners.append(owner)
        if cls._entered is None:
            native_watchers.append(_native)
            cls._entered = cls()
            cls._entered.__enter__()  # type: ignore[no-untyped-call]

    @classmethod
    def remove(cls, owner: SimulatedAccelerator) -> None:
        cls.owners.remove(owner)
        if not cls.owners and cls._entered is not None:
            cls._entered.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            cls._entered = None
            native_watchers.remove(_native)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that it would put around each operation costs more than the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view, written = _known(func)
        if not is_view:
            tensors = list(_accesses(func, written, args, kwargs))
            for owner in self.owners:
                owner.computes(tensors)
        return func(*args, **kwargs)


def _native(array: Any, is_write: bool) -> None:
    """Hears of memory that kernels and file I/O touch."""
    if isinstance(array, torch.Tensor):
        for owner in _Watch.owners:
            if owner.knows(array):
                owner.computes([(array, is_write)])


@cache
def _known(func: Any) -> tuple[bool, tuple[bool, ...]]:
    """Whether an operation only makes another tensor over the same bytes; which of its arguments it writes."""
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    written = tuple(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    return is_view, written


def _accesses(
    func: Any, written: tuple[bool, ...], args: Any, kwargs: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors of a call, and whether it writes them."""
    values = args
    if kwargs:
        names = [argument.name for argument in func._schema.arguments[len(args) :]]
        values = (*args, *(kwargs.get(name) for name in names))
    for value, is_write in zip(values, written, strict=False):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                yield each, is_write


def _covers(new: tuple[int, int, str, int], old: tuple[int, int, str, int]) -> bool:
    return new[0] <= old[0] and old[1] <= new[1]


def _users(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
