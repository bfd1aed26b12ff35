"""Links: one direction between two tiers. A link moves bytes and counts them; it knows no policy.

Note [Priorities]
A read that somebody waits for overtakes reads ahead of use, and both overtake write-back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .aio import Queue
from .errors import TransferError
from .ledger import Ledger

if TYPE_CHECKING:
    from typing_extensions import Buffer

NEEDED_NOW = 0
AHEAD = 1
WRITE_BACK = 2


class Ticket(Protocol):
    """One transfer in flight; waited for once; carries its error."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    def wait(self) -> None:
        """Blocks until it has ended; raises TransferError where it failed."""


class DoneTicket:
    """A transfer that had nothing to move."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def wait_for_end(tickets: Iterable[Ticket]) -> None:
    """Waits for transfers whose outcome nobody needs any more, so that their buffers may go.

    A TransferError is ignored: what failed has ended too, and nobody will read its bytes. Anything else that
    waiting raises gets through.
    """
    for ticket in tickets:
        with contextlib.suppress(TransferError):
            ticket.wait()


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The bytes of a contiguous CPU tensor, for the I/O core."""
    view: Buffer = tensor.view(-1).view(torch.uint8).numpy()  # type: ignore[assignment]
    return view


class NvmeLinks:
    """`nvme_read` and `nvme_write` over one swap file."""

    def __init__(self, queue: Queue, ledger: Ledger) -> None:
        self._queue = queue
        self._ledger = ledger
        self._seconds_before = (0.0, 0.0)

    def start_steps(self) -> None:
        """The set-up is over: its seconds do not count."""
        stats = self._queue.stats()
        self._seconds_before = (stats.read.seconds_busy, stats.write.seconds_busy)

    def read(
        self, buffer: torch.Tensor, offset: int, planes: Sequence[tuple[str, int]], *, priority: int = AHEAD
    ) -> Ticket:
        """Fills ``buffer`` (uint8) from the file; ``planes`` says which plane has how many of its bytes."""
        self._count("nvme_read", planes, buffer)
        return self._queue.read(buffer_of(buffer), offset, priority=priority)

    def write(self, buffer: torch.Tensor, offset: int, planes: Sequence[tuple[str, int]]) -> Ticket:
        """Writes ``buffer`` (uint8), which must not change until the ticket is done."""
        self._count("nvme_write", planes, buffer)
        return self._queue.write(buffer_of(buffer), offset, priority=WRITE_BACK)

    def update_seconds(self) -> None:
        """Brings the ledger's seconds up to date with what the queue has measured."""
        stats = self._queue.stats()
        self._ledger.seconds["nvme_read"] = stats.read.seconds_busy - self._seconds_before[0]
        self._ledger.seconds["nvme_write"] = stats.write.seconds_busy - self._seconds_before[1]

    def _count(self, link: str, planes: Sequence[tuple[str, int]], buffer: torch.Tensor) -> None:
        if sum(size for _, size in planes) != buffer.numel():
            raise AssertionError(f"{link}: planes {planes} do not add up to {buffer.numel()} bytes")
        for plane, size in planes:
            self._ledger.count(link, plane, size)
