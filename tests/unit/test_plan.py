"""The plan against arithmetic written out by hand, and refusals whose hints really fit."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.errors import PlanError
from offload.inventory import ParamInfo, build_inventory
from offload.optim import Adam
from offload.plan import STATE_PLANES, MemoryPlan, Placement

GiB = 1 << 30


def inventory_of(sizes, *, itemsize=2, frozen=(), activation_bytes=0):
    params = [
        ParamInfo(f"blocks.{index}.w.weight", (size,), itemsize, index not in frozen)
        for index, size in enumerate(sizes)
    ]
    return build_inventory(params, weight_itemsize=itemsize, activation_bytes=activation_bytes)


def placement(**changes):
    given_ = dict(  # noqa: C408
        precision="bf16", param_home="nvme", state_home="nvme", update="step", grad_itemsize=2,
        micro_batches=1, host_bytes=GiB,
    )  # fmt: skip
    return Placement(**{**given_, **changes})


def test_sums_by_hand_everything_on_nvme():
    """Three units of 4096, 2048 and 6144 elements (100 are padded to 2048), bf16."""
    plan = MemoryPlan.build(placement(), inventory_of([4096, 100, 6144], activation_bytes=777))
    elements = 4096 + 2048 + 6144
    assert plan.inventory.elements == elements
    assert (plan.weight_slots, plan.chunk_elements, plan.chunk_slots) == (3, 6144, 4)
    weight_slots, grads, ring = 3 * 6144 * 2, elements * 2, 4 * 6144 * 10
    assert plan.bytes_total("host") == weight_slots + grads + ring + 777
    assert plan.bytes_total("nvme") == elements * 2 + elements * 10
    assert plan.bytes_at_start() == {
        ("nvme_write", "weight"): elements * 2,
        ("nvme_write", "residual"): elements * 2,
    }


def test_sums_by_hand_everything_in_memory():
    plan = MemoryPlan.build(
        placement(precision="fp32", param_home="host", state_home="host", grad_itemsize=4),
        inventory_of([4096, 100, 6144], itemsize=4, frozen=(2,)),
    )
    trained = 4096 + 2048
    weights = trained * 4 + 6144 * 4  # the frozen one is whole pages already
    assert plan.bytes_total("host") == weights + trained * 4 + trained * 8
    assert plan.bytes_total("nvme") == 0
    assert not plan.bytes_at_start() and not plan.bytes_moved(5)


def test_update_in_backward_takes_two_gradient_slots():
    plan = MemoryPlan.build(placement(update="backward"), inventory_of([4096, 100, 6144]))
    assert plan.bytes_total("host") == 3 * 6144 * 2 + 2 * 6144 * 2 + 4 * 6144 * 10


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_bytes_moved_by_hand_with_a_slot_for_every_unit(update, steps):
    """Weights are read in the first step, moments in all but the first; all state is written in each."""
    plan = MemoryPlan.build(placement(update=update), inventory_of([4096, 4096, 4096]))
    n = 3 * 4096
    expected = {
        ("nvme_read", "weight"): n * 2,
        ("nvme_write", "weight"): n * 2 * steps,
        ("nvme_read", "residual"): n * 2 * steps,
        ("nvme_write", "residual"): n * 2 * steps,
        ("nvme_read", "exp_avg"): n * 4 * (steps - 1),
        ("nvme_write", "exp_avg"): n * 4 * steps,
        ("nvme_read", "exp_avg_sq"): n * 4 * (steps - 1),
        ("nvme_write", "exp_avg_sq"): n * 4 * steps,
    }
    assert plan.bytes_moved(steps) == ({k: v for k, v in expected.items() if v > 0} if steps else {})


def test_bytes_moved_is_linear_from_the_third_step_on():
    plan = MemoryPlan.build(placement(host_bytes=GiB), inventory_of([8192] * 9))
    per_step = plan.bytes_moved(4) - plan.bytes_moved(3)
    assert plan.bytes_moved(50) - plan.bytes_moved(49) == per_step
    # Nine units, four slots, forward, backward and update: at least the five that find no slot, each time.
    assert per_step["nvme_read", "weight"] >= 5 * 8192 * 2


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_state_planes_are_those_of_the_optimizer(precision):
    specs = Adam(weight_format=precision).state_specs(640)
    assert [(s.name, s.size_bytes // 640) for s in specs] == [
        (plane.name, plane.itemsize) for plane in STATE_PLANES[precision]
    ]


def test_no_trainable_parameter_is_refused():
    with pytest.raises(PlanError, match="has 300 parameters and none is trainable; set requires_grad"):
        MemoryPlan.build(placement(), inventory_of([100, 200], frozen=(0, 1)))


@pytest.mark.parametrize(
    "module", ["errors", "bytesize", "config", "plan", "schedule", "blocks", "inventory"]
)
def test_pure_modules_import_no_torch(module):
    script = f"import sys, offload.{module}; sys.exit('torch' in sys.modules)"
    root = str(Path(offload.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0


def test_a_hint_keeps_the_nvme_budget():
    """State on nvme would fit the host budget and not the other one: the number is named instead."""
    place = placement(param_home="host", state_home="host", host_bytes=3 << 20, nvme_bytes=1)
    with pytest.raises(PlanError, match=r"the smallest budget that works is \d+$"):
        MemoryPlan.build(place, inventory_of([300_000] * 2))


# -- any model, any budget --------------------------------------------------------------------------------

models = st.lists(st.integers(50_000, 300_000), min_size=1, max_size=8)
placements = st.builds(
    placement,
    precision=st.sampled_from(["bf16", "fp32"]),
    param_home=st.sampled_from(["host", "nvme"]),
    state_home=st.sampled_from(["host", "nvme"]),
    update=st.sampled_from(["step", "backward"]),
    micro_batches=st.integers(1, 3),
    host_bytes=st.integers(1 << 18, 8 << 20),
    nvme_bytes=st.one_of(st.none(), st.integers(1, 4 << 20)),
    chunk_elements_max=st.sampled_from([1, 2048, 70_000, 4 << 20]),
)


def model_for(place, sizes):
    return inventory_of(sizes, itemsize=2 if place.precision == "bf16" else 4)


def fix(place, message):
    """Does what a refusal says."""
    if number := re.search(r"the smallest that works is (\d+)", message):
        return replace(place, nvme_bytes=int(number[1]))
    if number := re.search(r"the smallest budget that works is (\d+)", message):
        return replace(place, host_bytes=int(number[1]))
    both = "both" in message
    changes = {}
    if both or 'offload_param.device "nvme"' in message:
        changes["param_home"] = "nvme"
    if both or 'offload_optimizer.device "nvme"' in message:
        changes["state_home"] = "nvme"
    if 'update "backward"' in message:
        changes["update"] = "backward"
    assert changes and message.endswith("fits"), message
    return replace(place, **changes)


@settings(max_examples=150, deadline=None)
@given(placements, models)
def test_every_refusal_names_a_setting_that_fits(place, sizes):
    """Done what the message says, the same refusal does not come back: at most host, then nvme."""
    inventory = model_for(place, sizes)
    budgets = []
    for _ in range(3):
        try:
            plan = MemoryPlan.build(place, inventory)
            break
        except PlanError as error:
            message = str(error)
            assert "\n" not in message and ("needs" in message)
            budget = "nvme" if message.startswith("the nvme tier") else "host"
            assert budget not in budgets, f"the hint did not fit: {message}"
            budgets.append(budget)
            place = fix(place, message)
    assert plan.bytes_total("host") <= place.host_bytes
    assert place.nvme_bytes is None or plan.bytes_total("nvme") <= place.nvme_bytes


@settings(max_examples=150, deadline=None)
@given(placements, models)
def test_a_device_hint_does_not_run_into_the_nvme_budget(place, sizes):
    """A hint that names a device or an update, and not a number, must be enough by itself."""
    inventory = model_for(place, sizes)
    try:
        MemoryPlan.build(place, inventory)
    except PlanError as error:
        if str(error).endswith("fits"):
            MemoryPlan.build(fix(place, str(error)), inventory)


@settings(max_examples=150, deadline=None)
@given(placements, models, st.integers(0, 5 << 20))
def test_more_memory_never_hurts(place, sizes, more):
    """What fits a budget fits a larger one, with no fewer slots and not a byte more moved."""
    inventory = model_for(place, sizes)
    place = replace(place, nvme_bytes=None)
    try:
        small = MemoryPlan.build(place, inventory)
    except PlanError:
        return
    large = MemoryPlan.build(replace(place, host_bytes=place.host_bytes + more), inventory)
    assert large.weight_slots >= small.weight_slots
    assert large.bytes_total("nvme") == small.bytes_total("nvme")
    assert small.bytes_moved(4).total() >= large.bytes_moved(4).total()


@settings(max_examples=100, deadline=None)
@given(placements, models)
def test_chunks_cover_every_unit_once(place, sizes):
    inventory = model_for(place, sizes)
    plan = MemoryPlan.build(replace(place, host_bytes=1 << 40, nvme_bytes=None), inventory)
    for unit, layout in enumerate(inventory.units):
        ends = [0] + [chunk.end for chunk in plan.chunks_of[unit]]
        assert [chunk.begin for chunk in plan.chunks_of[unit]] == ends[:-1] and ends[-1] == layout.elements
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    assert max(plan.chunk_bytes(chunk) for chunk in plan.chunks) <= plan.chunk_elements * place.state_itemsize
