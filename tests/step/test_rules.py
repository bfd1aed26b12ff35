"""Lion, Adagrad and SGD with the engine: the same bits on every placement, and those of plain PyTorch.

The pipeline knows none of them. Oracles: torch's own optimizers, and for Lion the paper's program.
"""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from fused_adam import FUSED_ADAM_IS_OURS
from models import RULES, Placement, Training, prepared, steps, train_offloaded, train_plain

import offload
from offload import accel, kernels
from offload.errors import CheckpointError, ConfigError, OffloadError

pytestmark = pytest.mark.usefixtures("the_cpu_computes")

PLACEMENTS = [
    Placement("cpu", "nvme", "step"),
    Placement("nvme", "cpu", "backward"),
    Placement("nvme", "nvme", "step", chunk=2048),
    Placement("nvme", "nvme", "backward", chunk=10**9),
    Placement("none", "none", "backward", chunk=2048),
]
LOOPS = {
    **{
        f"{rule}-{precision}": Training(precision, rule=rule)
        for rule in RULES
        for precision in ("fp32", "bf16")
    },
    **{
        f"{rule}-groups": Training(
            "bf16", rule=rule, groups=True, schedule=True, tied=True, frozen="blocks.0"
        )
        for rule in RULES
    },
}
ROUNDED = {
    f"{rule}-{precision}-rounded": Training(precision, "bf16", rule=rule, steps=6)
    for rule in ("momentum", "adagrad", "lion")
    for precision in ("fp32", "bf16")
}
CASES = [
    (loop, placement)
    for number, loop in enumerate(LOOPS | ROUNDED)
    for index, placement in enumerate(PLACEMENTS)
    if (number + index) % 2
]
"""Every rule meets every placement, in one loop or another."""


@cache
def in_memory(training):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "default_threads", lambda: 1)
        return train_offloaded(training, Placement(chunk=10**9), "/unused")


@pytest.mark.parametrize(("loop", "placement"), CASES, ids=str)
def test_same_bits_on_every_placement(loop, placement, swap_path):
    """And the ledger is the plan's, to the byte: see ``train_offloaded``."""
    training = (LOOPS | ROUNDED)[loop]
    train_offloaded(training, placement, swap_path).assert_same_bits(in_memory(training))


@pytest.mark.parametrize("loop", LOOPS)
def test_equal_to_plain_pytorch(loop):
    training = LOOPS[loop]
    outcome, plain = in_memory(training), train_plain(training)
    if FUSED_ADAM_IS_OURS:
        assert outcome.losses == plain.losses
        outcome.assert_same_state(plain)
    else:
        torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_accumulated_and_clipped_as_in_plain_pytorch(rule, swap_path):
    training = Training("bf16", rule=rule, accumulation=3, clip_config=0.5, groups=True)
    outcome, plain = train_offloaded(training, PLACEMENTS[2], swap_path), train_plain(training)
    torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-5, atol=0)
    if FUSED_ADAM_IS_OURS:
        outcome.assert_same_state(plain)


@pytest.mark.parametrize("rule", ["momentum", "adagrad", "lion"])
def test_rounded_moments_learn_as_exact_ones(rule):
    losses = {}
    for state_format in ("fp32", "bf16"):
        training = Training("bf16", state_format, rule=rule, steps=8)
        with prepared(training, Placement("cpu", "cpu", "backward"), "/unused") as (model, optimizer):
            losses[state_format] = steps(model, optimizer, training.batches() * 12)
    exact, rounded = (sum(each[-8:]) / 8 for each in losses.values())
    assert exact < 0.95 * losses["fp32"][0]
    assert abs(rounded - exact) < 0.02 * losses["fp32"][0]


@pytest.mark.parametrize("rule", ["momentum", "lion"])
def test_a_cycle_of_torch_moves_the_momentum_too(rule, swap_path):
    """OneCycleLR sets the momentum of SGD, and the first beta of Lion, at every step."""
    training = Training(rule=rule, steps=6)

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=7)

    plain = training.model()
    reference = training.plain_optimizer([{"params": list(plain.parameters())}])
    schedule, expected = cycle(reference), []
    for batch in training.batches():
        expected += steps(plain, reference, [batch])
        schedule.step()
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        schedule, losses = cycle(optimizer), []
        for batch in training.batches():
            losses += steps(model, optimizer, [batch])
            schedule.step()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


# -- state ------------------------------------------------------------------------------------------------


def with_state(training, placement, swap_path, saved=None):
    """The outcome of two steps, and the state dict after them; begun from ``saved`` where it is given."""
    with prepared(training, placement, swap_path) as (model, optimizer):
        batches = training.batches()
        if saved is not None:
            weights, state = saved
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            batches = batches[2:]
        losses = steps(model, optimizer, batches[:2])
        return losses, (model.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("state_format", ["fp32", "bf16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_state_goes_through_a_state_dict(rule, precision, state_format, swap_path):
    """Two steps, saved, loaded on another placement, two steps: the bits of four steps."""
    training = Training(precision, state_format, rule=rule)
    whole = train_offloaded(training, Placement("cpu", "cpu"), swap_path)
    losses, saved = with_state(training, Placement("nvme", "nvme"), swap_path)
    assert losses == whole.losses[:2]
    resumed, _ = with_state(training, Placement("cpu", "nvme", "backward"), swap_path, saved)
    assert resumed == whole.losses[2:]


@pytest.mark.parametrize("rule", RULES)
def test_state_goes_to_torch_and_back(rule, swap_path):
    """fp32: its keys are torch's, and either goes on from the other's."""
    training = Training(rule=rule)
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:2])
        ours, weights = optimizer.state_dict(), model.state_dict()
        plain = training.model()
        plain.load_state_dict(weights)
        reference = training.plain_optimizer([{"params": list(plain.parameters())}])
        loss = plain(training.batches()[0])
        loss.backward()
        reference.step()
        reference.zero_grad()
        theirs = reference.state_dict()
        keys = {index: state.keys() - {"step"} for index, state in ours["state"].items()}
        assert keys == {index: state.keys() - {"step"} for index, state in theirs["state"].items()}
        plain.load_state_dict(weights)
        reference.load_state_dict(copy.deepcopy(ours))
        for batch in training.batches()[2:]:
            plain(batch).backward()
            reference.step()
            reference.zero_grad()
        optimizer.load_state_dict(ours)
        steps(model, optimizer, training.batches()[2:])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-8)
        optimizer.load_state_dict(reference.state_dict())
        assert steps(model, optimizer, training.batches()[:1])[0] > 0


def test_adagrad_begins_with_its_initial_value(swap_path):
    training = Training(rule="adagrad")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (_, optimizer):
        before = optimizer.state_dict()["state"]
    assert all(bool((state["sum"] == 0.1).all()) and state["step"] == 0 for state in before.values())


def test_sgd_has_no_momentum_before_the_first_step(swap_path):
    """As torch: a buffer of zeros would make the first step another one, where there is dampening."""
    training = Training(rule="momentum")
    with prepared(training, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        start = optimizer.state_dict()
        assert start["state"] == {}
        weights = model.state_dict()
        first = steps(model, optimizer, training.batches())
        assert optimizer.state_dict()["state"][0].keys() == {"momentum_buffer"}
        model.load_state_dict(weights)
        optimizer.load_state_dict(start)
        assert steps(model, optimizer, training.batches()) == first


def test_state_of_another_rule_is_refused(swap_path):
    with prepared(Training(rule="lion"), Placement(), swap_path) as (_, optimizer):
        lion = optimizer.state_dict()
    with prepared(Training(rule="adagrad"), Placement(), swap_path) as (_, optimizer):
        before = optimizer.state_dict()["param_groups"]
        with pytest.raises(CheckpointError, match=r"sum of shape .* expected, got nothing"):
            optimizer.load_state_dict(lion)
        assert optimizer.state_dict()["param_groups"] == before


# -- what is refused ----------------------------------------------------------------------------------------


def test_momentum_that_comes_later_is_refused(swap_path):
    training = Training(rule="sgd")
    with prepared(training, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        optimizer.param_groups[0]["momentum"] = 0.9
        model(training.batches()[1]).backward()
        with pytest.raises(ConfigError, match="no group had momentum when the model was prepared"):
            optimizer.step()


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"nesterov": True}, "nesterov needs a momentum and no dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "nesterov needs a momentum and no dampening"),
    ],
)
def test_numbers_of_a_group_are_checked(numbers, match, swap_path):
    training = Training(rule="sgd")
    model = training.model()
    with pytest.raises(ConfigError, match=f"parameter group 0: {match}"):
        offload.prepare(
            model, training.config(Placement(), swap_path), [{"params": list(model.parameters()), **numbers}]
        )


@pytest.mark.parametrize("rule", RULES)
def test_state_on_an_accelerator_is_refused_by_name(rule, swap_path, monkeypatch):
    monkeypatch.setenv(accel.ENVIRONMENT, "simulated:1")
    training = Training(rule=rule)
    with pytest.raises(
        ConfigError, match=rf"optimizer\.type: {RULES[rule][0]} is for state that the CPU updates"
    ):
        offload.prepare(training.model(), training.config(Placement("none", "none"), swap_path))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "placement", [Placement("none", "cpu"), Placement("cpu", "nvme", "backward")], ids=str
)
def test_same_bits_where_an_accelerator_computes(placement, rule, swap_path, monkeypatch):
    training = replace(LOOPS[f"{rule}-bf16"], steps=3)
    expected = in_memory(training)
    monkeypatch.setenv(accel.ENVIRONMENT, "simulated:5")
    train_offloaded(training, placement, swap_path).assert_same_bits(expected)


def test_a_gradient_that_is_not_finite_changes_nothing(swap_path):
    training = Training(rule="lion")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        before = model.state_dict()
        (model(training.batches()[0]) * float("inf")).backward()
        optimizer.step()
        assert optimizer.engine.ledger.skipped_steps == 1
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(OffloadError):
        optimizer.step()
