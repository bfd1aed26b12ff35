"""Brings weights from host memory to the device that computes with them, and says when that must be done anew.

Every slot has a device half. It is *fresh* while it equals the host bytes of the unit in the slot; a fetch of
another unit or an update of this one makes it stale, and a lift makes it fresh again. When a lift starts depends
on the trace only (`Mover.use`), so the bytes on the link can be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .accel import Accelerator, Event
from .links import DeviceLinks


class Lifts:
    """The device halves of all slots. See `links`, Note [Ordering]."""

    def __init__(
        self,
        accelerator: Accelerator,
        links: DeviceLinks,
        halves: Sequence[torch.Tensor],
        host_bytes: Callable[[int, int], torch.Tensor],
    ) -> None:
        """
        Args:
            halves: device memory, uint8, one per slot.
            host_bytes: the weight plane of a unit (its number and its slot's) in host memory.
        """
        self.halves = [*halves]
        self._accelerator, self._links, self._host_bytes = accelerator, links, host_bytes
        self._idle: list[Event] = [accelerator.compute.record() for _ in halves]
        self._arrival: list[Event | None] = [None] * len(halves)  # None: stale

    def start(self, slot: int, unit: int) -> None:
        """Starts to make the half fresh, if it is not."""
        if self._arrival[slot] is None:
            host = self._host_bytes(unit, slot)
            half = self.halves[slot][: host.numel()]
            self._arrival[slot] = self._links.to_device(
                half, host, [("weight", host.numel())], idle=self._idle[slot]
            )

    def show(self, slot: int, unit: int) -> torch.Tensor:
        """The half, for compute: what is issued from now on finds it fresh."""
        self.start(slot, unit)
        arrival = self._arrival[slot]
        if arrival is None:
            raise AssertionError(f"unit {unit} has not been lifted")
        self._accelerator.compute.wait(arrival)
        return self.halves[slot]

    def settle(self, slot: int) -> None:
        """Waits until no copy reads the host bytes: they may change then."""
        arrival = self._arrival[slot]
        if arrival is not None:
            arrival.wait()

    def spoil(self, slot: int) -> None:
        """The host bytes differ from the half from now on, and nobody looks at the half any more."""
        if self._arrival[slot] is not None:
            self._arrival[slot] = None
            self._idle[slot] = self._accelerator.compute.record()
            self._accelerator.forget(self.halves[slot])

    def close(self) -> None:
        """Gives the halves up; no lift is in flight."""
        self.halves.clear()

    def has_changed(self, slot: int) -> None:
        """The half has been updated by compute, and its host bytes follow: both stay equal."""
        self._arrival[slot] = self._accelerator.compute.record()
