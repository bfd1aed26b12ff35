"""What peft's own calls need of a model whose weights are elsewhere: merging layer by layer, saving adapters alone.

Note [Adapters]
`merge_adapter`, `merge_and_unload` and `unmerge_adapter` write to the frozen base, one layer after the other, in
place or by assigning: each layer is gathered for it, and what has changed goes home. `save_pretrained` of a PeftModel
asks for the state of the whole model and takes a small part of it: it is asked first with tensors without values
which part that is, so that the base is not read into memory to save an adapter.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .access import gathered, read_weight
from .engine import OffloadEngine
from .models.pretrained import persistent_buffers

_MERGING = ("merge", "unmerge")


class AdapterHooks:
    """Gives modules of peft what they need until :meth:`remove`. See Note [Adapters]."""

    def __init__(self, model: nn.Module, engine: OffloadEngine) -> None:
        self._engine = engine
        self._given: list[tuple[nn.Module, str]] = []
        peft: Any = sys.modules.get("peft")  # who has not imported it has no module of it
        if peft is None:
            return
        for module in model.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                for name in _MERGING:
                    self._give(module, name, self._merge)
            elif isinstance(module, peft.PeftModel) and engine.weights.streamed:
                self._give(module, "save_pretrained", self._save)

    def remove(self) -> None:
        """The modules are peft's alone again. Idempotent."""
        for module, name in self._given:
            module.__dict__.pop(name, None)
        self._given.clear()

    def _give(self, module: nn.Module, name: str, call: Any) -> None:
        module.__dict__[name] = functools.partial(call, module, getattr(type(module), name))
        self._given.append((module, name))

    def _merge(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        base = set(layer.get_base_layer().parameters())
        with ExitStack() as stack:
            for params, modify in ((base, True), (set(layer.parameters()) - base, False)):
                of_param = self._engine.partition.of_param
                own = [p for p in params if p in of_param and of_param[p].gathered is None]
                stack.enter_context(gathered(self._engine, own, modify=modify))
            return call(layer, *args, **kwargs)

    def _save(self, model: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = self._state_for(model, kwargs)
        return call(model, *args, **kwargs)

    def _state_for(self, model: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """The model's state, with values where peft will look; None where that cannot be known."""
        params = dict(model.named_parameters(remove_duplicate=False))
        state = {name: param.detach().to("meta") for name, param in params.items()}
        state.update(persistent_buffers(model))
        name_of = {id(tensor): name for name, tensor in state.items()}
        save_embeddings = kwargs.get("save_embedding_layers", "auto")
        for adapter in kwargs.get("selected_adapters") or model.peft_config:
            taken = sys.modules["peft"].get_peft_model_state_dict(
                model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=save_embeddings
            )
            for tensor in taken.values():
                if id(tensor) not in name_of:
                    return None  # peft computes with values; it gets the state of the whole model
                name = name_of[id(tensor)]
                if name in params:
                    state[name] = self._value(params[name])
                    name_of[id(state[name])] = name
        return state

    def _value(self, param: nn.Parameter) -> torch.Tensor:
        stored = self._engine.partition.of_param.get(param)
        return (
            param.detach()
            if stored is None or stored.gathered is not None
            else read_weight(self._engine, stored)
        )
