"""Asynchronous file transfers: one :class:`Queue` per file, one :class:`Ticket` per transfer.

    with Queue("/mnt/nvme/rank0.swap", size=8 * GiB) as queue:
        ticket = queue.read(buffer, offset=0)  # returns at once
        ...
        ticket.wait()  # the bytes are in `buffer`, or TransferError

Buffers are anything that exports bytes (numpy arrays, memoryviews, mmaps); a buffer is kept alive until its
transfer is over, whatever happens to the ticket. Offsets, sizes and addresses may be odd; those that are
multiples of :attr:`Queue.alignment` bypass the page cache. Two transfers in flight at once that overlap in
the file, one of them a write, have no defined order.

The only package that touches the compiled core. Where that cannot be loaded, all goes through `aio_python`.
"""

from .queue import NEEDED, PREFETCH, QUEUE_DEPTH, REQUEST_BYTES, THREADS, WRITE_BACK, Queue, Ticket
from .refusals import backends, probe
from .stats import DirectionStats, QueueStats

__all__ = [
    "NEEDED",
    "PREFETCH",
    "QUEUE_DEPTH",
    "REQUEST_BYTES",
    "THREADS",
    "WRITE_BACK",
    "DirectionStats",
    "Queue",
    "QueueStats",
    "Ticket",
    "backends",
    "probe",
]
