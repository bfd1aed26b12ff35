"""Trains any model twice, with the engine and in plain PyTorch, by the same loop over the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import Outcome, Placement, Training, half_up
from tight import tight
from torch import nn

import offload
from offload.matmul import WideLinears, bf16_is_native

Loss = Callable[[nn.Module, Any], torch.Tensor]
Look = Callable[[nn.Module], None]
"""Called with the model after each step: what users do between steps."""


def nothing(_model: nn.Module) -> None:
    return None


def train_plain(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    *,
    precision: str = "fp32",
    lr: float = 1e-3,
    look: Look = nothing,
) -> Outcome:
    """The oracle: torch's AdamW over fp32 masters.

    In bf16 the model is cast, and two things are ours, so that losses can be compared closely: the linear
    layers' products, and what a weight halfway between two bf16 values becomes. Pretrained weights that were
    fp16 once are halfway more often than by chance.
    """
    outcome = Outcome()
    masters = dict(model.named_parameters())
    if precision == "bf16":
        masters = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in masters.items()}
        model.to(torch.bfloat16)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(half_up(masters[name]))
        if not bf16_is_native():
            WideLinears(model)
    trained = {name: param for name, param in masters.items() if param.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=0.01, fused=True)
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        outcome.losses.append(loss.item())
        if precision == "bf16":
            for name, param in model.named_parameters():
                if param.grad is not None:
                    masters[name].grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if precision == "bf16":
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(half_up(masters[name]))
        look(model)
    outcome.masters = {name: param.detach().clone() for name, param in trained.items()}
    return outcome


def engine_config(
    placement: Placement, swap_path: Path, *, precision: str = "fp32", lr: float = 1e-3
) -> dict[str, Any]:
    config = Training(precision=precision).config(placement, swap_path)
    config["optimizer"]["params"]["lr"] = lr
    return config


def train_offloaded(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    placement: Placement,
    swap_path: Path,
    *,
    precision: str = "fp32",
    lr: float = 1e-3,
    look: Look = nothing,
    is_tight: bool = False,
) -> Outcome:
    """The same with the engine, and with what must hold whatever the model: one step is one step.

    Args:
        is_tight: in the least memory, so that most weights are absent at any time.
    """
    outcome = Outcome()
    config = engine_config(placement, swap_path, precision=precision, lr=lr)
    config = tight(model, config) if is_tight else config
    model, optimizer = offload.prepare(model, config)
    engine = optimizer.engine
    with contextlib.closing(engine):
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            outcome.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            look(model)
        ledger = engine.report()
        assert ledger.steps == len(outcome.losses)
        assert ledger.skipped_steps == 0
        for stored, state in offload.optimizer_state(engine):
            master = state.get("master")
            outcome.masters[stored.name] = offload.read_master(engine, stored) if master is None else master
            outcome.moments[stored.name] = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    return outcome


def assert_equal_to_plain(
    outcome: Outcome, plain: Outcome, *, without_gradient: tuple[str, ...] = (), atol: float = 1e-7
) -> None:
    """fp32: losses and weights to rtol 1e-5.

    Args:
        without_gradient: ends of the names of parameters whose true gradient is zero: what they get is
            rounding, which Adam blows up to full steps in a random direction.
    """
    torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-5, atol=0)
    assert outcome.masters.keys() == plain.masters.keys()
    for name, value in plain.masters.items():
        if not name.endswith(without_gradient or ("\0",)):
            torch.testing.assert_close(
                outcome.masters[name], value, rtol=1e-5, atol=atol, msg=partial("{}: {}".format, name)
            )
