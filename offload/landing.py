"""Brings gradients from where autograd has made them into the planes where they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .ledger import Ledger
from .links import DeviceLinks, DoneTicket, Ticket
from .partition import StoredParam


class Landing(Protocol):
    """How a gradient gets into its plane."""

    def land(self, stored: StoredParam, plane: torch.Tensor, grad: torch.Tensor, *, add: bool) -> None:
        """Writes ``grad`` into the parameter's elements of its unit's gradient plane, or adds it to them."""

    def arrived(self, unit: int) -> Ticket:
        """Done when everything landed for the unit is in its plane."""

    def settle(self) -> None:
        """Waits until everything landed is in its plane."""

    def poll(self) -> None:
        """Moves on what can move without waiting."""


class LocalLanding:
    """Gradients are made in the memory where they wait."""

    def land(self, stored: StoredParam, plane: torch.Tensor, grad: torch.Tensor, *, add: bool) -> None:
        view = stored.view_elements(plane)
        if add:
            view.add_(grad)
        else:
            view.copy_(grad)

    def arrived(self, unit: int) -> Ticket:
        return DoneTicket()

    def settle(self) -> None:
        return None

    def poll(self) -> None:
        return None


@dataclass(eq=False)
class _Crossing:
    """One piece of a gradient on its way to host memory; the last piece stands for the gradient's memory."""

    stored: StoredParam
    source: torch.Tensor | None
    """Until it has been sent; then the ticket keeps it."""
    to: torch.Tensor
    staging: torch.Tensor | None = None
    """The buffer where it arrives; None where that is ``to`` itself."""
    arrived: torch.Tensor | None = None
    """Its part of the buffer."""
    add: bool = False
    frees: int = 0
    """Bytes of device memory that are free once it has arrived."""
    ticket: Ticket | None = None
    """None until it has been sent, and for ever where Ctrl-C has come meanwhile."""


class CrossingLanding:
    """Gradients are made on an accelerator, in the compute type, and wait in host memory, but for those that stay.

    The first gradient of a step goes straight into the plane where the types are equal; what is widened or added
    to what is there arrives in a staging buffer first. Pieces arrive in the order in which they were sent, so sums
    have one order of additions, whatever is slow.

    A gradient takes device memory until it has arrived, so only so many are on their way at once: the host waits
    for the oldest before it sends another, and so makes no more.
    """

    def __init__(
        self,
        links: DeviceLinks,
        staging: Sequence[torch.Tensor],
        ledger: Ledger,
        *,
        bytes_max: int,
        stay: Collection[int] = (),
    ) -> None:
        """
        Args:
            staging: pinned buffers of one size (uint8).
            bytes_max: device memory for gradients on their way.
            stay: units whose gradients wait on the accelerator.
        """
        self._stay, self._local = stay, LocalLanding()
        self._links, self._ledger = links, ledger
        self._staging = staging
        self._staging_bytes = staging[0].numel() if staging else 0
        self._bytes_max = bytes_max
        self._crossing: deque[_Crossing] = deque()

    def land(self, stored: StoredParam, plane: torch.Tensor, grad: torch.Tensor, *, add: bool) -> None:
        if stored.unit in self._stay:
            self._local.land(stored, plane, grad, add=add)
            return
        begin, end = stored.placed.begin, stored.placed.end
        flat = _in_plane_order(stored, grad)
        self._make_way(flat.nbytes)
        if not add and grad.dtype == plane.dtype:
            while any(crossing.stored is stored for crossing in self._crossing):
                self._wait_for_oldest()  # of a gradient that user code has thrown away since
            self._send(_Crossing(stored, flat, plane[begin:end], frees=flat.nbytes), flat)
            return
        elements = self._staging_bytes // grad.element_size()
        for first in range(0, flat.numel(), elements):
            piece = flat[first : first + elements]
            while (staging := self._free_staging()) is None:
                self._stall_for_oldest()
            to = plane[begin + first : begin + first + piece.numel()]
            arrived = staging[: piece.nbytes].view(piece.dtype)
            frees = flat.nbytes if first + elements >= flat.numel() else 0
            self._send(_Crossing(stored, piece, to, staging, arrived, add, frees), piece)

    def arrived(self, unit: int) -> Ticket:
        return _Arrival(self, unit)

    def is_complete(self, unit: int) -> bool:
        return all(crossing.stored.unit != unit for crossing in self._crossing)

    def settle(self) -> None:
        while self._crossing:
            self._wait_for_oldest()

    def settle_unit(self, unit: int) -> None:
        while not self.is_complete(unit):
            self._wait_for_oldest()

    def poll(self) -> None:
        while self._crossing and (ticket := self._crossing[0].ticket) is not None and ticket.done():
            self._wait_for_oldest()

    def _make_way(self, size: int) -> None:
        """Waits until a gradient of ``size`` bytes may be sent: one larger than all that is allowed goes alone."""
        while self._crossing and size + sum(each.frees for each in self._crossing) > self._bytes_max:
            self._stall_for_oldest()

    def _free_staging(self) -> torch.Tensor | None:
        used = [crossing.staging for crossing in self._crossing]
        return next((each for each in self._staging if not any(each is other for other in used)), None)

    def _send(self, crossing: _Crossing, source: torch.Tensor) -> None:
        self._crossing.append(crossing)  # first: it owns the memory on both sides
        to = crossing.to if crossing.arrived is None else crossing.arrived
        crossing.ticket = self._links.to_host(to, source, "grad")
        crossing.source = None

    def _stall_for_oldest(self) -> None:
        with self._ledger.stall("gradients"):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        crossing = self._crossing[0]
        if crossing.ticket is None:
            self._links.wait_for_host()
            self._crossing.popleft()
            return
        crossing.ticket.wait()
        self._crossing.popleft()
        if crossing.arrived is not None and crossing.add:
            crossing.to.add_(crossing.arrived)
        elif crossing.arrived is not None:
            crossing.to.copy_(crossing.arrived)


class _Arrival:
    """Everything that was sent for a unit. See :meth:`Landing.arrived`."""

    def __init__(self, landing: CrossingLanding, unit: int) -> None:
        self._landing, self._unit = landing, unit

    def done(self) -> bool:
        self._landing.poll()
        return self._landing.is_complete(self._unit)

    def wait(self) -> None:
        self._landing.settle_unit(self._unit)


def _in_plane_order(stored: StoredParam, grad: torch.Tensor) -> torch.Tensor:
    """The gradient's elements in the order of the plane, flat; on the device."""
    if grad.stride() != stored.stride or not grad.numel():
        laid_out = torch.empty_strided(grad.shape, stored.stride, dtype=grad.dtype, device=grad.device)
        grad = laid_out.copy_(grad)
    return grad.as_strided((grad.numel(),), (1,))
