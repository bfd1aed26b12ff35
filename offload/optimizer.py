"""The engine's optimizer as torch, LR schedulers and trainers know optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .checkpoint import LateStates, ParamState, check_optimizer_state, load_optimizer_state, state_names
from .errors import CheckpointError, ConfigError, OffloadError
from .partition import StoredParam
from .saving import SavedEngine


class OffloadOptimizer(torch.optim.Optimizer):
    """Adam, AdamW, Lion, Adagrad or SGD over planes that may lie anywhere.

    ``param_groups`` are the real ones, with torch's keys: learning rates, betas, momentum, weight decay and so on may
    be changed at any time and count from the next update. ``optimizer.engine`` is the engine.
    """

    engine: SavedEngine

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self._bound = False
        super().__init__(list(groups), defaults)
        for index, group in enumerate(self.param_groups):
            check_group(f"parameter group {index}", group)

    def bind(self, engine: SavedEngine) -> None:
        """Gives the optimizer its engine; from now on the set of parameters is fixed."""
        self.engine = engine
        self._late = LateStates(engine)
        self._bound = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the gradients to every parameter that has one.

        A step with a gradient that is not finite is refused as a whole: nothing changes, and
        ``optimizer.engine.ledger.skipped_steps`` counts it.

        Args:
            closure: evaluates the model and returns the loss; called once, before the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.step()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over all parameters of this optimizer. Returns the norm before."""
        return torch.tensor(self.engine.clip_grad_norm(float(max_norm)))

    def state_dict(self) -> dict[str, Any]:
        """The state at this moment, laid out as torch's optimizer of the same name does: ``state[index]`` by
        position in the groups.

        Moments are fp32 whatever format they are kept in; where that is another, ``state_format`` says which. Of
        bf16 weights it also has ``master``, the exact value that is trained, and of 8-bit moments ``scale``. The
        state of a parameter is in memory from when it is looked at, or from the next change on if what was given
        is still held: of a model whose state does not fit, go through ``offload.optimizer_state(engine)`` instead.
        """
        packed = super().state_dict()
        state_format = self.engine.plan.placement.state_format
        if state_format != "fp32":
            packed["state_format"] = state_format
        self.engine.settle_updates()
        index_of = self._indices()
        packed["state"] = {
            index_of[stored.param]: self._late.give(stored)
            for stored in self.engine.partition.trainable
            if state_names(self.engine, stored)
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, on whatever placement, or what torch's optimizer
        of the same name gave.

        State of another format is rounded to the nearest of this one, and a line in the log says so; of the same
        it is what it was, bit for bit.

        Raises:
            CheckpointError: it belongs to other parameters; nothing has been changed then.
        """
        groups = state_dict["param_groups"]
        sizes, own_sizes = ([len(g["params"]) for g in gs] for gs in (groups, self.param_groups))
        if sizes != own_sizes:
            raise CheckpointError(
                f"the state has groups of {sizes} parameters, this optimizer of {own_sizes}"
            )
        index_of = self._indices()
        saved_states, may_be_empty = state_dict["state"], not self.engine.optimizer.saves_step
        states = {
            stored: saved_states.get(index_of[stored.param], {})
            for stored in self.engine.partition.trainable
            if may_be_empty or index_of[stored.param] in saved_states
        }
        states = {stored: state for stored, state in states.items() if not self._has(stored, state)}
        for stored, state in states.items():
            check_optimizer_state(self.engine, stored, state)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        load_optimizer_state(self.engine, states, saved_as=state_dict.get("state_format", "fp32"))

    def _has(self, stored: StoredParam, state: Any) -> bool:
        """Whether the state is what the parameter has already, come back unread."""
        return isinstance(state, ParamState) and state.stored is stored and state.is_unread_of(self._late)

    def _indices(self) -> dict[torch.Tensor, int]:
        params = [param for group in self.param_groups for param in group["params"]]
        return {param: index for index, param in enumerate(params)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._bound:
            raise OffloadError(
                "parameter groups are fixed once the model is prepared; pass all groups to offload.prepare(params=...)"
            )
        super().add_param_group(param_group)


def check_group(where: str, group: dict[str, Any]) -> None:
    """Raises ConfigError where a number of a parameter group is out of its range."""
    for key in ("lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value"):
        if key in group and not float(group[key]) >= 0:
            raise ConfigError(f"{where}: {key} must be at least 0, got {group[key]}")
    for beta in group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ConfigError(f"{where}: a beta must be in [0, 1), got {beta}")
    if group.get("nesterov") and (not group["momentum"] or group["dampening"]):
        raise ConfigError(
            f"{where}: nesterov needs a momentum and no dampening; write them, or leave nesterov out"
        )
