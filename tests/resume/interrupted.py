"""Runs that are broken off and gone on with, and the uninterrupted run in memory that they are compared with."""

from __future__ import annotations

import contextlib
import functools
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import Outcome, Placement, Training

import offload
from offload import lifetime

GIB = 1 << 30


def settings(training: Training, placement: Placement, swap: Any, **changes: Any) -> dict[str, Any]:
    """With two generations, whatever is at home where."""
    config = training.config(placement, swap)
    return {**config, "durability": {"verify": placement.verify, "generations": 2}, **changes}


@dataclass
class Run:
    """One process's part of a run: a model in training with its schedule, at the place in its batches."""

    training: Training
    model: Any
    optimizer: Any
    scheduler: Any
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def engine(self) -> Any:
        return self.optimizer.engine

    @property
    def place(self) -> int:
        """Micro-batches that are behind us, over all processes."""
        done = self.engine.global_steps * self.training.accumulation
        return done + any(param.grad is not None for param in self.model.parameters())

    def train(self, micro_batches: int) -> None:
        """Goes on where the run is."""
        batches, first = self.training.batches(), self.place
        for place in range(first, first + micro_batches):
            loss = self.model(batches[place]) / self.training.accumulation
            loss.backward()
            self.outcome.losses.append(loss.item())
            if (place + 1) % self.training.accumulation == 0:
                self.optimizer.step()
                self.outcome.norms.append(self.engine.grad_norm)
                self.optimizer.zero_grad()
                self.scheduler.step()

    def state(self) -> Outcome:
        """Masters and moments now, with the losses and norms until here."""
        for stored, state in offload.optimizer_state(self.engine):
            master = state.get("master")
            self.outcome.masters[stored.name] = (
                offload.read_master(self.engine, stored) if master is None else master
            )
            self.outcome.moments[stored.name] = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
        return self.outcome


def start(
    training: Training,
    placement: Placement,
    swap: Any,
    *,
    seed: int | None = None,
    resume: Any = False,
    **more: Any,
) -> Run:
    """A run at its begin, or gone on with from a commit, by a model with other values."""
    changes = more.pop("changes", {})
    model = training.model()
    if resume:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
    groups = training.param_groups(dict(model.named_parameters()))
    model, optimizer = offload.prepare(
        model, settings(training, placement, swap, **changes), groups, resume=resume, **more
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    optimizer.engine.attach(scheduler=scheduler)
    return Run(training, model, optimizer, scheduler)


@contextlib.contextmanager
def running(*args: Any, **more: Any) -> Any:
    """A run that is closed at the end."""
    run = start(*args, **more)
    with contextlib.closing(run.engine):
        yield run


@functools.cache
def uninterrupted(training: Training, micro_batches: int) -> Outcome:
    """Everything in memory, no store."""
    model = training.model()
    groups = training.param_groups(dict(model.named_parameters()))
    config = training.config(Placement("none", "none"), "/nowhere")
    model, optimizer = offload.prepare(model, config, groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    with contextlib.closing(optimizer.engine):
        run = Run(training, model, optimizer, scheduler)
        run.train(micro_batches)
        return run.state()


def after(training: Training, first: int, last: int) -> Outcome:
    """What an uninterrupted run leaves after micro-batch ``last``, with the losses and norms from ``first`` on."""
    whole = uninterrupted(training, last)
    steps = first // training.accumulation
    return Outcome(whole.losses[first:], whole.norms[steps:], whole.masters, whole.moments)


def remove(swap: Path) -> None:
    """As the user would do it."""
    for directory in swap.iterdir():
        shutil.rmtree(directory)


def die(engine):
    """As a process that is killed: everything is closed, nothing is removed."""
    for drive in engine._store._drives:
        drive.queue.close()
        drive.directory.release()
    lifetime.forget(engine)
