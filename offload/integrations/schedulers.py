"""The schedules of the configuration's ``scheduler`` block, as torch schedulers.

Note [Learning rate of a step]
A schedule of DeepSpeed counts from -1: step 1 trains with the learning rate at count -1, which is set when
the schedule is built, and each applied step moves on by one. So with every warm-up steps 1 and 2 both train
at the lowest rate, and the target is reached in step ``warmup_num_steps + 2`` with the shape "linear" and one
step earlier with "log" (warm-ups of 0 and 1 step last 2).
Step 1 trains at

- WarmupLR, WarmupDecayLR: ``warmup_min_lr``
- WarmupCosineLR: 0, whatever ``warmup_min_ratio`` says; step 2 trains at that ratio
- OneCycle: ``cycle_min_lr``, and ``cycle_min_mom``; from step 2 on the momentum falls from ``cycle_max_mom``
- LRRangeTest: ``lr_range_test_min_lr``

That is kept, so that a configuration trains here as it does there. Five things are not as in DeepSpeed:

- A maximum that is not given is the optimizer's own learning rate, of each group its own, with every warm-up.
- The momentum cycle sets the first beta only; DeepSpeed also replaces the second one by 0.99. As there, it is for
  optimizers that have betas: of SGD the learning rate alone is cycled.
- ``last_batch_iteration`` starts at that count at once; in DeepSpeed the first step still trains at the
  optimizer's learning rate.
- A ``decay_mom_rate`` whose momentum reaches 1 is refused: what follows it is not Adam.
- ``state_dict()`` is torch's kind, with ``last_epoch`` (the count plus 1) and the last learning rates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..config import OffloadConfig, training
from ..errors import ConfigError


def build_scheduler(
    config: OffloadConfig, optimizer: torch.optim.Optimizer, *, total_steps: int | None
) -> LRScheduler | None:
    """The schedule that a configuration asks for; None where it asks for none.

    Building it sets the optimizer's learning rates to those of step 1. See Note [Learning rate of a step].

    Args:
        total_steps: steps of the run, for a schedule whose ``total_num_steps`` is not given.

    Raises:
        ConfigError: the schedule needs its length and nobody says it, or its momentum would reach 1.
    """
    check_schedule(config, total_steps=total_steps)
    if config.scheduler is None:
        return None
    params = config.scheduler.params
    if isinstance(params, training.WarmupLR):
        return WarmupLR(optimizer, params)
    if isinstance(params, training.WarmupDecayLR):
        return WarmupDecayLR(optimizer, params, _total(params.total_num_steps, total_steps))
    if isinstance(params, training.WarmupCosineLR):
        return WarmupCosineLR(optimizer, params, _total(params.total_num_steps, total_steps))
    if isinstance(params, training.OneCycle):
        return OneCycle(optimizer, params)
    return LRRangeTest(optimizer, params)


def check_schedule(config: OffloadConfig, *, total_steps: int | None) -> None:
    """Raises what :func:`build_scheduler` would raise, before there is an optimizer."""
    params = config.scheduler.params if config.scheduler is not None else None
    if isinstance(params, (training.WarmupDecayLR, training.WarmupCosineLR)):
        _total(params.total_num_steps, total_steps)
    if isinstance(params, training.OneCycle) and params.cycle_momentum:
        _check_momentum(params, total_steps)


def _total(given: int | None, total_steps: int | None) -> int:
    total = total_steps if given is None else given
    if total is None:
        raise ConfigError(
            "scheduler.params.total_num_steps: the schedule needs the number of steps of the run; write it"
        )
    return total


def _check_momentum(params: training.OneCycle, total_steps: int | None) -> None:
    """Refuses a momentum that grows to 1 within the run, or at some time where its length is not known."""
    growth = params.cycle_max_mom * params.decay_mom_rate
    if not params.decay_step_size or not growth:
        return
    cycle = params.cycle_first_step_size + (params.cycle_second_step_size or params.cycle_first_step_size)
    # momentum(n) = max * (1 + rate * n / decay_step_size), n = steps after the cycle
    steps = cycle + (1 - params.cycle_max_mom) / growth * params.decay_step_size
    if total_steps is None or steps <= total_steps:
        raise ConfigError(
            f"scheduler.params.decay_mom_rate: {params.decay_mom_rate:g} makes the momentum grow to 1 about"
            f" {steps:.0f} steps from the start, where Adam ends; write 0"
        )


class ConfiguredSchedule(LRScheduler):
    """A schedule in closed form: its learning rates depend on the count of steps and on nothing else."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        if last_batch_iteration != -1:  # torch wants to be told that these are the initial ones
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def iteration(self) -> int:
        """The count; -1 while step 1 trains."""
        return self.last_epoch - 1

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is; its settings are those of the configuration it was built from."""
        names = ("last_epoch", "base_lrs", "_step_count", "_last_lr")
        return {name: getattr(self, name) for name in names}


class WarmupLR(ConfiguredSchedule):
    """Rises from a minimum to a maximum and stays there."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: training.WarmupLR | training.WarmupDecayLR
    ) -> None:
        self.params = params
        super().__init__(optimizer, params.last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        low, high = self.params.warmup_min_lr, self.params.warmup_max_lr
        if self.iteration < 0:
            return [low for _ in self.base_lrs]
        factor = self._factor()
        maxima = [float(base) if high is None else high for base in self.base_lrs]
        return [low + (maximum - low) * factor for maximum in maxima]

    def _factor(self) -> float:
        return _rise(self.iteration, self.params.warmup_num_steps, self.params.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Rises from a minimum to a maximum, then falls in a straight line back to the minimum."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: training.WarmupDecayLR, total_steps: int
    ) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer, params)

    def _factor(self) -> float:
        warmup_steps = max(2, self.params.warmup_num_steps)
        if self.iteration < warmup_steps:
            return super()._factor()
        return max(0.0, (self.total_steps - self.iteration) / max(1.0, self.total_steps - warmup_steps))


class WarmupCosineLR(ConfiguredSchedule):
    """Rises to the optimizer's learning rate, then falls along half a cosine."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: training.WarmupCosineLR, total_steps: int
    ) -> None:
        self.params, self.total_steps = params, total_steps
        super().__init__(optimizer, params.last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        ratio = self._ratio()
        return [float(base) * ratio for base in self.base_lrs]

    def _ratio(self) -> float:
        params, iteration = self.params, self.iteration
        if iteration < 0:
            return 0.0
        warmup_steps = max(2, params.warmup_num_steps)
        if iteration < warmup_steps:
            rise = _rise(iteration, warmup_steps, params.warmup_type)
            return params.warmup_min_ratio + rise * (1.0 - params.warmup_min_ratio)
        progress = min(1.0, (iteration - warmup_steps + 1) / max(1, self.total_steps - warmup_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, params.cos_min_ratio + (1.0 - params.cos_min_ratio) * height)


class OneCycle(ConfiguredSchedule):
    """One rise and fall, the first beta against it, then a decay."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: training.OneCycle) -> None:
        self.params = params
        self._first = float(params.cycle_first_step_size)
        self._second = float(params.cycle_second_step_size or params.cycle_first_step_size)
        self._cycle = self._first + self._second
        super().__init__(optimizer, params.last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.params.cycle_momentum:
            momentum = self.get_momentum()
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])

    def get_lr(self) -> list[float | torch.Tensor]:
        low, high = self.params.cycle_min_lr, self.params.cycle_max_lr
        if self.iteration < 0:
            lr = low
        elif self.iteration < self._cycle:
            lr = low + (high - low) * self._height()
        else:
            lr = low / (1 + self.params.decay_lr_rate * self._decay_interval())
        return [lr for _ in self.base_lrs]

    def get_momentum(self) -> float:
        """The first beta of the step that trains next."""
        low, high = self.params.cycle_min_mom, self.params.cycle_max_mom
        if self.iteration < 0:
            return low
        if self.iteration < self._cycle:
            return high - (high - low) * self._height()
        return high * (1 + self.params.decay_mom_rate * self._decay_interval())

    def _height(self) -> float:
        """Where the cycle is, between 0 (its ends) and 1 (its peak)."""
        params, done = self.params, self.iteration + 1
        share = self._first / self._cycle
        x = 1.0 + done / self._cycle - math.floor(1 + done / self._cycle)
        rising = x <= share
        stairs = params.cycle_first_stair_count
        if not rising and params.cycle_second_stair_count is not None:
            stairs = params.cycle_second_stair_count
        if not stairs:
            return x / share if rising else (x - 1) / (share - 1)
        # Of whole steps, not of x: just below a stair, a rounding error would cost a whole one.
        in_cycle = done % self._cycle
        if in_cycle <= self._first:
            return math.floor(in_cycle * stairs / self._first) / stairs
        return math.floor((self._cycle - in_cycle) * stairs / self._second) / stairs

    def _decay_interval(self) -> float:
        if not self.params.decay_step_size:
            return 0.0
        return (self.iteration - self._cycle + 1) / self.params.decay_step_size


class LRRangeTest(ConfiguredSchedule):
    """Rises without end, in a straight line or in stairs."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: training.LRRangeTest) -> None:
        self.params = params
        super().__init__(optimizer, params.last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        params = self.params
        interval = (self.iteration + 1) / params.lr_range_test_step_size
        if params.lr_range_test_staircase:
            interval = math.floor(interval)
        lr = params.lr_range_test_min_lr * (1 + params.lr_range_test_step_rate * interval)
        return [lr for _ in self.base_lrs]


def _rise(iteration: int, steps: int, shape: str) -> float:
    """From 0 at count 0 to 1 at count ``steps``, or just before it with the shape "log"."""
    steps = max(2, steps)
    if iteration >= steps:
        return 1.0
    if shape == "log":
        return 1.0 / math.log(steps) * math.log(iteration + 1)
    return iteration / steps
