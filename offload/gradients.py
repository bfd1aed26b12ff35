"""Where gradients wait for their update, and how they are shown to the user.

Note [Gradients as users see them]
Where gradients wait for the step in the memory that computes, `p.grad` is a true view of the unit's gradient
plane, from the moment it is complete: clipping, editing and logging in plain loops work on what the update will
read, and autograd adds further micro-batches in place. With fp32 accumulation of bf16 gradients the view is fp32,
which torch allows where the parameter says so (`grad_dtype`).

Where they wait in host memory and an accelerator computes, `p.grad` is an OffloadedGradient: its shape, type and
device are true, every operation fetches the value first, and what an operation changes in place is written back.

Where the update runs in backward, the gradient is gone before user code could look at it. `p.grad` is then
an AbsentGradient until it is set to None: whatever touches it raises and names the way out, a backward that would
add to it too. It never silently does nothing. `zero_grad(set_to_none=False)` makes it a gradient of zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from .errors import ConfigError, OffloadError
from .landing import Landing
from .optim import block_square_sums
from .partition import GATHER_LOSS, Partition, StoredParam, absent_tensor
from .squares import SquareSums, UnitSquares, pieces_of

GRAD_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_DESCRIPTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "requires_grad", "is_leaf",
                 "grad_fn", "is_sparse", "is_quantized", "is_meta")
} | {
    torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.nelement,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.get_device,
}  # fmt: skip
"""What can be asked of a gradient without its value."""


class AbsentGradient(torch.Tensor):
    """A gradient that has been used up: its shape and type are true, everything else raises, but for zeroing it."""

    is_zeroed = False
    """Whether it counts as a gradient of zero in the next step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in _DESCRIPTIONS or name == "__repr__":
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in _ZEROING:
            args[0].__dict__["is_zeroed"] |= func is torch.Tensor.zero_
            return args[0]
        raise OffloadError(
            f"{name}() on a gradient that the update has already used: with offload_optimizer.update 'backward'"
            " gradients do not outlive backward; set update 'step', and clip with gradient_clipping or"
            " optimizer.clip_grad_norm_"
        )


_ZEROING = {torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.zero_}
"""What `zero_grad(set_to_none=False)` does to a gradient."""


class OffloadedGradient(torch.Tensor):
    """A gradient in host memory, shown on the device. See Note [Gradients as users see them]."""

    fetch: Callable[[], torch.Tensor]
    """Gives the value, on the device."""
    write: Callable[[torch.Tensor], None]
    """Takes a changed value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        fetched: dict[int, tuple[OffloadedGradient, torch.Tensor, int]] = {}

        def value_of(argument: Any) -> Any:
            if not isinstance(argument, OffloadedGradient):
                return argument
            if id(argument) not in fetched:
                value = vars(argument)["fetch"]()
                fetched[id(argument)] = (argument, value, value._version)
            return fetched[id(argument)][1]

        args, kwargs = pytree.tree_map(value_of, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for shown, value, version in fetched.values():
            if value._version != version:
                vars(shown)["write"](value)
            see = functools.partial(_see_through, shown, value)
            result = pytree.tree_map_only(torch.Tensor, see, result)
        return result


def _see_through(shown: OffloadedGradient, value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result that is the fetched value, or a view of it, shows the gradient too: writes to it must not be lost."""
    if result is value:
        return shown
    if result.layout is not torch.strided or not result.numel():
        return result
    if result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return result
    if result.dtype is not value.dtype:
        raise OffloadError("a gradient in host memory cannot be viewed in another type; clone() it first")
    layout = result.size(), result.stride(), result.storage_offset()
    fetch_whole, write_whole = vars(shown)["fetch"], vars(shown)["write"]

    def fetch() -> torch.Tensor:
        part: torch.Tensor = fetch_whole().as_strided(*layout)
        return part

    def write(part: torch.Tensor) -> None:
        whole = fetch_whole()
        whole.as_strided(*layout).copy_(part)
        write_whole(whole)

    view = result.detach().as_subclass(OffloadedGradient)
    view.fetch, view.write = fetch, write
    return view


class WaitingGradients:
    """One gradient plane per unit, for the whole step: `p.grad` shows it."""

    def __init__(
        self,
        partition: Partition,
        grad_itemsize: int,
        memory: Sequence[torch.Tensor],
        landing: Landing,
        *,
        device: torch.device | None = None,
        on_device: Collection[int] = (),
    ) -> None:
        """
        Args:
            memory: for each unit's plane, as bytes.
            device: the accelerator that makes the gradients, where that is not where all of them wait.
            on_device: units whose gradients wait there all the same.
        """
        self._partition, self._landing = partition, landing
        grad_dtype = GRAD_DTYPES[grad_itemsize]
        self.planes = [piece.view(grad_dtype).zero_() for piece in memory]
        self._shown: dict[StoredParam, torch.Tensor] = {}
        self._offloaded: set[StoredParam] = set()
        self._adding: set[StoredParam] = set()  # another gradient is to be added to what is there
        for stored in partition.trainable:
            view = stored.view_elements(self.planes[stored.unit])
            if view.dtype != stored.dtype:
                allow_grad_dtype(stored, view.dtype)
            if device is not None and stored.unit not in on_device:
                self._offloaded.add(stored)
                view = self._show_offloaded(stored, view, device)
            self._shown[stored] = view

    def is_offloaded(self, stored: StoredParam) -> bool:
        """Whether :meth:`before_accumulation` must be called."""
        return stored in self._offloaded

    def before_accumulation(self, stored: StoredParam) -> None:
        """Autograd is about to add to ``p.grad``, which is not the true value: it must not."""
        if stored.param.grad is self._shown[stored]:
            self._adding.add(stored)
            stored.param.grad = None
        else:
            self._adding.discard(stored)

    def end_backward(self) -> None:
        """Shows the gradients again to which nothing was added: `torch.autograd.grad` gives its own away."""
        for stored in self._adding:
            if stored.param.grad is None:
                stored.param.grad = self._shown[stored]
        self._adding.clear()

    def take(self, stored: StoredParam) -> None:
        """Moves the gradient that autograd has just made into the plane; sums made in place are there already."""
        shown, grad = self._shown[stored], stored.param.grad
        if grad is not shown and grad is not None:
            self._landing.land(stored, self.planes[stored.unit], grad, add=stored in self._adding)
            self._adding.discard(stored)
            stored.param.grad = shown

    def present(self, unit: int) -> list[StoredParam]:
        """The unit's parameters that have a gradient now; whatever the user has put there is in the plane."""
        present = [stored for stored in self._partition.trained[unit] if stored.param.grad is not None]
        for stored in present:
            self.take(stored)
        return present

    def scratch(self, unit: int) -> torch.Tensor:
        """Bytes for use before the first gradient, to be left zero."""
        return self.planes[unit].view(torch.uint8)

    def all_present(self) -> list[list[StoredParam]]:
        """Of each unit, the parameters that have a gradient now."""
        present = [self.present(unit) for unit in range(len(self.planes))]
        self._landing.settle()
        return present

    def waiting(self) -> Iterator[tuple[StoredParam, torch.Tensor]]:
        """Every parameter that has a gradient now, and the gradient where it waits."""
        for params in self.all_present():
            for stored in params:
                yield stored, stored.view_elements(self.planes[stored.unit])

    def replace(self, gradient: Callable[[StoredParam], torch.Tensor | None]) -> None:
        """Makes what ``gradient`` gives for each parameter the gradients that wait, and no others."""
        self._landing.settle()
        self._adding.clear()
        for stored, shown in self._shown.items():
            value = gradient(stored)
            if value is not None:
                stored.view_elements(self.planes[stored.unit]).copy_(value)
            stored.param.grad = None if value is None else shown

    def norm(self, present: Sequence[list[StoredParam]]) -> float:
        """Global norm of the gradients that are there: one order of additions, whatever the tiers."""
        pieces: list[torch.Tensor] = []
        for unit, params in enumerate(present):
            whole = len(params) == len(self._partition.trained[unit])
            pieces.extend(pieces_of(self.planes[unit], params, whole=whole))
        squares = block_square_sums(pieces)
        return math.sqrt(math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan)

    def poll(self) -> None:
        """Moves on what can move without waiting."""
        self._landing.poll()

    def explain_not_finite(self, present: Sequence[list[StoredParam]], *, may_be_absent: bool) -> str:
        """As :func:`explain_not_finite`, of all that are present."""
        planes = zip(present, self.planes, strict=True)
        grads = ((stored, stored.view_elements(plane)) for params, plane in planes for stored in params)
        return explain_not_finite(grads, may_be_absent=may_be_absent)

    def clip_norm(self, max_norm: float) -> float:
        """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before."""
        present = self.all_present()
        norm = self.norm(present)
        if math.isfinite(norm) and norm > max_norm:
            for params in present:
                for stored in params:
                    view = stored.view_elements(self.planes[stored.unit])
                    view.mul_(max_norm / (norm + 1e-6))
        return norm

    def close(self) -> None:
        """Detaches the gradients from the planes, so that the memory can go."""
        for stored, shown in self._shown.items():
            if stored.param.grad is shown:
                stored.param.grad = None
        self._shown.clear()
        self.planes.clear()

    def _show_offloaded(
        self, stored: StoredParam, view: torch.Tensor, device: torch.device
    ) -> OffloadedGradient:
        def fetch() -> torch.Tensor:
            self._landing.settle()
            return view.to(device, copy=True)

        def write(value: torch.Tensor) -> None:
            view.copy_(value)

        shown = absent_tensor(tuple(view.shape), view.dtype, device).as_subclass(OffloadedGradient)
        shown.fetch, shown.write = fetch, write
        return shown


class PassingGradients:
    """A few slots for gradients that are used as soon as their unit is complete."""

    def __init__(
        self,
        partition: Partition,
        grad_itemsize: int,
        slots: Sequence[Sequence[torch.Tensor]],
        landing: Landing,
        wait_for_slot: Callable[[list[int]], None],
        *,
        sums: SquareSums,
        on_device: Collection[int] = (),
    ) -> None:
        """
        Args:
            slots: bytes for gradients that wait in host memory, and for those that wait on the device.
            sums: makes their sums of squares.
            on_device: units that are updated on the device.
            wait_for_slot: called while no slot is free; returns when one may have become free.
        """
        self._partition, self._landing, self._on_device = partition, landing, on_device
        self._sums = sums
        self._slots = [[piece.view(GRAD_DTYPES[grad_itemsize]) for piece in pieces] for pieces in slots]
        self._planes: dict[int, torch.Tensor] = {}
        self._present: dict[int, list[StoredParam]] = {}
        self._wait_for_slot = wait_for_slot
        self._absent = {stored: _absent_gradient(stored) for stored in partition.trainable}
        self._zeroed: set[StoredParam] = set()  # whose gradient is zero unless backward gives one

    def scratch(self, unit: int) -> torch.Tensor:
        """Bytes for use before the first gradient, to be left zero."""
        return self._free(unit)[-1].view(torch.uint8)

    def _free(self, unit: int) -> list[torch.Tensor]:
        """The free slots where the unit's gradients would wait."""
        return self._slots[unit in self._on_device]

    @property
    def units(self) -> list[int]:
        """Units with a gradient in a slot."""
        return list(self._planes)

    def take(self, stored: StoredParam) -> None:
        """Moves the gradient that autograd has just made into its unit's slot."""
        grad = stored.param.grad
        if grad is None:
            return
        plane = self._planes.get(stored.unit)
        if plane is None:
            free = self._free(stored.unit)
            while not free:
                self._wait_for_slot([unit for unit in self.units if self._free(unit) is free])
            plane = free.pop()
            _zero_padding(plane, self._partition.units[stored.unit])
            self._planes[stored.unit] = plane
            self._present[stored.unit] = []
        present = self._present[stored.unit]
        self._landing.land(stored, plane, grad, add=stored in present)
        if stored not in present:
            present.append(stored)
        stored.param.grad = None

    def begin_step(self, updated: Collection[int]) -> None:
        """Takes note of gradients that were set to zero after the last step, and refuses those that were left.

        Args:
            updated: units that were updated in this step: there are none before its first backward.
        """
        if updated:
            return
        for stored, absent in self._absent.items():
            if stored.param.grad is not absent:
                continue
            if not absent.is_zeroed:
                raise OffloadError(
                    f"{stored.name} still has its gradient of the last step, to which this one would be added: call"
                    " optimizer.zero_grad() before backward, or set offload_optimizer.update to 'step'"
                )
            self._zeroed.add(stored)
            stored.param.grad = None

    def before_accumulation(self, stored: StoredParam) -> None:
        """Autograd is about to add to ``p.grad``: not to one that the update has used."""
        if stored.param.grad is self._absent[stored]:
            raise late_gradient(stored)

    def zeroed_units(self) -> set[int]:
        """Units with a parameter whose gradient is zero, so far."""
        return {stored.unit for stored in self._zeroed}

    def add_zeros(self, unit: int) -> None:
        """Gives those parameters of a unit their gradient of zero for which backward has given none."""
        for stored in self._partition.trained[unit]:
            if stored in self._zeroed:
                self._zeroed.discard(stored)
                if stored not in self._present.get(unit, ()):
                    stored.param.grad = torch.zeros_like(stored.absent, memory_format=torch.contiguous_format)
                    self.take(stored)

    def is_complete(self, unit: int) -> bool:
        """Whether every trained parameter of the unit has its gradient: but for those that a user has switched off
        meanwhile, as peft does with the adapters that are not active."""
        present = self._present.get(unit, ())
        return all(
            stored in present or not stored.param.requires_grad for stored in self._partition.trained[unit]
        )

    def present(self, unit: int) -> list[StoredParam]:
        """The unit's parameters that have a gradient, in the order of their planes."""
        return sorted(self._present[unit], key=lambda stored: (stored.placed.offset, stored.placed.end))

    def plane(self, unit: int) -> torch.Tensor:
        return self._planes[unit]

    def square_sums(self, unit: int) -> UnitSquares:
        """Done when all gradients that were taken for the unit are in its slot, and their sums of squares there."""
        end = max(stored.placed.end for stored in self._partition.trained[unit])  # the slot may go on
        return self._sums.start(
            self._planes[unit][:end],
            self.present(unit),
            whole=len(self._present[unit]) == len(self._partition.trained[unit]),
            arrived=self._landing.arrived(unit),
        )

    def release(self, unit: int) -> None:
        """Gives the unit's slot back and shows its gradients as absent."""
        for stored in self._present.pop(unit):
            stored.param.grad = self._absent[stored]
            self._absent[stored].is_zeroed = False
        self._free(unit).append(self._planes.pop(unit))

    def discard(self) -> None:
        """Gives all slots back; their gradients are not wanted."""
        self._landing.settle()
        for stored in self._zeroed:
            stored.param.grad = self._absent[stored]
        self._zeroed.clear()
        self._present.clear()
        for unit in list(self._planes):
            self._free(unit).append(self._planes.pop(unit))

    def clip_norm(self, max_norm: float) -> NoReturn:
        """Raises: nothing waits here to be clipped."""
        raise OffloadError(
            "gradients do not wait for step() with update 'backward': they cannot be clipped by their global norm;"
            " set offload_optimizer.update to 'step'"
        )

    def refuse_assigned(self) -> None:
        """Raises where user code has put a gradient that nothing would take up."""
        for stored in self._partition.trainable:
            grad = stored.param.grad
            if grad is not None and not isinstance(grad, AbsentGradient):
                raise OffloadError(
                    f"{stored.name}.grad has been assigned, and the update, which runs in backward, does not see"
                    " it; set offload_optimizer.update to 'step'"
                )

    def poll(self) -> None:
        """Moves on what can move without waiting."""
        self._landing.poll()

    def close(self) -> None:
        """Leaves no absent gradient behind."""
        for stored, absent in self._absent.items():
            if stored.param.grad is absent:
                stored.param.grad = None
        self._absent.clear()
        self._planes.clear()
        self._slots.clear()


def late_gradient(stored: StoredParam) -> OffloadError:
    """What is said of a gradient that comes after the update that should have had it."""
    return OffloadError(
        f"{stored.name} got a gradient after its unit was updated in this step: update 'backward'"
        " allows one backward per step() and no second use in a recomputed part;"
        " set offload_optimizer.update to 'step'"
    )


def _absent_gradient(stored: StoredParam) -> AbsentGradient:
    absent = stored.absent.detach().as_subclass(AbsentGradient)
    absent.is_zeroed = False
    return absent


def explain_not_finite(grads: Iterable[tuple[StoredParam, torch.Tensor]], *, may_be_absent: bool) -> str:
    """Which of the gradients are not finite, and what to do where an absent parameter may be the cause."""
    bad = {stored.name: grad for stored, grad in grads if not bool(grad.isfinite().all())}
    names = ", ".join(list(bad)[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    text = f"the gradient of {names} is not finite"
    if may_be_absent and any(bool(grad.isnan().all()) for grad in bad.values()):
        text += (
            " (a parameter used outside the model's forward may be absent, which reads as NaN:"
            f" {GATHER_LOSS})"
        )
    return text


def allow_grad_dtype(stored: StoredParam, dtype: torch.dtype) -> None:
    """Lets a parameter have a gradient of another type than its own.

    What autograd adds within one backward it adds in the parameter's type, as ever: "any type" casts nothing.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigError(
            f"gradients of {stored.dtype} weights in {dtype} need torch >= 2.10, this is {torch.__version__};"
            " set data_types.grad_accum_dtype to the compute type"
        )
    stored.param.grad_dtype = None


def _zero_padding(plane: torch.Tensor, params: list[StoredParam]) -> None:
    """Zeroes what lies between parameters: the slot held another unit's gradients before."""
    end = 0
    for stored in params:
        if stored.trainable:
            plane[end : stored.placed.begin].zero_()
            end = stored.placed.end
    plane[end:].zero_()
