"""Sums of squares of gradients: by them the host decides whether a step is taken and how much is clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .links import DeviceLinks, Ticket
from .optim import block_square_sums, square_sums_on_device
from .partition import StoredParam


class UnitSquares(Ticket, Protocol):
    """Done when the sums of a unit's gradients can be had without waiting, and the gradients are there."""

    def values(self) -> list[float]:
        """The sums, block after block."""


class SquareSums:
    """Starts the sums of one unit after another, where the unit's gradients are.

    Those of gradients on the device are made there and follow them to the host, which goes on meanwhile: in
    a backward nothing waits for the device because a unit is updated there.
    """

    def __init__(
        self, host: Mapping[int, torch.Tensor] | None = None, links: DeviceLinks | None = None
    ) -> None:
        """
        Args:
            host: of each unit whose gradients are on the device, host memory for its sums (fp64).
            links: brings them there.
        """
        self._host, self._links = host or {}, links

    def start(
        self, plane: torch.Tensor, params: list[StoredParam], *, whole: bool, arrived: Ticket
    ) -> UnitSquares:
        """The sums of one unit's gradients.

        Args:
            plane: the unit's gradient plane.
            params: those of its parameters that have a gradient; not none.
            whole: whether they are all that are trained.
            arrived: done when the gradients are there.
        """
        pieces = pieces_of(plane, params, whole=whole)
        unit = params[0].unit
        if self._links is None or unit not in self._host:
            return _OnHost(pieces, arrived)
        sums = square_sums_on_device(pieces)
        host = self._host[unit][: sums.numel()]
        return _FromDevice(host, self._links.numbers_to_host(host, sums))


class _OnHost:
    def __init__(self, pieces: Sequence[torch.Tensor], arrived: Ticket) -> None:
        self._pieces, self._arrived = pieces, arrived

    def done(self) -> bool:
        return self._arrived.done()

    def wait(self) -> None:
        self._arrived.wait()

    def values(self) -> list[float]:
        self.wait()
        return block_square_sums(self._pieces)


class _FromDevice:
    def __init__(self, host: torch.Tensor, crossing: Ticket) -> None:
        self._host, self._crossing = host, crossing

    def done(self) -> bool:
        return self._crossing.done()

    def wait(self) -> None:
        self._crossing.wait()

    def values(self) -> list[float]:
        self.wait()
        values: list[float] = self._host.tolist()
        return values


def pieces_of(plane: torch.Tensor, params: list[StoredParam], *, whole: bool) -> list[torch.Tensor]:
    """What of a unit's plane is gradients: all of it where ``whole``, as padding is zero and counts for nothing."""
    if whole:
        return [plane] if params else []
    return [plane[stored.placed.begin : stored.placed.end] for stored in params]
