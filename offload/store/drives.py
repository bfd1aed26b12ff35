"""The swap files of one run: a directory, a file and a queue on each path, and what share each gets.

Note [Shares]
A path gets as much as its ``weight`` says; where none is written, as much as its bandwidth allows, measured at the
start with all paths at work at once, so that drives behind one controller share what it has. A path with too
little free space gets what fits, and the others the rest.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ..aio import Queue, Ticket
from ..bytesize import MiB, format_bytes
from ..config.kinds import SwapPath
from ..config.schema import Aio
from ..errors import StoreError
from ..ledger import Ledger
from ..links import NvmeLinks
from .directory import SwapDirectory

logger = logging.getLogger("offload.store")

FILE_NAME = "planes.swap"
SPACE_SHARE_MAX = 0.98
"""Of the free space of a file system: its own tables need some."""
PROBE_SECONDS = 0.4
"""Of writing, and of reading, for each measurement."""
PROBE_REQUEST_BYTES = 8 * MiB
PROBE_FILE_BYTES = 256 * MiB
SLOW_SHARE = 0.5
"""A path whose drive gives less than this of what its share needs holds all others up: that is said."""


class Drive:
    """One path: its directory, its swap file, and the queue and links over it."""

    def __init__(self, path: str, aio: Aio, ledger: Ledger, *, rank: int) -> None:
        """
        Raises:
            StoreError: the path cannot be used.
            TransferError: the file cannot be made.
        """
        self.directory = SwapDirectory(path, rank=rank)
        try:
            self.queue = Queue(
                self.directory.path / FILE_NAME,
                backend=aio.backend,
                queue_depth=aio.queue_depth,
                request_bytes=aio.block_size,
                direct_io=aio.direct_io,
                threads=aio.thread_count,
            )
        except BaseException:
            self.directory.close()
            raise
        self.links = NvmeLinks(self.queue, ledger)

    def close(self) -> None:
        """Ends all transfers and removes file and directory. Idempotent."""
        self.queue.close()
        self.directory.close()


def open_drives(paths: Sequence[str], aio: Aio, ledger: Ledger, *, rank: int) -> list[Drive]:
    """Makes directory and file on every path, or leaves nothing behind on any."""
    with ExitStack() as undo:
        drives = []
        for path in paths:
            drives.append(Drive(path, aio, ledger, rank=rank))
            undo.callback(drives[-1].close)
        undo.pop_all()
    return drives


def shares_of(paths: Sequence[SwapPath], drives: Sequence[Drive]) -> list[float]:
    """Of each path, the share of the bytes that it gets; they add up to 1. See Note [Shares]."""
    if len(paths) == 1:
        return [1.0]
    given = [path.weight for path in paths]
    known = [weight for weight in given if weight is not None]
    if len(known) == len(given):
        return [weight / sum(known) for weight in known]
    speeds = measure(drives)
    # Weights beside measured speeds count in units of the mean: 2 is twice what an ordinary path gets.
    mean = sum(speeds) / len(speeds)
    weights = [
        speed if weight is None else weight * mean for weight, speed in zip(given, speeds, strict=True)
    ]
    shares = [weight / sum(weights) for weight in weights]
    logger.info(
        "striping over %s",
        ", ".join(
            f"{path.path} {share:.0%} ({speed / 1e9:.2f} GB/s)"
            for path, share, speed in zip(paths, shares, speeds, strict=True)
        ),
    )
    return shares


def measure(drives: Sequence[Drive]) -> list[float]:
    """Bytes per second of each drive, half of them written and half read, all drives at work at once."""
    buffers = [mmap.mmap(-1, PROBE_REQUEST_BYTES) for _ in drives]
    for drive in drives:
        drive.queue.preallocate(PROBE_FILE_BYTES)
    seconds = [0.0] * len(drives)
    for operation in ("write", "read"):
        for index, elapsed in enumerate(_probe(drives, buffers, operation)):
            seconds[index] += elapsed
    return [2 / max(per_byte, 1e-15) for per_byte in seconds]


def _probe(drives: Sequence[Drive], buffers: Sequence[mmap.mmap], operation: str) -> list[float]:
    """Seconds per byte of each drive in one direction. Two transfers are in flight on each."""
    begin = time.perf_counter()
    done = [0] * len(drives)
    ended = [begin] * len(drives)
    flying: list[list[Ticket]] = [[] for _ in drives]

    def start(index: int) -> None:
        offset = (done[index] + len(flying[index]) * PROBE_REQUEST_BYTES) % PROBE_FILE_BYTES
        transfer = getattr(drives[index].queue, operation)
        flying[index].append(transfer(buffers[index], offset))

    for index in range(len(drives)):
        start(index)
        start(index)
    while any(flying):
        for index, tickets in enumerate(flying):
            if tickets and tickets[0].done():
                tickets.pop(0).wait()
                done[index] += PROBE_REQUEST_BYTES
                ended[index] = time.perf_counter()
                if ended[index] - begin < PROBE_SECONDS:
                    start(index)
        time.sleep(0.0002)
    return [(end - begin) / size for end, size in zip(ended, done, strict=True)]


def fit_shares(shares: Sequence[float], size: int, drives: Sequence[Drive]) -> list[float]:
    """Shares under which ``size`` bytes fit the free space of every file system.

    Raises:
        StoreError: they do not fit all file systems together.
    """
    systems = [drive.directory.root.stat().st_dev for drive in drives]
    room = {}
    for device, drive in zip(systems, drives, strict=True):
        free = drive.directory.free_bytes()
        room[device] = None if free is None else int(free * SPACE_SHARE_MAX)
    fitted, full = list(shares), set[int]()
    while True:
        for device in room:
            need = size * sum(s for s, own in zip(fitted, systems, strict=True) if own == device)
            limit = room[device]
            if limit is not None and need > limit and device not in full:
                full.add(device)
                break
        else:
            return fitted
        fitted = _redistribute(shares, size, systems, room, full)
        if len(full) == len(room) and sum(fitted) < 1:
            free_text = ", ".join(
                f"{format_bytes(drive.directory.free_bytes() or 0)} on {drive.directory.root}"
                for drive in drives
            )
            raise StoreError(
                28, f"the swap files need {format_bytes(size)} and free are {free_text}; free some, or add a path",
                str(drives[0].directory.root),
            )  # fmt: skip
        logger.warning(
            "a swap path has too little free space for its share: it gets less, and the others more"
        )


def _redistribute(
    shares: Sequence[float], size: int, systems: Sequence[int], room: dict[int, int | None], full: set[int]
) -> list[float]:
    """Full file systems get what fits; the rest goes to the others, in proportion to their shares."""
    fitted = list(shares)
    for device in full:
        members = [index for index, own in enumerate(systems) if own == device]
        limit, total = room[device] or 0, sum(shares[index] for index in members)
        for index in members:
            fitted[index] = shares[index] / total * limit / size
    free = [index for index, own in enumerate(systems) if own not in full]
    left = 1 - sum(fitted[index] for index in range(len(shares)) if index not in free)
    total = sum(shares[index] for index in free)
    for index in free:
        fitted[index] = shares[index] / total * left
    return fitted
