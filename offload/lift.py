"""Brings weights from host memory to the device that computes with them, and says when that must be done anew.

Every slot has a device half. It is *fresh* while it equals the host bytes of the unit in the slot; a fetch of
another unit makes all of it stale, an update only the trained part, which lies at the front: frozen weights stay.
A lift makes it fresh again. When one starts depends on the trace only (`Mover.use`), so the bytes on the link can
be predicted.
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
        self._stale = [half.numel() for half in halves]  # bytes at the front that differ from the host's
        now = accelerator.compute.record()
        self._idle: list[Event] = [now] * len(halves)
        self._arrival: list[Event] = [now] * len(halves)
        self._changing: set[int] = set()

    def start(self, slot: int, unit: int, *, is_read: bool = False) -> None:
        """Starts to make the half fresh, if it is not.

        Args:
            is_read: compute may have read the half since it became stale.
        """
        if not self._stale[slot]:
            return
        is_changing = unit in self._changing
        if is_changing and self._stale[slot] < self.halves[slot].numel():
            return  # backward may still need the frozen part, which is fresh
        if is_read:
            self._idle[slot] = self._accelerator.compute.record()
        host = self._host_bytes(unit, slot)[: self._stale[slot]]
        half = self.halves[slot][: host.numel()]
        self._arrival[slot] = self._links.to_device(
            half, host, [("weight", host.numel())], idle=self._idle[slot]
        )
        self._stale[slot] = 0
        if is_changing:
            self._arrival[slot].wait()

    def show(self, slot: int, unit: int, *, is_read: bool) -> None:
        """Makes the half fresh for what compute is asked from now on."""
        self.start(slot, unit, is_read=is_read)
        self._accelerator.compute.wait(self._arrival[slot])

    def begin_change(self, slot: int | None, unit: int) -> None:
        """Waits until no copy reads the unit's host bytes: they may change, until :meth:`end_change`."""
        self._changing.add(unit)
        if slot is not None:
            self._arrival[slot].wait()

    def end_change(self, unit: int) -> None:
        """The unit's host bytes do not change any more. Idempotent."""
        self._changing.discard(unit)

    def settle(self, slot: int) -> None:
        """Waits until no copy reads the host bytes."""
        self._arrival[slot].wait()

    def spoil(self, slot: int, size: int | None = None) -> None:
        """The first ``size`` host bytes, or all, differ from the half's, at which nobody looks any more."""
        size = self.halves[slot].numel() if size is None else size
        if self._stale[slot] < size:
            self._idle[slot] = self._accelerator.compute.record()
            self._stale[slot] = size
            self._accelerator.forget(self.halves[slot][:size])

    def close(self) -> None:
        """Gives the halves up; no lift is in flight."""
        self.halves.clear()
