"""What is at home in memory on its way to the swap files, for a commit.

Note [Committing while training goes on]
State in memory changes in updates only, and forward and backward need no drive where it is at home in memory. So a
commit may be begun between two steps and ended before the next update: its snapshot costs no memory. Weights are
written before the next forward all the same, since user code may write to those that stay in memory at any time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from .links import Ticket, wait_for_end
from .pace import Pace
from .pipeline import ResidentStates, StateHome
from .plan import MemoryPlan
from .store.manifest import Manifest, Shapes
from .store.swap import SwapStore
from .store.tensors import forget_tensors, write_tensors
from .training_state import TrainingState
from .weights import ResidentWeights, StreamedWeights

WRITES_FLYING_MAX = 4


class Keeping:
    """One write after the other of what has changed since the last commit, weights first.

    See Note [Committing while training goes on].
    """

    def __init__(
        self,
        plan: MemoryPlan,
        weights: ResidentWeights | StreamedWeights,
        states: StateHome,
        store: SwapStore,
        *,
        bytes_per_second: int | None = None,
    ) -> None:
        self._plan, self._store, self._weights = plan, store, weights
        self._states = self._state_writes(states)
        self._flying: deque[Ticket] = deque()
        self._pace, self._due = Pace(bytes_per_second), 0.0

    def write_weights(self) -> None:
        """Returns when all weights have been written.

        Raises:
            TransferError: one could not be; nothing can be committed any more.
        """
        self._write_all(self._weight_writes())

    def advance(self) -> None:
        """Starts the writes of state that can be started without waiting. Raises as :meth:`write_weights`."""
        while self._flying and self._flying[0].done():
            self._end_write()
        while len(self._flying) < WRITES_FLYING_MAX and time.monotonic() >= self._due:
            if not self._start_write(self._states):
                return

    def end(self) -> None:
        """Returns when all state has been written. Raises as :meth:`write_weights`."""
        self._write_all(self._states)

    def _write_all(self, writes: Iterator[tuple[int, Ticket]]) -> None:
        try:
            while self._start_write(writes):
                if len(self._flying) >= WRITES_FLYING_MAX:
                    self._end_write()
                time.sleep(max(0.0, self._due - time.monotonic()))
            while self._flying:
                self._end_write()
        finally:
            wait_for_end(self._flying)

    def _start_write(self, writes: Iterator[tuple[int, Ticket]]) -> bool:
        """Starts the next write; whether there was one."""
        for size, ticket in writes:
            self._flying.append(ticket)
            self._due = time.monotonic() + self._pace.delay(size)
            return True
        return False

    def _end_write(self) -> None:
        self._flying[0].wait()
        self._flying.popleft()

    def _weight_writes(self) -> Iterator[tuple[int, Ticket]]:
        if self._plan.placement.param_home != "nvme":
            for unit, layout in enumerate(self._plan.inventory.units):
                plane = self._weights.host_plane(unit)[: layout.weight_bytes]
                yield from self._store.keep_weight(unit, plane)

    def _state_writes(self, states: StateHome) -> Iterator[tuple[int, Ticket]]:
        if isinstance(states, ResidentStates) and self._plan.placement.state_planes:
            for index in sorted(states.changed):
                chunk = self._plan.chunks[index]
                yield self._plan.chunk_bytes(chunk), self._store.keep_state(chunk, states.read(chunk).cpu())
            states.changed.clear()


class BegunCommit:
    """A commit of which all is written but state, and that. See Note [Committing while training goes on]."""

    def __init__(
        self, store: SwapStore, keeping: Keeping, state: TrainingState, kept: deque[str | None]
    ) -> None:
        """
        Args:
            state: what beside planes is saved.
            kept: files of tensors of the commits that stay; this one's is appended at the end.

        Raises:
            StoreError, TransferError: something could not be written; the commit before stands.
        """
        self._store, self._keeping, self._kept, self._step = store, keeping, kept, state.step
        keeping.write_weights()
        self._tensors = write_tensors(store.path, store.serial + 1, state.tensors)
        self._training = {"state": state.values, "tensors": self._tensors}

    def advance(self) -> None:
        """Writes on what can be written without waiting. Raises as :meth:`Keeping.write_weights`."""
        self._keeping.advance()

    def end(self, shapes: Shapes) -> Manifest:
        """Returns when the commit is made. Raises as the constructor."""
        self._keeping.end()
        manifest = self._store.commit(shapes, step=self._step, training=self._training)
        self._kept.append(self._tensors["file"])
        forget_tensors(self._store.path, {name for name in self._kept if name is not None})
        return manifest
