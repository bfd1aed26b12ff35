"""Refuses what would give a prepared model other tensors: `half()`, `to()`, `cuda()` and their like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .engine import OffloadEngine
from .errors import OffloadError


class CastGuard:
    """Lets through what leaves the engine's weights as they are, such as `to` where they are, until :meth:`remove`.

    torch sends all of these through ``Module._apply``, with what is to be done to each tensor. It is tried on a few
    bytes of the same kind first, so that nothing has changed where it is refused.
    """

    def __init__(self, model: nn.Module, engine: OffloadEngine) -> None:
        self._engine, self._modules = engine, list(model.modules())
        for module in self._modules:
            module.__dict__["_apply"] = functools.partial(self._apply, module)

    def remove(self) -> None:
        """Modules are moved and cast by torch alone again. Idempotent."""
        for module in self._modules:
            module.__dict__.pop("_apply", None)
        self._modules.clear()

    def _apply(self, module: nn.Module, change: Callable[[torch.Tensor], Any], recurse: bool = True) -> Any:
        tried: set[tuple[torch.dtype, int]] = set()
        for name, param in module.named_parameters(recurse=recurse):
            stored = self._engine.partition.of_param.get(param)
            kind = param.dtype, param.ndim
            if stored is None or stored.gathered is not None or kind in tried:
                continue
            tried.add(kind)
            sample = torch.zeros((2,) * param.ndim, dtype=param.dtype, device=param.device)
            before = sample.data_ptr()
            with torch.no_grad():
                changed = change(sample)
            if changed.is_meta or changed.dtype is not param.dtype or changed.data_ptr() != before:
                raise OffloadError(
                    f"{name} is {param.dtype} on {param.device} where the engine keeps it, which half(), to(), cuda()"
                    " and their like do not change after offload.prepare; choose precision and accelerator in the"
                    " configuration, or cast the model before"
                )
        return type(module)._apply(module, change, recurse)
