"""Numerics as users' loops bring them: accumulation, clipping, refused steps, groups, types.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from loops import (
    ALL,
    CHECKPOINTING,
    STEP,
    TinyGPT,
    Unbiased,
    compare,
    ids,
    mlp_a,
    norm_of,
    rows,
    same_step,
    seeded,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadError


@pytest.mark.parametrize("home", STEP)
def test_n01_several_backwards_before_one_step(home, prepare):
    def loop(model, optimizer):
        seen = []
        for outer in range(3):
            for chunk in rows(8, seed=outer).chunk(4):
                (model(chunk).square().mean() / 4).backward()
            seen.append(norm_of(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    _, optimizer, _ = compare(prepare, home, mlp_a, loop)
    assert optimizer.engine.report().steps == 3


@pytest.mark.parametrize("home", STEP)
def test_n01_in_bf16(home, prepare):
    """Summed in fp32, as the configuration says, a split batch is the whole one to bf16 rounding."""
    norms, masters = [], []
    for pieces in (4, 1):
        model, optimizer = prepare(
            seeded(mlp_a), home, precision="bf16", data_types={"grad_accum_dtype": "fp32"}
        )
        for chunk in rows(8).chunk(pieces):
            (model(chunk.bfloat16()).square().float().mean() / pieces).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        optimizer.step()
        assert optimizer.engine.grad_norm == pytest.approx(expected, rel=1e-5)
        norms.append(optimizer.engine.grad_norm)
        trained = optimizer.engine.partition.trainable
        masters.append(torch.cat([offload.read_master(optimizer.engine, s).flatten() for s in trained]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert ((masters[0] - masters[1]).abs() > 1e-4).float().mean() < 0.05  # a step is 1e-3


@pytest.mark.parametrize("home", STEP)
def test_n02_no_micro_batch_is_dropped(home, prepare):
    def loop(model, optimizer):
        seen = []
        for _ in range(2):
            for k in range(4):
                (model(ids(k)) * 10**k / 4).backward()
            seen.append(norm_of(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    compare(prepare, home, Unbiased, loop, gradient_accumulation_steps=4)


@pytest.mark.parametrize("home", STEP)
def test_n03_an_uneven_last_window_stays_pending(home, prepare):
    def loop(model, optimizer):
        seen = []
        for micro in range(5):
            (model(rows(4, seed=micro)).square().mean() / 2).backward()
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
        seen += [p.detach().clone() for p in model.state_dict().values()]  # after two steps
        seen.append(norm_of(model))  # of the fifth, which is neither applied nor lost
        (model(rows(4, seed=5)).square().mean() / 2).backward()
        optimizer.step()
        return seen

    _, optimizer, _ = compare(prepare, home, mlp_a, loop, gradient_accumulation_steps=2)
    assert optimizer.engine.report().steps == 3


class Clones(nn.Module):
    def __init__(self):
        super().__init__()
        one = torch.randn(40, 50)
        self.parts = nn.ParameterList(nn.Parameter(one.clone()) for _ in range(3))

    def forward(self, x):
        return sum((part * x).sum().square() * 1e-3 + (part * x).sin().sum() for part in self.parts)


@pytest.mark.parametrize("home", ALL)
def test_n06_sub_groups_share_no_step_count(home, prepare):
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(5))

    def loop(model, optimizer):
        seen = []
        for step in range(10):
            if step == 6:
                optimizer.param_groups[0]["betas"] = (0.7, 0.95)
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            first, *others = model.state_dict().values()
            assert all(torch.equal(first, other) for other in others), step
        return seen

    compare(prepare, home, Clones, loop, chunk=2000)


@pytest.mark.parametrize("home", STEP)
def test_n06_a_step_count_that_jumps(home, prepare):
    def loop(model, optimizer):
        seen = same_step(lambda m: m(rows(8)).square().mean(), 2)(model, optimizer)
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["step"] = torch.tensor(5.0)
        optimizer.load_state_dict(state)
        return seen + same_step(lambda m: m(rows(8)).square().mean(), 3)(model, optimizer)

    compare(prepare, home, mlp_a, loop)


@pytest.mark.parametrize("home", STEP)
@pytest.mark.parametrize("clip", [0.1, 0, None])
def test_n11_the_norm_is_that_before_clipping_and_the_gradient_that_after(clip, home, prepare):
    """Adam without moments and with an eps that dwarfs the gradient steps by lr / eps times it: by the gradient."""
    plain = seeded(mlp_a)
    loss_of = lambda model: 100 * model(rows(8)).square().mean()  # noqa: E731
    loss_of(plain).backward()
    norm = norm_of(plain)
    assert norm > 1
    exact = {"type": "AdamW", "params": {"lr": 1e4, "eps": 1e4, "betas": [0.0, 0.0], "weight_decay": 0.0}}
    model, optimizer = prepare(seeded(mlp_a), home, optimizer=exact, gradient_clipping=clip)
    loss_of(model).backward()
    optimizer.step()
    assert optimizer.engine.grad_norm == pytest.approx(norm, rel=1e-5)
    after = model.state_dict()
    applied = torch.cat(
        [(p.detach() - after[name]).flatten() for name, p in seeded(mlp_a).named_parameters()]
    )
    assert applied.norm().item() == pytest.approx(clip or norm, rel=2e-2)
    if clip:
        assert applied.norm().item() <= clip * (1 + 1e-3)


@pytest.mark.parametrize("home", STEP)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_n12_a_step_that_is_not_finite_is_refused_whole(precision, home, prepare, caplog):
    """Inf in one element at step 3, NaN at step 5: afterwards as if these batches had never been."""

    def run(poison):
        model, optimizer = prepare(seeded(TinyGPT), home, precision=precision)
        for step in range(8):
            bad = {3: math.inf, 5: math.nan}.get(step)
            if bad is not None and not poison:
                continue
            model(ids(step)).float().backward()
            if bad is not None:
                model.blocks[1].linear2.weight.grad[3, 4] = bad
            before = model.state_dict(), optimizer.state_dict()
            optimizer.step()
            optimizer.zero_grad()
            if bad is not None:
                after = model.state_dict(), optimizer.state_dict()
                torch.testing.assert_close(after, before, rtol=0, atol=0)
        return model.state_dict(), optimizer.state_dict(), optimizer.engine.report()

    *poisoned, report = run(True)
    *clean, _ = run(False)
    torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)
    assert (report.steps, report.skipped_steps) == (6, 2)
    assert caplog.text.count("step refused") == 2


def test_n12_updated_in_backward_it_stops_the_run(prepare):
    model, _ = prepare(seeded(TinyGPT), "nvme-backward")
    with pytest.raises(OffloadError, match="not finite"):
        (model(ids(0)) * math.inf).backward()


def three_groups(model):
    """Decay, no decay, and a fast one, interleaved by position."""
    params = list(model.parameters())
    return [
        {"params": params[0::3], "lr": 1e-3, "weight_decay": 0.1},
        {"params": params[1::3], "lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"params": params[2::3], "lr": 1e-1, "weight_decay": 0.0, "eps": 1e-6},
    ]


@pytest.mark.parametrize("home", ALL)
def test_n21_groups_keep_their_numbers(home, prepare):
    def loop(model, optimizer):
        scheduler = LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.5**s, lambda s: 1 / (1 + s)])
        seen = []
        for step in range(6):
            loss = model(ids(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen += [loss.item(), *(group["lr"] for group in optimizer.param_groups)]
            if step == 2:  # out and in again
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                state = copy.deepcopy(optimizer.state_dict())
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
        return seen

    compare(prepare, home, Unbiased, loop, three_groups)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16))
        self.register_buffer("mask", torch.tensor([True, False] * 4))
        self.register_buffer("offsets", torch.tensor([2**40 + 1]))
        self.register_buffer("cache", torch.arange(8) + 0.1, persistent=False)
        self.proj = nn.Linear(8, 8)

    def angles(self, positions):
        return (positions[:, None].float() * self.inv_freq).cos()

    def forward(self, positions):
        angles = self.angles(positions).to(self.proj.weight.dtype)
        return self.proj(angles).float().masked_fill(self.mask, 0).square().sum()


@pytest.mark.parametrize("home", ALL)
def test_n23_buffers_keep_their_type(home, prepare):
    reference = seeded(Rotary)
    model, optimizer = prepare(seeded(Rotary), home, precision="bf16")
    positions = torch.tensor([0, 17, 4095])
    for _ in range(3):
        model(positions).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in reference.named_buffers():
        assert model.get_buffer(name).dtype is buffer.dtype, name
        assert torch.equal(model.get_buffer(name), buffer), name
    assert torch.equal(model.angles(positions), reference.angles(positions))


@pytest.mark.parametrize("home", STEP)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", None])
def test_n25_small_contributions_survive_in_fp32(dtype, home, prepare):
    class Dot(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5))

        def forward(self, gradient):
            return (self.weight * gradient).sum()

    model, optimizer = prepare(
        Dot(), home, precision="bf16", gradient_accumulation_steps=256, data_types={"grad_accum_dtype": dtype}
    )
    for micro in range(256):
        model(torch.full((5,), 1.0 if micro == 0 else 2.0**-9, dtype=torch.bfloat16)).backward()
    expected = 1.0 if dtype == "bf16" else 1.0 + 255 * 2.0**-9  # by default, fp32
    assert model.weight.grad.tolist() == [expected] * 5
    optimizer.step()
    assert optimizer.engine.grad_norm == pytest.approx(expected * math.sqrt(5), rel=1e-6)


class Looped(nn.Module):
    """One layer four times, and the same tower over two inputs."""

    def __init__(self, checkpointing="none"):
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(17, 24), nn.Linear(24, 24), nn.Linear(24, 5)
        self.checkpointing = checkpointing

    def tower(self, x):
        x = self.enter(x)
        for _ in range(4):
            if self.checkpointing == "none":
                x = torch.tanh(self.again(x))
            else:
                x = torch.tanh(checkpoint(self.again, x, use_reentrant=self.checkpointing == "reentrant"))
        return self.leave(x)

    def forward(self, x):
        return (self.tower(x) - self.tower(2 * x)).square().mean()


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_n26_a_layer_that_runs_several_times(checkpointing, home, prepare):
    def run():
        compare(prepare, home, lambda: Looped(checkpointing), same_step(lambda m: m(rows(6))))

    if home == "nvme-backward":  # more units are used several times than may wait for the end of backward
        with pytest.raises(OffloadError, match=r"offload_optimizer\.update to 'step'"):
            run()
    else:
        run()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.three, self.norm = nn.Linear(256, 1), nn.Linear(256, 3), nn.LayerNorm(3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        gate = torch.sigmoid(self.narrow(x))
        return (gate * self.norm(self.three(x)) * self.temperature).square().mean() + self.nothing.sum()


@pytest.mark.parametrize("home", ALL)
def test_n29_very_small_tensors(home, prepare):
    # A norm over three leaves gradients that nearly cancel: a hundredth of a step is rounding.
    compare(prepare, home, Small, same_step(lambda m: m(rows(4, 256))), atol=1e-5)
