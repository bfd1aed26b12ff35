"""A small store of two generations, and in memory what it should hold, now and at each commit."""

import random

import torch

from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.inventory import ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.placement import Placement, SwapPaths
from offload.plan import MemoryPlan
from offload.store.manifest import ParamDetail, shapes_of
from offload.store.recovery import recover
from offload.store.swap import SwapStore

PAGE = 4096
PLANE_DTYPES = {"residual": "int16", "exp_avg": "float32", "exp_avg_sq": "float32"}


def plan_of(precision="bf16", trained=(20_000, 100, 5000), frozen=(3000, 0, 9000), chunk=4096):
    """One unit for each entry; frozen parameters are bytes."""
    itemsize = 2 if precision == "bf16" else 4
    params = []
    for index, (count, count_frozen) in enumerate(zip(trained, frozen, strict=True)):
        if count:
            params.append(ParamInfo(f"blocks.{index}.weight", (count,), itemsize, True))
        if count_frozen:
            params.append(ParamInfo(f"blocks.{index}.table", (count_frozen,), 1, False))
    placement = Placement(
        precision=precision, param_home="nvme", state_home="nvme", update="step", grad_itemsize=4,
        micro_batches=1, host_bytes=1 << 40, chunk_elements_max=chunk, generations=2,
    )  # fmt: skip
    inventory = build_inventory(params, weight_itemsize=itemsize)
    return MemoryPlan(placement, inventory, 2, 2, chunk, 4)


def shapes_for(plan):
    weight = {"bf16": "bfloat16", "fp32": "float32"}[plan.placement.precision]
    details = {
        param.info.name: ParamDetail(weight if param.info.trainable else "uint8", (1,))
        for unit in plan.inventory.units
        for param in unit.params
    }
    return shapes_of(plan, details, PLANE_DTYPES)


def swap_paths(roots):
    paths = tuple(SwapPath(str(root), 1.0 + index) for index, root in enumerate(roots))
    names = frozenset(path.path for path in paths)
    return SwapPaths(paths, names, names)


class Mirrored:
    """A store, and what it should hold."""

    def __init__(self, roots, seed=0, precision="bf16", aio=None, **shape):
        self.plan = plan_of(precision, **shape)
        self.shapes, self.aio = shapes_for(self.plan), aio or Aio()
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.weights = [self.noise(unit.weight_bytes) for unit in self.plan.inventory.units]
        self.states = [
            torch.zeros(self.plan.chunk_bytes(chunk), dtype=torch.uint8) for chunk in self.plan.chunks
        ]
        self.commits = {}
        """By serial: step, training, weights, states."""
        self.step = 0
        self.flying = []
        self.store = SwapStore.open(swap_paths(roots), self.plan, self.aio, Ledger())
        self.path = self.store.path

    def noise(self, size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)

    def fill(self):
        """The first values: weights and residuals, no moments."""
        for unit, plane in enumerate(self.weights):
            self.store.write_weight(unit, plane, 0, plane.numel()).wait()
        if self.plan.placement.precision == "bf16":
            for chunk in self.plan.chunks:
                part = self.noise(chunk.elements * 2)
                self.states[chunk.index][: part.numel()] = part
                self.store.write_residual(chunk, part).wait()

    def update(self, chunk, *, wait=True):
        """As the optimizer does it: state and weights of a chunk."""
        itemsize = self.plan.inventory.weight_itemsize
        begin, end = chunk.begin * itemsize, chunk.end * itemsize
        self.weights[chunk.unit][begin:end] = self.noise(end - begin)
        self.states[chunk.index] = self.noise(self.plan.chunk_bytes(chunk))
        tickets = [
            self.store.write_state(chunk, self.states[chunk.index].clone()),
            self.store.write_weight(chunk.unit, self.weights[chunk.unit].clone(), begin, end),
        ]
        self.flying += tickets
        if wait:
            self.settle()

    def settle(self):
        """Transfers of the same bytes have no order: who writes or reads them again waits."""
        while self.flying:
            self.flying.pop().wait()

    def put(self, unit=None):
        """As user code does it: some pages of a weight plane, frozen or not."""
        self.settle()
        unit = self.rng.randrange(len(self.weights)) if unit is None else unit
        plane = self.weights[unit]
        begin, end = sorted(self.rng.sample(range(plane.numel() // PAGE + 1), 2))
        plane[begin * PAGE : end * PAGE] = self.noise((end - begin) * PAGE)
        self.store.write_weight(unit, plane.clone(), begin * PAGE, end * PAGE).wait()

    def train(self, steps):
        """Random steps: all chunks or some of them, now and then user code. The last writes are still in flight."""
        for _ in range(steps):
            self.settle()
            self.step += 1
            for chunk in self.plan.chunks:
                if self.rng.random() < 0.8:
                    self.update(chunk, wait=False)
            if self.rng.random() < 0.3:
                self.put()

    def commit(self):
        """Both know of it, whether it returns or not."""
        training = {"data": self.rng.random(), "nested": [1, None, {"x": "y"}]}
        self.commits[self.store.serial + 1] = self.copy(training)
        self.store.commit(self.shapes, step=self.step, training=training)

    def copy(self, training=None):
        weights, states = ([plane.clone() for plane in planes] for planes in (self.weights, self.states))
        return self.step, training, weights, states

    def die(self):
        """As a process that is killed: everything is closed, nothing is removed."""
        for drive in self.store._drives:
            drive.queue.close()
            drive.directory.release()

    def recover(self, **how):
        """Starts anew from the last commit, as another process would."""
        self.flying = []
        self.store, manifest = recover(self.path, self.plan, self.shapes, self.aio, Ledger(), **how)
        self.step, training, weights, states = self.commits[manifest.serial]
        assert (manifest.step, manifest.training) == (self.step, training)
        self.weights, self.states = ([plane.clone() for plane in planes] for planes in (weights, states))
        return manifest

    def check(self):
        """Every byte is as it should be."""
        self.settle()
        for unit, plane in enumerate(self.weights):
            slot = torch.full((plane.numel() + PAGE,), 0xA5, dtype=torch.uint8)
            self.store.read_weight(unit, slot).wait()
            assert torch.equal(slot[: plane.numel()], plane), f"unit {unit}"
        for chunk in self.plan.chunks:
            buffer = torch.full_like(self.states[chunk.index], 0xA5)
            self.store.read_state(chunk, buffer).wait()
            assert torch.equal(buffer, self.states[chunk.index]), f"chunk {chunk.index}"

    def remove(self):
        """The end, as the user would do it."""
        self.store.discard()
