"""Links: one direction between two tiers. A link moves bytes and counts them; it knows no policy.

Note [Priorities]
A read that somebody waits for overtakes reads ahead of use, and both overtake write-back.

Note [Ordering]
Between host and device, copies run on streams of their own, and four rules keep them in order:
1. What is copied to the device overwrites bytes that compute may still be reading: the copy waits for an event
   recorded when nobody could look at them any more (``idle``).
2. Compute reads what was copied only after it has been told to wait for the copy's event.
3. What is copied to the host was made by compute: the copy waits for an event recorded after it was made.
4. Host memory that a copy reads or writes, and the source of a copy, stay untouched and alive until the host has
   seen the copy's event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .accel import Accelerator, Event, native_watchers
from .aio import Queue
from .bytesize import MiB
from .errors import TransferError
from .ledger import Ledger
from .tiers.host import HostTier

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
    if tensor.dtype is not torch.uint8 or tensor.ndim != 1:
        tensor = tensor.view(-1).view(torch.uint8)
    view: Buffer = tensor.numpy()  # type: ignore[assignment]
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
        for watch in native_watchers:
            watch(buffer, True)
        return self._queue.read(buffer_of(buffer), offset, priority=priority)

    def write(self, buffer: torch.Tensor, offset: int, planes: Sequence[tuple[str, int]]) -> Ticket:
        """Writes ``buffer`` (uint8), which must not change until the ticket is done."""
        self._count("nvme_write", planes, buffer)
        for watch in native_watchers:
            watch(buffer, False)
        return self._queue.write(buffer_of(buffer), offset, priority=WRITE_BACK)

    def seconds(self) -> tuple[float, float]:
        """Seconds in which the queue was busy with reads, and with writes, since the set-up."""
        stats = self._queue.stats()
        read, write = self._seconds_before
        return stats.read.seconds_busy - read, stats.write.seconds_busy - write

    def _count(self, link: str, planes: Sequence[tuple[str, int]], buffer: torch.Tensor) -> None:
        if sum(size for _, size in planes) != buffer.numel():
            raise AssertionError(f"{link}: planes {planes} do not add up to {buffer.numel()} bytes")
        for plane, size in planes:
            self._ledger.count(link, plane, size)


class CopyTicket:
    """A copy to the host in flight; keeps its source alive until the host has seen its end."""

    def __init__(self, event: Event, source: torch.Tensor) -> None:
        self._event = event
        self._source: torch.Tensor | None = source

    def done(self) -> bool:
        if self._source is not None and self._event.done():
            self._source = None
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self._event.wait()
            self._source = None


class AllTickets:
    """Several transfers as one."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Waits for all of them, and raises the first error."""
        failure: TransferError | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except TransferError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class ThenTicket:
    """One transfer after another: the second is started once the first has been seen to end."""

    def __init__(self, first: Ticket, start_second: Callable[[], Ticket]) -> None:
        self._now, self._start_second = first, start_second
        self._is_second = False

    def done(self) -> bool:
        if not self._is_second and self._now.done():
            self._advance()
        return self._is_second and self._now.done()

    def wait(self) -> None:
        if not self._is_second:
            self._advance()
        self._now.wait()

    def _advance(self) -> None:
        self._now.wait()
        self._now, self._is_second = self._start_second(), True


class DeviceLinks:
    """`h2d` and `d2h`, each on a stream of its own. See Note [Ordering]."""

    STAGING_BYTES = (64 * MiB, 16 * MiB, 4 * MiB, 1 * MiB)
    """Sizes to try for the buffer that stands in where host memory cannot be pinned."""

    def __init__(self, accelerator: Accelerator, host: HostTier, ledger: Ledger) -> None:
        self._accelerator, self._host, self._ledger = accelerator, host, ledger
        self._h2d, self._d2h = accelerator.stream("h2d"), accelerator.stream("d2h")
        self._staging: torch.Tensor | None = None
        self._staging_free: Event | None = None

    def to_device(
        self, device: torch.Tensor, host: torch.Tensor, planes: Sequence[tuple[str, int]], *, idle: Event
    ) -> Event:
        """Starts filling ``device`` from ``host`` (both uint8) once ``idle`` has passed; gives its end."""
        self._count("h2d", planes, device)
        self._h2d.wait(idle)
        if self._host.is_pinned(host):
            self._accelerator.copy(device, host, self._h2d)
        else:
            self._through_staging(device, host)
        return self._h2d.record()

    def to_host(self, host: torch.Tensor, device: torch.Tensor, plane: str) -> Ticket:
        """Starts filling ``host`` from what compute has made in ``device`` until now; same shape and type."""
        self._ledger.count("d2h", plane, device.nbytes)
        return self.numbers_to_host(host, device)

    def numbers_to_host(self, host: torch.Tensor, device: torch.Tensor) -> Ticket:
        """As :meth:`to_host`, for the few numbers by which the host decides: of no plane, and not counted."""
        self._d2h.wait(self._accelerator.compute.record())
        if self._host.is_pinned(host):
            self._accelerator.copy(host, device, self._d2h)
            return CopyTicket(self._d2h.record(), device)
        # A copy to ordinary memory holds up the calling thread on every device that we know.
        self._accelerator.copy(host, device, self._d2h)
        self._d2h.record().wait()
        return DoneTicket()

    def wait_for_host(self) -> None:
        """Waits for every copy to the host that was started."""
        self._d2h.record().wait()

    def _through_staging(self, device: torch.Tensor, host: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = self._make_staging()
        staging = self._staging
        for begin in range(0, host.numel(), max(staging.numel(), 1)):
            piece = host[begin : begin + staging.numel()]
            if self._staging_free is not None:
                self._staging_free.wait()
            staging[: piece.numel()].copy_(piece)
            self._accelerator.copy(device[begin : begin + piece.numel()], staging[: piece.numel()], self._h2d)
            self._staging_free = self._h2d.record()

    def _make_staging(self) -> torch.Tensor:
        for size in self.STAGING_BYTES:
            (staging,) = self._host.allocate("staging", [size], pinned=True)
            if self._host.is_pinned(staging):
                return staging
        return staging  # nothing can be pinned: the device's driver has a buffer of its own

    def _count(self, link: str, planes: Sequence[tuple[str, int]], buffer: torch.Tensor) -> None:
        if sum(size for _, size in planes) != buffer.numel():
            raise AssertionError(f"{link}: planes {planes} do not add up to {buffer.numel()} bytes")
        for plane, size in planes:
            self._ledger.count(link, plane, size)
