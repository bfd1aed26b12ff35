"""`offload.CPUAdam` beside torch's AdamW: the same bits, the same state dict, the same manners."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planes import where_fused_adam_is_ours
from torch import nn

import offload
from offload.errors import CheckpointError, ConfigError
from offload.ops.adam import DeepSpeedCPUAdam
from offload.optim import kernels

SHAPES = ((64, 32), (128,), (16, 8, 3, 3), (64,))
"""Whole vectors of torch's, whose tails round elsewhere."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in SHAPES]


def gradients(dtype: torch.dtype = torch.float32) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield [(torch.randn(shape, generator=generator) * 0.01).to(dtype) for shape in SHAPES]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 3e-3},
        {"params": params[2:], "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]


def train(optimizer: torch.optim.Optimizer, steps: int, grads: Iterator[list[torch.Tensor]]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(steps):
        for param, grad in zip(params, next(grads), strict=True):
            param.grad = grad
        optimizer.step()


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@where_fused_adam_is_ours
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_hundred_steps_are_torchs(decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(groups(theirs), weight_decay=0.02, fused=True)
    optimizer = offload.CPUAdam(groups(ours), weight_decay=0.02, adamw_mode=decoupled)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 100) for each in (optimizer, reference)]
    batches = gradients(), gradients()
    for _ in range(100):
        for each, grads, schedule in zip((optimizer, reference), batches, schedules, strict=True):
            train(each, 1, grads)
            schedule.step()
    assert_same(ours, theirs)


@where_fused_adam_is_ours
@pytest.mark.parametrize("first_is_ours", [True, False])
def test_the_state_goes_over_in_both_directions(first_is_ours: bool) -> None:
    """Thirty steps with one, saved, thirty with the other: as sixty with torch's."""
    params, reference_params = parameters(), parameters()
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        offload.CPUAdam,
        lambda given: torch.optim.AdamW(given, fused=True),
    ]
    first, second = (makers[index](groups(params)) for index in ((0, 1) if first_is_ours else (1, 0)))
    grads = gradients()
    train(first, 30, grads)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    if first_is_ours:  # which of torch's implementations is no part of our groups
        for group in second.param_groups:
            group["fused"] = True
    train(second, 30, grads)
    reference = torch.optim.AdamW(groups(reference_params), fused=True)
    train(reference, 60, gradients())
    assert_same(params, reference_params)
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] == 3e-3


def test_bf16_parameters_are_the_rounded_copies_of_fp32_masters() -> None:
    """What is trained is fp32: with the gradients of the same type, as fp32 parameters are trained."""
    weights = parameters(torch.bfloat16)
    masters = [nn.Parameter(param.detach().float()) for param in weights]
    optimizer, reference = offload.CPUAdam(weights, lr=1e-4), offload.CPUAdam(masters, lr=1e-4)
    grads = gradients(torch.bfloat16)
    for _ in range(50):
        batch = next(grads)
        for weight, master, grad in zip(weights, masters, batch, strict=True):
            weight.grad, master.grad = grad, grad.float()
        optimizer.step()
        reference.step()
    for weight, master in zip(weights, masters, strict=True):
        joined = torch.empty(weight.numel())
        residual = optimizer.state[weight]["residual"]
        kernels.join_master(weight.detach().view(-1), residual.view(-1), joined)
        assert torch.equal(joined, master.detach().view(-1))


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "int8"])
def test_saved_and_loaded_it_goes_on_bit_for_bit(state_format: Any) -> None:
    dtype = torch.bfloat16
    straight, resumed = parameters(dtype), parameters(dtype)
    optimizer = offload.CPUAdam(groups(straight), state_format=state_format)
    train(optimizer, 20, gradients(dtype))
    first = offload.CPUAdam(groups(resumed), state_format=state_format)
    grads = gradients(dtype)
    train(first, 10, grads)
    second = offload.CPUAdam(groups(resumed), state_format=state_format)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, 10, grads)
    assert_same(straight, resumed)
    for a, b in zip(straight, resumed, strict=True):
        for name, plane in optimizer.state[a].items():
            assert torch.equal(plane, second.state[b][name]), name


@pytest.mark.parametrize("saved_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("state_format", ["fp32", "bf16", "int8"])
def test_any_format_loads_any_other(saved_format: Any, state_format: Any) -> None:
    """The moments stay near: 8 bits of exp_avg are a sixteenth of its own size and of the largest in the block."""
    params = parameters(torch.bfloat16)
    source = offload.CPUAdam(params, state_format=saved_format)
    train(source, 20, gradients(torch.bfloat16))
    target, exact = (offload.CPUAdam(params, state_format=wanted) for wanted in (state_format, "fp32"))
    target.load_state_dict(source.state_dict())
    back = offload.CPUAdam(params)
    back.load_state_dict(target.state_dict())
    exact.load_state_dict(source.state_dict())
    for param in params:
        assert int(target.state[param]["step"]) == 20
        for name, bound in (("exp_avg", 1 / 16), ("exp_avg_sq", 1 / 8)):
            value, wanted = back.state[param][name], exact.state[param][name]
            allowed = bound * wanted.abs() + wanted.abs().max() / 2000
            assert bool(((value - wanted).abs() <= allowed).all()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (17,), (1, 1024), (3, 341), (31, 33), (2, 3, 5, 7), (8, 8, 4, 4)], ids=str
)
def test_every_shape_is_updated_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """N18: all elements, in as many dimensions as there are."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(master.clone().to(dtype)), nn.Parameter(master.to(dtype).float().clone())
    optimizer = offload.CPUAdam([ours], lr=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.1, foreach=False)
    for _ in range(3):
        grad = torch.randn(shape, generator=generator).to(dtype)
        ours.grad, theirs.grad = grad, grad.float()
        optimizer.step()
        reference.step()
    expected = theirs.detach().to(dtype)
    tolerance = {"rtol": 2e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 0.0}
    torch.testing.assert_close(ours.detach(), expected, **tolerance)
    assert not ours.numel() or not torch.equal(ours.detach(), master.to(dtype))


def test_non_contiguous_parameters() -> None:
    """Transposed and channels_last ones, and slices of others, keep their layout, and their neighbours."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(64, 40, generator=generator)
    made: list[Callable[[], torch.Tensor]] = [
        lambda: base.clone().t(),
        lambda: base.clone()[:, 4:36],
        lambda: base.clone().view(4, 8, 8, 10).contiguous(memory_format=torch.channels_last),
    ]
    for make in made:
        odd, plain = nn.Parameter(make()), nn.Parameter(make().contiguous())
        for param in (odd, plain):
            optimizer = offload.CPUAdam([param])
            for seed in range(3):
                grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed))
                param.grad = grad if param is plain else torch.empty_like(odd).copy_(grad)
                optimizer.step()
        assert torch.equal(odd, plain) and odd.stride() == make().stride()


def test_manners_of_a_torch_optimizer() -> None:
    """Closures, parameters without gradient, copies and pickles, the version that autograd checks."""
    model = nn.Linear(8, 4)
    empty, unused = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))
    optimizer = offload.CPUAdam([*model.parameters(), empty, unused], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8)).square().sum() + empty.sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(30)]
    assert losses[-1] is not None and losses[0] is not None and losses[-1] < losses[0] / 10
    assert unused not in optimizer.state and torch.equal(unused, torch.ones(2))
    kept = model.weight.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(other, offload.CPUAdam) and len(other.state) == len(optimizer.state)
        param = other.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        other.step()


def test_what_is_refused_changes_nothing() -> None:
    param = nn.Parameter(torch.ones(4))
    for params, settings, message in (
        ([param], {"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ([param], {"betas": (0.9, 1.0)}, r"a beta must be in \[0, 1\), got 1.0"),
        (
            [param],
            {"state_format": "int4"},
            "state_format of Adam must be 'fp32' or 'bf16' or 'int8', got 'int4'",
        ),
        (
            [param],
            {"state_format": "int8"},
            "updates torch.bfloat16 with this state_format, and one is torch.float32",
        ),
        ([nn.Parameter(torch.ones(2, dtype=torch.float16))], {}, "and one is torch.float16"),
        ([nn.Parameter(torch.ones(2, device="meta"))], {}, "on the CPU, and one is on meta"),
        ([{"params": [param], "amsgrad": True}], {}, "has no amsgrad"),
    ):
        with pytest.raises(ConfigError, match=message):
            offload.CPUAdam(params, **settings)
    optimizer = offload.CPUAdam([param])
    with pytest.raises(ConfigError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 1
    table = nn.Embedding(4, 2, sparse=True)
    optimizer.add_param_group({"params": table.parameters()})
    table(torch.tensor([1])).sum().backward()
    param.grad = torch.ones(4)
    with pytest.raises(ConfigError, match="dense gradients; build the embedding with sparse=False"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4)) and not optimizer.state


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("exp_avg_sq"), "parameter 0: its state has no exp_avg_sq"),
        (
            lambda state: state.update(exp_avg=torch.ones(3)),
            r"exp_avg of shape \(64, 32\) expected, got \(3,\)",
        ),
        (lambda state: state.update(max_exp_avg_sq=state["exp_avg"]), "amsgrad, which CPUAdam does not have"),
        (lambda state: state.update(exp_avg=state["exp_avg"].to(torch.int8)), "its state has no scale"),
    ],
)
def test_a_wrong_state_changes_nothing(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    params = parameters()
    optimizer = offload.CPUAdam(params)
    train(optimizer, 3, gradients())
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 7.0
    spoil(wrong["state"][0])
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(plane, after["state"][index][name]) for name, plane in state.items())


def test_deepspeeds_name_and_arguments() -> None:
    params = parameters(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(params, lr=1e-2, fp32_optimizer_states=False)
    train(optimizer, 2, gradients(torch.bfloat16))
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    for settings in ({"bias_correction": False}, {"amsgrad": True}):
        with pytest.raises(ConfigError, match="is not built; leave it out"):
            DeepSpeedCPUAdam(params, **settings)


@pytest.mark.parametrize("kind", [offload.CPUAdam, DeepSpeedCPUAdam])
def test_initialize_takes_it_over(kind: Any) -> None:
    model = nn.Linear(8, 4)
    given = kind(model.parameters(), lr=0.02, adamw_mode=False)
    engine, optimizer, _, _ = offload.initialize(
        model=model, optimizer=given, config={"bf16": {"enabled": False}}
    )
    assert optimizer.param_groups[0]["lr"] == 0.02
    loss = engine(torch.ones(2, 8)).square().sum()
    engine.backward(loss)
    engine.step()
    engine.close()
