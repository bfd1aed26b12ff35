"""The same results wherever things are, and however late the copies come."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .common import Finding, Run, Shaken, Waiting, accelerators, config, digest, prepared, train
from .common import batch as tokens

HOMES = ("none", "cpu", "nvme")
UPDATES = ("step", "backward")
LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2}
"""Of our losses against plain PyTorch's, relative: other orders of additions, and bf16 rounding, in 20 steps."""


def kernels(run: Run) -> Iterator[Finding]:
    """Whether Adam on the device computes the bits of the C++ kernel."""
    from offload.optim.device_check import check_torch, check_triton, choose_adam_segments

    device = torch.device("cuda", torch.cuda.current_device()) if run.is_cuda else torch.device("cpu")
    differ = check_torch(device)
    yield Finding("torch operations", _first(differ), not differ, {"differences": differ})
    if run.is_cuda:
        begin = time.perf_counter()
        differ = check_triton(device)
        seconds = time.perf_counter() - begin
        yield Finding(
            "Triton kernel", f"{_first(differ)}; {seconds:.1f} s", not differ, {"differences": differ}
        )
    chosen = choose_adam_segments(device).__module__.rpartition(".")[2]
    yield Finding("used in updates", chosen)


def parity(run: Run) -> Iterator[Finding]:
    """Every placement and update mode against everything on the device, bit for bit; and plain PyTorch."""
    steps = 2 if run.smoke else 20
    for precision in ("bf16",) if run.smoke else ("bf16", "fp32"):
        plain = _plain_losses(run, steps)
        reference: tuple[str, list[float]] | None = None
        for update, param, state in itertools.product(UPDATES, HOMES, HOMES):
            name = f"{precision} {update}: parameters {param}, state {state}"
            settings = config(run, param, state, update, bf16={"enabled": precision == "bf16"})
            try:
                with prepared(run.tiny(), settings) as (model, optimizer):
                    losses = train(model, optimizer, steps)
                    report = optimizer.engine.report()
                    moved = report.moved == report.predicted  # now: to read the state moves it
                    bits = digest(model, optimizer)
            except Exception as error:
                yield Finding(name, f"{type(error).__name__}: {error}", ok=False)
                continue
            if reference is None:
                reference = bits, losses
                worst = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
                yield Finding(
                    f"{precision}: losses of {steps} steps against plain PyTorch in fp32",
                    f"{worst:.1e} relative, {LOSS_TOLERANCE[precision]:.0e} allowed",
                    worst <= LOSS_TOLERANCE[precision],
                    {"losses": losses, "plain": plain},
                )
            same = bits == reference[0] and losses == reference[1]
            yield Finding(
                name,
                f"{'same bits' if same else f'{bits} is not {reference[0]}'};"
                f" bytes {'as planned' if moved else 'differ from the plan'}",
                same and moved,
            )


def overlap(run: Run) -> Iterator[Finding]:
    """Bits with copies overlapping, one at a time, and late: case N14 with a small model and a wide MLP."""
    repeats, steps = (1, 2) if run.smoke else (5, 20)
    for param, state, update in (
        ("cpu", "cpu", "step"),
        ("cpu", "cpu", "backward"),
        ("nvme", "nvme", "step"),
    ):
        settings = config(run, param, state, update)
        yield _compare(
            f"small decoder, {param} and {state}, {update}",
            lambda s=settings: _tiny_run(run, s, steps),
            repeats,
        )
    width, steps = (64, 3) if run.smoke else (4096, 50)
    run.need(5 if run.smoke else 30, "the wide MLP")
    settings = config(run, "cpu", "cpu")
    yield _compare(
        f"N14: MLP of {4 * width * (width + 1) / 1e6:.0f} M", lambda: _wide(width, steps, settings), repeats
    )


def _compare(name: str, one_run: Callable[[], str], repeats: int) -> Finding:
    bits = {"overlap on": [one_run() for _ in range(repeats)]}
    for how, change in (("overlap off", Waiting), ("late copies", Shaken)):
        with accelerators(change):
            bits[how] = [one_run() for _ in range(repeats if how == "overlap off" else min(repeats, 2))]
    different = {digest_ for each in bits.values() for digest_ in each}
    count = sum(map(len, bits.values()))
    return Finding(
        f"{name}, {count} runs", f"{len(different)} result(s)", len(different) == 1, {"bits": bits}
    )


def _tiny_run(run: Run, settings: dict[str, Any], steps: int) -> str:
    with prepared(run.tiny(), settings) as (model, optimizer):
        losses = train(model, optimizer, steps)
        return f"{digest(model, optimizer)} {losses[-1]!r}"


def _wide(width: int, steps: int, settings: dict[str, Any]) -> str:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    with prepared(nn.Sequential(*layers), settings) as (model, optimizer):
        for step in range(steps):
            x = torch.randn(32, width, generator=torch.Generator().manual_seed(step))
            loss = model(x.to(optimizer.engine.device, torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model, optimizer)


def _plain_losses(run: Run, steps: int) -> list[float]:
    device = torch.device("cuda" if run.is_cuda else "cpu")
    model = run.tiny().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        loss = model(tokens(step).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _first(differ: list[str]) -> str:
    return f"{differ[0]}; {len(differ)} differences" if differ else "the bits of the C++ kernel"
