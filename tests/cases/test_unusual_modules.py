"""Structures of modules: what they return and take, where their weights come from, and in what order they run.

Oracle: the same loop over a plain model with torch.optim.AdamW.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from loops import ALL, STEP, Experts, adamw, close, compare, rows, same_step, seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from offload import ConfigError


class Chain(nn.Module):
    """Layers one after another, each through `block`, which cases override."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))
        self.build()

    def build(self):
        pass

    def block(self, layer, x):
        return torch.tanh(layer(x))

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x.square().mean()


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    cache: list | None = None


class Keywords(nn.Module):
    """Takes keywords only, returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(17, 17)

    def forward(self, *, x, cache):
        cache.append(torch.tanh(self.inner(x)))
        return Output(cache[-1], cache)


class ReturnsDataclass(Chain):
    def build(self):
        self.layers = nn.ModuleList(Keywords() for _ in range(5))

    def forward(self, *, x):
        cache = []
        for layer in self.layers:
            x = layer(x=x, cache=cache).y
        return Output(sum(y.square().mean() for y in cache))


class Silent(nn.Module):
    """Returns nothing: its output is what it has put into a cache."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(17, 17)

    def forward(self, cache):
        cache.append(torch.tanh(self.inner(cache[-1])))


class ReturnsNothing(Chain):
    def build(self):
        self.layers = nn.ModuleList(Silent() for _ in range(5))

    def forward(self, x):
        cache = [x]
        for layer in self.layers:
            assert layer(cache) is None
        return sum(y.square().mean() for y in cache[1:])


class WeightNorm(Chain):
    def build(self):
        for layer in self.layers:
            parametrizations.weight_norm(layer)


class OldWeightNorm(Chain):
    """Its weights have been computed once, with a graph, before the engine comes."""

    def build(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for layer in self.layers:
                torch.nn.utils.weight_norm(layer)


class SpectralNorm(Chain):
    def build(self):
        for layer in self.layers:
            parametrizations.spectral_norm(layer)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Parametrized(Chain):
    def build(self):
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # as some kernels do
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ (weight + ctx.weight) / 2, grad.T @ x


class MoreThanFits(Chain):
    """One forward reads the weights of all its layers as attributes, and gives them to a function of its own."""

    def block(self, layer, x):
        return torch.tanh(Product.apply(x, layer.weight) + layer.bias)


class KeptInAList(Chain):
    """Parameters that no attribute leads to."""

    def build(self):
        self.kept = list(self.parameters())

    def forward(self, x):
        for weight, bias in zip(self.kept[::2], self.kept[1::2], strict=True):
            x = torch.tanh(F.linear(x, weight, bias))
        return x.square().mean()


class PenaltyInside(Chain):
    def forward(self, x):
        return super().forward(x) + 1e-2 * sum(p.norm() for p in self.parameters())


class Strides(nn.Module):
    """Weights that are transposed, with gaps, channels_last, empty and of no dimension."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.convolutions.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 9).T)
        self.gaps = nn.Parameter(torch.randn(6, 18)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        x = x[:, :12].reshape(-1, 3, 2, 2)
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x))
        return (
            x.square().mean() * self.scale + (self.gaps @ self.transposed).square().mean() + self.empty.sum()
        )


class DropsLayers(Chain):
    def block(self, layer, x):
        return x if torch.rand(()) < 0.4 else super().block(layer, x)


class LeavesEarly(Chain):
    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
            if torch.rand(()) < 0.3:
                break
        return x.square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(17, 17, 2, batch_first=True) for _ in range(3))

    def forward(self, x):
        x = x[None]
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


STRUCTURES = [
    ReturnsNothing, WeightNorm, OldWeightNorm, SpectralNorm, Parametrized, MoreThanFits, KeptInAList, PenaltyInside,
    Strides, DropsLayers, LeavesEarly, Recurrent,
]  # fmt: skip


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_s05_trains_as_in_plain_pytorch(structure, home, prepare):
    compare(prepare, home, structure, same_step(lambda m: m(rows(4)), 3))


@pytest.mark.parametrize("home", ALL)
def test_s05_keywords_and_dataclasses(home, prepare):
    compare(prepare, home, ReturnsDataclass, same_step(lambda m: m(x=rows(4)).y, 3))


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("home", ALL)
def test_n23_buffers_of_every_type_are_kept(home, prepare):
    class Buffers(Chain):
        def build(self):
            for dtype in DTYPES:
                self.register_buffer(f"of_{str(dtype).split('.')[1]}", torch.arange(5).to(dtype))

    model, optimizer = prepare(seeded(Buffers), home, precision="bf16")
    same_step(lambda m: m(rows(4).bfloat16()).float(), 2)(model, optimizer)
    for (name, buffer), (_, other) in zip(model.named_buffers(), Buffers().named_buffers(), strict=True):
        assert buffer.dtype is other.dtype, name
        assert torch.equal(buffer.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("fused", [False, True])
def test_s04_idle_experts_move_nothing(fused, prepare):
    """Small modules: no byte of an idle expert is read or written, and its state stays as it was."""
    model, optimizer = prepare(seeded(Experts, fused), "nvme")
    engine = optimizer.engine
    loss = same_step(lambda m: m(rows(3)), 1)
    loss(model, optimizer)
    loss(model, optimizer)
    engine.settle()
    used = set(seeded(Experts, fused).router(rows(3)).argmax(-1).tolist())
    names = [[stored.name for stored in unit] for unit in engine.partition.units]
    idle = [unit for unit, own in enumerate(names) if own[0].split(".")[1:2] not in [[str(e)] for e in used]]
    idle = [unit for unit in idle if names[unit][0].startswith("experts")]
    assert fused or len(idle) >= 5
    touched = []
    swap = engine._store
    for name in ("read_weight", "write_weight"):
        whole = getattr(swap, name)
        setattr(
            swap, name, lambda unit, *a, whole=whole, **k: (touched.append(unit), whole(unit, *a, **k))[1]
        )
    read = engine.ledger.moved["nvme_read", "exp_avg"]
    loss(model, optimizer)
    engine.settle()
    assert not set(touched) & set(idle)
    trained = sum(unit.elements for i, unit in enumerate(engine.plan.inventory.units) if i not in idle)
    assert engine.ledger.moved["nvme_read", "exp_avg"] - read == trained * 4
    assert all(stored.step == 0 for unit in idle for stored in engine.partition.units[unit])


@pytest.mark.parametrize("home", STEP)
def test_s05_embeddings_that_cannot_be_followed_are_refused(home, prepare):
    class Embedded(Chain):
        def build(self):
            self.embed = nn.Embedding(30, 17, **self.how)

    Embedded.how = {"sparse": True}
    with pytest.raises(ConfigError, match=r"embed: gradients of layout sparse .* embed.sparse = False"):
        prepare(Embedded(), home)
    Embedded.how = {"max_norm": 1.0}
    if home == "nvme":
        with pytest.raises(ConfigError, match=r"embed: max_norm .* embed.max_norm = None"):
            prepare(Embedded(), home)


@pytest.mark.parametrize("home", STEP)
def test_s09_modules_shared_dropped_and_frozen_ones_added_after(home, prepare):
    def loop(model, optimizer):
        model.layers[1].weight = model.layers[0].weight
        del model.layers[2]
        model.layers[2].bias = None
        torch.manual_seed(7)
        model.layers.append(nn.Linear(17, 17).requires_grad_(False))
        return same_step(lambda m: m(rows(4)), 3)(model, optimizer)

    plain, (model, optimizer) = seeded(Chain), prepare(seeded(Chain), home)
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))
