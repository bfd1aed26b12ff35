"""What `copy`, `pickle` and `torch.save` give for a prepared model: true values, and no engine in them.

Note [Copies]
A parameter gives its true value, wherever it is. A module gives an ordinary one, without our hooks, where its
weights are in host memory; where they are on nvme the copy would be the whole model in memory, and code that
copies a model (averaged weights) then goes on reading parameters that are absent: it is refused. Both are
said by attributes of the instances, because their types must stay what they are; `copy` and `pickle` look there.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from torch import nn

from .access import read_weight
from .engine import OffloadEngine
from .errors import OffloadError
from .partition import StoredParam
from .watched import own_attributes

_OF_PARAM = ("__reduce_ex__", "__deepcopy__")


class CopyHooks:
    """Ties copying and pickling to the engine until :meth:`remove`. See Note [Copies]."""

    def __init__(self, model: nn.Module, engine: OffloadEngine, hook_ids: set[int]) -> None:
        """
        Args:
            hook_ids: of the hooks that the engine has registered on the model's modules.
        """
        self._engine, self._hook_ids = engine, hook_ids
        self._modules = list(model.modules())
        for stored in engine.partition.of_param.values():
            how = functools.partial(self._reduce, stored), functools.partial(self._deepcopy, stored)
            stored.param.__dict__.update(zip(_OF_PARAM, how, strict=True))
        for module in self._modules:
            module.__dict__["__getstate__"] = functools.partial(self._state_of, module)

    def remove(self) -> None:
        """Copies are torch's own again. Idempotent."""
        for stored in self._engine.partition.of_param.values():
            for name in _OF_PARAM:
                stored.param.__dict__.pop(name, None)
        for module in self._modules:
            module.__dict__.pop("__getstate__", None)
        self._modules.clear()

    def _ordinary(self, stored: StoredParam) -> nn.Parameter:
        gathered = stored.gathered is not None
        value = stored.param.detach().clone() if gathered else read_weight(self._engine, stored)
        return nn.Parameter(value, stored.param.requires_grad)

    def _reduce(self, stored: StoredParam, protocol: Any) -> Any:
        ordinary = self._ordinary(stored)
        own = {key: value for key, value in own_attributes(stored.param).items() if key not in _OF_PARAM}
        ordinary.__dict__.update(own)
        return ordinary.__reduce_ex__(protocol)

    def _deepcopy(self, stored: StoredParam, memo: dict[int, Any]) -> nn.Parameter:
        ordinary: nn.Parameter = memo.setdefault(id(stored.param), self._ordinary(stored))
        return ordinary

    def _state_of(self, module: nn.Module) -> Any:
        if self._engine.weights.streamed:
            raise OffloadError(
                "a model whose weights are on nvme cannot be copied or pickled while its engine is open; take"
                " model.state_dict(), or copy it before offload.prepare"
            )
        get_state = getattr(type(module), "__getstate__", None)  # every type has one from Python 3.11 on
        state = module.__dict__ if get_state is None else get_state(module)
        if not isinstance(state, dict):
            return state
        ordinary = {}
        for name, value in state.items():
            if _is_ours(value):
                continue
            if isinstance(value, OrderedDict):
                value = OrderedDict((key, hook) for key, hook in value.items() if key not in self._hook_ids)
            ordinary[name] = value
        return ordinary


def _is_ours(value: object) -> bool:
    """Whether an attribute is a call that the engine has put into a module."""
    where = getattr(value.func, "__module__", "") if isinstance(value, functools.partial) else ""
    return where.split(".")[0] == __name__.split(".")[0]
