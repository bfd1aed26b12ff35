"""Ties an engine to a module: says which units are needed when, through the hooks that torch offers.

Note [What tells us that a weight is needed]
1. Forward hooks on every module that owns parameters, and on the modules that are units as a whole: the
   unit is leased from before forward to after it.
2. Reading a parameter as an attribute (``child.weight`` in a parent's forward, a weight shared without being
   tied): the module's dictionary of parameters notices, and the unit is leased until the forward that is
   running ends, or until its slot is needed.
3. Torch computing with a parameter that no forward uses, however it was come by (`watched`): its unit is leased for
   that one call.
4. The gradient of a module's output arriving in backward: its unit is leased until its gradients are complete.
5. Autograd unpacking a weight that it has saved (`packing`).
Only 5 is needed for a right backward, and only 1 and 3 for a right forward; the rest makes things early.

Note [Abandoned forwards]
torch calls our hook after a forward that has raised an Exception, but not after one that Ctrl-C has ended. What
such a forward has left open is closed when somebody asks next: it is abandoned if the Python frame that called
our first hook is not on the stack any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn.modules import module as nn_module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .apart import Apart, left_alone
from .engine import OffloadEngine
from .errors import OffloadError
from .gradients import PassingGradients, WaitingGradients
from .packing import Packing, Saving
from .partition import StoredParam, is_marker
from .watched import unwatch, watch
from .weights import Hold

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules whose parameters are used by their parent: they have no forward of their own."""


class WatchedParameters(dict[str, Any]):
    """A module's parameters; reading one as an attribute makes it present. See Note [What tells us ...]."""

    def __init__(self, params: dict[str, Any], on_read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(params)
        self._on_read = on_read

    @left_alone
    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._on_read(param)
        return param


class _Frame:
    """One forward that is running: what it holds, and the hooks it has pushed."""

    __slots__ = ("caller", "holds", "read", "saving", "units")

    def __init__(self, units: tuple[int, ...], caller: FrameType) -> None:
        self.units, self.caller = units, caller
        self.holds: list[Hold] = []
        self.read: dict[int, Hold] = {}  # units that it has only read a parameter of, the first one first
        self.saving: Saving | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether it has ended without our being told. See Note [Abandoned forwards]."""
        running: FrameType | None = sys._getframe(1)
        while running is not None and running is not self.caller:
            running = running.f_back
        return running is None

    def close(self) -> None:
        if self.saving is not None:
            self.saving.close()
        for hold in (*self.holds, *self.read.values()):
            hold.close()


class _Reading:
    """Whom torch asks before it reads a parameter between uses."""

    def __init__(self, hooks: ModuleHooks, stored: StoredParam) -> None:
        self._hooks, self._stored = hooks, stored

    @property
    def name(self) -> str:
        return self._stored.name

    def reading(self) -> AbstractContextManager[None]:
        return self._hooks.reading(self._stored)


class _Gone:
    """In place of it where the value went with its engine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reading(self) -> NoReturn:
        raise OffloadError(
            f"{self.name}: its value was on nvme and went with its engine, which is closed; read it before close(),"
            " inside `with offload.gather(parameters)` or from state_dict()"
        )


class ModuleHooks:
    """All hooks of one model. :meth:`remove` leaves it as it was."""

    def __init__(self, model: nn.Module, engine: OffloadEngine) -> None:
        self._engine, self._model = engine, model
        engine.close_abandoned = self._close_abandoned
        engine.give_up_reads = self._give_up_reads
        self._handles: list[RemovableHandle] = []
        self._watched: list[nn.Module] = []
        self._frames: list[_Frame] = []
        self._packing = Packing(engine)
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
            for stored in engine.partition.of_param.values():
                stored.watcher = _Reading(self, stored)
                stored.watch()
        self._units_of.setdefault(model, ())
        for module in self._units_of:
            self._handles.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
            self._handles.append(module.register_forward_hook(self._after_forward, always_call=True))
        for stored in engine.partition.of_param.values():
            stored.known_uses = stored.uses

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
        for stored in self._engine.partition.of_param.values():
            stored.watcher = None
            unwatch(stored.param)
            if stored.is_absent:
                watch(stored.param, _Gone(stored.name))

    # -- forward ------------------------------------------------------------------------------------------

    @left_alone
    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        caller = sys._getframe(1)
        with Apart():
            self._enter(module, caller)

    def _enter(self, module: nn.Module, caller: FrameType) -> None:
        self._close_abandoned()
        recomputing = _in_backward()
        frame = _Frame(self._units_of[module], caller)
        self._frames.append(frame)  # first, because `_after_forward` is called even if the rest fails
        if len(self._frames) == 1 and not recomputing:
            self._run.clear()
            if torch.is_grad_enabled():
                self._refuse_unknown()
            self._engine.begin_forward(training=torch.is_grad_enabled())
        held = self._held(self._frames[:-1])
        for unit in frame.units:
            if unit in held:
                continue
            if recomputing:
                self._note_backward(unit)
            elif module in self._run:
                self._engine.used_twice(unit)
            frame.holds.append(self._engine.lease(unit))
            self._engine.partition.unwatch(unit)
        self._run.add(module)
        frame.saving = self._packing.begin()

    @left_alone
    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        with Apart():
            frame = self._frames.pop()
            try:
                if frame.holds and torch.is_grad_enabled():
                    self._announce_backward(frame.units, output)
            finally:
                self._close(frame)

    def _close(self, frame: _Frame) -> None:
        frame.close()
        for unit in {*frame.units, *frame.read} - self._held(self._frames):
            self._engine.partition.watch(unit)

    @staticmethod
    def _held(frames: Iterable[_Frame]) -> set[int]:
        return {unit for frame in frames for unit in (*frame.units, *frame.read)}

    def _close_abandoned(self) -> bool:
        """Closes forwards that have ended without our being told; whether there were any."""
        found = False
        while self._frames and self._frames[-1].is_abandoned:
            self._close(self._frames.pop())
            found = True
        return found

    def _give_up_reads(self) -> bool:
        """Lets the unit go that was read first of those that nobody needs to stay; whether there was one.

        A parameter that is used once more is made present once more, and what has been computed with it keeps
        its slot.
        """
        if self._close_abandoned():
            return True
        for frame in self._frames:
            for unit in frame.read:
                frame.read.pop(unit).close()
                if unit not in self._held(self._frames):
                    self._engine.partition.watch(unit)
                return True
        return False

    def _refuse_unknown(self) -> None:
        """Raises where a parameter would not be trained as its user thinks. Runs often: a bare walk."""
        of_param, modules = self._engine.partition.of_param, [self._model]
        while modules:
            module = modules.pop()
            modules += [child for child in module._modules.values() if child is not None]
            for param in module._parameters.values():
                if not isinstance(param, nn.Parameter):
                    continue  # one that `functional_call` has put there
                stored = of_param.get(param)
                if (param.requires_grad and param not in self._trainable) or (
                    stored is not None and stored.is_replaced
                ):
                    self._refuse(param, stored)

    def _refuse(self, param: nn.Parameter, stored: StoredParam | None) -> None:
        name = next(name for name, other in self._model.named_parameters() if other is param)
        if stored is None and torch.compiler.is_exporting():
            raise OffloadError("a prepared model cannot be exported; export it before offload.prepare")
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

        @left_alone
        def arrived(_grad: torch.Tensor) -> None:
            with Apart():
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
        if stored is None:
            _refuse_wrapped(param)
            return
        if stored.gathered is not None or self._reading or not engine.is_open:
            return
        if self._frames and stored.unit in self._frames[-1].units:
            return
        with Apart():
            self._read_attribute(stored)

    def _read_attribute(self, stored: StoredParam) -> None:
        self._close_abandoned()
        if stored.unit in self._held(self._frames):
            return
        self._reading = True
        try:
            if self._frames:
                hold = self._engine.lease(stored.unit)
                self._frames[-1].read[stored.unit] = hold
                self._engine.partition.unwatch(stored.unit)
            else:
                self._engine.use(stored.unit)
        finally:
            self._reading = False

    @contextmanager
    def reading(self, stored: StoredParam) -> Iterator[None]:
        """Keeps a parameter present while torch computes with it. See `watched`, Note [Watched parameters].

        What autograd saves of it outside a forward is packed, too, so that any number of weights may be used there.
        """
        saving: Saving | None = None
        with Apart():
            self._close_abandoned()
            try:
                hold = self._engine.lease(stored.unit)
            except OffloadError as error:
                raise OffloadError(f"{stored.name} cannot be read: {error}") from error
            unwatch(stored.param)
        try:
            if not self._frames:
                saving = self._packing.begin_alone()
            yield
        finally:
            if saving is not None:
                saving.close()
            with Apart():
                hold.close()
                if stored.unit not in self._held(self._frames):
                    stored.watch()

    # -- backward -----------------------------------------------------------------------------------------

    def _note_backward(self, unit: int) -> None:
        self._open_backward()
        self._engine.before_backward(unit)

    def _gradient_hook(self, stored: StoredParam) -> Callable[[torch.Tensor], None]:
        @left_alone
        def ready(_param: torch.Tensor) -> None:
            with Apart():
                self._open_backward()
                self._engine.gradient_ready(stored)

        return ready

    def _accumulation_hook(
        self, gradients: WaitingGradients | PassingGradients, stored: StoredParam
    ) -> Callable[[torch.Tensor], None]:
        @left_alone
        def before(_grad: torch.Tensor) -> None:
            with Apart():
                self._open_backward()
                gradients.before_accumulation(stored)

        return before

    def _open_backward(self) -> None:
        if self._engine.begin_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with Apart():
            self._engine.end_backward()


def _refuse_wrapped(value: torch.Tensor) -> None:
    """Raises for an absent parameter in the wrapper of a transform, which nobody can make present any more."""
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
        if isinstance(value, nn.Parameter) and is_marker(value):
            raise OffloadError(
                f"an absent parameter of shape {tuple(value.shape)} has been given to a transform of torch.func; call"
                " it inside `with offload.gather(parameters)`"
            )


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


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _in_backward() -> bool:
    task: int = torch._C._current_graph_task_id()
    return task != -1
