"""Building a model that does not fit: parameters go to disk while the model is still being constructed.

Note [Construction]
Inside `offload.init`, constructors run as ever, with their own initialisers on real fp32 tensors and the
same random numbers. Only so many bytes of parameters stay in memory: the ones touched least recently are
written to a swap file and become absent. Reading a parameter as an attribute, or going through
`parameters()`, brings it back, so code that initialises the whole model once more at the end of a
constructor works. `prepare` then takes each value from where it is, once.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.weak import WeakTensorKeyDictionary

from . import lifetime
from .aio import Queue
from .bytesize import PAGE_BYTES, align_up
from .config.schema import Aio
from .errors import OffloadError
from .links import buffer_of
from .partition import absent_tensor
from .store.directory import SwapDirectory

FILE_NAME = "construction.swap"

# Where the values of parameters are that are not in the parameters themselves: read once, by `prepare`.
_sources = WeakTensorKeyDictionary()
_pager_of = WeakTensorKeyDictionary()


def set_source(param: nn.Parameter, read: Callable[[], torch.Tensor]) -> None:
    """Says where the value of an absent parameter comes from."""
    _sources[param] = read


def initial_value(param: nn.Parameter) -> torch.Tensor:
    """The value of a parameter that may be absent."""
    read = _sources.get(param)
    value: torch.Tensor = param.detach() if read is None else read()
    return value


def fill_later(model: nn.Module, read: Callable[[str], torch.Tensor]) -> None:
    """Replaces the meta parameters of a model by absent ones, whose values `prepare` will read by name."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in replaced:
                absent = nn.Parameter(absent_tensor(tuple(param.shape), param.dtype), param.requires_grad)
                absent.__dict__.update(param.__dict__)
                set_source(absent, functools.partial(read, f"{prefix}.{name}" if prefix else name))
                replaced[param] = absent
            module._parameters[name] = replaced[param]


def make_ordinary(model: nn.Module) -> None:
    """Modules built inside `offload.init` become ordinary ones: looking at a parameter moves nothing any more."""
    for module in model.modules():
        if isinstance(module._parameters, _PagedParameters):
            module.__dict__["_parameters"] = dict(module._parameters.items_unread())


def forget_sources(model: nn.Module) -> None:
    """The values of a model have been taken over: forgets where they came from."""
    params = list(model.parameters())
    pagers = {id(pager): pager for param in params if (pager := _pager_of.pop(param, None))}
    for param in params:
        _sources.pop(param, None)
    for pager in pagers.values():
        pager.forget(params)


class _PagedParameters(dict[str, Any]):
    """A module's parameters; every way of reading one brings it back."""

    def __init__(self, params: dict[str, Any], bring_back: Callable[[nn.Parameter], None]) -> None:
        super().__init__(params)
        self._bring_back = bring_back

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._bring_back(param)
        return param

    def items(self) -> Any:
        return _PagedItems(self)

    def items_unread(self) -> ItemsView[str, Any]:
        """The items as they are, absent ones included."""
        return super().items()


class _PagedItems(ItemsView[str, Any]):
    def __init__(self, params: _PagedParameters) -> None:
        super().__init__(params)
        self._params = params

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in list(self._params):
            yield name, self._params[name]


class _Page:
    """One parameter's place in the swap file, once it has one."""

    __slots__ = ("dtype", "offset", "resident", "shape", "size")

    def __init__(self, param: nn.Parameter) -> None:
        self.shape, self.dtype = tuple(param.shape), param.dtype
        self.size = param.numel() * param.element_size()
        self.offset: int | None = None
        self.resident = True


class ConstructionPager:
    """Keeps few parameters in memory while a model is built. See Note [Construction]."""

    def __init__(self, nvme_path: str, aio: Aio, *, live_bytes_max: int) -> None:
        self._live_bytes_max = live_bytes_max
        self._pages: OrderedDict[nn.Parameter, _Page] = OrderedDict()  # the least recently touched first
        self._live_bytes = 0
        self._end = 0
        self._hook: Any = None
        self._directory = SwapDirectory(nvme_path)
        try:
            self._queue = Queue(
                self._directory.path / FILE_NAME, backend=aio.backend, direct_io=aio.direct_io
            )
        except BaseException:
            self._directory.close()
            raise
        lifetime.register(self)

    def __enter__(self) -> ConstructionPager:
        self._hook = nn_module.register_module_parameter_registration_hook(self._registered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if kind is not None:
            self.close()

    def forget(self, params: Iterable[nn.Parameter]) -> None:
        """The values of these parameters have been taken; the file goes with the last."""
        for param in params:
            self._pages.pop(param, None)
        if not self._pages:
            self.close()

    def close(self) -> None:
        """Removes the file; what is only there is lost. Idempotent."""
        self._pages.clear()
        self._queue.close()
        self._directory.close()
        lifetime.forget(self)

    # -- pages --------------------------------------------------------------------------------------------

    def _registered(self, module: nn.Module, _name: str, param: Any) -> None:
        if param is None or param.device.type != "cpu":
            return
        if not isinstance(module._parameters, _PagedParameters):
            module.__dict__["_parameters"] = _PagedParameters(module._parameters, self._bring_back)
        if param not in self._pages:
            page = _Page(param)
            self._pages[param] = page
            self._live_bytes += page.size
            set_source(param, functools.partial(self._value, param))
            _pager_of[param] = self
        self._spill(keep=param)

    def _bring_back(self, param: nn.Parameter) -> None:
        page = self._pages.get(param)
        if page is None:
            return
        self._pages.move_to_end(param)
        if not page.resident:
            param.data = self._read(page)
            page.resident = True
            self._live_bytes += page.size
            self._spill(keep=param)

    def _value(self, param: nn.Parameter) -> torch.Tensor:
        page = self._pages.get(param)
        return param.detach() if page is None or page.resident else self._read(page)

    def _spill(self, *, keep: nn.Parameter) -> None:
        """Writes out what was touched least recently; never the parameter that is being worked on."""
        while self._live_bytes > self._live_bytes_max:
            victim = next((p for p, page in self._pages.items() if page.resident and p is not keep), None)
            if victim is None:
                return
            page = self._pages[victim]
            if page.offset is None:
                page.offset = self._end
                self._end += align_up(page.size, PAGE_BYTES)
                self._directory.check_space(page.size)
            data = victim.detach().contiguous()
            if data.dtype is not page.dtype or tuple(data.shape) != page.shape:
                raise OffloadError(
                    f"a parameter of shape {page.shape} became {tuple(data.shape)} while the model was built"
                    " inside offload.init; build this model without it"
                )
            if page.size:
                self._queue.write(buffer_of(data), page.offset).wait()
            victim.data = absent_tensor(page.shape, page.dtype)
            page.resident = False
            self._live_bytes -= page.size

    def _read(self, page: _Page) -> torch.Tensor:
        value = torch.empty(page.shape, dtype=page.dtype)
        if page.size and page.offset is not None:
            self._queue.read(buffer_of(value), page.offset).wait()
        return value
