"""What a script brings along: its optimizer and its scheduler, taken over without changing what they mean.

Note [Client optimizers]
Accepted are ``torch.optim.AdamW``, ``Adam``, ``Adagrad``, ``SGD`` and ``offload.CPUAdam`` before their first step,
and whatever is called with the parameters and returns one of them (the class itself, a ``functools.partial``, a
function). Their groups count with all their numbers; the class says how weight decay is applied.
Switches that only choose among torch's implementations (foreach, fused, capturable) mean nothing here, which is
logged. All that would change the mathematics is refused. The object itself is out of work afterwards: its
``step()`` raises.

Note [Client schedulers]
A function is called with our optimizer. A scheduler that exists is bound to the script's optimizer: our
groups are made with all that it keeps in those groups (initial and present learning rate, momentum), then its
``optimizer``, and that of every scheduler inside it, becomes ours. It goes on where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..config import training
from ..config.training import Optimizer as OptimizerConfig
from ..errors import ConfigError, OffloadError
from ..ops.adam import DeepSpeedCPUAdam
from ..optim.cpu_adam import CPUAdam

logger = logging.getLogger("offload")

_BLOCKS: Final[dict[type[torch.optim.Optimizer], type[training.OptimizerParams]]] = {
    torch.optim.Adam: training.Adam,
    torch.optim.AdamW: training.AdamW,
    CPUAdam: training.Adam,
    DeepSpeedCPUAdam: training.Adam,
    torch.optim.Adagrad: training.Adagrad,
    torch.optim.SGD: training.SGD,
}
"""What the configuration calls a class; of the Adams the groups say which."""
_ACCEPTED = (
    "accepted are torch.optim.AdamW, Adam, Adagrad and SGD, offload.CPUAdam, a callable that makes one of them from"
    " the parameters, and None with an optimizer block in the configuration"
)
_REFUSED_SWITCHES = ("amsgrad", "maximize", "differentiable")
_OTHER_SWITCHES = ("foreach", "fused", "capturable", "decoupled_weight_decay")


@dataclass(frozen=True, slots=True)
class ClientOptimizer:
    """A script's optimizer, read."""

    source: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    """Its groups without torch's switches, in their order."""
    settings: OptimizerConfig
    """The block of the configuration that says the same."""

    def retire(self) -> Callable[[], None]:
        """Makes the script's own object refuse to step; returns what undoes that."""

        def refuse(*_args: Any) -> None:
            raise OffloadError(
                f"this {type(self.source).__name__} was handed to offload.initialize, which returned the"
                " optimizer that trains the model now; call engine.step(), or step the returned one"
            )

        return self.source.register_step_pre_hook(refuse).remove


def read_optimizer(given: Any, params: list[Any]) -> ClientOptimizer:
    """Reads a script's optimizer. See Note [Client optimizers].

    Args:
        given: an optimizer, or what makes one.
        params: parameters or groups, for what makes one.

    Raises:
        ConfigError: it is none that can be taken over.
    """
    source = given
    if not isinstance(given, torch.optim.Optimizer) and callable(given):
        source = given(params)
    if type(source) not in _BLOCKS:
        made = f"what the callable made, a {type(source).__name__}," if source is not given else _name(source)
        raise ConfigError(f"optimizer: {made} cannot be taken over; {_ACCEPTED}")
    if any(
        float(state.get("step", 1)) > 0 for state in source.state.values()
    ):  # Adagrad has state from the start
        raise ConfigError(
            f"optimizer: this {type(source).__name__} has taken steps already, and its moments would be lost;"
            " hand over a new one"
        )
    for index, group in enumerate(source.param_groups):
        for switch in _REFUSED_SWITCHES:
            if group.get(switch):
                raise ConfigError(f"optimizer: parameter group {index}: {switch} is not built; leave it out")
    chosen = [name for name in ("foreach", "fused", "capturable") if source.defaults.get(name)]
    if chosen:
        logger.info(
            "optimizer: %s chooses among torch's implementations; this %s is replaced by the engine's own kernel,"
            " which runs where the optimizer state is",
            ", ".join(chosen),
            type(source).__name__,
        )
    switches = {*_REFUSED_SWITCHES, *_OTHER_SWITCHES}
    groups = [
        {key: value for key, value in group.items() if key not in switches} for group in source.param_groups
    ]
    if isinstance(source, torch.optim.Adagrad):  # torch looks at the constructor's alone
        for group in groups:
            group["initial_accumulator_value"] = source.defaults["initial_accumulator_value"]
    return ClientOptimizer(source, groups, _block_of(source))


def _block_of(source: torch.optim.Optimizer) -> OptimizerConfig:
    """The block of the configuration with an optimizer's defaults."""
    block = _BLOCKS[type(source)]
    if block is training.Adam and _is_decoupled(source):
        block = training.AdamW
    numbers = {key: _plain(source.defaults[key]) for key in block().defaults()}
    return OptimizerConfig(params=block(**numbers))


def _is_decoupled(source: torch.optim.Optimizer) -> bool:
    """Whether the decay of an Adam is AdamW's, which all its groups must agree on."""
    modes = {
        group.get("decoupled_weight_decay", type(source) is torch.optim.AdamW)
        for group in source.param_groups
    }
    if len(modes) > 1:
        raise ConfigError(
            "optimizer: parameter groups with and without decoupled_weight_decay cannot be mixed;"
            " use AdamW or Adam for all"
        )
    return modes == {True}


def _plain(number: Any) -> Any:
    """A number without the tensor that torch allows around it."""
    if isinstance(number, (tuple, list)):
        return tuple(float(each) for each in number)
    return number if isinstance(number, bool) else float(number)


def is_scheduler(given: Any) -> bool:
    """Whether this is a scheduler, rather than something to make one with."""
    return not isinstance(given, type) and callable(getattr(given, "step", None))


def check_scheduler(given: Any, client: ClientOptimizer | None) -> None:
    """Refuses a scheduler that :func:`bind_scheduler` could not bind, before anything is changed."""
    if not is_scheduler(given):
        if not callable(given):
            raise ConfigError(
                f"lr_scheduler: {_name(given)} is none; give a scheduler, or what is called with the"
                " optimizer and returns one"
            )
        return
    make = "give a callable instead: lr_scheduler=lambda optimizer: ..."
    for scheduler in _nested(given):
        if client is None or getattr(scheduler, "optimizer", None) is not client.source:
            raise ConfigError(
                f"lr_scheduler: this {type(scheduler).__name__} is not bound to the optimizer that was given;"
                f" {make}"
            )
    if client is not None:
        for index, group in enumerate(client.groups):
            if not any(param.requires_grad for param in group["params"]):
                raise ConfigError(
                    f"lr_scheduler: parameter group {index} of its optimizer has nothing to train and is left"
                    f" out, so this {type(given).__name__} has one group too many; remove the group, or"
                    f" {make}"
                )


def bind_scheduler(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler of our optimizer. See Note [Client schedulers]."""
    if not is_scheduler(given):
        scheduler = given(optimizer)
        if not is_scheduler(scheduler):
            raise ConfigError(
                f"lr_scheduler: the callable returned {_name(scheduler)}, which has no step(); let it"
                " return a scheduler"
            )
        return scheduler
    for scheduler in _nested(given):
        scheduler.optimizer = optimizer
    _Watch(optimizer)
    return given


class _Watch(LRScheduler):
    """Changes no learning rate. Being made, it has torch note when ``optimizer.step()`` is called, which
    schedulers made for another optimizer look for."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _nested(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)


def _name(value: Any) -> str:
    return f"a {type(value).__name__}"
