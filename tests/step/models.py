"""Small models and loops that every step test shares, and plain PyTorch training as their oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lion import Lion
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.matmul import WideLinears, bf16_is_native

VOCABULARY, WIDTH, LENGTH = 257, 64, 16


class Block(nn.Module):
    """Pre-norm attention and MLP, with biases, so that small and large parameters alternate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: a key's bias has a gradient of zero but for rounding, which Adam blows up to full steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with every trait that the engine must cope with, each switched by an argument."""

    def __init__(self, *, layers: int = 4, tied: bool = False, checkpointing: str = "none") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(layers))
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> scalar loss of the next token
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.02, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        "Adagrad",
        {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-8},
    ),
    "lion": ("Lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}
"""Optimizers beside Adam: DeepSpeed's name, and torch's numbers."""
GROUPS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.1}, {"weight_decay": 0.0}, {}],
    "momentum": [{"momentum": 0.5}, {"momentum": 0.0, "weight_decay": 0.0}, {"lr": 0.01, "dampening": 0.0}],
    "nesterov": [{"momentum": 0.5}, {"nesterov": False}, {}],
    "adagrad": [{"lr_decay": 0.0}, {"weight_decay": 0.0, "eps": 1e-6}, {"lr": 0.02}],
    "lion": [{"betas": (0.8, 0.9)}, {"weight_decay": 0.0}, {"lr": 5e-4}],
}
"""What of them differs between the three groups."""


@dataclass(frozen=True)
class Training:
    """One training run: what is trained, and how the loop is written."""

    precision: str = "fp32"
    state_format: str = "fp32"
    steps: int = 4
    seed: int = 0
    tied: bool = False
    frozen: str = ""
    """Prefixes of parameters that are not trained, separated by spaces."""
    checkpointing: str = "none"
    accumulation: int = 1
    clip_config: float = 0.0
    """gradient_clipping of the configuration."""
    clip_loop: float = 0.0
    """torch.nn.utils.clip_grad_norm_ called by the loop."""
    groups: bool = False
    """Three parameter groups with their own lr, betas, eps and weight decay."""
    adamw: bool = True
    rule: str = ""
    """One of RULES, instead of Adam or AdamW."""
    schedule: bool = False
    """A LambdaLR."""
    evaluate: bool = False
    """A forward without gradient between steps, and inside an accumulation window."""

    def model(self) -> GPT:
        torch.manual_seed(self.seed)
        model = GPT(tied=self.tied, checkpointing=self.checkpointing)
        for name, param in model.named_parameters():
            if any(name.startswith(prefix) for prefix in self.frozen.split()):
                param.requires_grad_(False)
        return model

    def batches(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = self.steps * self.accumulation
        return [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(count)]

    def param_groups(self, params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        trained = {name: param for name, param in params.items() if param.requires_grad}
        if not self.groups:
            return [{"params": list(trained.values())}]
        matrices = [p for n, p in trained.items() if p.ndim == 2 and "blocks" in n]
        vectors = [p for n, p in trained.items() if p.ndim == 1]
        rest = [p for n, p in trained.items() if p.ndim == 2 and "blocks" not in n]
        if self.rule:
            groups = [
                {"params": p, **n} for p, n in zip((matrices, vectors, rest), GROUPS[self.rule], strict=True)
            ]
            return [group for group in groups if group["params"]]
        groups = [
            {"params": matrices, "lr": 2e-3, "weight_decay": 0.1},
            {"params": vectors, "lr": 5e-4, "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": rest, "eps": 1e-6},
        ]
        return [group for group in groups if group["params"]]

    def plain_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """torch's own, with its fused implementation where that is the one whose bits are ours."""
        if not self.rule:
            adam = torch.optim.AdamW if self.adamw else torch.optim.Adam
            return adam(groups, lr=1e-3, weight_decay=0.01, fused=True)
        name, numbers = RULES[self.rule]
        kinds = {"SGD": torch.optim.SGD, "Adagrad": partial(torch.optim.Adagrad, fused=True), "Lion": Lion}
        return kinds[name](groups, **numbers)

    def config(self, placement: Placement, swap_path: Any) -> dict[str, Any]:
        kind = "AdamW" if self.adamw else "Adam"
        params = {"lr": 1e-3, "weight_decay": 0.01, "adam_w_mode": self.adamw}
        if self.rule:
            kind, params = RULES[self.rule]
        path = {"nvme_path": str(swap_path)}
        return {
            "bf16": {"enabled": self.precision == "bf16"},
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip_config,
            "optimizer": {"type": kind, "params": params},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": placement.chunk,
                "offload_param": {"device": placement.param, **path},
                "offload_optimizer": {
                    "device": placement.state,
                    "update": placement.update,
                    "state_format": self.state_format,
                    **path,
                },
            },
            "aio": {"backend": placement.backend},
            "durability": {"verify": placement.verify},
        }


@dataclass(frozen=True)
class Placement:
    """Where things are and when they are updated: nothing of it may change a number."""

    param: str = "none"
    state: str = "none"
    update: str = "step"
    chunk: int = 8192
    backend: str = "auto"
    verify: str = "resume"

    def __str__(self) -> str:
        return f"{self.param}-{self.state}-{self.update}-{self.chunk}-{self.backend}"


@dataclass
class Outcome:
    """What a run leaves: compared bit for bit between placements."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)

    def assert_same_bits(self, other: Outcome) -> None:
        assert self.losses == other.losses
        assert self.norms == other.norms
        self.assert_same_state(other)

    def assert_same_state(self, other: Outcome) -> None:
        """Masters and moments, bit by bit."""
        assert self.masters.keys() == other.masters.keys()
        for name, value in self.masters.items():
            assert torch.equal(value, other.masters[name]), name
        for name, value in self.moments.items():
            assert torch.equal(value, other.moments[name]), name


def train_plain(training: Training) -> Outcome:
    """The oracle: torch's own fused Adam or AdamW over fp32 master weights, everything in memory.

    Two things are ours, so that all bits can be compared: what a weight halfway between two bf16 values becomes,
    and the coefficient of clipping from a norm in fp64.
    """
    model, outcome = training.model(), Outcome()
    masters = dict(model.named_parameters())
    if training.precision == "bf16":
        masters = {
            name: nn.Parameter(param.detach().clone(), param.requires_grad) for name, param in masters.items()
        }
        model.to(torch.bfloat16)
        _round_weights(model, masters)
        if not bf16_is_native():
            WideLinears(model)  # torch's own products differ in the last place, and are very slow
    groups = training.param_groups(masters)
    optimizer = training.plain_optimizer(groups)
    scheduler = _schedule(training, optimizer)
    batches = iter(training.batches())
    trained = {name: param for name, param in masters.items() if param.requires_grad}
    for _ in range(training.steps):
        for _ in range(training.accumulation):
            loss = model(next(batches)) / training.accumulation
            loss.backward()
            outcome.losses.append(loss.item())
            if (
                training.clip_loop and training.accumulation == 1
            ):  # in the compute type, as the loop sees them
                torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_loop)
            if training.precision == "bf16":
                for name, param in model.named_parameters():
                    if param.grad is not None:
                        grad = param.grad.float()
                        total = grad if masters[name].grad is None else masters[name].grad + grad
                        masters[name].grad, param.grad = total, None
        if training.clip_loop and training.accumulation > 1:  # their sums, in fp32
            torch.nn.utils.clip_grad_norm_(trained.values(), training.clip_loop)
        grads = [param.grad for param in trained.values() if param.grad is not None]
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        if training.clip_config:
            for grad in grads:
                grad.mul_(min(1.0, training.clip_config / (norm + 1e-6)))
        outcome.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if training.precision == "bf16":
            _round_weights(model, masters)
    outcome.masters = {name: param.detach().clone() for name, param in trained.items()}
    for name, param in trained.items():
        outcome.moments[name] = moments_of(optimizer.state[param])
    return outcome


def train_offloaded(training: Training, placement: Placement, swap_path: Any) -> Outcome:
    """The same loop with the engine. Checks on the way that the ledger is what the plan has predicted."""
    model, outcome = training.model(), Outcome()
    groups = training.param_groups(dict(model.named_parameters()))
    model, optimizer = offload.prepare(model, training.config(placement, swap_path), groups)
    engine = optimizer.engine
    scheduler = _schedule(training, optimizer)
    batches = iter(training.batches())
    with contextlib.closing(engine):
        for _ in range(training.steps):
            for _ in range(training.accumulation):
                batch = next(batches)
                if training.evaluate:
                    with torch.no_grad():
                        model(batch)
                loss = model(batch) / training.accumulation
                loss.backward()
                outcome.losses.append(loss.item())
            if training.clip_loop:
                torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_loop)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            outcome.norms.append(engine.grad_norm)
        ledger = engine.report()
        assert ledger.steps == training.steps
        if not training.evaluate and not training.tied:  # the plan foresees units in their order only
            assert +ledger.moved == ledger.predicted
        for stored, state in offload.optimizer_state(engine):
            master = state.get("master")
            outcome.masters[stored.name] = offload.read_master(engine, stored) if master is None else master
            outcome.moments[stored.name] = moments_of(state)
    return outcome


def moments_of(state: dict[str, Any]) -> torch.Tensor:
    """All moments in a parameter's state."""
    names = ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer")
    found = [state[name] for name in names if state.get(name) is not None]
    return torch.stack(found) if found else torch.empty(0)


@torch.no_grad()
def _round_weights(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    for name, param in model.named_parameters():
        param.copy_(half_up(masters[name]))


def _schedule(training: Training, optimizer: torch.optim.Optimizer) -> Any:
    if not training.schedule:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def half_up(master: torch.Tensor) -> torch.Tensor:
    """bf16 with ties away from zero, by the definition: add half of the last place, cut off."""
    return ((master.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@contextlib.contextmanager
def prepared(
    training: Training, placement: Placement, swap_path: Any, model: nn.Module | None = None
) -> Iterator[tuple[nn.Module, Any]]:
    """The model and its optimizer, for loops that do more between steps."""
    model = training.model() if model is None else model
    model, optimizer = offload.prepare(model, training.config(placement, swap_path))
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


def steps(model: nn.Module, optimizer: Any, batches: Iterable[torch.Tensor]) -> list[float]:
    """One step for each batch; the losses."""
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
