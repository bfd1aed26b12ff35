"""What a format of optimizer state takes, moves and is refused for: sums by hand."""

import json
import re

import pytest
from typer.testing import CliRunner

from offload.bytesize import PAGE_BYTES
from offload.cli.main import app
from offload.config import OffloadConfig
from offload.errors import ConfigError, PlanError
from offload.inventory import ELEMENTS_ALIGNMENT, PARAM_ALIGNMENT_BYTES, ParamInfo, build_inventory
from offload.optim import kernels
from offload.placement import STATE_BLOCK, STATE_PLANES, WEIGHT_ITEMSIZE, Placement, placement_of
from offload.plan import MemoryPlan

GiB = 1 << 30
OPTIMIZER = "zero_optimization.offload_optimizer"


def inventory_of(sizes, *, itemsize=2):
    params = [ParamInfo(f"blocks.{i}.w.weight", (size,), itemsize, True) for i, size in enumerate(sizes)]
    return build_inventory(params, weight_itemsize=itemsize)


def placement(state_format, **changes):
    given = dict(  # noqa: C408
        precision="bf16", param_home="nvme", state_home="nvme", update="step", grad_itemsize=2,
        micro_batches=1, host_bytes=GiB,
    )  # fmt: skip
    return Placement(**{**given, "state_format": state_format, **changes})


def per_parameter(plan):
    steady = plan.bytes_moved(4) - plan.bytes_moved(3)
    return steady.total() / plan.inventory.trainable_parameters


def test_a_block_of_8_bit_moments_belongs_to_one_parameter_and_one_chunk():
    assert PARAM_ALIGNMENT_BYTES % (STATE_BLOCK * WEIGHT_ITEMSIZE["bf16"]) == 0
    assert ELEMENTS_ALIGNMENT % STATE_BLOCK == 0
    assert STATE_BLOCK == kernels.STATE_BLOCK


def test_int8_by_hand_with_extents_that_are_not_whole_pages_by_themselves():
    """Units of 6144 and 2048 elements in chunks of 4096: 3 bytes an element, 8 a block of 128, filled up to pages."""
    plan = MemoryPlan.build(placement("int8", chunk_elements_max=4096), inventory_of([6144, 2048]))
    whole, half = 4096 * 3 + 32 * 8, 2048 * 3 + 16 * 8
    assert (whole, half) == (12544, 6272)
    filled = {4096: 16384, 2048: 8192}
    assert [plan.chunk_bytes(chunk) for chunk in plan.chunks] == [filled[4096], filled[2048], filled[2048]]
    state = sum(filled[size] for size in (4096, 2048, 2048))
    lines = {(line.tier, line.purpose): line.total for line in plan.lines}
    assert lines["nvme", "optimizer state"] == state
    assert lines["host", "optimizer state chunks"] == plan.chunk_slots * filled[4096]
    assert plan.bytes_at_start()["nvme_write", "residual"] == 8192
    moved = plan.bytes_moved(3)
    fill = state - 8192 * 3 - 64 * 8  # counted with the scales, beside which it lies
    for link, steps_of_moments in (("nvme_read", 2), ("nvme_write", 3)):
        assert moved[link, "residual"] == 3 * 8192
        assert moved[link, "exp_avg"] == moved[link, "exp_avg_sq"] == steps_of_moments * 8192
        assert moved[link, "scale"] == steps_of_moments * (64 * 8 + fill)


@pytest.mark.parametrize("elements", [2048, 4096, 6144, 65536, 4 << 20])
@pytest.mark.parametrize(("rule", "precision", "state_format"), STATE_PLANES)
def test_extents_are_whole_pages_and_hardly_more_than_their_planes(rule, precision, state_format, elements):
    place = placement(state_format, rule=rule, precision=precision)
    planes = sum(plane.size_bytes(elements) for plane in place.state_planes)
    assert place.state_bytes(elements) % PAGE_BYTES == 0
    assert 0 <= place.state_bytes(elements) - planes < (PAGE_BYTES if state_format == "int8" else 1)


@pytest.mark.parametrize(
    ("state_format", "everything", "state_only"),
    # Weights in backward 2 + 2 read, 2 written. State each way: residual, exp_avg, exp_avg_sq, scales 8 / 128.
    [("fp32", 6 + 2 * 10, 2 * 10), ("bf16", 6 + 2 * 6, 2 * 6), ("int8", 6 + 2 * 3.0625, 2 * 3.0625)],
)
def test_bytes_per_parameter_and_step(state_format, everything, state_only):
    """Twelve units of 8 M elements, too many for the slots: every weight is read in forward and in backward."""
    inventory = inventory_of([8 << 20] * 12)
    plan = MemoryPlan.build(placement(state_format, update="backward"), inventory)
    # The last slots of forward are the first of backward, and those of its end begin the next forward.
    found = 2 * plan.weight_slots / 12 * 2
    assert everything - found - 0.5 <= per_parameter(plan) <= everything
    of_state = MemoryPlan.build(placement(state_format, update="backward", param_home="host"), inventory)
    assert per_parameter(of_state) == state_only
    if state_format == "int8":
        assert per_parameter(plan) <= 12.5 and per_parameter(of_state) <= 6.3


def config_of(state_format, *, precision="bf16", **others):
    return {
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"state_format": state_format, **others}},
    }


def test_int8_is_for_bf16_training():
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_dict(config_of("int8", precision="fp32"))
    assert str(refusal.value) == (
        f'{OPTIMIZER}.state_format: "int8" keeps the fp32 master as a bf16 weight and 8 bits, and the weights of'
        ' this run are fp32; write "bf16", or set bf16.enabled = true'
    )
    OffloadConfig.from_dict(config_of("bf16", precision="fp32"))
    OffloadConfig.from_dict(config_of("int8"))


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("others", "change"), [({}, 'device = "cpu" or "nvme"'), ({"device": "cpu", "ratio": 0.5}, "ratio = 1")]
)
def test_state_on_an_accelerator_is_exact(state_format, others, change):
    config = OffloadConfig.from_dict(config_of(state_format, **others))
    with pytest.raises(ConfigError) as refusal:
        placement_of(config, device_free_bytes=GiB)
    text = str(refusal.value)
    assert text.startswith(f"{OPTIMIZER}.state_format: {state_format!r} is for state that the CPU updates")
    assert text.endswith(f'; set {OPTIMIZER}.{change}, or use "fp32"') and "\n" not in text
    assert placement_of(config).state_home == "host"  # with a CPU, "none" is host memory
    moved = OffloadConfig.from_dict(config_of(state_format, device="cpu"))
    assert placement_of(moved, device_free_bytes=GiB).state_format == state_format


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("on_device", [False, True])
def test_rounded_formats_are_proposed_last(precision, on_device):
    """After everything that gives the same bits, however many settings that takes."""
    config = OffloadConfig.from_dict(config_of("fp32", precision=precision))
    remedies = placement_of(config, device_free_bytes=GiB if on_device else None).remedies
    rounded = [remedy.state_format != "fp32" for remedy in remedies]
    assert rounded == sorted(rounded) and any(rounded) and not all(rounded)
    formats = {remedy.state_format for remedy in remedies}
    assert formats == ({"fp32", "bf16", "int8"} if precision == "bf16" else {"fp32", "bf16"})
    for remedy in remedies:
        said = f'{OPTIMIZER}.state_format = "{remedy.state_format}" (rounded, not the exact format)'
        assert (said in remedy.settings) == (remedy.state_format != "fp32")
        assert remedy.state_format == "fp32" or not (remedy.state_home == "device" or remedy.device_share)


def test_a_refusal_proposes_a_format_where_nothing_else_is_left():
    """Everything is on nvme, and the update in backward: what is left is the disk, which is too small."""
    config = config_of("fp32", device="nvme", nvme_path="/swap", update="backward")
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": "/swap"}
    config["memory"] = {"host_bytes": "1GiB", "nvme_bytes": "8MiB"}
    inventory = inventory_of([1 << 20])
    with pytest.raises(PlanError) as refusal:
        MemoryPlan.build(placement_of(OffloadConfig.from_dict(config)), inventory)
    assert re.search(
        rf' or {OPTIMIZER}\.state_format = "bf16" \(rounded, not the exact format\), which needs [\d.]+ MiB$',
        str(refusal.value),
    )
    config["memory"]["nvme_bytes"] = "6MiB"
    with pytest.raises(PlanError, match=r'state_format = "int8" \(rounded'):
        MemoryPlan.build(placement_of(OffloadConfig.from_dict(config)), inventory)


@pytest.mark.parametrize(("state_format", "size"), [("fp32", 10), ("bf16", 6), ("int8", 3.0625)])
def test_offload_plan_shows_the_format_and_its_bytes(state_format, size, tmp_path):
    path = tmp_path / "config.json"
    config = config_of(state_format, device="nvme", nvme_path="/swap")
    path.write_text(json.dumps({**config, "memory": {"host_bytes": "100GiB"}}))
    result = CliRunner().invoke(app, ["plan", str(path), "--model", "preset:1b"])
    assert result.exit_code == 0, result.output
    assert f"bf16, optimizer state in {state_format}, update in step" in result.output
    moved = re.search(r"\n  in all .* ([\d.]+) B\n", result.output)
    assert moved is not None and float(moved[1]) == pytest.approx(2 * size, abs=0.011)
    assert ("\n  scale " in result.output) == (state_format == "int8")
