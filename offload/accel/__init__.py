"""Compute devices with memory of their own: the only package that touches device APIs.

The rest of the engine sees streams, events and copies, and four rules (see `links`, Note [Ordering]); which
device it is does not matter. `torch_device` is CUDA, XPU and whatever else ``torch.accelerator`` knows;
`simulated` is a device in CPU memory that reports every broken rule. With a CPU as the compute device there is
no accelerator: device and host are one memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import ConfigError

ENVIRONMENT = "OFFLOAD_ACCELERATOR"
"""Overrides `accelerator` in the configuration where that says "auto"."""

native_watchers: list[Callable[[Any, bool], None]] = []
"""Called with an array that native code, kernels or file I/O, is about to read, or to write (True). For tests."""


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until the stream has passed it."""


class Stream(Protocol):
    """A queue of work on the device: in order within itself, in no order with others but through events."""

    def record(self) -> Event:
        """The point after everything queued so far."""

    def wait(self, event: Event) -> None:
        """What is queued from now on starts after the event. Does not block the calling thread."""


class Accelerator(Protocol):
    """A compute device with its own memory."""

    name: str
    device: torch.device
    """Where the model's tensors are."""

    @property
    def compute(self) -> Stream:
        """The stream on which the calling thread's operations run now."""

    def stream(self, name: str) -> Stream:
        """A new stream, for copies."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queues a copy. Both must live and stay as they are until an event behind it is done."""

    def allocate(self, size: int) -> torch.Tensor:
        """Device memory: uint8, of undefined content, with a storage of its own."""

    def forget(self, memory: torch.Tensor) -> None:
        """The content of allocated memory is worth nothing from now on."""

    def register(self, slab: torch.Tensor) -> None:
        """Pins host memory (uint8), so that copies of it run beside everything else.

        Raises:
            OffloadError: the system refuses; the message has its reason.
        """

    def unregister(self, slab: torch.Tensor) -> None:
        """Ends what :meth:`register` began."""

    def memory(self) -> tuple[int, int]:
        """Bytes that can be allocated on the device, and bytes in all."""

    def peak_bytes(self) -> int:
        """The most bytes of device memory in use at once until now, by tensors of this process."""

    def random_state(self) -> torch.Tensor | None:
        """Of the device's generator of random numbers (uint8, in host memory); None where it is torch's of the CPU."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Makes the generator go on from what :meth:`random_state` gave.

        Raises:
            RuntimeError, TypeError: it is none of this kind of device.
        """

    def close(self) -> None:
        """Waits until every stream is empty. Idempotent."""


def open_accelerator(setting: str) -> Accelerator | None:
    """The compute device that ``accelerator`` in the configuration names; None is the CPU.

    Args:
        setting: "auto" takes what torch finds, "cpu" nothing; "cuda", "cuda:1", "xpu" that device;
            "simulated" or "simulated:SEED" the one for tests.

    Raises:
        ConfigError: there is no such device here.
    """
    if setting == "auto":
        setting = os.environ.get(ENVIRONMENT) or "auto"
    kind, _, argument = setting.partition(":")
    if kind == "cpu":
        return None
    if kind == "simulated":
        from .simulated import SimulatedAccelerator

        return SimulatedAccelerator(seed=int(argument or 0))
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind == "auto":
        if found is None:
            return None
        setting, kind = found.type, found.type
    if found is None or found.type != kind:
        here = "only the CPU" if found is None else f"{found.type!r}"
        raise ConfigError(
            f"accelerator {setting!r}: torch finds {here} here; set it to 'auto' or 'cpu', or plan for"
            " a device elsewhere with its memory.device_bytes"
        )
    count = torch.accelerator.device_count()
    if argument and int(argument) >= count:
        raise ConfigError(f"accelerator {setting!r}: there are {count} here, numbered from 0")
    from .torch_device import TorchAccelerator

    return TorchAccelerator(torch.device(setting))
