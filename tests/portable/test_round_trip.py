"""What is saved in one place comes back in any other: the same bits where formats are equal, and training goes on."""

import itertools
import json
import stat
from dataclasses import replace

import pytest
import torch
from leftovers import assert_same, saved, values_of
from models import Placement, Training, prepared, steps, train_offloaded
from safetensors.torch import load_file

import offload
from offload.errors import CheckpointError

PLACES = [
    Placement("none", "none"),
    Placement("cpu", "nvme"),
    Placement("nvme", "nvme", "backward", chunk=2048),
]
HALF = 2


WAYS = [
    *((("bf16", "int8"), *ways) for ways in itertools.permutations(PLACES, 2)),
    *zip([("bf16", "fp32")] * 3, PLACES, PLACES[1:] + PLACES[:1], strict=True),
    *zip([("fp32", "bf16")] * 3, PLACES, PLACES[2:] + PLACES[:2], strict=True),
]


@pytest.mark.parametrize(("kind", "before", "after"), WAYS, ids=str)
def test_k01_training_goes_on_anywhere(kind, before, after, swap_path, tmp_path):
    """Half of a run, saved; the other half by another process's engine elsewhere: the bits of the whole run."""
    training = Training(*kind, tied=True, frozen="blocks.0 positions")
    whole = train_offloaded(training, replace(before, update="step"), swap_path)
    batches = training.batches()
    with prepared(training, before, swap_path) as (model, optimizer):
        losses = steps(model, optimizer, batches[:HALF])
        expected = values_of(model, optimizer)
        folder = saved(optimizer, tmp_path / "out")
        assert_same(values_of(model, optimizer), expected)
    other = replace(training, seed=7)
    with prepared(training, replace(after, chunk=4096), swap_path, other.model()) as (model, optimizer):
        optimizer.engine.load_checkpoint(folder)
        assert_same(values_of(model, optimizer), expected)
        losses += steps(model, optimizer, batches[HALF:])
        found = values_of(model, optimizer)
    assert losses == whole.losses
    for name, master in whole.masters.items():
        assert torch.equal(found["exp_avg", name], whole.moments[name][0]), name
        assert torch.equal(found.get(("master", name), found["weight", name]).float(), master), name


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(PLACES[:2], 2)], ids=str)
def test_k09_state_goes_where_the_configuration_says_with_an_accelerator_too(
    before, after, swap_path, tmp_path, monkeypatch
):
    """A device that is simulated: state and weights that were on it come back in host memory and nvme, or go there."""
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "simulated:3")
    training = Training("bf16", frozen="blocks.0")
    with prepared(training, before, swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:HALF])
        folder = saved(optimizer, tmp_path / "out")
        losses = steps(model, optimizer, training.batches()[HALF:])
        expected = values_of(model, optimizer)
    with prepared(training, after, swap_path, replace(training, seed=7).model()) as (model, optimizer):
        plan = optimizer.engine.plan
        assert (len(plan.on_device) > 0) == (after.state == "none")
        optimizer.engine.load_checkpoint(folder)
        assert steps(model, optimizer, training.batches()[HALF:]) == losses
        assert_same(values_of(model, optimizer), expected)


@pytest.mark.parametrize(("saved_as", "kept_as"), [*itertools.permutations(("fp32", "bf16", "int8"), 2)])
def test_another_format_is_taken_over_as_by_the_optimizers_state_dict(saved_as, kept_as, swap_path, tmp_path):
    training = Training("bf16", saved_as)
    other = replace(training, state_format=kept_as, seed=3)
    with prepared(training, Placement("cpu", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        weights, states = model.state_dict(), optimizer.state_dict()
        folder = saved(optimizer, tmp_path / "out")
    with prepared(other, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        expected = values_of(model, optimizer)
    with prepared(other, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        optimizer.engine.load_checkpoint(folder)
        assert_same(values_of(model, optimizer), expected)


@pytest.mark.parametrize(("there", "here"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_another_precision_keeps_the_master(there, here, swap_path, tmp_path):
    training = Training(there)
    with prepared(training, Placement("nvme", "cpu"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        engine = optimizer.engine
        masters = {stored.name: offload.read_master(engine, stored) for stored in engine.partition.trainable}
        expected = values_of(model, optimizer)
        folder = saved(optimizer, tmp_path / "out")
    with prepared(replace(training, precision=here, seed=5), Placement("nvme", "nvme"), swap_path) as (
        model,
        optimizer,
    ):
        optimizer.engine.load_checkpoint(folder)
        engine = optimizer.engine
        for stored in engine.partition.trainable:
            assert torch.equal(offload.read_master(engine, stored), masters[stored.name]), stored.name
        found = values_of(model, optimizer)
        for key in found:
            if key[0].startswith("exp_avg"):
                assert torch.equal(found[key], expected[key]), key


def test_a_half_filled_window_comes_back(swap_path, tmp_path):
    """The gradients that wait are saved: the update that ends the window has the bits of an unbroken one."""
    training = Training("bf16", accumulation=2)
    first, second = training.batches()[:2]
    outcomes = []
    for breaks in (False, True):
        with prepared(training, Placement("cpu", "nvme"), swap_path) as (model, optimizer):
            (model(first) / 2).backward()
            if breaks:
                folder = saved(optimizer, tmp_path / "out")
            else:
                (model(second) / 2).backward()
                optimizer.step()
                outcomes.append(values_of(model, optimizer))
    with prepared(training, Placement("nvme", "nvme"), swap_path, replace(training, seed=9).model()) as (
        model,
        optimizer,
    ):
        optimizer.engine.load_checkpoint(folder)
        (model(second) / 2).backward()
        optimizer.step()
        assert_same(values_of(model, optimizer), outcomes[0])


def test_k03_k06_k13_frozen_weights_stay_out_on_wish_and_the_base_is_known(swap_path, tmp_path):
    training = Training("bf16", frozen="blocks tokens positions norm")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        expected = values_of(model, optimizer)
        full, small = (
            saved(optimizer, tmp_path / name, exclude_frozen=name == "small") for name in ("full", "small")
        )
    trained = sum(value.numel() for (kind, _), value in expected.items() if kind == "master")
    size = sum(file.stat().st_size for file in small.iterdir())
    assert (
        trained * 12 < size < trained * 12 + 40_000 < sum(file.stat().st_size for file in full.iterdir()) / 2
    )
    names = {name for file in small.glob("*.safetensors") for name in load_file(file)}
    assert {name.split(".")[0] for name in names} == {"head"}
    with prepared(training, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        optimizer.engine.load_checkpoint(small)  # the same base
        assert_same(values_of(model, optimizer), expected)
    with prepared(training, Placement("cpu", "nvme"), swap_path, replace(training, seed=1).model()) as (
        model,
        optimizer,
    ):
        before = values_of(model, optimizer)
        with pytest.raises(
            CheckpointError, match=r"tokens\.weight was left out there and has another value here"
        ):
            optimizer.engine.load_checkpoint(small)
        assert_same(values_of(model, optimizer), before)
        optimizer.engine.load_checkpoint(full)  # with its own frozen weights
        assert_same(values_of(model, optimizer), expected)


def test_k03_strictness(swap_path, tmp_path):
    """What is on one side only is named before anything changes, and left alone where it is allowed."""
    training = Training("fp32")
    with prepared(training, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        expected = values_of(model, optimizer)
        folder = saved(optimizer, tmp_path / "out")
    larger = replace(training, seed=4).model()
    larger.more = torch.nn.Linear(3, 3)
    smaller = replace(training, seed=4).model()
    del smaller.blocks[3]
    frozen = replace(training, seed=4, frozen="norm").model()
    for model, refusal in (
        (larger, r"it lacks more\.weight, more\.bias, which this model has"),
        (smaller, r"it has blocks\.3\.norm1\.weight, .*more, which this model lacks"),
    ):
        with prepared(training, Placement("cpu", "nvme"), swap_path, model) as (_, optimizer):
            before = values_of(model, optimizer)
            with pytest.raises(CheckpointError, match=refusal) as caught:
                optimizer.engine.load_checkpoint(folder)
            assert str(caught.value).startswith(f"{folder}: ") and "\n" not in str(caught.value)
            assert_same(values_of(model, optimizer), before)
            optimizer.engine.load_checkpoint(folder, strict=False)
            for key, value in values_of(model, optimizer).items():  # weights, and nothing else
                assert torch.equal(
                    value, (expected if key[0] == "weight" else before).get(key, before[key])
                ), key
    with prepared(training, Placement("cpu", "nvme"), swap_path, frozen) as (model, optimizer):
        with pytest.raises(
            CheckpointError, match=r"norm\.weight, norm\.bias was trained there and is frozen here"
        ):
            optimizer.engine.load_checkpoint(folder)
        optimizer.engine.load_checkpoint(folder, weights_only=True)
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected["weight", name]), name


def test_other_strides_and_types(swap_path, tmp_path):
    """Elements may lie in another order there, and parameters may be empty, scalars or integers."""

    class Odd(torch.nn.Module):
        def __init__(self, seed, permuted):
            super().__init__()
            torch.manual_seed(seed)
            weight = torch.randn(5, 7, 300)
            if permuted:
                weight = weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            self.weight = torch.nn.Parameter(weight)
            self.scale = torch.nn.Parameter(torch.randn(()))
            self.none = torch.nn.Parameter(torch.empty(0, 3))
            self.table = torch.nn.Parameter(torch.randint(0, 9, (5, 3)), requires_grad=False)
            self.frozen = torch.nn.Parameter(torch.randn(4, 6).t(), requires_grad=False)
            self.register_buffer("mean", torch.randn(3, 2).t())

        def forward(self, x):
            return ((self.weight * x).sum() + self.scale) ** 2 + self.none.sum()

    for precision, state_format in (("bf16", "int8"), ("fp32", "fp32")):
        training = Training(precision, state_format)
        batches = [torch.randn(300) for _ in range(3)]
        with prepared(training, Placement("cpu", "cpu"), swap_path, Odd(0, True)) as (model, optimizer):
            steps(model, optimizer, batches)
            expected = values_of(model, optimizer)
            folder = saved(optimizer, tmp_path / precision)
        (weights,) = folder.glob("weights-*")
        assert load_file(weights)["weight"].shape == (300, 5, 7)  # as it lies in memory
        for permuted in (True, False):
            small = Placement("nvme", "nvme", chunk=2048)
            with prepared(training, small, swap_path, Odd(1, permuted)) as (model, optimizer):
                optimizer.engine.load_checkpoint(folder)
                found = values_of(model, optimizer)
                same = {key for key in expected if permuted or state_format == "fp32" or key[0] == "weight"}
                assert_same({k: found[k] for k in same}, {k: expected[k] for k in same})
                assert all(found[key].shape == expected[key].shape or key[0] == "scale" for key in expected)


def test_files_are_the_owners_alone_and_readable_without_us(swap_path, tmp_path):
    training = Training("bf16", tied=True)
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        expected = {**model.state_dict()}
        masters = values_of(model, optimizer)
        folder = saved(optimizer, tmp_path / "out")
    for directory in (tmp_path / "out", folder):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in (*folder.iterdir(), tmp_path / "out" / "latest"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    (weights,), (state,) = folder.glob("weights-*"), folder.glob("state-*")
    found, planes = load_file(weights), load_file(state)
    expected.pop("head.weight")
    assert_same(found, expected)
    assert torch.equal(planes["norm.weight.exp_avg"], masters["exp_avg", "norm.weight"])
    header = json.loads(weights.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    assert header["__metadata__"] == {"format": "pt", "head.weight": "tokens.weight"}
