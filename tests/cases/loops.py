"""Loops and small models that the cases share.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import io
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEP = ["none", "nvme"]
ALL = ["none", "nvme", "nvme-backward"]
CHECKPOINTING = ["none", "non-reentrant", "reentrant"]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, foreach=False)


def seeded(build, *args, **kwargs):
    torch.manual_seed(0)
    return build(*args, **kwargs)


def close(got, expected, rtol=1e-5, atol=1e-7):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def compare(prepare, home, build, loop, groups=None, *, atol=1e-7, seen_atol=1e-7, **settings):
    """One loop over one model, with the engine and plain: what it returns, and all weights, are equal."""
    plain = seeded(build)
    torch.manual_seed(1)
    expected = loop(plain, adamw(groups(plain) if groups else plain.parameters()))
    model = seeded(build)
    model, optimizer = prepare(model, home, groups(model) if groups else None, **settings)
    torch.manual_seed(1)
    got = loop(model, optimizer)
    close(got, expected, atol=seen_atol)
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


def saved(model):
    """A state dict that has been through a file."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


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
