"""The oracle's optimizer: torch's fused AdamW over fp32 masters, with the rules of a step that the engine has.

Three things are ours, so that all bits can be compared. Masters fill whole vectors: torch's fused kernel computes the
rest of an array, element by element, with other roundings. A bf16 weight halfway between two values is rounded up. And
the coefficient of clipping comes from a norm in fp64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from fused_adam import FUSED_ADAM_IS_OURS
from models import half_up
from torch import nn

import offload

VECTOR = 16


class PlainAdamW(torch.optim.Optimizer):
    """AdamW for a model in memory. A step with a gradient that is not finite is refused as a whole."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, clip: float = 0.0) -> None:
        super().__init__(groups, defaults)
        self.clip, self.norms, self.skipped = clip, [], 0
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in self.param_groups:
            for param in group["params"]:
                whole = torch.zeros(-(-param.numel() // VECTOR) * VECTOR)
                whole[: param.numel()] = param.detach().float().reshape(-1)
                self.masters[param] = nn.Parameter(whole)
        inner = [{**g, "params": [self.masters[p] for p in g["params"]]} for g in self.param_groups]
        if FUSED_ADAM_IS_OURS:
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(inner, **defaults, fused=True)
        else:
            self.inner = offload.CPUAdam(inner, **defaults)  # what is compared is the loop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        norm = self.norm(grads)
        if not math.isfinite(norm):
            self.skipped += 1
            return loss
        self.norms.append(norm)
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for param, grad in grads.items():
            whole = torch.zeros_like(self.masters[param])
            whole[: param.numel()] = grad.float().reshape(-1)
            self.masters[param].grad = whole.mul_(scale) if scale != 1.0 else whole
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: own[key] for key in ("lr", "betas", "eps", "weight_decay")})
        self.inner.step()
        self.inner.zero_grad()
        for param in grads:
            self._show(param)
        return loss

    @staticmethod
    def norm(grads: dict[nn.Parameter, torch.Tensor]) -> float:
        return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads.values()))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        grads = {p: p.grad for p in self.masters if p.grad is not None}
        norm = self.norm(grads)
        if math.isfinite(norm) and norm > max_norm:
            for grad in grads.values():
                grad.mul_(max_norm / (norm + 1e-6))
        return torch.tensor(norm)

    @torch.no_grad()
    def round_weights(self) -> None:
        """bf16 weights are the rounded masters, from the start."""
        for param in self.masters:
            self._show(param)

    @torch.no_grad()
    def adopt(self, *, exact: bool) -> None:
        """The weights have been written to: they are the masters now, or only where they have changed."""
        for param, master in self.masters.items():
            value, own = param.detach().float().reshape(-1), master[: param.numel()]
            changed = value != half_up(own).float() if param.dtype is torch.bfloat16 else value != own
            own.copy_(value if exact else torch.where(changed, value, own))

    def values(self, param: nn.Parameter) -> list[torch.Tensor]:
        """Master, moments, and the count of steps."""
        state = self.inner.state.get(self.masters[param], {})
        pieces = [self.masters[param], *(state.get(name) for name in ("exp_avg", "exp_avg_sq"))]
        shaped = [torch.zeros(param.shape) if p is None else self._shaped(param, p) for p in pieces]
        return [*shaped, torch.tensor(float(state.get("step", 0)))]

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach().clone() for master in self.masters.values()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"masters": masters, "inner": copy.deepcopy(self.inner.state_dict()), "groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for master, value in zip(self.masters.values(), state_dict["masters"], strict=True):
            master.copy_(value)
        self.inner.load_state_dict(copy.deepcopy(state_dict["inner"]))
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        self.round_weights()

    def _show(self, param: nn.Parameter) -> None:
        value = self._shaped(param, self.masters[param])
        param.copy_(half_up(value) if param.dtype is torch.bfloat16 else value)  # which autograd sees

    def _shaped(self, param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach()[: param.numel()].reshape(param.shape).clone()
