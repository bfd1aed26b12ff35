"""Lion, Adagrad and SGD over the planes of a chunk: the optimizers with at most one moment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..config.training import Rule
from ..errors import ConfigError
from ..placement import MOMENTS, StateFormat, WeightFormat
from . import kernels, rule_kernels
from .adam import Adam
from .segments import AdagradSegment, LionSegment, SgdSegment, Span
from .shard import MasterPlanes, ShardOptimizer

__all__ = ["SGD", "Adagrad", "Lion", "make_optimizer"]


class _OneMoment(MasterPlanes):
    """On the CPU: one fused pass of the C++ kernel, arithmetic in fp32.

    A moment in "bf16" is rounded stochastically by ``seed``, step and element, as Adam's are; nothing else is ever
    rounded.
    """

    rule: ClassVar[Rule]
    state_formats = ("fp32", "bf16")

    def __init__(
        self,
        *,
        weight_format: WeightFormat = "bf16",
        state_format: StateFormat = "fp32",
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(weight_format=weight_format, state_format=state_format)
        self.threads = threads
        self.seed = seed

    @property
    def moments(self) -> tuple[str, ...]:
        return MOMENTS[self.rule]

    def _split_master(self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        kernels.split_master(master, weight, residual, threads=self.threads)

    def update(
        self,
        planes: Mapping[str, torch.Tensor],
        segments: Sequence[Any],
        grad: torch.Tensor,
        grad_scale: float = 1.0,
    ) -> None:
        self._run(
            planes["weight"],
            planes["residual"] if self.weight_dtype == torch.bfloat16 else None,
            planes[self.moments[0]] if self.moments else None,
            grad,
            segments,
            grad_scale=grad_scale,
            seed=self.seed,
            threads=self.threads,
        )

    @abstractmethod
    def _run(self, *planes: Any, **options: Any) -> None:
        """The kernel of the rule."""


class Lion(_OneMoment):
    """Lion, whose decay is decoupled (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

    rule = "lion"

    def _run(self, *planes: Any, **options: Any) -> None:
        rule_kernels.lion_segments(*planes, **options)

    def segment(self, span: Span, group: Mapping[str, Any]) -> LionSegment:
        beta1, beta2 = group["betas"]
        return LionSegment(
            span.begin,
            span.end,
            span.step,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            element=span.element,
        )


class Adagrad(_OneMoment):
    """Adagrad with the bits of ``torch.optim.Adagrad(fused=True)``; the decay is added to the gradient."""

    rule = "adagrad"

    def _run(self, *planes: Any, **options: Any) -> None:
        rule_kernels.adagrad_segments(*planes, **options)

    def segment(self, span: Span, group: Mapping[str, Any]) -> AdagradSegment:
        return AdagradSegment(
            span.begin,
            span.end,
            span.step,
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            initial_accumulator_value=float(group["initial_accumulator_value"]),
            element=span.element,
        )

    def first_moments(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}


class SGD(_OneMoment):
    """SGD with the bits of ``torch.optim.SGD``; the decay is added to the gradient.

    ``has_momentum`` says whether there is a plane for it. With it, groups without momentum leave theirs alone.
    """

    saves_step = False

    def __init__(
        self,
        *,
        weight_format: WeightFormat = "bf16",
        state_format: StateFormat = "fp32",
        has_momentum: bool = True,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(weight_format=weight_format, state_format=state_format, threads=threads, seed=seed)
        self.has_momentum = has_momentum

    @property
    def moments(self) -> tuple[str, ...]:
        return MOMENTS["momentum" if self.has_momentum else "sgd"]

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def _run(self, *planes: Any, **options: Any) -> None:
        rule_kernels.sgd_segments(*planes, **options)

    def segment(self, span: Span, group: Mapping[str, Any]) -> SgdSegment:
        if group["momentum"] and not self.has_momentum:
            raise ConfigError(
                f"momentum {group['momentum']} needs a plane of state, and no group had momentum when the model was"
                " prepared; give it from the start"
            )
        return SgdSegment(
            span.begin,
            span.end,
            span.step,
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            element=span.element,
        )


def make_optimizer(
    rule: Rule,
    *,
    weight_format: WeightFormat,
    state_format: StateFormat,
    decoupled: bool = True,
    seed: int = 0,
) -> ShardOptimizer:
    """The optimizer of a rule, on the CPU.

    Args:
        decoupled: of "adam": the decay is AdamW's.
    """
    formats: dict[str, Any] = {"weight_format": weight_format, "state_format": state_format, "seed": seed}
    if rule == "adam":
        return Adam(**formats, adamw_mode=decoupled)
    if rule == "lion":
        return Lion(**formats)
    if rule == "adagrad":
        return Adagrad(**formats)
    return SGD(**formats, has_momentum=rule == "momentum")
