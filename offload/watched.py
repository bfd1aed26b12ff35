"""Parameters that torch asks us about before it looks at them: their value is true, or there is an error.

Note [Watched parameters]
Between uses a streamed parameter is of a class made here from its own, which differs in `__torch_function__` only:
torch asks it before every function, method and attribute that is given the parameter. What needs no value is
answered (shape, type, gradient), what would write is refused by name, and for everything else the parameter is made
present for the call. While a forward of the engine's model uses it, it has its own class: computing costs nothing
more, and compilers see ordinary parameters. What goes past torch's functions (`torch.tensor(p)`, a transform of
torch.func or a TorchScript function applied to `p` itself, foreign C++) finds the marker of an absent parameter: NaN.
"""

from __future__ import annotations

import functools
import sys
import types
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from .errors import OffloadError

_KEY = "_offload_watcher"


class Watcher(Protocol):
    """Who knows where the value of a watched parameter is."""

    @property
    def name(self) -> str: ...

    def reading(self) -> AbstractContextManager[object]:
        """Makes the parameter present, and of its own class, until closed. OffloadError where that cannot be."""


def watch(param: nn.Parameter, watcher: Watcher) -> None:
    """From now on torch asks ``watcher`` before anybody reads the parameter. Nothing is asked of an empty one."""
    if not isinstance(param, Watched) and param.shape.numel():
        param.__dict__[_KEY] = watcher
        param.__class__ = _watched_type(type(param))


def unwatch(param: nn.Parameter) -> None:
    """The parameter is of its own class again. Idempotent."""
    if isinstance(param, Watched):
        param.__class__ = type(param).__bases__[1]
        del param.__dict__[_KEY]


def own_attributes(param: nn.Parameter) -> dict[str, Any]:
    """What users have hung on a parameter."""
    return {key: value for key, value in param.__dict__.items() if key != _KEY}


class Watched:
    """First base of the class of a watched parameter. See Note [Watched parameters]."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DESCRIPTIONS or (func is _DETACH and sys._getframe(1).f_code is _SAVING):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CONVERSIONS:
            with torch._C.DisableTorchFunctionSubclass():
                same = func(*args, **kwargs)
            if same is args[0] or isinstance(same, str):
                return same
        if func == _SET_DATA and args[0] is args[1]:
            return None
        _refuse_writes(func, args, kwargs)
        if func is torch.autograd.grad:  # of watched parameters it asks for gradients only
            args, kwargs = pytree.tree_map(_gradient_edge, (args, kwargs))
        params = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Watched)]
        with ExitStack() as stack:
            for param in dict.fromkeys(params):
                stack.enter_context(vars(param)[_KEY].reading())
            if func == _GET_DATA:  # with the version counter of the parameter, so that writes are found
                return args[0].detach()
            return func(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Torch asks nobody before this one."""
        with vars(self)[_KEY].reading():
            return torch.Tensor.as_subclass(self, cls)  # type: ignore[arg-type]


@functools.cache
def _watched_type(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Its name is that of ``kind``: quantisation libraries ask for it."""
    made: type[nn.Parameter] = types.new_class(kind.__name__, (Watched, kind))
    return made


_GET_DATA: Any = getattr(torch.Tensor, "data").__get__  # noqa: B009
_SET_DATA: Any = getattr(torch.Tensor, "data").__set__  # noqa: B009
_DETACH = torch.Tensor.detach
_SAVING = nn.Module._save_to_state_dict.__code__
"""Where torch collects a state dict: our hook puts the true value there next, or says that it is gone."""

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "is_cuda", "is_cpu", "is_xpu",
    "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "is_leaf", "grad_fn",
    "output_nr", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad",
)  # fmt: skip
_SETTINGS = ("grad", "_grad", "requires_grad", "grad_dtype")
_METHODS = (
    "dim", "ndimension", "size", "numel", "nelement", "element_size", "get_device", "__len__", "is_floating_point",
    "is_complex", "is_signed", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "requires_grad_", "_is_view", "_use_count", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    "is_same_size", "__dir__",
)  # fmt: skip
_FUNCTIONS = (
    "numel", "is_floating_point", "is_complex", "is_same_size", "result_type", "empty_like", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "_has_compatible_shallow_copy_type",
)  # fmt: skip


def _descriptions() -> set[Any]:
    found = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)}
    for name in _SETTINGS:
        if (setting := getattr(torch.Tensor, name, None)) is not None:
            found |= {setting.__get__, setting.__set__, setting.__delete__}
    found |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    return found | {getattr(torch, name) for name in _FUNCTIONS}


DESCRIPTIONS = _descriptions()
"""What can be asked of a parameter, or set, without its value."""

_CONVERSIONS = {
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")
}
"""What often changes nothing: ``model.to(device)``."""


def _gradient_edge(value: Any) -> Any:
    """Where the gradient of a watched parameter arrives; anything else as it is."""
    if not isinstance(value, Watched):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(value)  # type: ignore[arg-type]


def _refuse_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises where ``func`` would write to a watched parameter, whose slot may be another unit's a moment later."""
    name = getattr(func, "__name__", str(func))
    written: Any = [kwargs.get("out")]
    if func == _SET_DATA or name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        written = args[:1] or list(kwargs.values())[:1]
    for leaf in pytree.tree_leaves(written):
        if not isinstance(leaf, Watched):
            continue
        whose = vars(leaf)[_KEY].name
        if func == _SET_DATA:
            raise OffloadError(
                f"{whose}.data is assigned, which the engine's weights do not follow; write inside"
                " `with offload.gather(parameters, modify=True)`, and resize parameters before offload.prepare"
            )
        raise OffloadError(
            f"{whose} would be written to by {name}() in a slot that it may leave, and the write be lost;"
            " write inside `with offload.gather(parameters, modify=True)`"
        )


_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
           "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setstate__"}  # fmt: skip
