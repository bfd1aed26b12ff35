"""A frozen base in 8 and in 4 bits under trained adapters, as bitsandbytes and torchao do. Oracle: plain torch."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from against_plain import assert_equal_to_plain, engine_config, train_offloaded, train_plain
from models import Placement
from tight import tight
from torch import nn

import offload
from offload.errors import ConfigError

WIDTH, BLOCK, STEPS = 32, 16, 10
PLACEMENTS = [
    Placement("nvme", "nvme", chunk=4096),
    Placement("nvme", "nvme", "backward", chunk=4096),
    Placement("cpu", "cpu"),
]


@dataclass
class QuantState:
    """What beside its code a weight is: tensors that no module has registered."""

    absmax: torch.Tensor
    shape: torch.Size
    blocksize: int = BLOCK


class Code(nn.Parameter):
    """A parameter of a type of its own, as bitsandbytes has them."""

    def __new__(cls, data, quant_state=None):
        code = torch.Tensor._make_subclass(cls, data, False)
        code.quant_state = quant_state
        return code


def quantised_4bit(weight):
    """Two codes a byte, of blocks with a scale each."""
    absmax = weight.view(-1, BLOCK).abs().amax(1)
    codes = (weight.view(-1, BLOCK) / absmax[:, None] * 7).round().to(torch.int16).add(8).flatten()
    packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(-1, 1)
    return Code(packed, QuantState(absmax, weight.shape))


def dequantised_4bit(packed, state):
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).to(state.absmax.dtype) - 8
    return (codes.view(-1, state.blocksize) / 7 * state.absmax[:, None]).view(state.shape)


class MatMul4Bit(torch.autograd.Function):
    """Keeps the code on its node, not its values."""

    @staticmethod
    def forward(ctx, x, packed, state):
        ctx.packed, ctx.state = packed, state
        return x @ dequantised_4bit(packed, state).T.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad @ dequantised_4bit(ctx.packed, ctx.state).to(grad.dtype), None, None


class MatMul8Bit(torch.autograd.Function):
    """Saves the code and the scale of each row."""

    @staticmethod
    def forward(ctx, x, code, scale):
        ctx.save_for_backward(code, scale)
        return x @ (code.to(scale.dtype) * scale).T.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        code, scale = ctx.saved_tensors
        return grad @ (code.to(scale.dtype) * scale).to(grad.dtype), None, None


class Linear8Bit(nn.Module):
    """Codes as int8, the scale of each row in an fp32 buffer, as torchao's int8 weight-only layers."""

    def __init__(self, weight):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.code = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return MatMul8Bit.apply(x, self.code, self.scale)


class Linear4Bit(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.code = quantised_4bit(weight)

    def forward(self, x):
        return MatMul4Bit.apply(x, self.code, self.code.quant_state)


class Adapted(nn.Module):
    """A quantised layer under a low-rank adapter."""

    def __init__(self, kind):
        super().__init__()
        self.base = kind(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(kind) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


KINDS = {"8 bits": Linear8Bit, "4 bits": Linear4Bit}


def stack(kind):
    torch.manual_seed(0)
    return Stack(KINDS[kind])


def rows(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]


def loss_of(model, x):
    return model(x.to(model.layers[0].down.weight.dtype))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_equal_plain(kind, placement, swap_path):
    plain = train_plain(stack(kind), loss_of, rows())
    outcome = train_offloaded(stack(kind), loss_of, rows(), placement, swap_path, is_tight=True)
    assert_equal_to_plain(outcome, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_has_the_same_bits_everywhere_and_those_of_plain_losses(kind, swap_path):
    """Adapters in bf16 over codes that are what they were, and scales that stay fp32."""
    first, *others = [
        train_offloaded(stack(kind), loss_of, rows(), placement, swap_path, precision="bf16", is_tight=True)
        for placement in (Placement(chunk=4096), *PLACEMENTS)
    ]
    for outcome in others:
        outcome.assert_same_bits(first)
    plain = train_plain(stack(kind), loss_of, rows())
    torch.testing.assert_close(first.losses, plain.losses, rtol=2e-2, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_keep_their_type_bytes_attributes_and_are_never_rewritten(kind, precision, swap_path):
    original, model = stack(kind), stack(kind)
    config = engine_config(PLACEMENTS[0], swap_path, precision=precision)
    model, optimizer = offload.prepare(model, tight(model, config))
    states = [getattr(layer.base.code, "quant_state", None) for layer in model.layers]
    engine = optimizer.engine
    with contextlib.closing(engine):
        for x in rows():
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        inventory = engine.plan.inventory
        trained_bytes = inventory.elements * inventory.weight_itemsize
        assert engine.report().moved["nvme_write", "weight"] == STEPS * trained_bytes
        state = model.state_dict()
        for index, (layer, other) in enumerate(zip(model.layers, original.layers, strict=True)):
            code, expected = layer.base.code, other.base.code
            assert isinstance(code, type(expected)) and code.dtype is expected.dtype
            assert type(code).__name__ == type(expected).__name__
            assert getattr(code, "quant_state", None) is states[index]
            assert torch.equal(state[f"layers.{index}.base.code"], expected)
            with offload.gather(code):
                assert torch.equal(code.cpu(), expected)
            for (name, buffer), (_, kept) in zip(
                layer.base.named_buffers(), other.base.named_buffers(), strict=True
            ):
                assert buffer.dtype is torch.float32 and torch.equal(buffer.cpu(), kept), name
        for kept, layer in zip(states, original.layers, strict=True):
            assert kept is None or torch.equal(kept.absmax, layer.base.code.quant_state.absmax)


class Wrapped(torch.Tensor):
    """A tensor made of others, as torchao's weights are: it has no bytes of its own."""

    @staticmethod
    def __new__(cls, code, scale):
        return torch.Tensor._make_wrapper_subclass(cls, code.shape, dtype=torch.float32)

    def __init__(self, code, scale):
        self.code, self.scale = code, scale

    def __tensor_flatten__(self):
        return ["code", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["code"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].code, args[0].scale)
        raise TypeError(f"{func} of a wrapped tensor")


def test_tensors_made_of_others_are_refused_by_name(swap_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = Wrapped(torch.zeros(8, 8, dtype=torch.int8), torch.ones(8, 1))
    model[1].weight = nn.Parameter(wrapped, requires_grad=False)
    with pytest.raises(ConfigError, match=r"^1\.weight: a Wrapped is made of other tensors"):
        offload.prepare(model, engine_config(PLACEMENTS[0], swap_path))
