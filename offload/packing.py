"""Weights that autograd saves: packed as their place in a slot, so that no graph holds a slot.

Note [Saved tensors]
Our pack hook is active during every forward of the engine's model, and while a parameter is read outside of one. Where
others have hooks of their own (a checkpoint, which saves nothing and runs the block again in backward; `save_on_cpu`)
ours is asked first, in the forward and when it runs again, and gives theirs what is no weight. A checkpoint counts
what is saved, and runs the block again up to the last of it: it is given a marker for each weight, or whatever the
block does between its last two saved tensors (to a buffer) would be done another number of times than in plain
PyTorch. All other tensors are saved as they are, with their version, because torch's check for in-place changes does
not see packed ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch._C._functorch import is_functorch_wrapped_tensor

from .apart import Apart, left_alone
from .engine import OffloadEngine
from .errors import OffloadError
from .partition import absent_tensor


class _PackedWeight:
    """A saved view of a weight: where it lies in the weight plane of which unit, and of which version.

    The version of a frozen weight is None: an update of an adapter beside it does not change it.
    """

    __slots__ = ("counted_as", "dtype", "offset", "size", "stride", "unit", "version")

    def __init__(self, unit: int, version: int | None, tensor: torch.Tensor, counted_as: Any) -> None:
        """
        Args:
            counted_as: what a checkpoint has given for the weight's marker; None where there is none.
        """
        self.unit, self.version, self.counted_as = unit, version, counted_as
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class Saving:
    """Our saved-tensor hooks, active until closed."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        self._hooks = hooks
        hooks.__enter__()

    def close(self) -> None:
        """Takes them off, also from below others that have been activated since."""
        above = []
        while (top := _top_saving()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if top[0] is self._hooks.pack_hook:
                break
            above.append(top)
        for pack, unpack in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class Packing:
    """Packs the weights of an engine. See Note [Saved tensors]."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    def begin(self) -> Saving | None:
        """Activates our hooks, unless they are."""
        outer = _top_saving()
        return None if getattr(outer and outer[0], "owner", None) is self else self._begin(outer)

    def begin_alone(self) -> Saving | None:
        """Activates our hooks where nobody has any."""
        return self._begin(None) if torch.is_grad_enabled() and _top_saving() is None else None

    def _begin(self, outer: Any) -> Saving | None:
        if not self._engine.weights.streamed:
            return None
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return None  # inside a transform of torch.func
        pack_other, unpack_other = outer if outer is not None else (_pack_versioned, _unpack_versioned)
        is_counted = getattr(
            pack_other, "is_counted", pack_other.__module__ == torch.utils.checkpoint.__name__
        )

        @left_alone
        def pack(tensor: torch.Tensor) -> Any:
            unit = self._engine.weights.unit_at(tensor) if _has_memory(tensor) else None
            if unit is None:
                return pack_other(tensor)
            layout = self._engine.plan.inventory.units[unit]
            frozen_begin = layout.elements * self._engine.plan.inventory.weight_itemsize
            is_frozen = tensor.storage_offset() * tensor.element_size() >= frozen_begin
            version = None if is_frozen else self._engine.version(unit)
            counted_as = pack_other(_marker_of(tensor, version)) if is_counted else None
            return _PackedWeight(unit, version, tensor, counted_as)

        @left_alone
        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, _PackedWeight):
                version = packed.version
                if is_counted:  # runs the block again, where that has not been done: with the weights of now
                    again: Any = unpack_other(packed.counted_as)
                    version = again.version
                with Apart():
                    return self._unpack_weight(packed, version)
            tensor: torch.Tensor = unpack_other(packed)
            return tensor

        pack.owner, pack.is_counted = self, is_counted  # type: ignore[attr-defined]
        return Saving(torch.autograd.graph.saved_tensors_hooks(pack, unpack))

    def _unpack_weight(self, packed: _PackedWeight, version: int | None) -> torch.Tensor:
        engine = self._engine
        if version is not None and engine.version(packed.unit) != version:
            raise OffloadError(
                f"weights of {engine.plan.inventory.units[packed.unit].name} were updated between a forward and"
                " its backward; call backward before step(), and set offload_optimizer.update to 'step' where a"
                " weight is used again after its gradient is complete"
            )
        engine.use(packed.unit)
        plane = engine.weights.seen(packed.unit)
        return plane.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


def _top_saving() -> Any:
    """The saved-tensor hooks that are asked now: a pair, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies somewhere: a wrapper of torch.func's does not, nor do the zeros of a tangent."""
    return not (is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor())


def _marker_of(tensor: torch.Tensor, version: int | None) -> torch.Tensor:
    """What looks like a weight to a checkpoint, and keeps no slot."""
    with Apart():
        marker = absent_tensor(tuple(tensor.shape), tensor.dtype, tensor.device)
    marker.version = version  # type: ignore[attr-defined]
    return marker


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
