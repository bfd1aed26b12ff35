"""The swap files of one run: a directory, a file and a queue on each path, and what share each gets.

Note [Shares]
A path gets as much as its ``weight`` says; where none is written, as much as its bandwidth allows, measured at the
start with all paths at work at once, so that drives behind one controller share what it has. A path with too
little free space gets what fits, and the others the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from ..aio import Queue, Ticket
from ..bytesize import MiB, format_bytes
from ..config.kinds import SwapPath
from ..config.schema import Aio
from ..errors import StoreError
from ..ledger import Ledger
from ..links import NvmeLinks
from ..slab import map_slab
from .directory import SwapDirectory

logger = logging.getLogger("offload.store")

FILE_NAME, PROBE_NAME = "planes.swap", "probe.swap"
SPACE_SHARE_MAX = 0.98
"""Of the free space of a file system: its own tables need some."""
PROBE_SECONDS = 0.4
"""Of writing, and of reading, for each measurement."""
PROBE_REQUEST_BYTES = 8 * MiB
PROBE_FILE_BYTES = 256 * MiB


def open_queue(path: Path, aio: Aio, *, create: bool) -> Queue:
    """A queue over a swap file."""
    return Queue(
        path,
        backend=aio.backend,
        queue_depth=aio.queue_depth,
        request_bytes=aio.block_size,
        direct_io=aio.direct_io,
        threads=aio.thread_count,
        sqpoll=aio.sqpoll,
        create=create,
    )


class Drive:
    """One path: its directory, its swap file, and the queue and links over it."""

    def __init__(self, directory: SwapDirectory, aio: Aio, ledger: Ledger, *, create: bool = True) -> None:
        """
        Args:
            directory: closed with the drive, or when it cannot be made.
            create: make the swap file; else it has to be there.

        Raises:
            TransferError: the file cannot be made or opened.
        """
        self.directory, self._aio = directory, aio
        try:
            self.queue = self.open(FILE_NAME, create=create)
        except BaseException:
            self.directory.close()
            raise
        self.links = NvmeLinks(self.queue, ledger)

    def open(self, name: str, *, create: bool = True) -> Queue:
        """A queue over a file in the directory."""
        return open_queue(self.directory.path / name, self._aio, create=create)

    def close(self) -> None:
        """Ends all transfers and removes file and directory, unless they belong to a commit. Idempotent."""
        self.queue.close()
        self.directory.close()


def open_drives(paths: Sequence[str], aio: Aio, ledger: Ledger, *, rank: int) -> list[Drive]:
    """Makes directory and file on every path, or leaves nothing behind on any.

    Raises:
        StoreError: a path cannot be used.
        TransferError: a file cannot be made.
    """
    with ExitStack() as undo:
        drives = []
        for path in paths:
            drives.append(Drive(SwapDirectory(path, rank=rank), aio, ledger))
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
    """Bytes per second of each drive, half of them written and half read, all drives at work at once.

    A drive without room for it counts as the slowest of the others: it gets what fits anyhow.
    """
    with ExitStack() as stack:
        probes: dict[int, _Probe] = {}
        for index, drive in enumerate(drives):
            free = drive.directory.free_bytes()
            room = PROBE_FILE_BYTES if free is None else min(PROBE_FILE_BYTES, free // (2 * len(drives)))
            if room >= 2 * PROBE_REQUEST_BYTES:
                probes[index] = stack.enter_context(closing(_Probe(drive, room)))
        for operation in ("write", "read"):
            _run_probes(list(probes.values()), operation)
        speeds = {index: 2 / max(probe.seconds_per_byte, 1e-15) for index, probe in probes.items()}
    slowest = min(speeds.values(), default=1.0)
    return [speeds.get(index, slowest) for index in range(len(drives))]


class _Probe:
    """What measures one drive: a file of its own, gone when it is closed, and two transfers in flight."""

    def __init__(self, drive: Drive, size: int) -> None:
        self._queue = drive.open(PROBE_NAME)
        self._path = drive.directory.path / PROBE_NAME
        self._slots = size // PROBE_REQUEST_BYTES
        self._buffer = map_slab(PROBE_REQUEST_BYTES)
        self.flying: list[Ticket] = []
        self.seconds_per_byte = 0.0
        try:
            self._queue.preallocate(self._slots * PROBE_REQUEST_BYTES)
        except BaseException:
            self.close()
            raise

    def begin(self, operation: str, now: float) -> None:
        self._transfer = getattr(self._queue, operation)
        self._begun, self._ended, self._started, self._done = now, now, 0, 0
        self.start()
        self.start()

    def start(self) -> None:
        offset = self._started % self._slots * PROBE_REQUEST_BYTES
        self._started += 1
        self.flying.append(self._transfer(self._buffer, offset))

    def poll(self, now: float) -> None:
        if self.flying and self.flying[0].done():
            self.flying.pop(0).wait()
            self._done, self._ended = self._done + PROBE_REQUEST_BYTES, now
            if now - self._begun < PROBE_SECONDS:
                self.start()

    def end(self) -> None:
        self.seconds_per_byte += (self._ended - self._begun) / self._done

    def close(self) -> None:
        self._queue.close(cancel=True)
        self._path.unlink(missing_ok=True)


def _run_probes(probes: Sequence[_Probe], operation: str) -> None:
    begin = time.perf_counter()
    for probe in probes:
        probe.begin(operation, begin)
    while any(probe.flying for probe in probes):
        for probe in probes:
            probe.poll(time.perf_counter())
        time.sleep(0.0002)
    for probe in probes:
        probe.end()


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
        _tell_full(device, need, systems, drives)


def _tell_full(device: int, need: float, systems: Sequence[int], drives: Sequence[Drive]) -> None:
    members = [drive.directory for own, drive in zip(systems, drives, strict=True) if own == device]
    logger.warning(
        "%s has %s free, too little free space for its share of %s: it gets less, and the others more",
        ", ".join(str(directory.root) for directory in members),
        format_bytes(members[0].free_bytes() or 0),
        format_bytes(int(need)),
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
