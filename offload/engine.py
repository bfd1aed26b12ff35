"""Runs a training step: who is needed when, what waits, what is updated. Knows no modules (hooks do).

Note [One step]
`begin_forward` -> for each unit `lease` ... close -> `begin_backward` -> for each unit `before_backward`,
`gradient_ready` for each parameter -> `end_backward` -> `step`. Every call may be missing, repeated or come
in another order (evaluation, exceptions, branches): leases are taken on demand, and what the calls add is
that things are there early. Units are fetched and updated ahead by `poll`, at each call.

Note [Update in backward]
Weights then change before `step()` is called, so nothing in the same backward may read a unit's weights after
its update. A unit is updated when all its trained parameters have a gradient: each use of a weight in the
graph has then been differentiated. Not so of its frozen weights: a node that keeps one on its ``ctx`` (as
quantised layers do) may run later, so a unit that has any is updated when the next unit's backward begins. A
unit used several times, or holding a tied weight, may get further gradients from a recomputed (reentrant) part,
and waits for the end of backward. A gradient that comes after all the same is an error, never a lost sum.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NoReturn

import torch

from .accel import Accelerator
from .errors import OffloadError, TransferError
from .gradients import PassingGradients, WaitingGradients, explain_not_finite, late_gradient
from .homes import Source, Tiers, bring_home, make_gradients, make_states, make_weights
from .ledger import Ledger
from .optim import ShardOptimizer
from .partition import Partition, StoredParam
from .pipeline import OptimizerPipeline, Unbroken, UnitUpdate, state_planes
from .plan import Chunk, MemoryPlan
from .schedule import Phase
from .store.swap import SwapStore
from .weights import NO_HOLD, Hold, StreamedWeights

logger = logging.getLogger("offload")

BACKWARD_HOLDS_MAX = 2
"""Units kept for their backward at once: the one being differentiated, and the one before it, whose last
gradients may still be on their way."""


class OffloadEngine:
    """Everything of one model in training, from its first byte on the way to its last."""

    def __init__(
        self,
        partition: Partition,
        plan: MemoryPlan,
        *,
        groups: Sequence[dict[str, Any]],
        optimizer: ShardOptimizer,
        clip_norm: float,
        store: SwapStore | None,
        ledger: Ledger,
        source: Source | None,
        accelerator: Accelerator | None = None,
        on_device: ShardOptimizer | None = None,
    ) -> None:
        """Brings all parameters home, unit by unit.

        Args:
            groups: the optimizer's live `param_groups`; their numbers are read at each update.
            optimizer: what an update computes.
            clip_norm: gradients are clipped to this global norm before the update; 0 is off.
            store: where planes homed on nvme go; the engine owns it from now on.
            source: initial values of a parameter; asked once for each, and may free them afterwards. None: the
                store has all, from a commit.
            accelerator: what computes, where that is not the CPU; the engine owns it from now on.
            on_device: the same optimizer for units that are updated there.
        """
        self.plan, self.ledger = plan, ledger
        self.partition, self.groups, self.clip_norm = partition, groups, clip_norm
        self.grad_norm: float | None = None
        """Global norm of the gradients of the last step, before clipping."""
        self._store = store
        self._failure: BaseException | None = None
        self._closed, self._owner_pid = False, os.getpid()
        self._updating = Unbroken(self.stop, BaseException)
        self._serving = Unbroken(self.stop, TransferError)
        self._on_close: list[Callable[[], None]] = []
        self.close_abandoned: Callable[[], bool] = lambda: False
        """Asks for the leases of forwards that have ended unheard; says whether there were any."""
        self.give_up_reads = self.close_abandoned  # and for a lease that a running forward may do without
        self.before_change: Callable[[], object] = lambda: None
        """Called before an update, a value that is written, or the end changes what can be read."""
        self._in_backward = False
        self._holds: dict[int, Hold] = {}  # of units in backward, oldest first
        self._updated: set[int] = set()  # units updated in this step, where the update runs in backward
        self._shared: set[int] = {  # see Note [Update in backward]
            stored.unit for stored in partition.of_param.values() if len(stored.names) > 1
        }
        self._used_twice: set[int] = set()
        self._frozen = {stored.unit for stored in partition.of_param.values() if not stored.trainable}
        self._complete: dict[int, None] = {}  # units with frozen weights, to be updated soon
        self._versions = [0] * len(partition.units)
        self._first_forward: float | None = None
        self._squares: dict[int, list[float]] = {}  # of units updated in this backward

        self.accelerator, self.optimizer = accelerator, optimizer
        self._tiers = tiers = Tiers.open(accelerator, ledger)
        with ExitStack() as undo:
            undo.callback(tiers.close)
            self.weights = make_weights(partition, plan, tiers, store, ledger, self._reclaim)
            self._states = make_states(plan, tiers, store)
            self.pipeline = OptimizerPipeline(
                optimizer, plan, self._states, self.weights, ledger, on_device=on_device
            )
            self.gradients = make_gradients(partition, plan, tiers, ledger, self._wait_for_gradient_slot)
            bring_home(partition, plan, self.weights, self._states, self.gradients, store, source)
            undo.pop_all()
        ledger.start_steps()
        if store is not None:
            store.start_steps()

    # -- forward and backward -----------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """A forward of the model begins; with ``training``, a backward is expected to follow."""
        with self._guard():
            if self._first_forward is None:
                self._first_forward = time.perf_counter()
            self._break_off_backward()
            self.weights.enter(Phase.FORWARD, training=training)
            if training and isinstance(self.gradients, WaitingGradients):
                self._announce(range(len(self.partition.units)))
            self.poll()

    def lease(self, unit: int) -> Hold:
        """Makes a unit's weights present until the hold is closed. Waits only if they are not there."""
        with self._guard():
            if self.partition.is_gathered(unit):
                return NO_HOLD
            hold = self._checked(self.weights.lease(unit))
            self.poll()
            return hold

    def use(self, unit: int) -> None:
        """Makes a unit's weights present, without keeping them."""
        with self._guard():
            self.weights.use(unit)
            self.partition.refuse_misuse()

    @property
    def device(self) -> torch.device:
        """What computes: where inputs have to be."""
        return self.partition.device

    @property
    def is_open(self) -> bool:
        """Whether the engine still serves its model."""
        return not self._closed

    def version(self, unit: int) -> int:
        """Number of updates the unit's weights have had."""
        return self._versions[unit]

    def used_twice(self, unit: int) -> None:
        """The unit has been used again in the same forward. See Note [Update in backward]."""
        self._used_twice.add(unit)

    def begin_backward(self) -> bool:
        """A backward begins. False where it had begun already."""
        if self._in_backward:
            return False
        with self._guard():
            self._in_backward = True
            self.weights.enter(Phase.BACKWARD)
            if isinstance(self.gradients, PassingGradients):
                self.gradients.begin_step(self._updated)
                self._announce(unit for unit in self._backward_order() if unit not in self._updated)
            self.poll()
        return True

    def before_backward(self, unit: int) -> None:
        """The unit's weights are needed in backward now, and stay until its gradients are complete."""
        with self._guard():
            self._update_complete(without=unit)
            hold = self._holds.pop(unit, None)
            if hold is None:
                self._release_holds(down_to=BACKWARD_HOLDS_MAX - 1)
                hold = self.weights.lease(unit)
            self._holds[unit] = hold
            self.poll()

    def gradient_ready(self, stored: StoredParam) -> None:
        """Autograd has finished ``stored.param.grad``."""
        with self._guard():
            if isinstance(self.gradients, WaitingGradients):
                self.gradients.take(stored)
                self.gradients.poll()  # the rest has nothing to do with a gradient that waits
                return
            with self._updating:
                self._take_passing(stored, self.gradients)
            self.poll()

    def end_backward(self) -> None:
        """Backward has ended: nothing needs to stay for it."""
        with self._guard():
            if self._in_backward:
                self._release_holds()
                self._complete.clear()  # all that have a gradient come now
                if isinstance(self.gradients, PassingGradients):
                    with self._updating:
                        for unit in sorted(set(self.gradients.units) - self._updated, reverse=True):
                            self._update_passing(unit, self.gradients)
                else:
                    self.gradients.end_backward()
                self._used_twice.clear()
                self.weights.end_backward()
                self._in_backward = False
            self.poll()

    def _announce(self, units: Iterable[int]) -> None:
        with self._updating:
            for unit in units:
                self.pipeline.announce(unit)

    def poll(self) -> None:
        """Moves on what can move without waiting."""
        with self._updating:
            self.gradients.poll()
            self.pipeline.run()
        self.weights.poll()

    def _take_passing(self, stored: StoredParam, passing: PassingGradients) -> None:
        if stored.unit in self._updated:
            raise late_gradient(stored)
        passing.take(stored)
        if passing.is_complete(stored.unit) and stored.unit not in self._shared | self._used_twice:
            if stored.unit in self._frozen:
                self._complete[stored.unit] = None
            else:
                self._update_passing(stored.unit, passing)

    def _update_complete(self, *, without: int | None = None) -> None:
        """Updates units that have waited because of their frozen weights. See Note [Update in backward]."""
        for unit in [unit for unit in self._complete if unit != without]:
            del self._complete[unit]
            if isinstance(self.gradients, PassingGradients) and unit not in self._used_twice:
                with self._updating:
                    self._update_passing(unit, self.gradients)

    def _update_passing(self, unit: int, passing: PassingGradients) -> None:
        passing.add_zeros(unit)
        plane, params = passing.plane(unit), passing.present(unit)
        sums = passing.square_sums(unit)

        def check() -> None:
            squares = sums.values()
            if not math.isfinite(math.fsum(squares)):
                grads = ((stored, stored.view_elements(plane)) for stored in params)
                raise OffloadError(
                    f"{explain_not_finite(grads, may_be_absent=self.weights.streamed)}; with update 'backward'"
                    " other units have been updated already: this step cannot be skipped; restart from the last"
                    " checkpoint, with offload_optimizer.update 'step'"
                )
            self._squares[unit] = squares

        self._updated.add(unit)
        update = self._unit_update(unit, plane, params, 1.0, passing.release)
        update.arrived, update.on_begin = sums, check
        self.pipeline.enqueue(update, in_backward=True)
        self._holds.pop(unit, NO_HOLD).close()

    def _break_off_backward(self) -> None:
        """A backward whose end has not been heard of was ended by an exception: its gradients are partial."""
        if not self._in_backward:
            return
        self._release_holds()
        self._complete.clear()
        if isinstance(self.gradients, PassingGradients):
            with self._updating:
                if self._updated:
                    raise OffloadError(
                        f"a backward broke off after {len(self._updated)} of {len(self.partition.units)} units"
                        " had been updated, which is half a step; restart from the last checkpoint; with"
                        " offload_optimizer.update 'step' an interrupted backward changes nothing"
                    )
            self.gradients.discard()
        self._used_twice.clear()
        self._in_backward = False

    def _backward_order(self) -> Sequence[int]:
        if isinstance(self.weights, StreamedWeights):
            return self.weights.mover.scheduler.order(Phase.BACKWARD)
        return range(len(self.partition.units))[::-1]

    # -- update -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Applies the gradients. False where a gradient was not finite and the whole step was refused."""
        with self._guard(), torch._C.DisableTorchFunctionSubclass():
            self._break_off_backward()
            if isinstance(self.gradients, PassingGradients):
                applied = self._step_in_backward(self.gradients)
            else:
                applied = self._step_now(self.gradients)
            if applied:
                self.ledger.steps += 1
            if self._first_forward is not None:
                self.ledger.step_seconds = time.perf_counter() - self._first_forward
            return applied

    def _step_in_backward(self, passing: PassingGradients) -> bool:
        passing.begin_step(self._updated)
        passing.refuse_assigned()
        with self._updating:
            for unit in passing.zeroed_units() - self._updated:
                self._update_passing(unit, passing)
                self.pipeline.run()
            self.pipeline.drain()
        self.pipeline.cancel_announced()
        applied = bool(self._updated)
        self.grad_norm = math.sqrt(math.fsum(chain.from_iterable(self._squares.values())))
        self._squares.clear()
        self._updated.clear()
        return applied

    def _step_now(self, waiting: WaitingGradients) -> bool:
        present = waiting.all_present()
        self.grad_norm = norm = waiting.norm(present)
        if not math.isfinite(norm):
            self.ledger.skipped_steps += 1
            logger.warning(
                "step refused: %s; no weight, moment or step count has changed (%d refused so far)",
                waiting.explain_not_finite(present, may_be_absent=self.weights.streamed),
                self.ledger.skipped_steps,
            )
            return False
        scale = min(1.0, self.clip_norm / (norm + 1e-6)) if self.clip_norm else 1.0
        self.weights.enter(Phase.UPDATE, updated={unit for unit, params in enumerate(present) if params})
        with self._updating:
            for unit, params in enumerate(present):
                update = self._unit_update(unit, waiting.planes[unit], params, scale, lambda unit: None)
                self.pipeline.enqueue(update)
            self.pipeline.drain()
        self.pipeline.cancel_announced()
        return any(present)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before."""
        return self.gradients.clip_norm(max_norm)

    def _unit_update(
        self,
        unit: int,
        plane: torch.Tensor,
        params: list[StoredParam],
        grad_scale: float,
        on_updated: Callable[[int], None],
    ) -> UnitUpdate:
        self._versions[unit] += bool(params)
        self.weights.outdate(params)
        segments = [self.optimizer.segment(p.next_span(), self.groups[p.group]) for p in params]
        return UnitUpdate(unit, plane, segments, grad_scale, on_updated)

    # -- giving way ---------------------------------------------------------------------------------------

    def _reclaim(self) -> bool:
        """A slot for weights is needed and all are held: let an update finish, or a hold for backward go."""
        if self.give_up_reads():
            return True
        with self._updating:
            if self.pipeline.give_way():
                return True
        if self._holds:
            self._release_oldest_hold()
            return True
        return False

    def _release_holds(self, down_to: int = 0) -> None:
        while len(self._holds) > down_to:
            self._release_oldest_hold()

    def _release_oldest_hold(self) -> None:
        self._holds.pop(next(iter(self._holds))).close()

    def _wait_for_gradient_slot(self, taken_by: list[int]) -> None:
        self._update_complete()
        if self.pipeline.pending:
            self.pipeline.wait_once()
            self.pipeline.run()
            return
        units = [unit for unit in taken_by if unit not in self._updated]
        raise OffloadError(
            f"all {self.plan.grad_slots} gradient slots wait for units that are not complete ({units}): they are"
            " shared, used several times or in part only; set offload_optimizer.update to 'step', or give"
            " memory.host_bytes more"
        )

    def _guard(self) -> Unbroken:
        """After a failed transfer, or half an update, the state is not that of any step: nothing goes on."""
        if self._failure is not None:
            reason = str(self._failure) or type(self._failure).__name__
            stopped = f"the engine stopped in step {self.ledger.steps + 1}: {reason}"
            raise OffloadError(stopped) from self._failure
        if self._closed:
            raise OffloadError("the engine is closed")
        return self._serving

    def stop(self, error: BaseException) -> None:
        """Nothing goes on from now on: the state is not that of any step."""
        self._failure = error

    # -- access between steps -----------------------------------------------------------------------------

    def settle_updates(self) -> None:
        """Waits until every update begun has been applied and stored."""
        with self._guard(), self._updating:
            self.pipeline.settle()

    def lease_unannounced(self, unit: int) -> Hold:
        """As :meth:`lease`, without the schedule learning from it."""
        with self._guard():
            return self._checked(self.weights.lease_unannounced(unit))

    def _checked(self, hold: Hold) -> Hold:
        try:
            self.partition.refuse_misuse()
        except OffloadError:
            hold.close()
            raise
        return hold

    def put_weight(self, unit: int, plane: torch.Tensor, begin: int, end: int) -> None:
        """Brings bytes [begin, end) of a unit's weight plane, changed in host memory, home."""
        with self._guard():
            self.weights.put(unit, plane, begin, end)

    def read_chunk(self, chunk: Chunk) -> torch.Tensor:
        """The bytes of a chunk's state; where its home is host memory, the state itself."""
        with self._guard():
            return self._states.read(chunk)

    def write_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Brings the changed bytes of a chunk's state home."""
        with self._guard():
            self._states.store(chunk, buffer).wait()

    def state_planes(self, chunk: Chunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state planes in a chunk's bytes, by name."""
        return state_planes(self.optimizer, chunk, buffer)

    # -- reports and the end ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until nothing is in flight: what is in memory and on disk is the state after the last step."""
        self.settle_updates()
        with self._guard():
            self.weights.settle()

    def report(self) -> Ledger:
        """The ledger, complete: everything in flight has arrived."""
        if not self._closed and self._failure is None:
            self.settle()
        if self._store is not None and not self._closed:
            self._store.update_seconds()
        self.ledger.predicted = self.plan.bytes_moved(self.ledger.steps)
        return self.ledger

    def close(self) -> None:
        """Ends all transfers and gives back threads, descriptors, files and memory. Idempotent.

        Weights homed in host memory stay readable as ordinary tensors; those homed on nvme are gone. Does
        nothing in a forked child: transfers and files are its parent's.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        try:
            self.pipeline.close()
            self.weights.close()
        finally:
            if self._store is not None:
                self._store.update_seconds()
                self._store.close()
            self._tiers.close()
        self.gradients.close()
        self._holds.clear()
        while self._on_close:
            self._on_close.pop()()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OffloadError(
            "an engine cannot be copied or pickled; take model.state_dict() and optimizer.state_dict()"
        )

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls back once when the engine has been closed."""
        self._on_close.append(callback)
