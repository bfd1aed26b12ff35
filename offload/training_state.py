"""What a run needs beside its planes to go on bit for bit: plain JSON, and a few tensors by name. No pickle.

Note [Training state]
- Of the optimizer: the numbers of its groups as they are now (schedulers and users change them), and the updates of
  each parameter. Moments and masters are planes and not in here.
- Of what is attached to the engine (`SavedEngine.attach`): a scheduler, the data, the window of micro-batches;
  whatever has ``state_dict()`` and ``load_state_dict()``. What is attached later is given its part then.
- Random numbers of Python, numpy, torch, and the accelerator.
- Tensors: persistent buffers as ``buffer.NAME``, and gradients that wait for their step as ``gradient.NAME``.
- ``client_state``: the user's own JSON, as it is.

Everything that is read is taken as a stranger's: it is held against itself (:func:`TrainingState.of`), and against
the model (:func:`check`), before anything is changed.
"""

from __future__ import annotations

import base64
import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn

from . import plain
from .accel import Accelerator
from .config.training import OPTIMIZERS
from .engine import OffloadEngine
from .errors import CheckpointError, ConfigError
from .gradients import WaitingGradients
from .models.pretrained import persistent_buffers
from .optim import ShardOptimizer
from .partition import Partition, StoredParam

logger = logging.getLogger("offload")

VERSION = 1
BUFFER, GRADIENT = "buffer.", "gradient."
COUNT_MAX = (1 << 53) - 1
_NUMBERS: dict[str, dict[str, Any]] = {kind.__name__: kind().defaults() for kind in OPTIMIZERS}
"""What a parameter group of each type of optimizer has."""


class Stateful(Protocol):
    """What can be attached: a scheduler, a dataset."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


@dataclass(frozen=True, slots=True)
class TrainingState:
    """See Note [Training state]."""

    values: dict[str, Any]
    """JSON: what a manifest keeps."""
    tensors: Mapping[str, torch.Tensor]
    """True only until training goes on. Empty where they have not been read."""

    @classmethod
    def of(cls, values: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> TrainingState:
        """What :func:`capture` gave, read from a file.

        Args:
            values: any JSON.
            tensors: by name, where there are any.

        Raises:
            CheckpointError: somebody else wrote it, or another version.
        """
        _check_values(values)
        return cls(values, tensors or {})

    @property
    def step(self) -> int:
        """Steps that were applied."""
        return int(self.values["step"])

    @property
    def skipped_steps(self) -> int:
        """Steps that were refused because a gradient was not finite."""
        return int(self.values["skipped_steps"])

    @property
    def tag(self) -> str | None:
        """What the user has called it."""
        return None if self.values["tag"] is None else str(self.values["tag"])

    @property
    def client_state(self) -> dict[str, Any]:
        """The user's own JSON."""
        return dict(self.values["client_state"])

    @property
    def tensor_names(self) -> list[str]:
        """Of all tensors that belong to it."""
        return list(self.values["tensors"])

    def part(self, name: str) -> Any:
        """What an attached object gave as its ``state_dict()``; None where none of that name was attached.

        Raises:
            CheckpointError: it is damaged.
        """
        parts = self.values["parts"]
        return plain.decode(parts[name], name) if name in parts else None


def capture(
    engine: OffloadEngine,
    model: nn.Module,
    *,
    step: int,
    skipped_steps: int,
    parts: Mapping[str, Stateful],
    client_state: Mapping[str, Any] | None = None,
    tag: str | None = None,
) -> TrainingState:
    """The state now, between steps.

    Args:
        step: steps that were applied, over all processes of the run.
        parts: what is attached, by name.

    Raises:
        ConfigError: something of it is not plain; names it.
    """
    client = dict(client_state or {})
    plain.check_json(client, "client_state")
    tensors = {BUFFER + name: buffer for name, buffer in persistent_buffers(model)}
    if isinstance(engine.gradients, WaitingGradients):
        waiting = engine.gradients.waiting()
        tensors.update((GRADIENT + stored.name, gradient) for stored, gradient in waiting)
    values = {
        "version": VERSION,
        "step": step,
        "skipped_steps": skipped_steps,
        "tag": tag,
        "optimizer": {
            "type": engine.optimizer.type,
            "groups": [_group(engine, index) for index in range(len(engine.groups))],
        },
        "parts": {name: plain.encode(part.state_dict(), name) for name, part in parts.items()},
        "random": _random_numbers(engine.accelerator),
        "tensors": list(tensors),
        "client_state": client,
    }
    return TrainingState(values, tensors)


def check(
    state: TrainingState,
    model: nn.Module,
    partition: Partition,
    *,
    optimizer: ShardOptimizer,
    keeps_gradients: bool,
) -> None:
    """Raises CheckpointError, naming what differs, where ``state`` is not of this model and optimizer.

    Args:
        keeps_gradients: whether gradients can wait for their step: not with update 'backward'.
    """
    saved = state.values["optimizer"]
    if saved["type"] != optimizer.type:
        raise CheckpointError(f"it was trained with {saved['type']}, and this optimizer is {optimizer.type}")
    groups = saved["groups"]
    count = 1 + max(stored.group for stored in partition.trainable)
    if len(groups) != count:
        raise CheckpointError(f"it has {len(groups)} parameter groups, and this optimizer {count}")
    for index, group in enumerate(groups):
        there, here = set(group["params"]), {stored.name for stored in _members(partition, index)}
        if there != here:
            name = min(there ^ here)
            where = "there and not here" if name in there else "here and not there"
            raise CheckpointError(f"parameter group {index}: {ascii(name)[1:-1]} is in it {where}")
    places = _tensor_places(model, partition if keeps_gradients else None)
    for name in state.tensor_names:
        if name not in places:
            raise CheckpointError(
                f"it has {ascii(name)[1:-1]}, which this model or placement has no place for"
            )
        wanted, given = places[name].shape, state.tensors.get(name)
        if given is None:
            raise CheckpointError(f"{name} is missing")
        if given.shape != wanted or given.is_floating_point() != places[name].is_floating_point():
            raise CheckpointError(
                f"{name} is {given.dtype} {tuple(given.shape)} there and {places[name].dtype}"
                f" {tuple(wanted)} here"
            )


def check_engine(engine: OffloadEngine, model: nn.Module, state: TrainingState) -> None:
    """As :func:`check`, for an engine that is there."""
    check(
        state,
        model,
        engine.partition,
        optimizer=engine.optimizer,
        keeps_gradients=isinstance(engine.gradients, WaitingGradients),
    )


def restore(
    engine: OffloadEngine, model: nn.Module, state: TrainingState, parts: Mapping[str, Stateful]
) -> None:
    """Makes everything but the planes what it was. What is in them is the caller's work.

    Args:
        parts: what is attached by now.

    Raises:
        CheckpointError: it is of another model; nothing has been changed then.
    """
    check_engine(engine, model, state)
    has_scheduler = "scheduler" in state.values["parts"]
    for index, group in enumerate(state.values["optimizer"]["groups"]):
        steps = dict(zip(group["params"], group["steps"], strict=True))
        for stored in _members(engine.partition, index):
            stored.step = steps[stored.name]
        _restore_numbers(engine.groups[index], group["numbers"], index, tells=not has_scheduler)
    places = _tensor_places(model, None)
    with torch.no_grad():
        for name in state.tensor_names:
            if name.startswith(BUFFER):
                places[name].copy_(state.tensors[name])
    if isinstance(engine.gradients, WaitingGradients):
        engine.gradients.replace(lambda stored: state.tensors.get(GRADIENT + stored.name))
    for name, part in parts.items():
        restore_part(engine, state, name, part)
    _restore_random_numbers(state.values["random"], engine.accelerator)


def restore_part(engine: OffloadEngine, state: TrainingState, name: str, part: Stateful) -> None:
    """Gives an attached object what it had, and the groups the numbers that its making may have changed."""
    saved = state.part(name)
    if saved is None:
        return
    try:
        part.load_state_dict(saved)
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name}: its saved state does not fit this {type(part).__name__}: {type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}"
        ) from error
    for index, group in enumerate(state.values["optimizer"]["groups"]):
        _restore_numbers(engine.groups[index], group["numbers"], index, tells=False)


# -- the optimizer ------------------------------------------------------------------------------------------


def _members(partition: Partition, index: int) -> list[StoredParam]:
    return [stored for stored in partition.trainable if stored.group == index]


def _group(engine: OffloadEngine, index: int) -> dict[str, Any]:
    members = _members(engine.partition, index)
    numbers = {key: value for key, value in engine.groups[index].items() if key != "params"}
    return {
        "numbers": plain.encode(numbers, f"parameter group {index}"),
        "params": [stored.name for stored in members],
        "steps": [stored.step for stored in members],
    }


def _restore_numbers(group: dict[str, Any], numbers: Any, index: int, *, tells: bool) -> None:
    saved = plain.decode(numbers, f"parameter group {index}")
    if tells and saved["lr"] != group["lr"]:
        logger.warning(
            "parameter group %d goes on with lr %g, as it was saved; the configuration's %g does not count: set"
            " optimizer.param_groups[%d]['lr'] to change it",
            index, saved["lr"], group["lr"], index,
        )  # fmt: skip
    group.update(saved)


# -- random numbers -----------------------------------------------------------------------------------------


def _random_numbers(accelerator: Accelerator | None) -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    if kind != "MT19937":
        raise ConfigError(f"numpy draws from {kind}, which is not saved; leave numpy.random at MT19937")
    device = None if accelerator is None else accelerator.random_state()
    return {
        "python": plain.encode(random.getstate(), "random"),
        "numpy": [_text(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "device": None if device is None else _text(device.numpy().tobytes()),
    }


def _restore_random_numbers(values: dict[str, Any], accelerator: Accelerator | None) -> None:
    random.setstate(plain.decode(values["python"], "random.python"))
    np.random.set_state(_numpy_state(values["numpy"]))
    torch.set_rng_state(_state_tensor(values["torch"]))
    if values["device"] is None or accelerator is None or accelerator.random_state() is None:
        return
    try:
        accelerator.set_random_state(_state_tensor(values["device"]))
    except (RuntimeError, TypeError):
        logger.warning(
            "the random numbers of %s begin anew: the saved ones are another device's", accelerator.name
        )


def _check_random_numbers(values: dict[str, Any]) -> None:
    """Tries them out on generators that nobody uses."""
    _fields(values, "random", python=dict, numpy=list, torch=str)
    if "device" not in values or type(values["device"]) not in (str, type(None)):
        _refuse("random.device", "text or null belongs here")
    tries: dict[str, Callable[[], object]] = {
        "python": lambda: random.Random().setstate(plain.decode(values["python"], "random.python")),
        "numpy": lambda: np.random.RandomState().set_state(_numpy_state(values["numpy"])),
        "torch": lambda: torch.Generator().set_state(_state_tensor(values["torch"])),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, CheckpointError):
            _refuse(f"random.{name}", "it is no state of a generator")


def _numpy_state(values: list[Any]) -> tuple[str, Any, int, int, float]:
    keys, position, has_gauss, cached = values
    state = np.frombuffer(_bytes(keys), np.uint32)
    if type(position) is not int or not 0 <= position <= len(state) or has_gauss not in (0, 1):
        raise ValueError("no position in the state")
    return "MT19937", state, position, int(has_gauss), float(cached)


def _state_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# -- tensors ------------------------------------------------------------------------------------------------


def _tensor_places(model: nn.Module, partition: Partition | None) -> dict[str, torch.Tensor]:
    """What tensors of a state may be called, and something of the shape and kind of each."""
    places = {BUFFER + name: buffer for name, buffer in persistent_buffers(model)}
    if partition is not None:
        places.update((GRADIENT + stored.name, stored.absent) for stored in partition.trainable)
    return places


# -- what a stranger may have written -----------------------------------------------------------------------


def _check_values(values: Any) -> None:
    if type(values) is not dict or type(values.get("version")) is not int:
        _refuse("training", "it is no state of a run")
    if values["version"] != VERSION:
        _refuse("version", f"it is {values['version'] % 10**9} and this program reads {VERSION}")
    _fields(
        values, "training", step=int, skipped_steps=int, optimizer=dict, parts=dict, random=dict, tensors=list,
        client_state=dict,
    )  # fmt: skip
    for name in ("step", "skipped_steps"):
        _check_count(values[name], name)
    if "tag" not in values or type(values["tag"]) not in (str, type(None)):
        _refuse("tag", "text or null belongs here")
    if any(type(name) is not str or not name.startswith((BUFFER, GRADIENT)) for name in values["tensors"]):
        _refuse("tensors", "names of buffers and gradients belong here")
    optimizer = values["optimizer"]
    _fields(optimizer, "optimizer", type=str, groups=list)
    if optimizer["type"] not in _NUMBERS:
        _refuse("optimizer.type", f"{ascii(optimizer['type'])[:40]} is none of {', '.join(_NUMBERS)}")
    for index, group in enumerate(optimizer["groups"]):
        _check_group(group, _NUMBERS[optimizer["type"]], f"optimizer.groups[{index}]")
    for name, part in values["parts"].items():
        if type(plain.decode(part, name)) is not dict:
            _refuse(f"parts.{ascii(name)[:60]}", "an object belongs here")
    _check_random_numbers(values["random"])


def _check_group(group: Any, expected: Mapping[str, Any], where: str) -> None:
    if type(group) is not dict:
        _refuse(where, "an object belongs here")
    _fields(group, where, numbers=dict, params=list, steps=list)
    if any(type(name) is not str for name in group["params"]) or len(group["params"]) != len(group["steps"]):
        _refuse(where, "names of parameters, and as many steps, belong here")
    if len(set(group["params"])) != len(group["params"]):
        _refuse(where, "a parameter occurs twice")
    for count in group["steps"]:
        _check_count(count, f"{where}.steps")
    numbers = plain.decode(group["numbers"], f"{where}.numbers")
    if type(numbers) is not dict or "params" in numbers:
        _refuse(where, "the numbers of a parameter group belong here")
    for name, example in expected.items():
        value, place = numbers.get(name), f"{where}.{name}"
        if isinstance(example, tuple):
            if type(value) is not tuple or len(value) != len(example):
                _refuse(place, f"{len(example)} numbers belong here")
            for beta in value:
                _check_number(beta, 1.0, place)
        elif isinstance(example, bool):
            if type(value) is not bool:
                _refuse(place, "true or false belongs here")
        else:
            _check_number(value, math.inf, place, least=-math.inf if name == "dampening" else 0)


def _check_number(value: Any, below: float, where: str, *, least: float = 0) -> None:
    if type(value) not in (int, float) or not least <= value < below or abs(value) > 1e300:
        _refuse(where, f"{ascii(value)[:40]} is no number from {least:g} to below {below:g}")


def _check_count(value: Any, where: str) -> None:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        _refuse(where, "a count belongs here")


def _fields(values: dict[str, Any], where: str, **kinds: type) -> None:
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind:
            found = type(values[name]).__name__ if name in values else "nothing"
            _refuse(f"{where}.{name}", f"{kind.__name__} belongs here, not {found}")


def _refuse(where: str, what: str) -> NoReturn:
    raise CheckpointError(f"{where}: {what}")
