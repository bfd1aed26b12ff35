"""Cases from other projects' issues that only a device with memory of its own can show."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .common import (
    WIDTH,
    Finding,
    Refusing,
    Run,
    Shaken,
    accelerators,
    batch,
    config,
    digest,
    prepared,
    train,
)

MiB = 1 << 20


def lifetimes(run: Run) -> Iterator[Finding]:
    """N15, M05, M10: buffers that go too early, or never, or cannot be pinned."""
    yield _closed_while_copying(run)
    yield _built_again_and_again(run)
    yield _pinning_refused(run)


def structure(run: Run) -> Iterator[Finding]:
    """K09, S12, S15, P02, P04: what must stay where it is, and what must not move."""
    yield _loaded_from_elsewhere(run)
    yield _frozen_bytes(run)
    yield _buffers(run)
    yield _gradient_bytes(run)
    yield _generation(run)


def pinned_bytes(run: Run) -> Iterator[Finding]:
    """M01: what pinning takes beyond what was asked for."""
    from offload.accel import open_accelerator
    from offload.tiers.host import HostTier

    for size in (int(129.5e6), int(1.2 * (1 << 30)), int(2.25 * (1 << 30))):
        asked = size // 64 if run.smoke else size
        accelerator = open_accelerator(run.accelerator)
        before = _status()
        tier = HostTier(accelerator)
        (memory,) = tier.allocate("weights", [asked], pinned=True)
        memory.fill_(1)
        pinned, after = tier.is_pinned(memory), _status()
        accelerator.close()
        tier.close()
        del memory
        gc.collect()
        end = _status()
        grown = {key: after[key] - before[key] for key in after}
        locked = max(grown["VmLck"], grown["VmPin"])
        allowed = asked + 2 * MiB + 8192  # two pages per block, and what Python takes meanwhile
        yield Finding(
            f"M01: {asked / 1e6:.1f} MB pinned",
            f"locked {locked / 1e6:.1f} MB, resident {grown['VmRSS'] / 1e6:+.1f} MB;"
            f" {(end['VmRSS'] - before['VmRSS']) / 1e6:+.1f} MB after closing",
            pinned and max(locked, grown["VmRSS"]) <= allowed and end["VmRSS"] - before["VmRSS"] < 4 * MiB,
            {"asked": asked, **grown},
        )


def _closed_while_copying(run: Run) -> Finding:
    """N15: the engine is closed while lifts are on their way, and its memory is used for something else at once."""
    from offload.tiers.host import HostTier

    with accelerators(Shaken), prepared(run.tiny(), config(run, "cpu", "cpu")) as (model, optimizer):
        train(model, optimizer, 2)
        optimizer.engine.settle()
        wanted = digest(model)
        with torch.no_grad():
            model(batch(9).to(optimizer.engine.device))
        optimizer.engine.close()
        sevens = [piece.fill_(7) for piece in HostTier().allocate("other", [MiB] * 8)]
        run.synchronize()
        got = digest(model)
        del sevens
    return Finding(
        "N15: closed while copies run", "same weights" if got == wanted else "changed", got == wanted
    )


def _built_again_and_again(run: Run) -> Finding:
    """M05: ten engines one after the other, and one that breaks off."""
    from offload import construct

    def once() -> None:
        with prepared(run.tiny(), config(run, "cpu", "nvme")) as (model, optimizer):
            train(model, optimizer, 2)

    def broken() -> None:
        original, calls = construct.initial_value, iter(range(1000))

        def failing(param: nn.Parameter) -> torch.Tensor:
            if next(calls) == 5:
                raise RuntimeError("broken off")
            return original(param)

        construct.initial_value = failing
        try:
            once()
        except RuntimeError:
            pass
        finally:
            construct.initial_value = original

    once()  # what torch and CUDA take when they first run stays
    broken()
    gc.collect()
    before = _held(run)
    for _ in range(2 if run.smoke else 10):
        once()
        broken()
    gc.collect()
    grown = {key: value - before[key] for key, value in _held(run).items()}
    ok = grown["device"] == 0 and grown["rss"] < 50 * MiB and grown["threads"] <= 0 and grown["files"] <= 0
    text = f"device {grown['device']} B, RSS {grown['rss'] / 1e6:+.1f} MB, threads {grown['threads']:+d}"
    return Finding("M05: built and closed again", f"{text}, files {grown['files']:+d}", ok, grown)


def _pinning_refused(run: Run) -> Finding:
    """M10: the same results through a small buffer, and one warning."""

    def one_run() -> str:
        with prepared(run.tiny(), config(run, "cpu", "cpu")) as (model, optimizer):
            train(model, optimizer, 3)
            return digest(model, optimizer)

    expected = one_run()
    with accelerators(Refusing), _warnings() as warnings:
        got = one_run()
    told = [text for text in warnings if "cannot be pinned" in text and "limit" in text]
    return Finding(
        "M10: pinning refused above 64 KiB",
        f"{'same bits' if got == expected else 'other bits'}, {len(told)} warning(s)",
        got == expected and len(told) == 1,
        {"warnings": warnings},
    )


def _loaded_from_elsewhere(run: Run) -> Finding:
    """K09: a state saved on another device goes to where this configuration has it."""
    device = torch.device("cuda" if run.is_cuda else "cpu")
    results, homes = set(), set()
    with prepared(run.tiny(), config(run, "cpu", "cpu")) as (model, optimizer):
        train(model, optimizer, 3)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for place in (torch.device("cpu"), device):
        with prepared(run.tiny(1), config(run, "cpu", "cpu")) as (model, optimizer):
            model.load_state_dict({name: value.to(place) for name, value in weights.items()})
            optimizer.load_state_dict(_moved(state, place))
            homes |= {buffer.device.type for buffer in optimizer.engine._states.buffers}
            train(model, optimizer, 2, first=3)
            results.add(digest(model, optimizer))
    ok = len(results) == 1 and homes == {"cpu"}
    return Finding(
        "K09: loaded from cpu and from the device", f"{len(results)} result(s), state on {sorted(homes)}", ok
    )


def _moved(state: Any, place: torch.device) -> Any:
    if isinstance(state, torch.Tensor):
        return state.to(place)
    if isinstance(state, dict):
        return {key: _moved(value, place) for key, value in state.items()}
    return [_moved(value, place) for value in state] if isinstance(state, list) else state


class _Quantised(torch.autograd.Function):
    """x times a matrix that is kept as bytes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, scale: float) -> torch.Tensor:
        if weight.dtype is not torch.uint8 or weight.device != x.device:
            raise AssertionError(f"{weight.dtype} on {weight.device}")
        ctx.save_for_backward(weight)
        ctx.scale = scale
        return x @ ((weight.to(x.dtype) - 128) * scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ ((weight.to(grads[0].dtype) - 128) * ctx.scale).t(), None, None


class _QuantisedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        values = torch.randint(0, 256, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(1))
        self.packed = nn.Parameter(values.to(torch.uint8), requires_grad=False)
        self.packed.quant_state = {"scale": 1 / 512}  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = _Quantised.apply(self.first(x), self.packed, self.packed.quant_state["scale"])
        return self.last(hidden).square().mean()


def _frozen_bytes(run: Run) -> Finding:
    """S12: integers are not converted, attributes survive, bytes are exact."""
    torch.manual_seed(0)
    model = _QuantisedModel()
    wanted = model.packed.detach().clone()
    with prepared(model, config(run, "cpu", "cpu")) as (_, optimizer):
        for _step in range(3):
            model(torch.ones(4, WIDTH, device=optimizer.engine.device, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        got, state = model.state_dict()["packed"], getattr(model.packed, "quant_state", None)
    ok = got.dtype is torch.uint8 and torch.equal(got.cpu(), wanted) and state == {"scale": 1 / 512}
    return Finding("S12: frozen uint8 weights", "exact" if ok else f"{got.dtype}, {state}", ok)


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("cache", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.layer(x)) * self.cache.to(x.dtype)).square().mean()


def _buffers(run: Run) -> Finding:
    """S15: buffers are where the model computes, and change in training."""
    torch.manual_seed(0)
    with prepared(_Normalised(), config(run, "cpu", "cpu", bf16={"enabled": False})) as (model, optimizer):
        device = optimizer.engine.device
        for _step in range(3):
            model(torch.randn(8, WIDTH, device=device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        places = {buffer.device for buffer in model.buffers()}
        seen, mean = int(model.norm.num_batches_tracked), model.norm.running_mean.abs().sum().item()
    ok = places == {device} and seen == 3 and mean > 0
    return Finding("S15: buffers", f"on {', '.join(map(str, places))}, {seen} batches seen", ok)


def _gradient_bytes(run: Run) -> Finding:
    """P02: bf16 gradients cross in 2 bytes per parameter."""
    steps = 3
    with prepared(run.tiny(), config(run, "cpu", "cpu")) as (model, optimizer):
        train(model, optimizer, steps)
        moved = optimizer.engine.report().moved["d2h", "grad"]
        count = optimizer.engine.plan.inventory.trainable_parameters
    per_parameter = moved / steps / count
    return Finding(
        "P02: gradients to the host", f"{per_parameter:.2f} bytes per parameter", per_parameter == 2
    )


def _generation(run: Run) -> Finding:
    """P04: weights gathered once are not moved for each token."""
    import offload

    with prepared(run.tiny(), config(run, "cpu", "cpu")) as (model, optimizer), torch.no_grad():
        device, ledger = optimizer.engine.device, optimizer.engine.ledger

        def per_token() -> float:
            before, ids = ledger.link_bytes()["h2d"], torch.zeros(1, 2, dtype=torch.long, device=device)
            for _token in range(20):
                model(ids)
                ids = torch.cat([ids, ids[:, :1]], dim=1)
            return (ledger.link_bytes()["h2d"] - before) / 20

        streamed = per_token()
        before = torch.cuda.memory_allocated() if run.is_cuda else 0
        with offload.gather(model):
            gathered = per_token()
        after = torch.cuda.memory_allocated() if run.is_cuda else 0
        whole = optimizer.engine.plan.inventory.weight_bytes
    text = f"{gathered / 1e3:.1f} kB per token gathered, {streamed / 1e3:.1f} kB streamed of {whole / 1e3:.1f} kB"
    return Finding("P04: 20 tokens", text, gathered <= whole / 20 + 1 and after <= before)


# ---- what a process holds ----


def _status() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(lines.get(key, "0 kB").split()[0]) << 10 for key in ("VmLck", "VmPin", "VmRSS")}


def _held(run: Run) -> dict[str, int]:
    return {
        "device": torch.cuda.memory_allocated() if run.is_cuda else 0,
        "rss": _status()["VmRSS"],
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the library warns of, inside."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler, logger = Keep(logging.WARNING), logging.getLogger("offload")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
