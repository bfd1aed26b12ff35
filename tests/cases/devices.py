"""Simulated accelerators with one more trait each, and small models on them, for the device's cases."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
from torch import nn

import offload
from offload.accel.simulated import SimulatedAccelerator, _users

HOMES = [
    ("none", "none", "step"),
    ("cpu", "none", "step"),
    ("none", "cpu", "step"),
    ("cpu", "cpu", "step"),
    ("cpu", "cpu", "backward"),
    ("nvme", "nvme", "backward"),
]
"""Where weights and optimizer state are, and when the update runs."""


class Counting(SimulatedAccelerator):
    """Knows which device memory is still held, and what each copy stream has moved."""

    def __init__(self, seed=0, **settings):
        super().__init__(seed, **settings)
        self.copied = Counter()
        self._pieces = []
        self.live_peak = 0

    def allocate(self, size):
        memory = super().allocate(size)
        self._pieces.append(memory.detach())
        self.live_peak = max(self.live_peak, self.live_bytes)
        return memory

    def copy(self, destination, source, stream):
        super().copy(destination, source, stream)
        self.copied[stream.name] += source.nbytes

    @property
    def live_bytes(self):
        """Bytes of allocated device memory that somebody besides us, and the question, still looks at."""
        return sum(piece.numel() for piece in self._pieces if _users(piece.untyped_storage()) > 2)


class Late(SimulatedAccelerator):
    """A copy runs when somebody waits for it, and never before."""

    def __init__(self, seed=0, **settings):
        super().__init__(seed, **settings)
        self.eagerness = 0.0


class InTurn(SimulatedAccelerator):
    """Nothing overlaps: a copy has run before anything else is issued."""

    def copy(self, destination, source, stream):
        super().copy(destination, source, stream)
        stream.drain()


class Wide(nn.Module):
    """A stack of wide layers, each a unit."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        x = x.to(next(self.parameters()).dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide(width=64, layers=4):
    torch.manual_seed(0)
    return Wide(width, layers)


def rows(count=4, width=64, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def config(swap_path, home, *, precision="fp32", **settings):
    """A configuration that places everything at a home: (weights, state, update)."""
    params, states, update = home
    path = {"nvme_path": str(swap_path)}
    return {
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2048,
            "offload_param": {"device": params, **path},
            "offload_optimizer": {"device": states, "update": update, **path},
        },
        **settings,
    }


def train(model, optimizer, steps=3, *, micro_batches=1, first=0):
    """A loop; returns its losses."""
    losses = []
    for step in range(first, first + steps):
        for micro_batch in range(micro_batches):
            loss = model(rows(seed=100 * step + micro_batch)) / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(engine):
    """Everything that training has made: masters, moments and counts, by name."""
    result = {}
    for stored, state in offload.optimizer_state(engine):
        result[stored.name, "master"] = offload.read_master(engine, stored)
        result.update({(stored.name, key): value.clone() for key, value in state.items()})
    return result


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def on_cpu(steps=3, *, micro_batches=1, layers=4, **settings):
    """The oracle: losses and bits of the same loop with the CPU as the compute device."""
    settings = {"accelerator": "cpu", "gradient_accumulation_steps": micro_batches, **settings}
    plain = config("/unused", ("none", "none", "step"), **settings)
    model, optimizer = offload.prepare(wide(layers=layers), plain)
    with contextlib.closing(optimizer.engine):
        return train(model, optimizer, steps, micro_batches=micro_batches), bits(optimizer.engine)
