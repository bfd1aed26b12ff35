"""Training on the simulated accelerator: the bits of the CPU, the bytes of the plan, on every placement.

Each run has a seed of delays of its own; `make soak` runs the suites of `step` and `cases` with many seeds. The
oracle is the same loop on the CPU with everything in memory.
"""

import contextlib
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from models import Placement, Training, train_offloaded

import offload
from offload import accel
from offload.accel.simulated import SimulatedAccelerator, SimulatedEvent
from offload.config import OffloadConfig
from offload.inventory import ParamInfo, build_inventory
from offload.placement import placement_of
from offload.plan import MemoryPlan

SLOTS = 4
"""Of weights, where memory does not ask for fewer."""

HOMES = ("none", "cpu", "nvme")
EVERYTHING = {
    "precision": "bf16", "steps": 3, "tied": True, "frozen": "blocks.0 blocks.1.norm1 blocks.1.qkv",
    "groups": True, "schedule": True,
}  # fmt: skip
STEP_LOOPS = {
    "sums": Training(
        **EVERYTHING, checkpointing="non-reentrant", accumulation=2, clip_loop=0.5, evaluate=True
    ),
    "plain": Training(precision="bf16", steps=3, clip_config=0.5, frozen="blocks.1.up"),
}
BACKWARD_LOOPS = {
    "all": Training(**EVERYTHING, checkpointing="reentrant"),
    "plain": Training(precision="bf16", steps=3, frozen="blocks.1.norm1 blocks.1.qkv blocks.2"),
}
CASES = [
    (name, loop, Placement(param, state, update))
    for update, loops in (("step", STEP_LOOPS), ("backward", BACKWARD_LOOPS))
    for name, loop in loops.items()
    for param in HOMES
    for state in HOMES
]
_in_memory = {}


def in_memory(training, monkeypatch):
    """The oracle, once for each loop."""
    if training not in _in_memory:
        monkeypatch.setenv(accel.ENVIRONMENT, "cpu")
        _in_memory[training] = train_offloaded(training, Placement(), "/unused")
    return _in_memory[training]


@pytest.mark.parametrize(
    ("seed", "training", "placement"),
    [
        pytest.param(seed, loop, placement, id=f"{name}-{placement}-{seed}")
        for seed, (name, loop, placement) in enumerate(CASES)
    ],
)
def test_the_bits_of_the_cpu(seed, training, placement, swap_path, monkeypatch):
    expected = in_memory(training, monkeypatch)
    monkeypatch.setenv(accel.ENVIRONMENT, f"simulated:{seed}")
    train_offloaded(training, placement, swap_path).assert_same_bits(expected)


@pytest.mark.parametrize("register_max", [100_000, 0])
@pytest.mark.parametrize(
    "placement", [Placement("nvme", "nvme", "backward"), Placement("cpu", "none")], ids=str
)
def test_where_host_memory_cannot_be_pinned(placement, register_max, swap_path, monkeypatch, caplog):
    training = BACKWARD_LOOPS["plain"]
    expected = in_memory(training, monkeypatch)

    def open_limited(_setting):
        accelerator = SimulatedAccelerator(seed=7)
        accelerator.register_bytes_max = register_max
        return accelerator

    monkeypatch.setattr("offload.api.open_accelerator", open_limited)
    train_offloaded(training, placement, swap_path).assert_same_bits(expected)
    assert caplog.text.count("cannot be pinned") == 1


@contextlib.contextmanager
def prepared(training, placement, swap_path, monkeypatch):
    monkeypatch.setenv(accel.ENVIRONMENT, "simulated:3")
    model, optimizer = offload.prepare(training.model(), training.config(placement, swap_path))
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("param", "state"), [*itertools.product(HOMES, HOMES)])
def test_memory_is_what_the_plan_says(param, state, update, swap_path, monkeypatch):
    """Of both tiers, purpose by purpose; activations and gradients on their way are not the engine's to allocate."""
    training = Training(precision="bf16")
    with prepared(training, Placement(param, state, update), swap_path, monkeypatch) as (_, optimizer):
        engine = optimizer.engine
        for tier, allocated in (
            ("host", engine._tiers.host.allocated),
            ("device", engine._tiers.device.allocated),
        ):
            planned = Counter()
            for line in engine.plan.lines:
                if line.tier == tier and line.purpose not in ("gradients on their way", "update scratch"):
                    planned[line.purpose] += line.total
            assert +planned == +allocated, tier
        assert engine.accelerator.peak_bytes() <= engine.plan.bytes_total("device")


# -- bytes over PCIe, by formula --------------------------------------------------------------------------


def bytes_per_step(training, placement, swap_path, monkeypatch):
    """Bytes per link and plane of the third and fourth step together, halved; and the engine's inventory."""
    with prepared(training, placement, swap_path, monkeypatch) as (model, optimizer):
        seen = []
        batches = iter(training.batches())
        for _ in range(training.steps):
            for _ in range(training.accumulation):
                (model(next(batches)) / training.accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(Counter(optimizer.engine.report().moved))
        assert seen[-1] == optimizer.engine.plan.bytes_moved(training.steps)
        moved = seen[-1] - seen[-3]
        return {key: size // 2 for key, size in moved.items()}, optimizer.engine.plan.inventory


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_resident_weights_cost_four_bytes(state, update, swap_path, monkeypatch):
    """A gradient to the host and a new weight back, each once, each in bf16."""
    training = Training(precision="bf16")
    moved, inventory = bytes_per_step(training, Placement("none", state, update), swap_path, monkeypatch)
    padded = inventory.elements  # parameters, and what aligns them
    assert moved["h2d", "weight"] == 2 * padded and moved["d2h", "grad"] == 2 * inventory.parameters
    pcie = moved["h2d", "weight"] + moved["d2h", "grad"]
    assert pcie / inventory.parameters == pytest.approx(4, rel=0.02)


def test_frozen_weights_beside_trained_ones_cost_nothing(swap_path, monkeypatch):
    """Of each block one small parameter is trained, as with an adapter: only such parts are lifted anew."""
    frozen = " ".join(
        f"{name}" for name, _ in Training().model().named_parameters() if not name.endswith("norm2.weight")
    )
    training = Training(precision="bf16", frozen=frozen)
    moved, inventory = bytes_per_step(training, Placement("none", "cpu"), swap_path, monkeypatch)
    assert 0 < inventory.trainable_parameters * 100 < inventory.parameters
    assert moved == {
        ("h2d", "weight"): 2 * inventory.elements,
        ("d2h", "grad"): 2 * inventory.trainable_parameters,
    }


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_streamed_weights_stay_at_the_turns(param, micro_batches, swap_path, monkeypatch):
    """Each use of a unit lifts it, but for the units that the device still has at a turn.

    With as many slots as units less d, a backward lifts the first d units anew and a further forward the last d;
    the first forward lifts all, because the update has made all stale. So for many units and one micro-batch it
    is 2 bytes in forward, 2 in backward, and 2 of gradients, which cross once per micro-batch in bf16, also where
    they add up in fp32.
    """
    training = Training(precision="bf16", accumulation=micro_batches)
    moved, inventory = bytes_per_step(training, Placement(param, "cpu"), swap_path, monkeypatch)
    sizes = [unit.weight_bytes for unit in inventory.units]
    first, last = sum(sizes[: len(sizes) - SLOTS]), sum(sizes[SLOTS:])
    assert len(sizes) - SLOTS > 0
    assert moved["h2d", "weight"] == sum(sizes) + micro_batches * first + (micro_batches - 1) * last
    assert moved["d2h", "grad"] == micro_batches * 2 * inventory.parameters


@pytest.mark.parametrize("update", ["step", "backward"])
def test_streamed_weights_cost_six_bytes(update):
    """The same of a model of many units, by the plan, which equals the ledger."""
    params = [ParamInfo(f"blocks.{index}.weight", (1 << 20,), 2, trainable=True) for index in range(100)]
    placement = replace(
        placement_of(OffloadConfig.from_any({"bf16": {"enabled": True}}), device_free_bytes=1 << 40),
        param_home="host",
        state_home="host",
        update=update,
        host_bytes=1 << 40,
    )
    plan = MemoryPlan.build(placement, build_inventory(params, weight_itemsize=2))
    moved = plan.bytes_moved(9) - plan.bytes_moved(8)
    per_parameter = {key: size / (100 << 20) for key, size in moved.items()}
    assert per_parameter == {("h2d", "weight"): 4 - 2 * SLOTS / 100, ("d2h", "grad"): 2}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("placement", "may_wait"),
    [
        (Placement("none", "none", "backward"), ()),
        (
            Placement("none", "none", "step"),
            ("step",),
        ),  # for the norm, once: it decides whether there is a step
        (Placement("cpu", "none", "backward"), ()),
        (Placement("cpu", "cpu", "step"), ("step",)),  # for gradients that the host needs
    ],
)
def test_the_host_does_not_wait_in_the_step(placement, may_wait, seed, swap_path, monkeypatch):
    """Events that have not passed are asked, not waited for; and no value of the device is read."""
    monkeypatch.setenv(accel.ENVIRONMENT, f"simulated:{seed}")
    now, waits = [""], Counter()
    in_done = [False]
    real_done, real_wait, real_tolist = SimulatedEvent.done, SimulatedEvent.wait, torch.Tensor.tolist

    def done(event):
        in_done[0] = True
        try:
            return real_done(event)
        finally:
            in_done[0] = False

    def wait(event):
        if not in_done[0] and event.stream._run < event.position:
            waits[now[0]] += 1
        real_wait(event)

    def tolist(tensor):
        if optimizer.engine._tiers.accelerator.is_device(tensor):
            waits[now[0]] += 1
        return real_tolist(tensor)

    for name, function in (("done", done), ("wait", wait)):
        monkeypatch.setattr(SimulatedEvent, name, function)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    training = Training(precision="bf16", steps=3)
    model, optimizer = offload.prepare(training.model(), training.config(placement, swap_path))
    with contextlib.closing(optimizer.engine):
        for batch in training.batches():
            now[0] = "forward"
            loss = model(batch)
            now[0] = "backward"
            loss.backward()
            now[0] = "step"
            optimizer.step()
            now[0] = "zero_grad"
            optimizer.zero_grad()
        now[0] = ""
    assert set(waits) <= {*may_wait, ""}, waits
