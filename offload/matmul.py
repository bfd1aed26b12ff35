"""bf16 linear layers on CPUs without bf16 matrix instructions: computed in fp32, piece by piece.

Note [bf16 without bf16 units]
Where neither AVX-512 BF16 nor AMX is there, torch multiplies bf16 matrices element by element: the backward of
a Linear then runs at less than one GFLOP/s, a hundred times slower than fp32 on the same cores. Weights and
gradients stay bf16 here, and only the product is computed in fp32: each piece of the weight is widened just
before its use, small enough to stay in the cache, so no fp32 copy of a layer ever exists. Sums are fp32 and
rounded to bf16 once, as matrix units do it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .plan import PIECE_ELEMENTS

logger = logging.getLogger("offload")


@functools.cache
def bf16_is_native() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _WideLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` in bf16 with fp32 products. See Note [bf16 without bf16 units]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:  # (..., I), (O, I), (O) -> (..., O)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        x_NI = x.reshape(-1, x.shape[-1]).float()
        y_NO = torch.empty(x_NI.shape[0], weight.shape[0], dtype=x.dtype)
        for rows in _pieces(weight):
            y = x_NI @ weight[rows].float().t()
            y_NO[:, rows] = y if bias is None else y.add_(bias[rows].float())
        return y_NO.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO = grads[0].reshape(-1, weight.shape[0])
        x_NI = x.reshape(-1, x.shape[-1]).float() if needs_weight else None
        grad_x = torch.zeros(grad_NO.shape[0], weight.shape[1]) if needs_x else None
        grad_weight = (
            torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        )
        for rows in _pieces(weight):
            grad = grad_NO[:, rows].float()
            if grad_x is not None:
                grad_x.addmm_(grad, weight[rows].float())
            if grad_weight is not None and x_NI is not None:
                grad_weight[rows] = grad.t() @ x_NI
        return (
            None if grad_x is None else grad_x.to(x.dtype).reshape(x.shape),
            grad_weight,
            grad_NO.float().sum(0).to(weight.dtype) if needs_bias and ctx.has_bias else None,
        )


def _pieces(weight: torch.Tensor) -> Iterator[slice]:
    rows = max(PIECE_ELEMENTS // max(weight.shape[1], 1), 1)
    for begin in range(0, weight.shape[0], rows):
        yield slice(begin, min(begin + rows, weight.shape[0]))


def wide_forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)``, as above where weight and input are bf16."""
    if (
        x.dtype is not torch.bfloat16
        or module.weight.dtype is not torch.bfloat16
        or torch.is_autocast_enabled("cpu")
    ):
        return nn.functional.linear(x, module.weight, module.bias)
    result: torch.Tensor = _WideLinear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return result


class WideLinears:
    """The linear layers of a model, computing as above until :meth:`remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._changed: list[nn.Module] = []
        for module in model.modules():
            own = "forward" in module.__dict__
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not own:
                module.forward = functools.partial(wide_forward, module)  # type: ignore[method-assign]
                self._changed.append(module)
        if self._changed:
            logger.info(
                "this CPU has no bf16 matrix instructions: %d linear layers multiply in fp32",
                len(self._changed),
            )

    def remove(self) -> None:
        """Makes the layers compute as torch does. Idempotent."""
        for module in self._changed:
            module.__dict__.pop("forward", None)
        self._changed.clear()
