"""Lion as an oracle: no release of torch has it."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The program of Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", in plain torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in (p for p in group["params"] if p.grad is not None):
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = moment * beta1 + param.grad * (1 - beta1)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update.sign_(), alpha=-group["lr"])
                moment.mul_(beta2).add_(param.grad, alpha=1 - beta2)
