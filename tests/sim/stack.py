"""Store, links, mover, weights and pipeline, real, over a virtual disk; an optimizer that only counts.

Every element of every plane holds the number of updates it has had, so a lost, doubled, torn or stale
update shows as a wrong number wherever it is looked at next.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from virtual import VirtualDirectory, VirtualQueue

from offload.blocks import BlockState
from offload.errors import TransferError
from offload.inventory import ELEMENTS_ALIGNMENT, ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.links import NvmeLinks
from offload.optim import PlaneSpec, Segment, ShardOptimizer
from offload.pipeline import NvmeStates, OptimizerPipeline, UnitUpdate
from offload.placement import Placement
from offload.plan import MemoryPlan
from offload.schedule import Phase
from offload.store.layout import StoreLayout
from offload.store.swap import SwapStore
from offload.weights import HostSlots, StreamedWeights

CHUNK = ELEMENTS_ALIGNMENT


class CountingOptimizer(ShardOptimizer):
    """Checks that every plane holds the same count, and adds one."""

    weight_dtype = torch.float32
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self) -> None:
        self.updated: list[tuple[int, int]] = []
        """(unit, first element) of every chunk updated."""

    def state_specs(self, numel):
        return tuple(PlaneSpec(name, torch.float32, numel) for name in self.moments)

    def segment(self, span, group):
        raise AssertionError("not used")

    def init_state(self, planes, master=None):
        raise AssertionError("not used")

    def update(self, planes, segments, grad, grad_scale=1.0):
        unit, begin = int(grad[0]), int(grad[1])
        self.updated.append((unit, begin))
        count = segments[0].step - 1
        for name, plane in planes.items():
            assert plane.numel() == grad.numel()
            assert bool((plane == count).all()), f"{name} of unit {unit}, {begin}: not {count} everywhere"
            plane.add_(1)


class SimulatedRun:
    """A training loop as the engine runs it, with every choice that it leaves open taken at random."""

    def __init__(self, seed: int, *, fail=None, chunks_of=None, weight_slots=None, **choices) -> None:
        self.random = rng = random.Random(seed)
        chunks_of = chunks_of or [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        # One parameter per unit; blocks of a list, so that each is a unit of its own.
        params = [
            ParamInfo(f"blocks.{index}.w.weight", (chunks * CHUNK,), 4, trainable=True)
            for index, chunks in enumerate(chunks_of)
        ]
        inventory = build_inventory(params, weight_itemsize=4)
        assert [unit.elements // CHUNK for unit in inventory.units] == chunks_of
        self.update = choices.get("update") or rng.choice(("step", "backward"))
        placement = Placement(
            precision="fp32",
            param_home="nvme",
            state_home="nvme",
            update=self.update,
            grad_itemsize=4,
            micro_batches=choices.get("micro_batches")
            or (1 if self.update == "backward" else rng.randint(1, 2)),
            host_bytes=1 << 40,
        )
        slots = weight_slots or rng.randint(2, 4)
        ring = choices.get("ring") or rng.randint(2, 5)
        self.plan = MemoryPlan(placement, inventory, min(slots, len(chunks_of)), 2, CHUNK, ring)
        self.ledger = Ledger()
        self.queue = VirtualQueue(seed=seed, fail=fail)
        self.queue.preallocate(self.plan.bytes_total("nvme"))
        self.directory = VirtualDirectory()
        drive = SimpleNamespace(
            directory=self.directory,
            queue=self.queue,
            links=NvmeLinks(self.queue, self.ledger),
            close=self._close_drive,
        )
        self.store = SwapStore([drive], StoreLayout(self.plan), self.plan, self.ledger)
        unit_count = len(inventory.units)
        self.attached: dict[int, int] = {}
        partition = SimpleNamespace(
            units=[()] * unit_count,
            attach=self._attach,
            detach=self._detach,
            is_saved=lambda unit: False,
            is_gathered=lambda unit: False,
        )
        size = max(unit.weight_bytes for unit in inventory.units)
        tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.plan.weight_slots)]
        slots = HostSlots(tensors, self.store, self.plan)
        self.weights = StreamedWeights(partition, self.plan, slots, self.ledger, self._reclaim)
        self.ring = [torch.zeros(CHUNK * 8, dtype=torch.uint8) for _ in range(ring)]
        self.states = NvmeStates(self.store, list(self.ring))
        self.optimizer = CountingOptimizer()
        self.pipeline = OptimizerPipeline(self.optimizer, self.plan, self.states, self.weights, self.ledger)
        self.counts = [0] * unit_count
        self.enqueued: list[tuple[int, int]] = []
        self.in_order = True
        """Gradients have come in the order announced: updates are then applied in the order of enqueueing."""
        self.grad_slots_free = 2
        self.holds: dict[int, object] = {}
        for unit, layout in enumerate(inventory.units):
            zeros = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
            self.store.write_weight(unit, zeros, 0, layout.weight_bytes).wait()
        self.ledger.start_steps()

    def _close_drive(self) -> None:
        self.queue.close()
        self.directory.close()

    # -- what the engine does -----------------------------------------------------------------------------

    def poll(self) -> None:
        self.pipeline.run()
        self.weights.poll()
        self.check()

    def _attach(self, unit: int, plane: torch.Tensor) -> int:
        assert plane.data_ptr() not in self.attached.values(), "a slot used by two units"
        self.attached[unit] = plane.data_ptr()
        return 0  # no parameter

    def _detach(self, unit: int) -> int:
        self.attached.pop(unit, None)
        return 0

    def _reclaim(self) -> bool:
        if self.pipeline.give_way():
            return True
        if self.holds:
            self.holds.pop(next(iter(self.holds))).close()
            return True
        return False

    def see(self, unit: int) -> None:
        """The computation reads the weights: they are those after the last update, all of them."""
        elements = self.plan.inventory.units[unit].elements
        plane = self.weights.plane(unit)[: elements * 4].view(torch.float32)
        assert bool((plane == self.counts[unit]).all()), f"unit {unit}: not {self.counts[unit]} everywhere"

    def use(self, unit: int) -> None:
        """A forward of a unit, during which anything else may be polled."""
        hold = self.weights.lease(unit)
        view = self.weights.plane(unit)[:4]  # somebody looks, as autograd does
        for _ in range(self.random.randint(0, 3)):
            self.poll()
        assert unit in self.attached and self.attached[unit] == view.data_ptr()
        self.see(unit)
        hold.close()
        if self.random.random() < 0.5:
            self.poll()  # still looked at, no lease
            self.see(unit)
        del view

    def gradient(self, unit: int) -> UnitUpdate:
        layout = self.plan.inventory.units[unit]
        grad = torch.zeros(layout.elements)
        for chunk in self.plan.chunks_of[unit]:
            grad[chunk.begin], grad[chunk.begin + 1] = unit, chunk.begin
            self.enqueued.append((unit, chunk.begin))
        self.counts[unit] += 1
        segment = Segment(0, layout.elements, self.counts[unit], 1.0, 0.9, 0.99, 1e-8, 0.0)
        self.grad_slots_free -= 1
        return UnitUpdate(unit, grad, [segment], 1.0, self._updated)

    def _updated(self, unit: int) -> None:
        self.grad_slots_free += 1

    def step(self, *, order=None) -> None:
        units = range(len(self.counts))
        order = list(units) if order is None else order
        self.in_order &= order == list(units)
        for _ in range(self.plan.placement.micro_batches):
            self.weights.enter(Phase.FORWARD)
            if self.update == "step":
                for unit in units:
                    self.pipeline.announce(unit)
            for unit in order:
                self.use(unit)
            self.weights.enter(Phase.BACKWARD)
            if self.update == "backward":
                for unit in self.weights.mover.scheduler.order(Phase.BACKWARD):
                    self.pipeline.announce(unit)
            for unit in reversed(order):
                self._backward(unit)
            while self.holds:
                self.holds.pop(next(iter(self.holds))).close()
        if self.update == "step":
            self.weights.enter(Phase.UPDATE)
            for unit in units:
                self.pipeline.enqueue(self.gradient(unit))
        self.pipeline.drain()
        self.pipeline.cancel_announced()
        assert self.pipeline.pending == 0
        assert sorted(self.optimizer.updated) == sorted(self.enqueued)
        if self.in_order:
            assert self.optimizer.updated == self.enqueued
        self.check()

    def _backward(self, unit: int) -> None:
        while len(self.holds) >= 2:
            self.holds.pop(next(iter(self.holds))).close()
        self.holds[unit] = self.weights.lease(unit)
        self.poll()
        self.see(unit)
        if self.update != "backward":
            return
        while self.grad_slots_free <= 0:
            self.pipeline.wait_once()
            self.pipeline.run()
        self.pipeline.enqueue(self.gradient(unit), in_backward=True)
        self.holds.pop(unit).close()
        self.poll()

    # -- what must be true at every moment ----------------------------------------------------------------

    def check(self) -> None:
        residency = self.weights.mover.residency
        residency.verify()
        for copy in residency.copies:
            assert (copy.state is BlockState.LOADING) == (copy.block in self.weights.mover._tickets)
            assert copy.readable or copy.block not in self.attached
        if self.in_order:
            assert self.optimizer.updated == self.enqueued[: len(self.optimizer.updated)]
        free = [buffer.data_ptr() for buffer in self.states._free]
        held = [job.buffer.data_ptr() for job in self.pipeline._jobs if job.buffer is not None]
        held += [writing.buffer.data_ptr() for writing in self.pipeline._writing]
        assert sorted(free + held) == sorted(buffer.data_ptr() for buffer in self.ring)

    def settle(self) -> None:
        self.pipeline.settle()
        self.weights.settle()
        self.check()
        assert not self.queue.in_flight
        for unit, layout in enumerate(self.plan.inventory.units):
            plane = torch.empty(layout.weight_bytes, dtype=torch.uint8)
            self.store.read_weight(unit, plane).wait()
            assert bool((plane[: layout.elements * 4].view(torch.float32) == self.counts[unit]).all())
        for chunk in self.plan.chunks:
            state = self.states.read(chunk).view(torch.float32)
            assert bool((state == self.counts[chunk.unit]).all())

    def close(self) -> None:
        try:
            self.pipeline.close()
            self.weights.close()
        finally:
            self.store.close()
        assert self.directory.closed and not self.queue.in_flight and not self.attached


def random_failure(seed: int):
    """Transfer number n fails, for one random n after the set-up, or each with a small probability."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        number = rng.randint(7, 120)
        return lambda n: n == number
    return lambda n: n > 6 and rng.random() < 0.02


__all__ = ["CHUNK", "SimulatedRun", "TransferError", "random_failure"]
