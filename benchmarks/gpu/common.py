"""What the sections of the GPU check share: what a section is given, what it finds, and engines to look at."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class Finding:
    """One row of the table."""

    check: str
    measured: str
    ok: bool | None = None
    """None where there is nothing to be right or wrong."""
    data: dict[str, Any] = field(default_factory=dict)
    """For the JSON."""


class NotRunError(Exception):
    """Why a section, or a part of it, cannot be run here."""


@dataclass
class Run:
    """What a section is given."""

    device: str
    """"cuda" or "test"."""
    smoke: bool
    swap: Path
    deadline: float
    """When the section must be done, by ``time.monotonic()``."""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def accelerator(self) -> str:
        """As the configuration names it."""
        return "cuda" if self.is_cuda else "simulated"

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Raises NotRunError where less is left, so that what comes later is not cut off halfway."""
        if self.left() < seconds:
            raise NotRunError(f"{what} takes about {seconds:.0f} s, {max(self.left(), 0):.0f} s are left")

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def tiny(self, seed: int = 7) -> TinyGPT:
        """A decoder small enough for every placement."""
        torch.manual_seed(seed)
        return TinyGPT(1 if self.smoke else 4)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def provide_psutil() -> None:
    """Where only torch and pybind11 are installed: the two numbers that the library asks psutil for."""
    with contextlib.suppress(ImportError):
        import psutil  # noqa: F401

        return
    stand_in = types.ModuleType("psutil")
    memory = {
        line.split(":")[0]: int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    stand_in.virtual_memory = lambda: types.SimpleNamespace(available=memory["MemAvailable"])  # type: ignore[attr-defined]
    stand_in.cpu_count = lambda logical=True: None  # type: ignore[attr-defined]
    sys.modules["psutil"] = stand_in


# ---- engines ----


def config(run: Run, param: str, state: str, update: str = "step", **changes: Any) -> dict[str, Any]:
    """A configuration with parameters and optimizer state on "none", "cpu" or "nvme"."""
    from offload.metrics import memory_available_bytes

    path = {"nvme_path": str(run.swap)}
    return {
        "accelerator": run.accelerator,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "memory": {"host_bytes": int(memory_available_bytes() * 0.9)},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, **path},
            "offload_optimizer": {"device": state, "update": update, **path},
        },
        **changes,
    }


@contextmanager
def prepared(model: nn.Module, settings: dict[str, Any], **sizes: int) -> Iterator[tuple[nn.Module, Any]]:
    """The model and its optimizer; closed at the end."""
    import offload

    model, optimizer = offload.prepare(model, settings, **sizes)
    try:
        yield model, optimizer
    finally:
        optimizer.engine.close()


def train(model: nn.Module, optimizer: Any, steps: int, *, first: int = 0) -> list[float]:
    """So many steps of the small model, from batch ``first`` on; the losses."""
    device, losses = optimizer.engine.device, []
    for step in range(first, first + steps):
        loss = model(batch(step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def batch(step: int) -> torch.Tensor:
    """Ids, 4 x 32."""
    return torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(step))


VOCABULARY, WIDTH = 512, 64


class Block(nn.Module):
    """Attention written out, so that it has one order of additions on every device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / x.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> scalar
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1])).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def digest(model: nn.Module, optimizer: Any = None) -> str:
    """Of all weights, and with ``optimizer`` of its state: equal where every bit is."""
    sha = hashlib.sha256()
    tensors = list(model.state_dict().values())
    if optimizer is not None:
        for state in optimizer.state_dict()["state"].values():
            tensors += [state[name] for name in sorted(state)]
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:12]


# ---- accelerators that behave otherwise ----


class Wrapped:
    """An accelerator with some of its methods replaced."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Waiting(Wrapped):
    """Every copy has ended when the call returns: nothing overlaps."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._inner.copy(destination, source, stream)
        stream.record().wait()


class Shaken(Wrapped):
    """Copies start late, by a random time: on CUDA a kernel sleeps before them on their stream."""

    SLEEP_CYCLES_MAX = 2_000_000

    def __init__(self, inner: Any, seed: int = 0) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if self._inner.device.type == "cuda":
            raw = stream.raw
            same = torch.cuda.Stream(
                stream_id=raw.stream_id, device_index=raw.device_index, device_type=raw.device_type
            )
            with torch.cuda.stream(same):
                torch.cuda._sleep(self._random.randrange(self.SLEEP_CYCLES_MAX))
        self._inner.copy(destination, source, stream)


class Refusing(Wrapped):
    """Pins no more than so many bytes at once, as under a limit of locked memory."""

    bytes_max = 1 << 16

    def register(self, slab: torch.Tensor) -> None:
        from offload import OffloadError

        if slab.numel() > self.bytes_max:
            raise OffloadError(f"{slab.numel()} bytes, and the limit is {self.bytes_max}")
        self._inner.register(slab)


@contextmanager
def accelerators(change: Callable[[Any], Any]) -> Iterator[None]:
    """Engines prepared inside get their accelerator from ``change``."""
    from offload import api

    original = api.open_accelerator
    api.open_accelerator = lambda setting: change(original(setting))
    try:
        yield
    finally:
        api.open_accelerator = original
