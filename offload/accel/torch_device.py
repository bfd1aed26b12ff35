"""Devices that torch has streams and events for: CUDA first, XPU and others through the same calls."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any, cast

import torch

from ..errors import OffloadError
from . import Event, Stream

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, whichever is the current one."""


class TorchEvent:
    """A recorded ``torch.Event``."""

    def __init__(self, event: torch.Event) -> None:
        self.raw = event

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()


class TorchStream:
    """A ``torch.Stream``."""

    def __init__(self, stream: torch.Stream) -> None:
        self.raw = stream

    def record(self) -> TorchEvent:
        return TorchEvent(self.raw.record_event())

    def wait(self, event: Event) -> None:
        self.raw.wait_event(cast(TorchEvent, event).raw)


class TorchAccelerator:
    """A device of ``torch.accelerator``.

    Which stream is the current one is a matter of the calling thread: forward runs in the user's, backward in
    autograd's thread of the device, where torch makes the stream of the forward operation the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._api: ModuleType = getattr(torch, device.type)  # what torch.accelerator does not have everywhere
        current = self._api.current_device()  # also where the index is given: it starts the device
        self.device = torch.device(device.type, current if device.index is None else device.index)
        self.name = str(self.device)
        self._streams: list[TorchStream] = []

    @property
    def compute(self) -> TorchStream:
        return TorchStream(torch.accelerator.current_stream(self.device))

    def stream(self, name: str) -> TorchStream:
        stream = TorchStream(torch.Stream(device=self.device))
        self._streams.append(stream)
        return stream

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with self._api.device(self.device):  # set_stream() makes the stream's device the current one
            before = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(cast(TorchStream, stream).raw)
            try:
                destination.copy_(source, non_blocking=True)
            finally:
                torch.accelerator.set_stream(before)

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def forget(self, memory: torch.Tensor) -> None:
        return None

    def register(self, slab: torch.Tensor) -> None:
        if self.device.type != "cuda":
            raise OffloadError(f"torch has no call to pin existing host memory for {self.device.type}")
        error = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), _PORTABLE)
        self._check("cudaHostRegister", error)

    def unregister(self, slab: torch.Tensor) -> None:
        self._check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))

    def memory(self) -> tuple[int, int]:
        free, total = self._api.mem_get_info(self.device)
        cached = self._api.memory_reserved(self.device) - self._api.memory_allocated(self.device)
        return int(free) + int(cached), int(total)

    def peak_bytes(self) -> int:
        return int(self._api.max_memory_allocated(self.device))

    def random_state(self) -> torch.Tensor:
        state: torch.Tensor = self._api.get_rng_state(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._api.set_rng_state(state, self.device)

    def close(self) -> None:
        """Waits for the whole device: memory that is freed next may be given to any stream."""
        self._streams.clear()
        self._api.synchronize(self.device)

    def _check(self, call: str, error: Any) -> None:
        if int(error) == 0:
            return
        # The runtime remembers the refusal, and torch would blame the next kernel for it: so one is started here.
        with self._api.device(self.device), contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        raise OffloadError(f"{call}: {torch.cuda.cudart().cudaGetErrorString(error)} ({int(error)})")
