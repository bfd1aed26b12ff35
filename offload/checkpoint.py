"""Values in and out of a live engine by name: `state_dict`, `load_state_dict`, export.

Note [State that is read late]
A wrapper of optimizers (accelerate's, and so transformers' Trainer) takes `state_dict()` when it is made, and gives it
back at once: read there and then, all state of a model that fits no memory would be in memory, and all of it would be
written again. So the state of each parameter is read when somebody looks at it, or before the engine changes it while
somebody still has it: what it gives is the state at the call. What nobody has looked at needs no writing when it
comes back.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import metrics
from .access import ChunkAccess, gathered, join_master, read_master, read_weight, write_weight
from .bytesize import format_bytes
from .engine import OffloadEngine
from .errors import CheckpointError, OffloadError
from .models.pretrained import TensorSpec, write_checkpoint
from .partition import StoredParam, is_marker
from .placement import STATE_BLOCK

logger = logging.getLogger("offload")

_refusals: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Of modules whose weights are gone: the hook that says so, until they are prepared again."""


class StateDictHooks:
    """Makes ``state_dict()`` of the model, and of every module in it, give full tensors wherever they are.

    ``load_state_dict()`` writes to where they are. Both hold what torch holds: ``state_dict()`` of the whole
    model is the whole model in memory; export streams.
    """

    def __init__(self, model: nn.Module, engine: OffloadEngine) -> None:
        self._engine = engine
        self._loading: dict[nn.Module, tuple[ExitStack, dict[StoredParam, torch.Tensor]]] = {}
        self._given: dict[StoredParam, tuple[str, weakref.ref[torch.Tensor]]] = {}
        """Where, and as which tensor, a tied weight stands in the state that it was last put into."""
        self._handles: list[RemovableHandle] = []
        self._modules: list[nn.Module] = []
        for module in model.modules():
            if any(
                param in engine.partition.of_param
                for param in module._parameters.values()
                if param is not None
            ):
                self._modules.append(module)
                if (refusal := _refusals.pop(module, None)) is not None:
                    refusal.remove()
                self._handles += [
                    module.register_state_dict_post_hook(functools.partial(self._fill)),
                    module.register_load_state_dict_pre_hook(self._before_load),
                    module.register_load_state_dict_post_hook(self._after_load),
                ]

    @property
    def ids(self) -> set[int]:
        """Under which the hooks stand in their modules."""
        return {handle.id for handle in self._handles}

    def remove(self) -> None:
        """Takes the hooks off, for good. Modules whose weights are gone with the engine keep one that says so."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._modules:
            if any(is_marker(param) for _, param in _params(module)):
                _refusals[module] = module.register_state_dict_post_hook(refuse_lost)
        self._modules.clear()

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, param in _params(module):
            stored = self._engine.partition.of_param.get(param)
            if stored is not None and prefix + name in state:
                value = read_weight(self._engine, stored)
                if len(stored.names) > 1:
                    value = self._shared(stored, state, prefix + name, value)
                state[prefix + name] = value

    def _shared(
        self, stored: StoredParam, state: dict[str, Any], key: str, value: torch.Tensor
    ) -> torch.Tensor:
        """The tensor that stands in ``state`` already under another name of a tied weight, else ``value``.

        As in torch, whoever saves a state can see by that what is tied.
        """
        if stored in self._given:
            first_key, given = self._given[stored]
            first = given()
            is_there = first is not None and state.get(first_key) is first
            if first is not None and is_there and torch.equal(first, value):
                return first
        self._given[stored] = key, weakref.ref(value)
        return value

    def _before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_args: Any
    ) -> None:
        """Lets torch check and copy into temporary tensors; what counts is written afterwards."""
        if metadata.get("assign_to_params_buffers", False):
            raise OffloadError(
                "load_state_dict(assign=True) would replace parameters that the engine owns; leave assign out"
            )
        stack, given = ExitStack(), {}
        for name, param in _params(module):
            stored = self._engine.partition.of_param.get(param)
            if stored is not None:
                stack.enter_context(gathered(self._engine, [param], modify=False))
                value = state.get(prefix + name)
                if isinstance(value, torch.Tensor) and value.shape == param.shape:
                    given[stored] = value
        self._loading[module] = stack, given

    def _after_load(self, module: nn.Module, _incompatible: Any) -> None:
        """Writes the given values: a value wider than the compute type becomes the exact master."""
        stack, given = self._loading.pop(module)
        stack.close()
        for stored, value in given.items():
            exact = stored.trainable and stored.dtype is torch.bfloat16
            write_weight(self._engine, stored, value.float() if exact else value)


def refuse_lost(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of ``state_dict()``: markers of absent parameters are no values to save."""
    lost = [prefix + name for name, _ in _params(module) if is_marker(state.get(prefix + name))]
    if lost:
        raise OffloadError(
            f"{', '.join(lost)}: these weights were on nvme and went with their engine, which is closed; take"
            " state_dict() before close(), or load values into a model built anew"
        )


def optimizer_state(engine: OffloadEngine) -> Iterator[tuple[StoredParam, dict[str, torch.Tensor]]]:
    """Per trained parameter: ``step``, moments in fp32, and of bf16 weights the exact fp32 ``master``.

    Keys are torch's: its SGD keeps no ``step`` (beside rounded state, whose noise depends on it, there is one here),
    and has a moment after the first step only. Of 8-bit moments also ``scale``: from their values alone a scale would
    come back but for its last bit. One parameter's state is in memory at a time, and one chunk, which is read once:
    nothing may be trained or written before the last parameter has come.
    """
    access = ChunkAccess(engine)
    for stored in engine.partition.trainable:
        yield stored, state_of(engine, stored, access)


def state_names(engine: OffloadEngine, stored: StoredParam) -> list[str]:
    """What :func:`state_of` gives."""
    optimizer, placement = engine.optimizer, engine.plan.placement
    planes = {plane.name for plane in placement.state_planes}
    names = ["step"] if optimizer.saves_step or placement.state_format != "fp32" else []
    if optimizer.saves_step or stored.step:
        names += optimizer.moments_of(engine.groups[stored.group])
    return names + ["scale"] * ("scale" in planes) + ["master"] * ("residual" in planes)


def state_of(engine: OffloadEngine, stored: StoredParam, access: ChunkAccess) -> dict[str, torch.Tensor]:
    """One parameter's state. See :func:`optimizer_state`."""
    optimizer = engine.optimizer
    planes = access.read(stored, *(plane.name for plane in engine.plan.placement.state_planes))
    if not stored.step:
        for name, value in optimizer.first_moments(engine.groups[stored.group]).items():
            planes[name].fill_(value)
    state = {}
    for name in state_names(engine, stored):
        if name == "step":
            state[name] = torch.tensor(float(stored.step))
        elif name == "scale":
            state[name] = planes[name].view(-1, 2)
        elif name == "master":
            state[name] = join_master(engine, stored, planes["residual"])
        else:
            state[name] = planes[name].as_strided(stored.placed.info.shape, stored.stride)
    return state


class LateStates:
    """States that were given out and that nobody has looked at. See Note [State that is read late]."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._unread: weakref.WeakValueDictionary[int, ParamState] = weakref.WeakValueDictionary()
        self._count = itertools.count()
        self._access: ChunkAccess | None = None
        self._then = engine.before_change
        engine.before_change = self._before_change

    def _before_change(self) -> None:
        self.read_all()
        self._then()

    def give(self, stored: StoredParam) -> ParamState:
        """The state of one parameter as it is now."""
        state = ParamState(self, stored, next(self._count))
        self._unread[state.number] = state
        return state

    def read(self, stored: StoredParam) -> dict[str, torch.Tensor]:
        """As :func:`state_of`; of parameters that follow each other each chunk is read once."""
        self._access = self._access or ChunkAccess(self._engine)
        return state_of(self._engine, stored, self._access)

    def read_all(self) -> None:
        """What is still unread will not be there any more."""
        for state in list(self._unread.values()):
            len(state)
        self._access = None

    def noted(self, state: ParamState) -> None:
        """A state has been read."""
        self._unread.pop(state.number, None)
        if not self._unread:
            self._access = None

    def check_memory(self) -> None:
        """Raises OffloadError where all that is unread cannot be in memory at once."""
        need = sum(
            4 * state.stored.placed.info.numel
            for state in self._unread.values()
            for name in state_names(self._engine, state.stored)
            if name != "step"
        )
        if need > (available := metrics.memory_available_bytes()):
            raise OffloadError(
                f"optimizer state as a pickle needs {format_bytes(need)} of memory at once, {format_bytes(available)}"
                " are available; save with optimizer.engine.save_checkpoint(DIR), or train with the Trainer of"
                " offload.integrations.transformers"
            )


class ParamState(MutableMapping[str, Any]):
    """What ``state_dict()`` gives of one parameter: a dictionary. See Note [State that is read late]."""

    def __init__(self, late: LateStates, stored: StoredParam, number: int) -> None:
        self.stored, self.number = stored, number
        self._late = late
        self._read: dict[str, Any] | None = None

    def is_unread_of(self, late: LateStates) -> bool:
        """Whether it is what the parameter has now."""
        return self._read is None and self._late is late

    def _values(self) -> dict[str, Any]:
        if self._read is None:
            self._read = self._late.read(self.stored)
            self._late.noted(self)
        return self._read

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return repr(self._values())

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        """As a dictionary of a type that ``torch.load`` trusts; what is unread stays so."""
        values = self._read
        if values is None:
            self._late.check_memory()
            values = self._late.read(self.stored)
        return OrderedDict, (), None, None, iter(values.items())


def load_optimizer_state(
    engine: OffloadEngine,
    states: dict[StoredParam, dict[str, torch.Tensor]],
    *,
    saved_as: str = "fp32",
) -> None:
    """Writes what :func:`optimizer_state` gave, or torch's optimizer gives: then the weights are the master.

    Args:
        saved_as: the format of the state that was saved; from the same format it comes back bit for bit.
    """
    for stored, state in states.items():
        check_optimizer_state(engine, stored, state)
    kept_as = engine.plan.placement.state_format
    if saved_as != kept_as:
        how = "as it is" if kept_as == "fp32" else "rounded to the nearest"
        logger.info(
            "optimizer state saved as %s is kept as %s from now on: taken over %s", saved_as, kept_as, how
        )
    access = ChunkAccess(engine)
    for stored, state in states.items():
        moments = [name for name in engine.optimizer.moments if _has_moment(engine, state, name)]
        planes = {name: stored.flatten(state[name], torch.float32) for name in moments}
        if saved_as == kept_as and "scale" in state:
            planes["scale"] = state["scale"].flatten()
        if planes:
            access.write(stored, planes)
        if "master" in state and stored.dtype is not torch.float32:
            write_weight(engine, stored, state["master"].float(), access=access)
        stored.step = int(state.get("step", bool(moments)))  # of SGD only whether it was the first counts


def _has_moment(engine: OffloadEngine, state: dict[str, torch.Tensor], name: str) -> bool:
    """Whether the state has a moment, or may do without: torch's SGD has none before the first step."""
    return engine.optimizer.saves_step or state.get(name) is not None


def check_optimizer_state(engine: OffloadEngine, stored: StoredParam, state: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError where a plane is missing or has another shape than the parameter."""
    shape, optimizer = stored.placed.info.shape, engine.optimizer
    moments = [name for name in optimizer.moments if _has_moment(engine, state, name)]
    for plane in (*moments, *(["master"] if "master" in state else [])):
        if plane not in state or tuple(state[plane].shape) != shape:
            got = tuple(state[plane].shape) if plane in state else "nothing"
            raise CheckpointError(f"{stored.name}: {plane} of shape {shape} expected, got {got}")
    scales = (-(-stored.placed.info.numel // STATE_BLOCK), 2)
    if "scale" in state and tuple(state["scale"].shape) != scales:
        got = tuple(state["scale"].shape)
        raise CheckpointError(f"{stored.name}: scale of shape {scales} expected, got {got}")
    if optimizer.saves_step and "step" not in state:
        raise CheckpointError(f"{stored.name}: its step count is missing")


def export(
    engine: OffloadEngine,
    out_dir: str | Path,
    *,
    config: dict[str, Any],
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
    dtype: torch.dtype | None = None,
    tokenizer_files: Path | None = None,
) -> None:
    """Writes the weights as safetensors that ``transformers`` opens, one tensor in memory at a time.

    Args:
        config: the model's ``config.json``.
        buffers: persistent buffers to write beside the parameters.
        dtype: of floating-point weights; their compute type where it is None. fp32 is the exact master.
        tokenizer_files: a directory whose tokenizer files are copied.

    Raises:
        OffloadError: the directory cannot be written; nothing half-done is left.
    """
    params = [stored for unit in engine.partition.units for stored in unit]
    specs, fetch = exported(engine, params, buffers, dtype)
    aliases = {alias: stored.name for stored in params for alias in stored.names[1:]}
    write_checkpoint(Path(out_dir), specs, fetch, config, aliases=aliases, tokenizer_files=tokenizer_files)


def exported(
    engine: OffloadEngine,
    params: Iterable[StoredParam],
    buffers: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
) -> tuple[list[TensorSpec], Callable[[str], torch.Tensor]]:
    """What a file of weights holds, and how to read one of its tensors. ``dtype`` is that of :func:`export`.

    A tied weight is in it once, under its first name.
    """
    stored_of_name = {stored.name: stored for stored in params}
    buffer_of_name = dict(buffers)

    def dtype_of(stored: StoredParam) -> torch.dtype:
        return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype

    def fetch(name: str) -> torch.Tensor:
        if name in buffer_of_name:
            return buffer_of_name[name].detach().cpu().contiguous()
        stored = stored_of_name[name]
        wanted = dtype_of(stored)
        value = read_master(engine, stored) if wanted is torch.float32 else read_weight(engine, stored)
        return value.to(wanted).contiguous()

    specs = [TensorSpec(name, p.placed.info.shape, str(dtype_of(p))) for name, p in stored_of_name.items()]
    specs += [TensorSpec(name, tuple(t.shape), str(t.dtype)) for name, t in buffer_of_name.items()]
    return specs, fetch


def _params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module._parameters.items() if param is not None]
