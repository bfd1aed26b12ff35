"""A small run that commits at every micro-batch, told from outside how it went; the same in memory, step by step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from interrupted import settings
from models import Placement, Training
from torch import nn

import offload

PLACEMENTS = [
    Placement("nvme", "nvme", "step", chunk=1024),
    Placement("nvme", "nvme", "backward", chunk=4096),
    Placement("cpu", "nvme", "step", chunk=1024),
    Placement("nvme", "cpu", "step", chunk=1024),
    Placement("cpu", "cpu", "backward", chunk=4096),
]
FORMATS = [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "int8"), ("fp32", "bf16")]
WIDTH = 48


class Small(nn.Module):
    """Three units, one of them with a frozen weight; dropout draws, and a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros(1))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + torch.tanh(torch.nn.functional.dropout(block(x), 0.1))
        return x.float().square().mean()


class Loop:
    """The loop of a user: a schedule, the place in the data, a commit whenever one is asked for."""

    def __init__(self, seed: int, swap: Any, *, resume: bool, in_memory: bool = False) -> None:
        placement = Placement() if in_memory else PLACEMENTS[seed % len(PLACEMENTS)]
        precision, state_format = FORMATS[seed % len(FORMATS)]
        self.accumulation = 2 if PLACEMENTS[seed % len(PLACEMENTS)].update == "step" and seed % 2 else 1
        training = Training(precision=precision, state_format=state_format, accumulation=self.accumulation)
        config = training.config(placement, swap) if in_memory else settings(training, placement, swap)
        torch.manual_seed(seed)
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        self.model, self.optimizer = offload.prepare(Small(), config, resume=resume)
        self.engine = self.optimizer.engine
        self.place, self.seed = 0, seed
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.engine.attach(scheduler=self.scheduler, loop=self)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def micro_batch(self) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.place)
        batch = torch.randn(2, WIDTH, generator=generator).to(self.dtype)
        (self.model(batch) / self.accumulation).backward()
        self.place += 1
        if self.place % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def digest(self) -> str:
        """Of everything that there is: weights, masters, moments, buffers, numbers of the groups, gradients."""
        found = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        for stored, state in offload.optimizer_state(self.engine):
            for name, value in {**state, "grad": stored.param.grad}.items():
                if value is not None:
                    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    found.update(stored.name.encode() + name.encode() + data)
        found.update(repr([{**group, "params": 0} for group in self.optimizer.param_groups]).encode())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


@functools.cache
def undisturbed(seed: int, micro_batches: int) -> list[str]:
    """The digest before each micro-batch of a run that nobody interrupts, in memory, and after the last."""
    loop = Loop(seed, "/nowhere", resume=False, in_memory=True)
    digests = [loop.digest()]
    for _ in range(micro_batches):
        loop.micro_batch()
        digests.append(loop.digest())
    loop.engine.close()
    return digests


def train(seed: int, swap: Any, *, resume: bool, say: Callable[[str], None], last: int) -> None:
    """Trains and commits until something ends it; says what has been committed."""
    loop = Loop(seed, swap, resume=resume)
    while loop.place < last:
        loop.engine.save_checkpoint()
        say(f"{loop.place}")
        loop.micro_batch()
    loop.engine.close()
