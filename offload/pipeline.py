"""Streams chunks of optimizer state past the update: read, update, write, several in flight.

Note [Life of a chunk]
``announced -> loading -> (gradient known) -> updated -> storing -> gone``. Announcing a unit starts its reads
as slots of the ring become free, long before its gradient is there; enqueueing says that the gradient is
complete. `run` does whatever can be done without waiting, `drain` waits until every enqueued update has been
applied; the last writes may still be in flight then, and trail into the next forward. Results do not depend
on any of it: a chunk's update reads its own planes and its own gradient only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from .ledger import Ledger
from .links import AHEAD, NEEDED_NOW, DoneTicket, Ticket, wait_for_end
from .optim import ShardOptimizer, Span
from .plan import Chunk, MemoryPlan
from .store.swap import SwapStore


class StateHome(Protocol):
    """Where the state of chunks is between updates."""

    @property
    def has_room(self) -> bool:
        """Whether a chunk can be loaded now."""

    def load(self, chunk: Chunk, *, needed_now: bool) -> tuple[torch.Tensor, Ticket] | None:
        """The bytes of the chunk's planes and the transfer that fills them; None while there is no room."""

    def store(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        """Brings changed bytes home."""

    def release(self, buffer: torch.Tensor) -> None:
        """The buffer is not needed any more."""

    def read(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes, outside the ring: changes become true with :meth:`store`."""

    def close(self) -> None:
        """Gives the memory back; no transfer is in flight."""


class ResidentStates:
    """State planes that stay where they are updated: in host memory, or on the device."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = [*buffers]
        self.changed = set(range(len(buffers)))
        """Chunks whose bytes are not those of the last commit."""

    has_room = True

    def load(self, chunk: Chunk, *, needed_now: bool) -> tuple[torch.Tensor, Ticket]:
        return self.buffers[chunk.index], DoneTicket()

    def store(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        self.changed.add(chunk.index)
        return DoneTicket()

    def release(self, buffer: torch.Tensor) -> None:
        return None

    def read(self, chunk: Chunk) -> torch.Tensor:
        return self.buffers[chunk.index]

    def close(self) -> None:
        self.buffers.clear()


class NvmeStates:
    """State planes in the swap store, and the ring of buffers that they pass through."""

    def __init__(self, store: SwapStore, ring: Sequence[torch.Tensor]) -> None:
        self.swap = store
        self._free = list(ring)[::-1]

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def load(self, chunk: Chunk, *, needed_now: bool) -> tuple[torch.Tensor, Ticket] | None:
        if not self._free:
            return None
        buffer = self._free.pop()
        try:
            priority = NEEDED_NOW if needed_now else AHEAD
            return buffer, self.swap.read_state(chunk, buffer, priority=priority)
        except BaseException:
            self._free.append(buffer)
            raise

    def store(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        return self.swap.write_state(chunk, buffer)

    def release(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def read(self, chunk: Chunk) -> torch.Tensor:
        buffer = torch.empty(self.swap.state_bytes(chunk), dtype=torch.uint8)
        self.swap.read_state(chunk, buffer, priority=NEEDED_NOW).wait()
        return buffer

    def close(self) -> None:
        self._free.clear()


class Weights(Protocol):
    """Where the pipeline finds the weight planes that it updates."""

    def begin_update(self, unit: int, *, in_backward: bool) -> None:
        """Makes the unit present and keeps it so until :meth:`end_update`."""

    def plane(self, unit: int) -> torch.Tensor:
        """The unit's weight plane, as bytes."""

    def store(self, unit: int, begin: int, end: int) -> Ticket:
        """Brings bytes [begin, end) of the changed plane home."""

    def updated(self, unit: int) -> None:
        """Everything that changes has changed."""

    def end_update(self, unit: int) -> None:
        """Everything changed has been stored."""


@dataclass(eq=False)
class UnitUpdate:
    """The update of one unit: what the kernel needs besides the planes."""

    unit: int
    grad: torch.Tensor
    """One element per element of the trainable region."""
    segments: Sequence[Span]
    """Elements to update, ascending; the rest stays as it is."""
    grad_scale: float
    on_updated: Callable[[int], None]
    """Called once, when the gradient is not needed any more."""
    arrived: Ticket = field(default_factory=DoneTicket)
    """Done when the gradient is there."""
    on_begin: Callable[[], None] | None = None
    """Called once, when the gradient is there and before anything changes; may refuse the update."""
    chunks_left: int = 0
    begun: bool = False


@dataclass(eq=False)
class _Job:
    """One chunk on its way. See Note [Life of a chunk]."""

    chunk: Chunk
    update: UnitUpdate | None = None
    buffer: torch.Tensor | None = None
    loading: Ticket | None = None


@dataclass(eq=False)
class _Writing:
    chunk: Chunk
    update: UnitUpdate
    buffer: torch.Tensor
    tickets: tuple[Ticket, Ticket]


class Unbroken:
    """Around what leaves the state of half a step where it is broken off: by a failed transfer, or by anything."""

    __slots__ = ("_breaks", "_on_break")

    def __init__(self, on_break: Callable[[BaseException], None], breaks: type[BaseException]) -> None:
        self._on_break, self._breaks = on_break, breaks

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and isinstance(error, self._breaks):
            self._on_break(error)


class OptimizerPipeline:
    """Order and depth of updates; not Adam, not files. See Note [Life of a chunk]."""

    def __init__(
        self,
        optimizer: ShardOptimizer,
        plan: MemoryPlan,
        states: StateHome,
        weights: Weights,
        ledger: Ledger,
        *,
        on_device: ShardOptimizer | None = None,
    ) -> None:
        """
        Args:
            on_device: the same optimizer for units that are updated on an accelerator.
        """
        self._optimizer, self._plan, self._states = optimizer, plan, states
        self._on_device = on_device
        self._weights, self._ledger = weights, ledger
        self._jobs: list[_Job] = []
        self._announced: set[int] = set()
        self._writing: deque[_Writing] = deque()
        self._beginning: set[UnitUpdate] = (
            set()
        )  # whose weights are being fetched: not to be applied meanwhile

    @property
    def pending(self) -> int:
        """Chunks whose update has been enqueued and not applied yet."""
        return sum(job.update is not None for job in self._jobs)

    def announce(self, unit: int) -> None:
        """The unit's update will come: its state may be read. Idempotent."""
        if unit not in self._announced:
            self._announced.add(unit)
            self._jobs.extend(_Job(chunk) for chunk in self._plan.chunks_of[unit])

    def enqueue(self, update: UnitUpdate, *, in_backward: bool = False) -> None:
        """The unit's gradient is complete. Chunks without a segment are left alone.

        Args:
            in_backward: the weights have just been used: they stay present from now on. Otherwise they are
                fetched when it is their turn.
        """
        self.announce(update.unit)
        self._announced.discard(update.unit)
        jobs = [job for job in self._jobs if job.chunk.unit == update.unit and job.update is None]
        touched = [job for job in jobs if _overlaps(update.segments, job.chunk)]
        for job in jobs:
            if job not in touched:
                self._cancel(job)
        if not touched:
            update.on_updated(update.unit)
            return
        update.chunks_left = len(touched)
        for job in touched:
            job.update = update
        if in_backward:
            self._begin(update, in_backward=True)

    def run(self) -> None:
        """Does what can be done without waiting."""
        while self._reap() or self._load() or self._update_one():
            pass

    def drain(self) -> None:
        """Waits until every enqueued update has been applied; writes may still be in flight."""
        self.run()
        while self.pending:
            self.wait_once()
            self.run()

    def settle(self) -> None:
        """As :meth:`drain`, and waits for the writes too."""
        self.drain()
        while self._writing:
            self._wait_for_write()

    def give_way(self) -> bool:
        """Waits for something that holds weights or buffers; False where nothing does."""
        if self._writing:
            self._wait_for_write()
            return True
        if not any(self._may_update(job) for job in self._jobs):
            return False
        pending = self.pending
        self.run()  # the last wait may have made room for a read that nobody has started yet
        if self.pending == pending:
            if not self._wait_once():
                return False
            self.run()
        return True

    def wait_once(self) -> None:
        """Waits for the one transfer that holds up the next update, or for the oldest write."""
        if not self._wait_once():
            raise AssertionError(f"the pipeline waits for nothing: {len(self._jobs)} jobs")

    def _wait_once(self) -> bool:
        job = self._next_update()
        if job is not None and job.loading is not None:
            with self._ledger.stall("state"):
                job.loading.wait()
            return True
        late = next(
            (job.update for job in self._jobs if job.update is not None and not _has_gradient(job)), None
        )
        if late is not None:
            with self._ledger.stall("gradients"):
                late.arrived.wait()
            return True
        if self._next_update() is not None:  # its gradient has arrived since it was first asked for
            return True
        if self._writing:
            self._wait_for_write()
            return True
        return self._recycle()

    def cancel_announced(self) -> None:
        """Forgets units whose update will not come."""
        for job in [job for job in self._jobs if job.update is None]:
            self._cancel(job)
        self._announced.clear()

    def close(self) -> None:
        """Waits for what is in flight, whatever its outcome, so that buffers may go."""
        tickets = [job.loading for job in self._jobs if job.loading is not None]
        tickets += [job.update.arrived for job in self._jobs if job.update is not None]
        tickets += [ticket for writing in self._writing for ticket in writing.tickets]
        wait_for_end(tickets)
        self._jobs.clear()
        self._writing.clear()
        self._states.close()

    # -- steps, each of which says whether it has done something ------------------------------------------

    def _reap(self) -> bool:
        """Gives back what has been written."""
        if not self._writing or not all(ticket.done() for ticket in self._writing[0].tickets):
            return False
        self._finish_write()
        return True

    def _wait_for_write(self) -> None:
        """Waits for the oldest write: a stall."""
        with self._ledger.stall("write"):
            self._finish_write()

    def _finish_write(self) -> None:
        writing = self._writing[0]
        for ticket in writing.tickets:
            ticket.wait()
        self._writing.popleft()
        self._states.release(writing.buffer)
        update = writing.update
        if not update.chunks_left and not any(other.update is update for other in self._writing):
            self._weights.end_update(update.unit)

    def _load(self) -> bool:
        """Starts reading the first chunk that is not read yet, those with a gradient first.

        Transfers of the same bytes have no order among each other: a chunk whose last update is still being
        written must not be read before that has ended.
        """
        if not self._states.has_room:
            return False
        waiting = [job for job in self._jobs if job.buffer is None]
        if not waiting:
            return False
        job = next((job for job in waiting if job.update is not None), waiting[0])
        if any(writing.chunk is job.chunk for writing in self._writing):
            return False
        loaded = self._states.load(job.chunk, needed_now=job.update is not None)
        if loaded is None:
            return False
        job.buffer, job.loading = loaded
        return True

    def _update_one(self) -> bool:
        """Updates the first chunk that has its gradient and is being read, once it is: the one waited for.

        A chunk before it may have a gradient and no buffer yet, where gradients come in an order that was not
        foreseen: it gets one only when those that have one are done.
        """
        job = self._next_update()
        if job is None or job.loading is None or not job.loading.done():
            return False
        job.loading.wait()
        self._jobs.remove(job)
        self._apply(job)
        return True

    def _next_update(self) -> _Job | None:
        """The first chunk that is being read and whose gradient is there."""
        for job in self._jobs:
            if job.update is None or job.loading is None:  # most are: chunks read ahead of their gradients
                continue
            if self._may_update(job) and _has_gradient(job):
                return job
        return None

    def _may_update(self, job: _Job) -> bool:
        """Whether the gradient is complete, and no weights are being fetched that the update had to wait for.

        While one unit's weights are being fetched, only updates that have theirs go on: they give slots back.
        """
        if job.update is None or job.update in self._beginning:
            return False
        return job.update.begun or not self._beginning

    def _apply(self, job: _Job) -> None:
        update, chunk, buffer = job.update, job.chunk, job.buffer
        if update is None or buffer is None:
            raise AssertionError(f"chunk {chunk.index} is not ready")
        if update.on_begin is not None:
            check, update.on_begin = update.on_begin, None
            check()
        self._begin(update, in_backward=False)
        itemsize = self._plan.inventory.weight_itemsize
        begin, end = chunk.begin * itemsize, chunk.end * itemsize
        weight = self._weights.plane(update.unit)[begin:end].view(self._optimizer.weight_dtype)
        optimizer = self._optimizer
        if self._on_device is not None and update.unit in self._plan.on_device:
            optimizer = self._on_device
        planes = {"weight": weight, **state_planes(optimizer, chunk, buffer)}
        optimizer.update(
            planes, _within(update.segments, chunk), update.grad[chunk.begin : chunk.end], update.grad_scale
        )
        update.chunks_left -= 1
        tickets = (self._states.store(chunk, buffer), self._weights.store(update.unit, begin, end))
        self._writing.append(_Writing(chunk, update, buffer, tickets))
        if not update.chunks_left:
            self._weights.updated(update.unit)
            update.on_updated(update.unit)

    def _begin(self, update: UnitUpdate, *, in_backward: bool) -> None:
        if not update.begun:
            update.begun = True
            while any(writing.update.unit == update.unit for writing in self._writing):
                self._wait_for_write()  # the unit's last update is not home yet
            self._beginning.add(update)
            try:
                self._weights.begin_update(update.unit, in_backward=in_backward)
            finally:
                self._beginning.discard(update)

    def _cancel(self, job: _Job) -> None:
        if job.loading is not None and job.buffer is not None:
            job.loading.wait()  # first: where it is interrupted, the job is as it was
            self._states.release(job.buffer)
        self._jobs.remove(job)

    def _recycle(self) -> bool:
        """Takes the buffer of a chunk that was read ahead and has no gradient yet."""
        for job in reversed(self._jobs):
            if job.update is None and job.loading is not None and job.buffer is not None:
                job.loading.wait()
                self._states.release(job.buffer)
                job.buffer = job.loading = None
                return True
        return False


def _has_gradient(job: _Job) -> bool:
    """Whether the chunk's gradient is complete and in its plane."""
    return job.update is not None and job.update.arrived.done()


def state_planes(optimizer: ShardOptimizer, chunk: Chunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The planes that lie side by side in a chunk's bytes, by name."""
    planes, at = {}, 0
    for spec in optimizer.state_specs(chunk.elements):
        planes[spec.name] = buffer[at : at + spec.size_bytes].view(spec.dtype)
        at += spec.size_bytes
    return planes


def _overlaps(segments: Sequence[Span], chunk: Chunk) -> bool:
    return any(segment.begin < chunk.end and segment.end > chunk.begin for segment in segments)


def _within(segments: Sequence[Span], chunk: Chunk) -> Sequence[Span]:
    """The parts of segments that lie in a chunk, counted from its begin."""
    if chunk.begin == 0 and segments[-1].end <= chunk.end:
        return segments
    return [
        replace(
            segment,
            begin=max(segment.begin, chunk.begin) - chunk.begin,
            end=min(segment.end, chunk.end) - chunk.begin,
            element=segment.element + max(0, chunk.begin - segment.begin),
        )
        for segment in segments
        if segment.begin < chunk.end and segment.end > chunk.begin
    ]
