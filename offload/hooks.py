"""Ties an engine to a module: says which units are needed when, through the hooks that torch offers.

Note [What tells us that a weight is needed]
1. Forward hooks on every module that owns parameters, and on the modules that are units as a whole: the
   unit is leased from before forward to after it.
2. Reading a parameter as an attribute (``child.weight`` in a parent's forward, a weight shared without being
   tied): the module's dictionary of parameters notices, and the unit is leased until the forward that is
   running ends.
3. The gradient of a module's output arriving in backward: its unit is leased until its gradients are complete.
4. Autograd unpacking a tensor that was saved as a view of a weight. Saved weights are packed as (unit,
   offset, size, stride), so the graph holds no slot, and backward is right even where 1 to 3 said nothing.
Only 4 is needed for a right backward, and only 1 and 2 for a right forward; the rest makes things early.

Note [Saved tensors]
Our pack hook is active during the outermost forward of the model. Inside a checkpointed block torch's own
hook is, which saves nothing and runs the block again in backward; that inner forward keeps its unit present
(what it saves are views of the slot, and the use count of the slot's storage protects it). All other tensors
are saved as they are, with their version, because torch's check for in-place changes does not see packed ones.

Note [Abandoned forwards]
torch calls our hook after a forward that has raised an Exception, but not after one that Ctrl-C has ended. What
such a forward has left open is closed when somebody asks next: it is abandoned if the Python frame that called
our first hook is not on the stack any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .engine import OffloadEngine
from .errors import OffloadError
from .gradients import PassingGradients, WaitingGradients
from .partition import StoredParam
from .weights import Hold

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules whose parameters are used by their parent: they have no forward of their own."""


class WatchedParameters(dict[str, Any]):
    """A module's parameters; reading one as an attribute makes it present. See Note [What tells us ...]."""

    def __init__(self, params: dict[str, Any], on_read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(params)
        self._on_read = on_read

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._on_read(param)
        return param


class _Frame:
    """One forward that is running: what it holds, and the hooks it has pushed."""

    __slots__ = ("caller", "holds", "saving", "units")

    def __init__(self, units: tuple[int, ...], caller: FrameType | None) -> None:
        self.units, self.caller = units, caller
        self.holds: list[Hold] = []
        self.saving: torch.autograd.graph.saved_tensors_hooks | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether it has ended without our being told. See Note [Abandoned forwards]."""
        running: FrameType | None = sys._getframe(1)
        while running is not None and running is not self.caller:
            running = running.f_back
        return running is None

    def close(self) -> None:
        if self.saving is not None:
            _deactivate(self.saving)
        for hold in self.holds:
            hold.close()


class _PackedWeight:
    """A saved view of a weight: where it lies in the weight plane of which unit, and of which version.

    The version of a frozen weight is None: an update of an adapter beside it does not change it.
    """

    __slots__ = ("dtype", "offset", "size", "stride", "unit", "version")

    def __init__(self, unit: int, version: int | None, tensor: torch.Tensor) -> None:
        self.unit, self.version = unit, version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class ModuleHooks:
    """All hooks of one model. :meth:`remove` leaves it as it was."""

    def __init__(self, model: nn.Module, engine: OffloadEngine) -> None:
        self._engine, self._model = engine, model
        engine.close_abandoned = self._close_abandoned
        self._handles: list[RemovableHandle] = []
        self._watched: list[nn.Module] = []
        self._frames: list[_Frame] = []
        self._reading = False
        self._units_of: dict[nn.Module, tuple[int, ...]] = {}
        self._run: set[nn.Module] = set()  # modules that have run in this forward
        self._trainable = {param for param in engine.partition.of_param if param.requires_grad}
        for stored in engine.partition.trainable:
            self._handles.append(stored.param.register_post_accumulate_grad_hook(self._gradient_hook(stored)))
            gradients = engine.gradients
            if isinstance(gradients, PassingGradients) or gradients.is_offloaded(stored):
                self._handles.append(stored.param.register_hook(self._accumulation_hook(gradients, stored)))
        if engine.weights.streamed:
            self._units_of = _units_of_modules(model, engine)
            for module in self._units_of:
                self._watch(module)
            self._handles.append(nn_module.register_module_parameter_registration_hook(self._registered))
        self._units_of.setdefault(model, ())
        for module in self._units_of:
            self._handles.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
            self._handles.append(module.register_forward_hook(self._after_forward, always_call=True))

    @property
    def ids(self) -> set[int]:
        """Under which the hooks stand in their modules."""
        return {handle.id for handle in self._handles}

    def remove(self) -> None:
        """Takes all hooks off. Idempotent."""
        while self._frames:  # of a forward that Ctrl-C has ended, and nobody has asked since
            self._frames.pop().close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched:
            module.__dict__["_parameters"] = dict(module._parameters)
        self._watched.clear()

    # -- forward ------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            self._refuse_compiled()
        self._close_abandoned()
        recomputing = _in_backward()
        frame = _Frame(self._units_of[module], sys._getframe(1))
        self._frames.append(frame)  # first, because `_after_forward` is called even if the rest fails
        if len(self._frames) == 1 and not recomputing:
            self._run.clear()
            if torch.is_grad_enabled():
                self._refuse_unknown()
            self._engine.begin_forward(training=torch.is_grad_enabled())
        held = {unit for outer in self._frames[:-1] for unit in outer.units}
        for unit in frame.units:
            if unit in held:
                continue
            if recomputing:
                self._note_backward(unit)
            elif module in self._run:
                self._engine.used_twice(unit)
            frame.holds.append(self._engine.lease(unit))
        self._run.add(module)
        if len(self._frames) == 1 and not recomputing and self._engine.weights.streamed:
            frame.saving = self._save_weights()

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        frame = self._frames.pop()
        try:
            if frame.holds and torch.is_grad_enabled():
                self._announce_backward(frame.units, output)
        finally:
            frame.close()

    def _refuse_compiled(self) -> None:
        self._frames.append(_Frame((), None))  # `_after_forward` is called all the same
        raise OffloadError(
            "torch.compile of a module that the engine watches is not built: compiled code keeps tensors by address;"
            " leave it out, or, where offload_param.device is 'none', compile block by block: block.compile()"
        )

    vars(_refuse_compiled)["_torchdynamo_disable"] = (
        True  # called, not traced, and without importing the compiler
    )

    def _close_abandoned(self) -> bool:
        """Closes forwards that have ended without our being told; whether there were any."""
        found = False
        while self._frames and self._frames[-1].is_abandoned:
            self._frames.pop().close()
            found = True
        return found

    def _refuse_unknown(self) -> None:
        """Raises where a parameter would not be trained as its user thinks. Runs often: a bare walk."""
        of_param, modules = self._engine.partition.of_param, [self._model]
        while modules:
            module = modules.pop()
            modules += [child for child in module._modules.values() if child is not None]
            for param in module._parameters.values():
                if param is None:
                    continue
                stored = of_param.get(param)
                if (param.requires_grad and param not in self._trainable) or (
                    stored is not None and stored.is_replaced
                ):
                    self._refuse(param, stored)

    def _refuse(self, param: nn.Parameter, stored: StoredParam | None) -> None:
        name = next(name for name, other in self._model.named_parameters() if other is param)
        if stored is None:
            raise OffloadError(
                f"{name} has come into the model after it was prepared, and would not be trained;"
                " resize, replace or add parameters before offload.prepare"
            )
        if stored.is_replaced:
            raise OffloadError(
                f"{name}.data has been assigned since the model was prepared, which the engine's weights"
                " do not follow; write inside `with offload.gather(parameters, modify=True)`, and resize"
                " parameters before offload.prepare"
            )
        raise OffloadError(
            f"{name} was frozen when the model was prepared: it has no optimizer state and would"
            " not be trained; set requires_grad before offload.prepare"
        )

    def _announce_backward(self, units: tuple[int, ...], output: Any) -> None:
        """Leases the units when the gradient of the output arrives."""

        def arrived(_grad: torch.Tensor) -> None:
            for unit in units:
                self._note_backward(unit)

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(arrived)

    # -- parameters read as attributes --------------------------------------------------------------------

    def _registered(self, module: nn.Module, _name: str, param: nn.Parameter | None) -> None:
        """A parametrization, which adapters of single parameters make in each forward, sets what it takes over."""
        stored = self._engine.partition.of_param.get(param) if param is not None else None
        if stored is not None and isinstance(module, ParametrizationList):
            stored.expect_reset()

    def _watch(self, module: nn.Module) -> None:
        if module._parameters:
            module.__dict__["_parameters"] = WatchedParameters(module._parameters, self._on_read)
            self._watched.append(module)

    def _on_read(self, param: nn.Parameter) -> None:
        engine = self._engine
        stored = engine.partition.of_param.get(param)
        if stored is None or stored.gathered is not None or self._reading or not engine.is_open:
            return
        self._close_abandoned()
        if any(stored.unit in frame.units for frame in self._frames):
            return
        self._reading = True
        try:
            if self._frames:
                frame = self._frames[-1]
                frame.holds.append(engine.lease(stored.unit))
                frame.units = (*frame.units, stored.unit)
            else:
                engine.use(stored.unit)
                stored.look_at()
        finally:
            self._reading = False

    # -- saved tensors ------------------------------------------------------------------------------------

    def _save_weights(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Activates our saved-tensor hooks, unless a checkpoint around us has its own."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and "checkpoint" in getattr(outer[0], "__qualname__", ""):
            return None
        pack_other, unpack_other = outer if outer is not None else (_pack_versioned, _unpack_versioned)

        def pack(tensor: torch.Tensor) -> Any:
            unit = self._engine.weights.unit_at(tensor)
            if unit is None:
                return pack_other(tensor)
            layout = self._engine.plan.inventory.units[unit]
            frozen_begin = layout.elements * self._engine.plan.inventory.weight_itemsize
            is_frozen = tensor.storage_offset() * tensor.element_size() >= frozen_begin
            return _PackedWeight(unit, None if is_frozen else self._engine.version(unit), tensor)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, _PackedWeight):
                return self._unpack_weight(packed)
            tensor: torch.Tensor = unpack_other(packed)
            return tensor

        saving = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        saving.__enter__()
        return saving

    def _unpack_weight(self, packed: _PackedWeight) -> torch.Tensor:
        engine = self._engine
        if packed.version is not None and engine.version(packed.unit) != packed.version:
            raise OffloadError(
                f"weights of {engine.plan.inventory.units[packed.unit].name} were updated between a forward and"
                " its backward; call backward before step(), and set offload_optimizer.update to 'step' where a"
                " weight is used again after its gradient is complete"
            )
        engine.use(packed.unit)
        plane = engine.weights.seen(packed.unit)
        return plane.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    # -- backward -----------------------------------------------------------------------------------------

    def _note_backward(self, unit: int) -> None:
        self._open_backward()
        self._engine.before_backward(unit)

    def _gradient_hook(self, stored: StoredParam) -> Callable[[torch.Tensor], None]:
        def ready(_param: torch.Tensor) -> None:
            self._open_backward()
            self._engine.gradient_ready(stored)

        return ready

    def _accumulation_hook(
        self, gradients: WaitingGradients | PassingGradients, stored: StoredParam
    ) -> Callable[[torch.Tensor], None]:
        def before(_grad: torch.Tensor) -> None:
            self._open_backward()
            gradients.before_accumulation(stored)

        return before

    def _open_backward(self) -> None:
        if self._engine.begin_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._engine.end_backward)


def _units_of_modules(model: nn.Module, engine: OffloadEngine) -> dict[nn.Module, tuple[int, ...]]:
    """Modules to hook and the units each needs: of its own parameters, or the one unit that it is."""
    of_param = engine.partition.of_param
    params_in = [sum(1 for _ in unit) for unit in engine.partition.units]
    found: dict[nn.Module, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            continue
        own = {of_param[param].unit for param in _own_params(module)}
        everything = set(module.parameters())
        units = {of_param[param].unit for param in everything}
        if not own and len(units) == 1 and len(everything) == params_in[next(iter(units))]:
            own = units
        if own:
            found[module] = tuple(sorted(own))
    for module in model.modules():
        if isinstance(module, _CONTAINERS) and module._parameters:
            found.setdefault(module, ())  # never called, but watched
    return found


def _own_params(module: nn.Module) -> Iterable[nn.Parameter]:
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from child.parameters()


def _deactivate(saving: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Takes saved-tensor hooks off, also from below others that have been activated since."""
    above = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top[0] is saving.pack_hook:
            break
        above.append(top)
    for pack, unpack in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _in_backward() -> bool:
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _pack_versioned(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version  # a node that saved its own output would keep itself alive


def _unpack_versioned(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.dtype}, {list(tensor.shape)}] is at version {tensor._version};"
            f" expected version {version} instead."
        )
    return tensor
