"""What is read from rounded state, written to it, and kept of it in a checkpoint.

Oracles: the run without a break, the bytes of the planes, and the largest error that rounding to the nearest can make.
"""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from models import Placement, Training, half_up, prepared, steps, train_offloaded

import offload
from offload import construct
from offload.access import read_weight
from offload.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("the_cpu_computes")

FORMATS = [("bf16", "bf16"), ("bf16", "int8"), ("fp32", "bf16")]
"""Precision of training, format of state."""


def planes_of(engine):
    """The bytes of all state, and of all weights."""
    engine.settle()
    states = [engine.read_chunk(chunk).clone() for chunk in engine.plan.chunks]
    return states + [read_weight(engine, s) for s in engine.partition.trainable]


@pytest.mark.parametrize(
    "second", [Placement("none", "none"), Placement("nvme", "nvme", "backward", 2048)], ids=str
)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_goes_on_from_the_same_format_bit_for_bit(formats, second, swap_path, caplog):
    training = Training(*formats, steps=6)
    batches = training.batches()
    unbroken = train_offloaded(training, Placement(), swap_path)
    with prepared(training, Placement("nvme", "nvme", chunk=2048), swap_path) as (model, optimizer):
        losses = steps(model, optimizer, batches[:3])
        weights, state = model.state_dict(), optimizer.state_dict()
        before = planes_of(optimizer.engine)
        optimizer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(before, planes_of(optimizer.engine), strict=True))
    assert state.get("state_format", "fp32") == training.state_format
    assert all(
        state["state"][i][name].dtype is torch.float32
        for i in state["state"]
        for name in ("exp_avg", "exp_avg_sq")
    )
    with caplog.at_level(logging.INFO, "offload"), prepared(replace(training, seed=9), second, swap_path) as (
        model, optimizer,
    ):  # fmt: skip
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        losses += steps(model, optimizer, batches[3:])
        for stored, values in offload.optimizer_state(optimizer.engine):
            assert torch.equal(
                torch.stack([values["exp_avg"], values["exp_avg_sq"]]), unbroken.moments[stored.name]
            )
            assert torch.equal(offload.read_master(optimizer.engine, stored), unbroken.masters[stored.name])
    assert losses == unbroken.losses
    assert "optimizer state saved" not in caplog.text


@pytest.mark.parametrize(("saved_as", "kept_as"), [*itertools.permutations(("fp32", "bf16", "int8"), 2)])
def test_another_format_takes_a_checkpoint_over_with_one_line(saved_as, kept_as, swap_path, caplog):
    """Rounded to the nearest: half a step of the format from what was saved, at most."""
    training = Training("bf16", saved_as)
    with prepared(training, Placement("cpu", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        weights, saved = model.state_dict(), optimizer.state_dict()
    with prepared(replace(training, state_format=kept_as), Placement("cpu", "nvme"), swap_path) as (
        model,
        optimizer,
    ):
        model.load_state_dict(weights)
        with caplog.at_level(logging.INFO, "offload"):
            optimizer.load_state_dict(saved)
        state = optimizer.state_dict()
        assert state.get("state_format", "fp32") == kept_as and ("scale" in state["state"][0]) == (
            kept_as == "int8"
        )
        for index, before in saved["state"].items():
            after = state["state"][index]
            assert after["step"] == before["step"] == 4
            assert_near(after, before, kept_as)
        steps(model, optimizer, training.batches()[:1])
    how = "as it is" if kept_as == "fp32" else "rounded to the nearest"
    lines = [record.message for record in caplog.records if "optimizer state saved" in record.message]
    assert lines == [
        f"optimizer state saved as {saved_as} is kept as {kept_as} from now on: taken over {how}"
    ]


def assert_near(after, before, kept_as):
    if kept_as == "fp32":
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(after[name], before[name]), name
        return
    relative = {"bf16": 2**-8, "int8": 2**-16}  # of a master 24 bits are left
    if kept_as == "int8":
        torch.testing.assert_close(after["master"], before["master"], rtol=relative["int8"], atol=0)
    else:
        assert torch.equal(after["master"], before["master"])
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(after[name], before[name], rtol=relative["bf16"], atol=1e-38)
        return
    for name, of in (("exp_avg", before["exp_avg"]), ("exp_avg_sq", before["exp_avg_sq"].sqrt())):
        got = after[name] if name == "exp_avg" else after[name].sqrt()
        largest = block_maxima(of.abs())
        bias, top, half = (16, 3952, 32) if name == "exp_avg" else (32, 8032, 64)
        # Half a step of x + bias, on the scale where the block's largest is `top`; above zero one step at least.
        step = (of.abs() + bias * largest / top) / half
        assert bool(((got - of).abs() <= 1.01 * step + largest / top).all()), name


def block_maxima(values):
    """Of each element, the largest of its block of 128."""
    flat = values.flatten()
    padded = torch.zeros(-(-flat.numel() // 128) * 128)
    padded[: flat.numel()] = flat
    largest = padded.view(-1, 128).amax(1, keepdim=True).expand(-1, 128).flatten()
    return largest[: flat.numel()].view_as(values)


def test_state_of_torch_is_taken_over(swap_path):
    """It says no format: fp32."""
    training = Training("bf16", "int8")
    plain = training.model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    steps(plain, reference, training.batches())
    with prepared(training, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(reference.state_dict())
        for index, state in optimizer.state_dict()["state"].items():
            weight = [*plain.parameters()][index]
            assert_near(state, {**reference.state_dict()["state"][index], "master": weight.detach()}, "int8")


def test_scales_of_another_shape_are_refused_whole(swap_path):
    training = Training("bf16", "int8")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        state, before = optimizer.state_dict(), planes_of(optimizer.engine)
        state["state"][3]["scale"] = torch.zeros(5, 2)
        with pytest.raises(CheckpointError, match=r"scale of shape \(1, 2\) expected, got \(5, 2\)"):
            optimizer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(before, planes_of(optimizer.engine), strict=True))


@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_values_written_between_steps(state, swap_path):
    """An element that is written has the written value; its neighbours keep their masters, all bits of them."""
    training = Training("bf16", "int8")
    with prepared(training, Placement("nvme", state), swap_path) as (model, optimizer):
        engine = optimizer.engine
        steps(model, optimizer, training.batches()[:2])
        masters = {s.name: offload.read_master(engine, s) for s in engine.partition.trainable}
        assert any((m != half_up(m).float()).any() for m in masters.values())
        weight = model.blocks[2].up.weight
        with offload.gather([weight], modify=True):
            weight.data[0] = 0.5
        for stored in engine.partition.trainable:
            expected = masters[stored.name].clone()
            if stored.name == "blocks.2.up.weight":
                expected[0] = 0.5
            assert torch.equal(offload.read_master(engine, stored), expected), stored.name
        steps(model, optimizer, training.batches()[2:])


@pytest.mark.parametrize(("param", "state"), [("nvme", "nvme"), ("cpu", "cpu")])
def test_a_prepare_that_breaks_off_gives_back_what_the_planes_hold(param, state, swap_path, monkeypatch):
    """Of a trained fp32 value 24 bits, rounded; of what had not been taken yet, all."""
    training = Training("bf16", "int8")
    model, reference = training.model(), dict(training.model().named_parameters())
    left = [construct.initial_value] * (len(reference) - 1)

    def broken(param):
        if not left:
            raise RuntimeError("the checkpoint ends here")
        return left.pop()(param)

    monkeypatch.setattr("offload.construct.initial_value", broken)
    with pytest.raises(RuntimeError, match="ends here"):
        offload.prepare(model, training.config(Placement(param, state), swap_path))
    rounded = 0
    for name, value in model.named_parameters():
        was = reference[name].detach()
        kept = ((was.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
        assert torch.equal(value, kept) or torch.equal(value, was), name
        rounded += not torch.equal(value, was)
    assert rounded > 4
