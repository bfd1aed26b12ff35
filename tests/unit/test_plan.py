"""The plan against arithmetic written out by hand, and refusals whose hints really fit."""

import itertools
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.bytesize import KiB, format_bytes, parse_bytes, round_up_bytes
from offload.config import OffloadConfig
from offload.errors import ConfigError, PlanError
from offload.inventory import ParamInfo, build_inventory
from offload.optim import kernels, make_optimizer
from offload.placement import STATE_PLANES, Placement, placement_of, refuse_unbuilt
from offload.plan import GRAD_SUM_ELEMENTS, PIECE_ELEMENTS, MemoryPlan

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


def test_sums_by_hand_with_a_part_of_the_state_on_the_device():
    """Units of 4096, 2048 and 6144 elements: the first two are half of the whole."""
    place = placement(param_home="host", state_home="host", device_bytes=GiB, device_share=0.5)
    plan = MemoryPlan.build(place, inventory_of([4096, 100, 6144]))
    elements, there, rest = 12288, 6144, 6144
    assert plan.on_device == {0, 1}
    scratch, crossing, staging = 64 << 20, 2 * 6144 * 2, 4 * 6144 * 4
    assert plan.bytes_total("device") == 3 * 6144 * 2 + there * 2 + there * 10 + scratch + crossing
    assert plan.bytes_total("host") == elements * 2 + rest * 2 + rest * 10 + staging
    assert plan.bytes_moved(3) - plan.bytes_moved(2) == {
        ("h2d", "weight"): 6144 * 2,  # of the one unit that the host updates: every unit has a slot
        ("d2h", "weight"): there * 2,
        ("d2h", "grad"): 6144 * 2,
    }
    backward = MemoryPlan.build(replace(place, update="backward"), plan.inventory)
    slots = backward.bytes_total("device") - 3 * 6144 * 2 - there * 10 - scratch - crossing
    assert slots == 2 * 4096 * 2
    less = MemoryPlan.build(replace(place, device_share=0.49), plan.inventory)
    assert less.on_device == {0}
    frozen = inventory_of([4096, 100, 6144], frozen=(0,))
    assert MemoryPlan.build(replace(place, device_share=0.3), frozen).on_device == {1}
    assert MemoryPlan.build(placement(), frozen).on_device == set()


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


@pytest.mark.parametrize("elements", [1, 127, 128, 2048, 8192 + 2048])
@pytest.mark.parametrize(("rule", "precision", "state_format"), STATE_PLANES)
def test_state_planes_are_those_of_the_optimizer(rule, precision, state_format, elements):
    optimizer = make_optimizer(rule, weight_format=precision, state_format=state_format)
    specs = optimizer.state_specs(elements)
    planes = STATE_PLANES[rule, precision, state_format]
    assert optimizer.moments == placement(rule=rule).moments
    assert [(s.name, s.size_bytes) for s in specs] == [(p.name, p.size_bytes(elements)) for p in planes]
    residual = sum(spec.dtype.itemsize for spec in specs if spec.name == "residual")
    place = placement(rule=rule, precision=precision, state_format=state_format)
    assert place.residual_itemsize == residual


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


def test_every_purpose_has_a_line_of_its_own():
    """Activations, libraries and the widened piece are told apart, and the sum is theirs."""
    params = [
        ParamInfo("blocks.0.w.weight", (64, 128), 2, True),
        ParamInfo("blocks.1.w.weight", (96,), 2, True),
    ]
    inventory = build_inventory(params, weight_itemsize=2, activation_bytes=300 << 10)
    plan = MemoryPlan.build(placement(), replace(inventory, library_bytes=5 << 20))
    sizes = {line.purpose: line.total for line in plan.lines if line.tier == "host"}
    assert sizes["activations"] == 300 << 10
    assert sizes["library code and scratch"] == 5 << 20
    assert sizes["fp32 piece of a bf16 weight"] == 4 * 64 * 128
    assert sum(sizes.values()) == plan.bytes_total("host")
    for purpose, size in sizes.items():
        assert re.search(
            rf"^  host  {purpose} .*{re.escape(format_bytes(size))}$", plan.report(), re.MULTILINE
        )
    large = [ParamInfo("blocks.0.w.weight", (4096, 4096), 2, True)]
    of_large = MemoryPlan.build(placement(), build_inventory(large, weight_itemsize=2))
    assert of_large.lines[-1].total == 4 * PIECE_ELEMENTS
    in_fp32 = build_inventory([replace(large[0], itemsize=4)], weight_itemsize=4)
    fp32 = placement(precision="fp32", grad_itemsize=4)
    assert "fp32 piece" not in MemoryPlan.build(fp32, in_fp32).report()


def test_report_says_what_fits_and_what_a_step_moves():
    plan = MemoryPlan.build(placement(), inventory_of([4096, 100, 6144]))
    lines = plan.report().splitlines()
    least = MemoryPlan.build(placement(host_bytes=plan.smallest.bytes_total("host")), plan.inventory)
    assert least.bytes_total("host") < plan.bytes_total("host")
    (in_all,) = [line for line in lines if line.startswith("  host  in all")]
    assert in_all.endswith(
        f"{format_bytes(plan.bytes_total('host'))} of 1.00 GiB;"
        f' "{round_up_bytes(least.bytes_total("host"))}" would do, more slowly'
    )
    moved = plan.bytes_moved(4) - plan.bytes_moved(3)
    read, written = (
        format_bytes(sum(size for (name, _), size in moved.items() if name == link))
        for link in ("nvme_read", "nvme_write")
    )
    share = moved.total() / plan.inventory.trainable_parameters
    assert lines[-1].split() == ["in", "all", *read.split(), *written.split(), f"{share:.2f}", "B"]


@given(st.integers(1, 1 << 50))
def test_a_rounded_budget_is_enough_and_hardly_more(size):
    assert size <= parse_bytes(round_up_bytes(size)) <= max(1.02 * size, size + KiB)


# -- hints ------------------------------------------------------------------------------------------------

SETTING = re.compile(r"([a-z_]+(?:\.[a-z_]+)+) = (?:\"([^\"]+)\"|(\d+))( with an nvme_path)?")


def settings_of(message):
    """What a refusal tells to write: the budgets, and, where there is one, the other way."""
    hint = message[message.rindex("; write ") :]
    budgets, _, other = hint.partition(", or ")
    return [
        {path: (text or int(number), bool(on_path)) for path, text, number, on_path in SETTING.findall(part)}
        for part in (budgets, other)
    ]


def written(config, changes):
    """The configuration with the settings that a message names, and nothing else."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for path, (value, needs_path) in changes.items():
        *blocks, name = path.split(".")
        section = config
        for block in blocks:
            section[block] = dict(section.get(block, {}))
            section = section[block]
        section[name] = value
        if needs_path:
            section["nvme_path"] = "/elsewhere"
    return config


def some_configs(*budgets):
    """A third of the configurations, another one for each pair of budgets."""
    every = [*configs()]
    return random.Random("/".join(budgets)).sample(every, len(every) // 3)


def configs():
    """All combinations of what a hint depends on."""
    for precision, kept_as, stage, params, states, update, clipping, accumulation, ratio, idle in itertools.product(
        ("bf16", "fp32"), ("fp32", "bf16", "int8"), (0, 3), ("none", "cpu", "nvme"), ("none", "cpu", "nvme"),
        ("auto", "step", "backward"), (None, 1.0), (1, 2), (1.0, 0.5), (None, "/other"),
    ):  # fmt: skip
        if ("adam", precision, kept_as) not in STATE_PLANES:
            continue
        if kept_as != "fp32" and (stage, idle) != (3, None):
            continue  # two more formats of what is told in a hint by the same words
        if params != "none" and stage != 3:
            continue
        if update == "backward" and (clipping or accumulation > 1):
            continue
        if ratio < 1 and states != "cpu":
            continue
        path = {"nvme": "/swap"}
        yield {
            "bf16": {"enabled": precision == "bf16"},
            "gradient_clipping": clipping,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {
                "stage": stage,
                "offload_param": {"device": params, "nvme_path": path.get(params, idle)},
                "offload_optimizer": {
                    "device": states,
                    "nvme_path": path.get(states, idle),
                    "update": update,
                    "ratio": ratio,
                    "state_format": kept_as,
                },
            },
        }


@pytest.mark.parametrize("device_bytes", ["1MiB", "64MiB", "67MiB"])
@pytest.mark.parametrize("host_bytes", ["6MiB", "64MiB"])
def test_every_hint_for_device_memory_leads_to_a_plan_that_fits(device_bytes, host_bytes):
    """The same where an accelerator's budget is hard too; what is proposed takes no more device memory."""
    refusals = of_device = others = 0
    for config in some_configs(host_bytes, device_bytes):
        config["memory"] = {"host_bytes": host_bytes, "device_bytes": device_bytes}
        settings_ = OffloadConfig.from_dict(config)
        inventory = inventory_of([100_000] * 4, itemsize=2 if settings_.precision == "bf16" else 4)
        try:
            place = placement_of(settings_, device_free_bytes=GiB)
        except ConfigError:
            assert settings_.zero_optimization.offload_optimizer.state_format != "fp32"
            continue
        try:
            MemoryPlan.build(place, inventory)
        except PlanError as error:
            message = str(error)
        else:
            continue
        refusals += 1
        of_device += message.startswith("device memory needs at least ")
        budgets, other = settings_of(message)
        for changes in filter(None, (budgets, other)):
            fixed = OffloadConfig.from_dict(written(config, changes))
            refuse_unbuilt(fixed)
            plan = MemoryPlan.build(placement_of(fixed, device_free_bytes=GiB), inventory)
        if other:
            others += 1
            said = re.search(r", which needs (.*) of device memory and (.*) of host memory$", message)
            assert said.groups() == tuple(
                format_bytes(plan.smallest.bytes_total(tier)) for tier in ("device", "host")
            )
    assert refusals > 20
    assert others and of_device


def test_device_memory_is_refused_with_its_sum_and_what_fits():
    """Weights, gradients and state of a model on the device, where there is room for weights and gradients."""
    config = {"bf16": {"enabled": True}, "memory": {"device_bytes": "66MiB", "host_bytes": "1GiB"}}
    place = placement_of(OffloadConfig.from_dict(config), device_free_bytes=GiB)
    inventory = inventory_of([500_000] * 4)
    with pytest.raises(PlanError) as refusal:
        MemoryPlan.build(place, inventory)
    assert str(refusal.value) == (
        "device memory needs at least 90.8 MiB = 3.83 MiB weights + 3.83 MiB gradients + 19.1 MiB optimizer"
        " state + 64.0 MiB update scratch; memory.device_bytes is 66.0 MiB; write memory.device_bytes ="
        ' "91MiB", or zero_optimization.offload_optimizer.device = "cpu", which needs 5.74 MiB of device memory'
        " and 34.5 MiB of host memory"
    )


@pytest.mark.parametrize("host_bytes", ["1KiB", "1500KiB", "3MiB", "5MiB"])
@pytest.mark.parametrize("nvme_bytes", ["auto", "1MiB", "4MiB"])
def test_every_hint_leads_to_a_plan_that_fits(host_bytes, nvme_bytes):
    """Written into the file, all by itself, it is a configuration that is legal and a plan that is built."""
    refusals = others = 0
    for config in some_configs(host_bytes, nvme_bytes):
        config["memory"] = {"host_bytes": host_bytes, "nvme_bytes": nvme_bytes}
        settings_ = OffloadConfig.from_dict(config)
        inventory = inventory_of([100_000] * 4, itemsize=2 if settings_.precision == "bf16" else 4)
        try:
            MemoryPlan.build(placement_of(settings_), inventory)
        except PlanError as error:
            message = str(error)
        else:
            continue
        refusals += 1
        assert "\n" not in message and not re.search(r"\d{5}", message)  # no raw byte counts
        budgets, other = settings_of(message)
        assert budgets and all(path.startswith("memory.") for path in budgets)
        for changes in filter(None, (budgets, other)):
            fixed = OffloadConfig.from_dict(written(config, changes))
            refuse_unbuilt(fixed)
            plan = MemoryPlan.build(placement_of(fixed), inventory)
        if other:
            others += 1
            said = re.search(r", which needs (.*)$", message)[1]
            assert said == format_bytes(plan.smallest.bytes_total("host"))
    assert refusals > 20
    assert others or host_bytes in ("1KiB", "1500KiB") or nvme_bytes == "1MiB"


@pytest.mark.parametrize("reason", [{"gradient_clipping": 1.0}, {"gradient_accumulation_steps": 4}])
def test_update_in_backward_is_not_proposed_where_it_is_impossible(reason):
    """The gradients of a model whose planes are on nvme already are all that could be saved."""
    blocks = {"device": "nvme", "nvme_path": "/swap"}
    config = {
        "zero_optimization": {"stage": 3, "offload_param": blocks, "offload_optimizer": blocks},
        "memory": {"host_bytes": "6MiB"},
    }
    inventory = inventory_of([100_000] * 16, itemsize=4)
    with pytest.raises(PlanError, match=r'update = "backward", which needs 1\.93 MiB$'):
        MemoryPlan.build(placement_of(OffloadConfig.from_dict(config)), inventory)
    with pytest.raises(PlanError, match=r'write memory\.host_bytes = "\d+KiB"$'):
        MemoryPlan.build(placement_of(OffloadConfig.from_dict({**config, **reason})), inventory)


# -- any model, any budget --------------------------------------------------------------------------------

models = st.lists(st.integers(50_000, 300_000), min_size=1, max_size=8)
placements = st.builds(
    lambda formats, **others: placement(
        **dict(zip(("rule", "precision", "state_format"), formats, strict=True)), **others
    ),
    formats=st.sampled_from(list(STATE_PLANES)),
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


@settings(max_examples=150, deadline=None)
@given(placements, models)
def test_budgets_of_a_refusal_are_enough_and_hardly_more(place, sizes):
    inventory = model_for(place, sizes)
    try:
        plan = MemoryPlan.build(place, inventory)
    except PlanError as error:
        budgets, other = settings_of(str(error))
        assert not other  # nobody told this placement what else is legal
        named = {path.removeprefix("memory."): parse_bytes(value) for path, (value, _) in budgets.items()}
        place = replace(place, **named)
        plan = MemoryPlan.build(place, inventory)
        for name, budget in named.items():
            smallest = plan.smallest.bytes_total(name.removesuffix("_bytes"))
            assert smallest <= budget <= max(1.02 * smallest, smallest + KiB)
    assert plan.bytes_total("host") <= place.host_bytes
    assert place.nvme_bytes is None or plan.bytes_total("nvme") <= place.nvme_bytes


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
    assert max(plan.chunk_bytes(chunk) for chunk in plan.chunks) <= place.state_bytes(plan.chunk_elements)


def test_a_sum_of_squares_is_of_as_many_elements_as_the_kernel_takes() -> None:
    assert GRAD_SUM_ELEMENTS == kernels.SQUARE_BLOCK
