"""Models drawn from a seed, small and odd in every way in which users' models are: parts in a row.

Every part maps rows of one width to rows of the same width, so parts can be drawn in any order. What a draw
contains is noted (``Drawn.features``), so that a test can count what it has tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PICKS = 4
"""Flags of a batch that parts look at: which of them run."""


class BombError(RuntimeError):
    """The exception of a part that was told to fail."""


@dataclass(frozen=True)
class Batch:
    """Rows and what decides which way they go."""

    x: torch.Tensor  # (N, W)
    ids: torch.Tensor  # (N,)
    picks: tuple[bool, ...]
    bomb: type[BaseException] | None = None
    """What the fuse of the model raises."""


@dataclass
class Answer:
    """What a model returns: a dataclass that torch's pytree does not know."""

    rows: torch.Tensor
    nothing: None = None
    more: Any = None


class Aware(nn.Module):
    """A part that looks at the batch, not only at the rows: ``forward(x, batch)``."""


def run(part: nn.Module, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A part's rows, in whatever form it gives them."""
    return rows_of(part(x, batch) if isinstance(part, Aware) else part(x))


def rows_of(output: Any) -> torch.Tensor:
    """The rows in an output of any form: its first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Answer):
        return output.rows
    members = output.values() if isinstance(output, dict) else output
    return next(rows_of(member) for member in members if member is not None)


def give(x: torch.Tensor, form: str) -> Any:
    """Rows in one of the forms in which modules answer."""
    half = x * 0.5
    return {
        "tensor": x,
        "tuple": (x, None),
        "list": [None, x, [half]],
        "dict": {"nothing": None, "rows": x, "half": (half,)},
        "dataclass": Answer(x, more={"half": half}),
    }[form]


FORMS = ("tensor", "tuple", "list", "dict", "dataclass")


class Bare(Aware):
    """Parameters of its own: vector, scalar, empty, listed, in a dictionary, and two not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(1, width))})
        self.transposed = nn.Parameter(torch.randn(width, width).t())
        self.strided = nn.Parameter(torch.randn(width, 3)[:, 1])  # its elements do not fill its memory

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = x * self.gain + self.listed[0] * self.named["a"]
        if batch.picks[0]:
            x = x * self.listed[1]
        return (x @ self.transposed) * self.temperature + self.strided + self.empty.sum()


class Borrower(Aware):
    """Uses a child's weight without calling the child, and a child through its ``forward``, past all hooks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child, self.called = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = torch.tanh(F.linear(x, self.child.weight.t(), self.child.bias))
        return self.called.forward(x) if batch.picks[1] else self.called(x)


class Times(Aware):
    """One part several times."""

    def __init__(self, part: nn.Module, times: int) -> None:
        super().__init__()
        self.part, self.times = part, times

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        for _ in range(self.times + batch.picks[2]):
            x = torch.tanh(run(self.part, x, batch))
        return x


class Checkpointed(Aware):
    """A part that runs again in backward."""

    def __init__(self, part: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checkpoint(lambda rows: run(self.part, rows, batch), x, use_reentrant=self.reentrant)


class Choice(Aware):
    """A list of parts of which the batch picks some, in one order or the other, or none."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        chosen = [part for part, is_picked in zip(self.layers, batch.picks, strict=False) if is_picked]
        for part in chosen[::-1] if batch.picks[-1] else chosen:
            x = x + torch.tanh(run(part, x, batch))
        return x


class Experts(Aware):
    """Each row goes to the expert of its id."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        chosen, out = batch.ids % len(self.experts), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            at = chosen == expert
            out = out.index_put((at,), self.experts[expert](x[at]))
        return out


class Embedded(Aware):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + self.table(batch.ids)


class Adapted(Aware):
    """A frozen layer, frozen codes of 8 bits, and a small trained bypass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        codes = torch.randint(0, 256, (width, width), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.base(x) + _Decoded.apply(x, self.codes) + self.up(self.down(x))


class _Decoded(torch.autograd.Function):
    """Keeps a frozen weight as an attribute, not among the saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        ctx.codes = codes
        return x @ ((codes.to(x.dtype) - 128) / 512)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ((ctx.codes.to(grad.dtype) - 128) / 512).t(), None


class Saving(Aware):
    """A function of its own that saves a trained weight, and work in place on what comes out of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        y = _Product.apply(x, self.weight)
        y.mul_(0.5)
        return y.relu_() if batch.picks[3] else y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Attention(Aware):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=batch.picks[0])[0]


class Recurrent(Aware):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.cell(x[None])[0][0]


class Convolved(Aware):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.einsum("ncw,c->nw", self.conv(x[:, None]), self.mix)


class Remembering(Aware):
    """Buffers that a forward of training changes: one saved, one not, one of integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.scale = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
            self.count += 1
        return self.scale(x - self.mean.to(x.dtype)) + self.shift.to(x.dtype)


class Formed(Aware):
    """A part whose output has another form."""

    def __init__(self, part: nn.Module, form: str) -> None:
        super().__init__()
        self.part, self.form = part, form

    def forward(self, x: torch.Tensor, batch: Batch) -> Any:
        return give(run(self.part, x, batch), self.form)


class Lent(Aware):
    """Its output has a parameter of its own in it, as it is: code outside the model works on it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shown = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, batch: Batch) -> Any:
        return {"rows": x * self.shown, "shown": self.shown}


@dataclass
class Drawn:
    """What a model consists of."""

    features: set[str] = field(default_factory=set)


class RandomModel(nn.Module):
    """Parts in a row; somewhere among them the fuse."""

    def __init__(
        self, parts: list[nn.Module], *, form: str, fuse: int, drop: float, lends: Lent | None
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.lent = lends
        self.form, self.fuse = form, fuse
        self.drop = nn.Dropout(drop)

    def forward(self, batch: Batch) -> Any:
        x = batch.x
        for index, part in enumerate(self.parts):
            if index == self.fuse and batch.bomb is not None:
                raise batch.bomb(f"part {index} fails")
            x = 0.5 * x + torch.tanh(run(part, x, batch))
        x = self.drop(x)
        if self.lent is not None:
            lent = self.lent(x, batch)
            return [give(lent["rows"], self.form), lent["shown"]]
        return give(x, self.form)


Maker = Callable[[random.Random, int, Drawn], nn.Module]
_SIMPLE: dict[str, Maker] = {
    "linear": lambda rng, width, _: nn.Linear(width, width, bias=rng.random() < 0.5),
    "mlp": lambda rng, width, _: nn.Sequential(
        nn.Linear(width, hidden := rng.choice((3, 31, 97))), nn.GELU(), nn.Linear(hidden, width)
    ),
    "norm": lambda rng, width, _: nn.LayerNorm(width),
    "rms norm": lambda rng, width, _: nn.RMSNorm(width),
    "group norm and prelu": lambda rng, width, _: nn.Sequential(nn.GroupNorm(1, width), nn.PReLU(width)),
    "bare": lambda rng, width, _: Bare(width),
    "borrower": lambda rng, width, _: Borrower(width),
    "experts": lambda rng, width, _: Experts(width, 3),
    "embedding": lambda rng, width, _: Embedded(width),
    "adapter": lambda rng, width, _: Adapted(width),
    "saving function": lambda rng, width, _: Saving(width),
    "attention": lambda rng, width, _: Attention(width),
    "recurrent": lambda rng, width, _: Recurrent(width),
    "convolution": lambda rng, width, _: Convolved(width),
    "buffers": lambda rng, width, _: Remembering(width),
    "batch norm": lambda rng, width, _: nn.BatchNorm1d(width),
    "weight norm": lambda rng, width, _: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
}
_FP32_ONLY = {"batch norm", "recurrent", "weight norm", "rms norm"}
"""What torch does not compute in bf16 here, or not beside running statistics in fp32; and what has gradients in fp32
of weights in bf16, which torch adds to others in one type or the other, as it happens to hold them."""
WRAPPED = ("times", "checkpoint", "reentrant", "choice", "form", "nested")
KINDS = (*_SIMPLE, *WRAPPED, "frozen part", "frozen half", "tied", "shared", "lent", "dropout", "bare root")
"""All that a model may have in it."""
NEEDS_SEVERAL_UNITS = {"tied", "shared", "bare root"}
"""Features with which one module needs the weights of several units at once, or a unit has several uses."""


def draw_part(rng: random.Random, width: int, drawn: Drawn, *, fp32: bool, depth: int = 0) -> nn.Module:
    kinds = [kind for kind in _SIMPLE if fp32 or kind not in _FP32_ONLY]
    if depth < 2 and rng.random() < 0.4:
        kind = rng.choice(WRAPPED)

        def inner() -> nn.Module:
            return draw_part(rng, width, drawn, fp32=fp32, depth=depth + 1)

        drawn.features.add(kind)
        if kind == "times":
            return Times(inner(), rng.randint(1, 3))
        if kind in ("checkpoint", "reentrant"):
            return Checkpointed(inner(), reentrant=kind == "reentrant")
        if kind == "form":
            return Formed(inner(), rng.choice(FORMS))
        parts = [inner() for _ in range(rng.randint(2, 3))]
        return Choice(parts) if kind == "choice" else _Row(parts)
    kind = rng.choice(kinds)
    drawn.features.add(kind)
    part = _SIMPLE[kind](rng, width, drawn)
    if rng.random() < 0.15:
        drawn.features.add("frozen part")
        part.requires_grad_(False)
    elif rng.random() < 0.1:
        drawn.features.add("frozen half")
        for param in list(part.parameters())[::2]:
            param.requires_grad_(False)
    return part


class _Row(Aware):
    """A list within the list."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(run(block, x, batch))
        return x


def build_model(seed: int, precision: str) -> tuple[nn.Module, Drawn, int]:
    """The model of a seed, what is in it, and its width: the same at every call, values and all."""
    rng = random.Random(f"model {seed}")
    torch.manual_seed(seed)
    drawn, width = Drawn(), rng.choice((5, 8, 13, 17, 24, 48))
    parts = [draw_part(rng, width, drawn, fp32=precision == "fp32") for _ in range(rng.randint(2, 6))]
    linears = [part for part in parts if type(part) is nn.Linear]
    if linears and rng.random() < 0.5:  # a weight used by two modules
        drawn.features.add("tied")
        again = nn.Linear(width, width, bias=False)
        again.weight = rng.choice(linears).weight
        parts.insert(rng.randint(0, len(parts)), again)
    if rng.random() < 0.2:  # a module under two names
        drawn.features.add("shared")
        parts.insert(rng.randint(0, len(parts)), rng.choice(parts))
    lends = None
    if rng.random() < 0.15:
        drawn.features.add("lent")
        lends = Lent(width)
    drop = rng.choice((0.0, 0.0, 0.2))
    form = rng.choice(FORMS)
    drawn.features |= {f"output {form}"} | ({"dropout"} if drop else set())
    model = RandomModel(parts, form=form, fuse=rng.randrange(len(parts)), drop=drop, lends=lends)
    if rng.random() < 0.15:
        drawn.features.add("bare root")
        model.register_parameter("root", nn.Parameter(torch.randn(width)))
        model.parts[0].register_forward_pre_hook(lambda _module, args: (args[0] * model.root, *args[1:]))
    if not any(param.requires_grad for param in model.parameters()):
        model.parts.append(nn.Linear(width, width))
    return model, drawn, width
