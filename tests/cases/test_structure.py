"""Models and loops as users bring them: numerics, checkpoints, structure and API, one case of the log each.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, PolynomialLR
from torch.utils.checkpoint import checkpoint

import offload
from offload import ConfigError, OffloadError

STEP = ["none", "nvme"]
ALL = ["none", "nvme", "nvme-backward"]
CHECKPOINTING = ["none", "non-reentrant", "reentrant"]


@pytest.fixture
def prepare(swap_path):
    """Prepares a model at a home (``nvme-backward``: updated in backward); closes the engines at the end."""
    engines = []

    def call(model, home, params=None, *, precision="fp32", chunk=1000, **settings):
        device, _, update = home.partition("-")
        place = {"device": device, "nvme_path": str(swap_path)}
        config = {
            "bf16": {"enabled": precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": chunk,
                "offload_param": place,
                "offload_optimizer": {**place, "update": update or "step"},
            },
            **settings,
        }
        model, optimizer = offload.prepare(model, config, params)
        engines.append(optimizer.engine)
        return model, optimizer

    yield call
    for engine in engines:
        engine.close()


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, foreach=False)


def seeded(build, *args, **kwargs):
    torch.manual_seed(0)
    return build(*args, **kwargs)


def close(got, expected, rtol=1e-5, atol=1e-7):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def compare(prepare, home, build, loop, groups=None, *, atol=1e-7, **settings):
    """One loop over one model, with the engine and plain: what it returns, and all weights, are equal."""
    plain = seeded(build)
    torch.manual_seed(1)
    expected = loop(plain, adamw(groups(plain) if groups else plain.parameters()))
    model = seeded(build)
    model, optimizer = prepare(model, home, groups(model) if groups else None, **settings)
    torch.manual_seed(1)
    got = loop(model, optimizer)
    close(got, expected)
    close(dict(model.state_dict()), dict(plain.state_dict()), atol=atol)
    return model, optimizer, plain


def steps(*losses):
    """A loop of steps: each loss is a function of the model."""

    def loop(model, optimizer):
        seen = []
        for loss_of in losses:
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    return loop


def same_step(loss_of, count=4):
    return steps(*[loss_of] * count)


def norm_of(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()


def mlp_a():
    """No size is a multiple of 8."""
    return nn.Sequential(nn.Linear(17, 31), nn.ReLU(), nn.Linear(31, 13), nn.ReLU(), nn.Linear(13, 1))


def rows(count, width=17, seed=3):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class TinyGPT(nn.Module):
    """Two attention blocks, the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 67, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids(seed, length=9):
    return torch.randint(0, 67, (2, length), generator=torch.Generator().manual_seed(seed))


# -- numerics ---------------------------------------------------------------------------------------------


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


class Unbiased(nn.Module):
    """No attention: a key's bias has a gradient of zero but for rounding, which Adam blows up."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 67)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


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


# -- memory -----------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen layers with a small trained bypass each, as LoRA."""

    def __init__(self, checkpointing="none", dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Bypassed(24, dropout) for _ in range(7))
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return x.square().mean()


class Bypassed(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(self.dropout(x))))


@pytest.mark.parametrize("home", ALL)
def test_m11_no_state_for_frozen_weights(home, prepare):
    model, optimizer, _ = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24))))
    engine = optimizer.engine
    trained = [p for p in model.parameters() if p.requires_grad]
    assert engine.plan.inventory.trainable_parameters == sum(p.numel() for p in trained)
    assert set(optimizer.state_dict()["state"]) == set(range(len(trained)))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("home", ALL)
def test_m11_freezing_and_unfreezing_what_is_trained(home, prepare):
    """Frozen from step 5 to step 10: untouched, then trained again, as in torch."""

    def loop(model, optimizer):
        seen = []
        for step in range(14):
            if step in (5, 10):
                model.layers[1].down.requires_grad_(step == 10)
            loss = model(rows(6, 24))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(prepare, home, Adapted, loop)


@pytest.mark.parametrize("home", ALL)
def test_m11_unfreezing_what_was_frozen_raises(home, prepare):
    """It has no state and no place in a gradient plane; to go on without a word would train nothing."""
    model, optimizer = prepare(seeded(Adapted), home)
    same_step(lambda m: m(rows(6, 24)), 2)(model, optimizer)
    model.layers[1].base.requires_grad_(True)
    with pytest.raises(OffloadError, match=r"layers\.1\.base\.weight.*frozen"):
        model(rows(6, 24))
    model.layers[1].base.requires_grad_(False)
    same_step(lambda m: m(rows(6, 24)), 2)(model, optimizer)


# -- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ALL)
def test_k03_frozen_weights_are_in_the_checkpoint(home, prepare):
    model = seeded(Adapted)
    with torch.no_grad():
        for layer in model.layers:
            layer.base.weight.fill_(0.0123456789)
    plain, loop = copy.deepcopy(model), same_step(lambda m: m(rows(6, 24)), 3)
    model, optimizer = prepare(model, home)
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))
    fresh = Adapted()
    fresh.load_state_dict(saved(model), strict=True)
    close(dict(fresh.state_dict()), dict(plain.state_dict()))
    partial = {name: value for name, value in saved(model).items() if "base" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(partial, strict=True)


def saved(model):
    """A state dict that has been through a file."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("home", ALL)
def test_k04_the_tied_head_is_saved_and_stays_tied(home, prepare):
    loop = same_step(lambda m: m(ids(0)), 3)
    model, optimizer, plain = compare(prepare, home, UnbiasedTied, loop)
    state = saved(model)
    for fresh in (UnbiasedTied(), Unbiased0()):
        fresh.load_state_dict(state, strict=True)
        close(fresh(ids(1)), plain(ids(1)))
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert model.head.weight is model.embed.weight
    stored = [s for s in optimizer.engine.partition.trainable if "embed.weight" in s.names]
    assert [s.names for s in stored] == [("embed.weight", "head.weight")]
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


class Unbiased0(Unbiased):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 67, bias=False)


class UnbiasedTied(Unbiased0):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("home", ALL)
def test_k05_state_dict_in_the_middle_of_training_is_full(home, prepare):
    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(ids(step))
            seen.append(saved(model))  # between forward and backward
            loss.backward()
            optimizer.step()
            seen.append(saved(model))
            optimizer.zero_grad()
        return seen

    compare(prepare, home, Unbiased, loop)


@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_and_resumed(home, prepare):
    loop = same_step(lambda m: m(rows(6, 24)), 3)
    model, optimizer = prepare(seeded(Adapted), home)
    loop(model, optimizer)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    adapter = {name: value for name, value in saved(model).items() if name in names}
    state = copy.deepcopy(optimizer.state_dict())
    rest = loop(model, optimizer)
    optimizer.engine.close()
    again = seeded(Adapted)
    result = again.load_state_dict(adapter, strict=False)
    assert all("base" in name for name in result.missing_keys) and not result.unexpected_keys
    again, optimizer = prepare(again, home)
    optimizer.load_state_dict(state)
    assert loop(again, optimizer) == rest


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS_TO_COPY = [saved_and_loaded, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("way", WAYS_TO_COPY, ids=["torch.save", "deepcopy", "pickle"])
@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_from_the_parameters_themselves(home, way, prepare):
    """Not from the state dict: full tensors all the same, and the attributes that users hang on them."""
    model, optimizer, plain = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24)), 2))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = way({**trained, "again": next(iter(trained.values()))})
    assert copied.pop("again") is next(iter(copied.values()))
    expected = {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    close({name: p.detach() for name, p in copied.items()}, expected)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copied.values())
    same_step(lambda m: m(rows(6, 24)), 1)(model, optimizer)
    close({name: p.detach() for name, p in copied.items()}, expected)  # copies


@pytest.mark.parametrize("home", STEP)
def test_k06_a_saved_parameter_keeps_its_attributes(home, prepare):
    model, _ = prepare(seeded(mlp_a), home)
    model[0].weight.tag = "first"
    copied = pickle.loads(pickle.dumps(model[0].weight))
    assert copied.__dict__ == {"tag": "first"}
    with offload.gather(model[0].weight):
        model[0].weight.data.fill_(2.0)
        assert bool((copy.deepcopy(model[0].weight) == 2.0).all())


@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_inside_gather(home, prepare):
    model, _, plain = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24)), 2))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    buffer = io.BytesIO()
    with offload.gather(trained.values()):
        torch.save(trained, buffer)
    buffer.seek(0)
    for name, param in torch.load(buffer).items():
        close(param.detach(), plain.get_parameter(name).detach())


# -- structure --------------------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(4))
        self.never = nn.Linear(17, 40)

    def forward(self, x, sometimes):
        for index, layer in enumerate(self.layers):
            if index != 2 or sometimes:
                x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("home", ALL)
def test_s01_parameters_that_are_not_used(home, prepare):
    losses = [lambda m, step=step: m(rows(4), step % 2 == 0) for step in range(6)]
    model, _, _ = compare(prepare, home, Unused, steps(*losses))
    assert torch.equal(model.state_dict()["never.weight"], seeded(Unused).never.weight)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 30), nn.ReLU(), nn.Linear(30, 17)) for _ in range(6)
        )

    def forward(self, x, order):
        for index in order:
            x = x + self.layers[index](x)
        return x.square().mean()


@pytest.mark.parametrize("home", ALL)
def test_s02_the_order_changes_with_the_data(home, prepare):
    """Flags, dropped layers, early exits, reversed order: right for any, and nothing stays held."""
    chance = random.Random(7)
    orders = [list(range(6))] * 2
    orders += [[i for i in range(6) if chance.random() < 0.6] or [0] for _ in range(4)]
    orders += [list(range(n)) for n in (2, 5, 1)] + [list(range(6))[::-1]] + [chance.sample(range(6), 6)]
    losses = [lambda m, order=order: m(rows(4), order) for order in orders]
    _, optimizer, _ = compare(prepare, home, Branches, steps(*losses))
    engine = optimizer.engine
    engine.settle()
    if engine.weights.streamed:
        assert not any(copy_.leases for copy_ in engine.weights.mover.residency.copies)
        present = engine.weights.mover.residency.present
        assert len(present) <= engine.plan.weight_slots < len(engine.partition.units)


@pytest.mark.parametrize("home", STEP)
def test_s03_evaluation_between_and_inside(home, prepare):
    def look(model, length):
        model.eval()
        with torch.no_grad():
            logits = model.logits(ids(99, length))
        model.train()
        return logits

    def train(model, optimizer, seeds, watch):
        for seed in seeds:
            for micro in range(2):
                (model(ids(10 * seed + micro)) / 2).backward()
                if watch:
                    look(model, 5)  # inside the accumulation window
            optimizer.step()
            optimizer.zero_grad()

    def loop(model, optimizer, watch=True):
        seen = []
        train(model, optimizer, (0, 1), watch)
        if watch:
            seen += [look(model, length) for length in (3, 9, 1, 6, 4)]
            text = ids(5, 2)
            for _ in range(20):  # a loop that generates
                with torch.no_grad():
                    text = torch.cat([text, model.logits(text)[:, -1:].argmax(-1)], 1)
            seen.append(text)
            with pytest.raises(IndexError):
                model(torch.full((1, 4), 10**6))  # an exception in the middle of a forward
        train(model, optimizer, (2, 3), watch)
        return seen

    model, _, _ = compare(prepare, home, Evaluated, loop)
    quiet = seeded(Evaluated)
    loop(quiet, adamw(quiet.parameters()), watch=False)
    close(dict(model.state_dict()), dict(quiet.state_dict()))


class Evaluated(Unbiased):
    def logits(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def forward(self, ids):
        if ids.max() > 66:
            self.blocks[0](self.embed(ids.clamp(max=66)))
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Experts(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.router = nn.Linear(17, 8, bias=False)
        self.fused = nn.Parameter(torch.randn(8, 17, 17) / 4) if fused else None
        self.experts = None if fused else nn.ModuleList(nn.Linear(17, 17) for _ in range(8))

    def forward(self, x):
        weight, chosen = (self.router(x) * 10).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            at = chosen == expert
            y = x[at] @ self.fused[expert] if self.experts is None else self.experts[expert](x[at])
            out = out.index_put((at,), torch.tanh(y) * weight[at, None])
        return out.square().mean() + (x.mean() - out.mean()).square()


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("fused", [False, True])
def test_s04_experts_without_tokens(fused, home, prepare):
    used = seeded(Experts, fused).router(rows(3)).argmax(-1).unique()
    assert len(used) <= 3, "five experts or more are idle"
    losses = [lambda m, seed=seed: m(rows(3, seed=seed)) for seed in (3, 3, 4, 5, 3)]
    compare(prepare, home, lambda: Experts(fused), steps(*losses))


class Elsewhere(nn.Module):
    """Parameters used outside the forward of the module that owns them."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(17, 17)
        self.position = nn.Embedding(4, 17)
        self.bare = nn.Parameter(torch.randn(17))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(17)) for _ in range(2))
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.randn(17))})
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))

    def forward(self, x):
        x = F.linear(x, self.child.weight, self.child.bias) + self.position.weight[: x.shape[0]]
        x = x * self.bare + self.scales[0] * self.named["gain"]
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = F.linear(x, self.child.weight.T, self.scales[1])
        return x.square().mean() + 1e-2 * self.blocks[3].weight.norm()


@pytest.mark.parametrize("home", ALL)
def test_s05_parameters_used_outside_their_module(home, prepare):
    compare(prepare, home, Elsewhere, same_step(lambda m: m(rows(4))))


@pytest.mark.parametrize(
    ("home", "first"), [*((home, False) for home in ALL), *((home, True) for home in STEP)]
)
def test_s05_a_penalty_outside_forward_over_attributes(home, first, prepare):
    """Autograd saves the parameters themselves: their units stay until backward."""

    def loss_of(model):
        if first:  # the forward itself needs three units at once
            return 1e-2 * model.blocks[2].weight.norm() + model(rows(4))
        loss = model(rows(4))
        return loss + 1e-2 * (model.blocks[0].weight.norm() + model.blocks[2].weight.square().sum())

    _, optimizer, _ = compare(prepare, home, Elsewhere, same_step(loss_of))
    engine = optimizer.engine
    assert not any(engine.partition.is_saved(unit) for unit in range(len(engine.partition.units)))


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_over_more_than_fits(home, prepare):
    """An error that says what to do, and afterwards the run goes on."""

    def loss_of(model):
        return model(rows(4)) + 1e-2 * sum(block.weight.norm() for block in model.blocks)

    if home == "none":
        compare(prepare, home, Elsewhere, same_step(loss_of))
        return
    model, optimizer = prepare(seeded(Elsewhere), home)
    with pytest.raises(OffloadError, match=r"weight slots are in use .* inside `with offload.gather"):
        loss_of(model)
    plain = seeded(Elsewhere)
    without = same_step(lambda m: m(rows(4)))
    close(without(model, optimizer), without(plain, adamw(plain.parameters())))


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_over_parameters_inside_gather(home, prepare):
    def loop(model, optimizer):
        seen = []
        for _ in range(3):
            with offload.gather(model):
                loss = model(rows(4)) + 1e-2 * sum(p.norm() for p in model.parameters())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(prepare, home, Elsewhere, loop)


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_differentiated_after_gather(home, prepare):
    def loss_of(model):
        with offload.gather(model):
            penalty = sum(p.norm() for p in model.parameters())
        return model(rows(4)) + 1e-2 * penalty

    if home == "none":
        compare(prepare, home, Elsewhere, same_step(loss_of))
        return
    model, optimizer = prepare(seeded(Elsewhere), home)
    with pytest.raises(
        OffloadError, match=r"inside gather .*needs .*blocks.1.weight.* call its backward, inside"
    ):
        loss_of(model)
    same_step(lambda m: m(rows(4)))(model, optimizer)


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_outside_forward_over_parameters(home, prepare, caplog):
    """``model.parameters()`` gives absent ones, which are NaN: so is the loss, and nothing is updated."""

    def loss_of(model):
        return model(rows(4)) + 1e-2 * sum(p.norm() for p in model.parameters())

    if home == "none":
        compare(prepare, home, Elsewhere, same_step(loss_of))
        return
    model, optimizer = prepare(seeded(Elsewhere), home)
    text = r"the gradient of .*blocks.* is not finite .*inside `with offload.gather"
    if home == "nvme":
        assert math.isnan(same_step(loss_of, 1)(model, optimizer)[0])
        assert re.search(text, caplog.text) and "step refused" in caplog.text
    else:
        with pytest.raises(OffloadError, match=text):
            loss_of(model).backward()
        with pytest.raises(OffloadError, match="the engine stopped in step 1"):
            model.state_dict()
        return
    close(dict(model.state_dict()), dict(seeded(Elsewhere).state_dict()), rtol=0, atol=0)


def test_s05_a_penalty_computed_before_forward_over_absent_parameters(prepare):
    model, optimizer = prepare(seeded(Elsewhere), "nvme")
    same_step(lambda m: m(rows(4)), 1)(model, optimizer)
    stored = optimizer.engine.partition.of_param
    penalty = sum(p.norm() for p in model.parameters() if stored[p].is_absent)
    assert penalty.isnan()
    with pytest.raises(
        OffloadError, match=r"was computed with outside .* while absent, which gives NaN; .*gather"
    ):
        model(rows(4))
    del penalty
    same_step(lambda m: m(rows(4)), 1)(model, optimizer)


def test_s05_a_penalty_over_present_parameters(prepare):
    """Whatever way a present parameter was come by, its unit stays until the penalty is differentiated."""

    def loss_of(model):
        loss = model(rows(4))
        return loss + dict(model.named_parameters())["blocks.4.weight"].square().sum()

    _, optimizer, _ = compare(prepare, "nvme", Elsewhere, same_step(loss_of))
    assert optimizer.engine.plan.weight_slots < len(optimizer.engine.partition.units)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("home", ALL)
def test_s09_embeddings_resized_before(home, tied, prepare):
    def build():
        model = small_llama(tied)
        torch.manual_seed(2)
        model.resize_token_embeddings(80, mean_resizing=False)
        return model

    batch = ids(0).clone()
    batch[0, 3] = 79
    model, optimizer, _ = compare(
        prepare, home, build, same_step(lambda m: m(input_ids=batch, labels=batch).loss)
    )
    assert optimizer.engine.plan.inventory.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("home", ALL)
def test_s09_embeddings_resized_after(home, prepare):
    """The engine does not know the new matrix: it must not be left untrained without a word."""
    model, optimizer = prepare(small_llama(True), home)
    batch = ids(0)
    same_step(lambda m: m(input_ids=batch, labels=batch).loss, 2)(model, optimizer)
    with pytest.raises(OffloadError, match=r"embed_tokens.weight.* before offload.prepare"):
        model.resize_token_embeddings(80, mean_resizing=False)
        model(input_ids=batch, labels=batch)


@pytest.mark.parametrize("home", ALL)
def test_s09_a_new_module_after(home, prepare):
    model, optimizer = prepare(seeded(Unbiased), home)
    same_step(lambda m: m(ids(0)), 2)(model, optimizer)
    model.head = nn.Linear(32, 99)
    with pytest.raises(OffloadError, match=r"head.weight has come into the model.* before offload.prepare"):
        model(ids(0))


def small_llama(tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("home", ALL)
def test_s10_empty_groups_and_groups_of_frozen_parameters(home, prepare):
    def groups(model):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": frozen, "lr": 1.0},
            {"params": trained[:2], "lr": 2e-3},
            {"params": [], "lr": 5.0},
            {"params": trained[2:], "lr": 3e-3},
        ]

    plain, model = seeded(Adapted), seeded(Adapted)
    expected = same_step(lambda m: m(rows(6, 24)))(plain, adamw([groups(plain)[1], groups(plain)[3]]))
    model, optimizer = prepare(model, home, groups(model))
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 3e-3]
    close(same_step(lambda m: m(rows(6, 24)))(model, optimizer), expected)
    close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("home", ALL)
def test_s10_nothing_to_train_is_said(home, prepare):
    for groups in (None, [], [{"params": []}]):
        model = seeded(mlp_a).requires_grad_(False)
        with pytest.raises(ConfigError, match="no trainable parameter"):
            prepare(model, home, groups)
        assert torch.equal(model(rows(3)), seeded(mlp_a)(rows(3))), "the model is as it was"


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_s11_checkpointing_with_frozen_weights_and_dropout(checkpointing, home, prepare):
    def loss_of(model):
        return model(rows(6, 24).requires_grad_())

    compare(prepare, home, lambda: Adapted(checkpointing, dropout=0.3), same_step(loss_of))


class _Dequantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        return x @ ((codes.to(x.dtype) - 128) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx, grad):
        codes, scale = ctx.saved_tensors
        return grad @ ((codes.to(grad.dtype) - 128) * scale.to(grad.dtype)), None, None


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(QuantisedLayer(24) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class QuantisedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        codes = torch.randint(0, 256, (width, width), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.codes.quant_state = {"scale": torch.tensor(0.01), "blocksize": 64}
        self.bypass = nn.Linear(width, width)

    def forward(self, x):
        quantised = _Dequantised.apply(x, self.codes, self.codes.quant_state["scale"])
        return torch.tanh(quantised) + self.bypass(x)


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_s12_quantised_frozen_weights(precision, home, prepare):
    original = seeded(Quantised)
    if precision == "fp32":
        model, optimizer, _ = compare(prepare, home, Quantised, same_step(lambda m: m(rows(6, 24))))
    else:
        model, optimizer = prepare(seeded(Quantised), home, precision="bf16")
        loss = same_step(lambda m: m(rows(6, 24).bfloat16()).float())(model, optimizer)
        assert loss[0] == pytest.approx(original(rows(6, 24)).item(), rel=2e-2), "not wrong by a factor"
    state = model.state_dict()
    for index, layer in enumerate(original.layers):
        codes = model.layers[index].codes
        assert codes.dtype is torch.uint8 and not codes.requires_grad
        assert codes.quant_state["blocksize"] == 64
        assert codes.quant_state["scale"] == layer.codes.quant_state["scale"]
        assert torch.equal(state[f"layers.{index}.codes"], layer.codes)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 17, bias=False), nn.BatchNorm1d(17), nn.ReLU()) for _ in range(3)
        )
        self.register_buffer("cache", torch.linspace(0, 1, 17), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.cache
        return x.square().mean()


@pytest.mark.parametrize("home", ALL)
def test_s15_buffers_stay_and_are_updated(home, prepare):
    losses = [lambda m, seed=seed: m(rows(8, seed=seed)) for seed in range(4)]
    model, _, plain = compare(prepare, home, Buffers, steps(*losses))
    norm = model.layers[1][1]
    assert norm.num_batches_tracked.item() == 4
    close(norm.running_var, plain.layers[1][1].running_var)
    assert torch.equal(model.cache, plain.cache)
    model.eval(), plain.eval()
    with torch.no_grad():
        close(model(rows(2)), plain(rows(2)))


@pytest.mark.parametrize("home", ALL)
def test_s16_shapes_stay_true(home, prepare):
    plain, model = seeded(Adapted), seeded(Adapted)
    model, _ = prepare(model, home)
    for (name, param), (same_name, mine) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == same_name
        assert (mine.shape, mine.ndim, mine.numel(), mine.dtype, mine.device, mine.requires_grad) == (
            param.shape, param.ndim, param.numel(), param.dtype, param.device, param.requires_grad
        )  # fmt: skip
        assert mine.size(0) == len(mine) == param.size(0)
        assert mine.nelement() * mine.element_size() == param.nbytes


INITS = ["normal_", "zeros_", "xavier_uniform_"]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("home", STEP)
def test_s16_an_initialiser_inside_gather_is_kept(home, init, prepare):
    model, _ = prepare(seeded(Branches), home)
    written = seeded(Branches)
    for each in (model, written):
        with offload.gather(each, modify=True):
            for param in each.parameters():
                if param.ndim == 2:
                    torch.manual_seed(4)
                    getattr(nn.init, init)(param)
    close(dict(model.state_dict()), dict(written.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["absent", "present", "data"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("home", STEP)
def test_s16_an_initialiser_elsewhere_is_kept_or_refused(home, init, how, prepare):
    """Refused at once, or when the parameter is needed next; never lost without a word."""
    model, _ = prepare(seeded(Branches), home)
    name = "layers.0.0.weight"
    param = dict(model.named_parameters())[name]
    with torch.no_grad():
        model(rows(4), range(6))  # the first unit has left its slot
    if how == "present":
        assert model.layers[0][0].weight is param
    torch.manual_seed(10)
    expected = getattr(nn.init, init)(torch.empty(param.shape))
    try:
        torch.manual_seed(10)
        if how == "data":
            param.data = expected.clone()
        else:
            getattr(nn.init, init)(param)
        model(rows(4), [1])  # a forward of training, which does not need it
        for _ in range(2):
            with torch.no_grad():
                model(rows(4), range(6))
    except (OffloadError, RuntimeError) as error:
        assert re.search(rf"{name}.*gather|single memory location", str(error))
        if how == "data":  # still assigned, and refused again
            with pytest.raises(OffloadError, match="gather"):
                model(rows(4), [1])
        else:
            with torch.no_grad():
                close(model(rows(4), range(6)), seeded(Branches)(rows(4), range(6)).detach())
    else:
        assert torch.equal(model.state_dict()[name], expected)


# -- API --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ALL)
def test_a01_the_optimizer_is_one_of_torch(home, prepare):
    def loop(model, optimizer):
        assert isinstance(optimizer, torch.optim.Optimizer)
        seen = []
        schedules = [
            LambdaLR(optimizer, lambda step: 0.9**step),
            OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
            PolynomialLR(optimizer, total_iters=12, power=2.0),
        ]
        group = optimizer.param_groups[0]
        for step in range(9):
            loss = model(rows(8, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedules[step % 3].step()
            if step == 5:
                group["lr"], group["weight_decay"] = 0.05, 0.1
            seen += [loss.item(), group["lr"], *group["betas"]]
        assert [saved["params"] for saved in optimizer.state_dict()["param_groups"]] == [[*range(6)]]
        return seen

    _, optimizer, _ = compare(prepare, home, mlp_a, loop)
    assert optimizer.defaults["lr"] == 1e-3
    assert "AdamW" in repr(optimizer) or "Offload" in repr(optimizer)


@pytest.mark.parametrize("home", STEP)
def test_a01_zero_grad_with_zeros(home, prepare):
    """Gradients set to zero are gradients: decay and moments go on, as in torch."""

    def loop(model, optimizer):
        seen = []
        for step in range(4):
            if step != 2:
                loss = model(rows(8, seed=step)).square().mean()
                loss.backward()
                seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert all(not p.grad.any() for p in model.parameters())
        return seen

    compare(prepare, home, mlp_a, loop)


@pytest.mark.parametrize("home", ALL)
def test_a01_state_dict_is_that_of_torch(home, prepare):
    def loop(model, optimizer):
        same_step(lambda m: m(rows(8)).square().mean(), 3)(model, optimizer)
        state = optimizer.state_dict()
        assert set(state) == {"state", "param_groups"}
        return [
            values[key].float()
            for values in state["state"].values()
            for key in ("step", "exp_avg", "exp_avg_sq")
        ]

    compare(prepare, home, mlp_a, loop)


@pytest.mark.parametrize("home", STEP)
def test_a01_closure(home, prepare):
    def loop(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(rows(8)).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    compare(prepare, home, mlp_a, loop)
