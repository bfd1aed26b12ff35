"""Devices that torch has streams and events for: CUDA first, XPU and others through the same calls."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch

from ..errors import OffloadError
from . import Event, Stream


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
    """A device of ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        if ":" not in str(device):
            device = torch.device(device.type, getattr(torch, device.type).current_device())
        self.device, self.name = device, str(device)
        self._api: ModuleType = getattr(torch, device.type)  # what torch.accelerator does not have everywhere
        self._streams: list[TorchStream] = []

    @property
    def compute(self) -> TorchStream:
        return TorchStream(torch.accelerator.current_stream(self.device))

    def stream(self, name: str) -> TorchStream:
        stream = TorchStream(torch.Stream(device=self.device))
        self._streams.append(stream)
        return stream

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
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
        error = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
        self._check("cudaHostRegister", error)

    def unregister(self, slab: torch.Tensor) -> None:
        error = torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
        self._check("cudaHostUnregister", error)

    def memory(self) -> tuple[int, int]:
        free, total = self._api.mem_get_info(self.device)
        return int(free), int(total)

    def peak_bytes(self) -> int:
        return int(self._api.max_memory_allocated(self.device))

    def close(self) -> None:
        for stream in self._streams:
            stream.raw.synchronize()
        self._streams.clear()

    def _check(self, call: str, error: Any) -> None:
        if int(error) != 0:
            raise OffloadError(f"{call}: {torch.cuda.cudart().cudaGetErrorString(error)} ({int(error)})")
