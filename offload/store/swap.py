"""The swap store: reads and writes planes of units and chunks; knows files and extents, not Adam."""

from __future__ import annotations

import logging
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bytesize import format_bytes
from ..config.schema import Aio
from ..errors import TransferError
from ..ledger import Ledger
from ..links import AHEAD, AllTickets, DoneTicket, Ticket
from ..optim.checksum import crc32c
from ..placement import SwapPaths
from ..plan import Chunk, MemoryPlan
from .checksums import (
    BLOCK_BYTES,
    COMMIT_BLOCK_BYTES,
    Blocks,
    CheckedTicket,
    Checksums,
    Mismatch,
    Owner,
    explain,
    name_of,
)
from .commits import Commits
from .drives import Drive, fit_shares, open_drives, shares_of
from .generations import Generations
from .layout import Extent, Item, Items, PlaneKind, StoreLayout, Stripes, state_planes
from .manifest import FileEntry, ItemEntry, Manifest, Shapes

logger = logging.getLogger("offload.store")

IMBALANCE_MAX = 1.5
"""Drives that finish their shares at times farther apart than this factor are told of."""
IMBALANCE_SECONDS_MIN = 1.0
"""Nothing is said before the slower one has worked so long: a moment says nothing of a drive."""


Run = tuple[int, int, Stripes]
"""Bytes [begin, end) of a plane or chunk, and the extents in which they lie at the same places."""


class SwapStore:
    """One run's planes on NVMe. Open it with :meth:`open`; when it is closed they are gone, unless committed."""

    def __init__(
        self,
        drives: Sequence[Drive],
        layout: StoreLayout,
        plan: MemoryPlan,
        ledger: Ledger,
        *,
        verify: bool = False,
    ) -> None:
        self._drives, self._layout, self._plan, self._ledger = drives, layout, plan, ledger
        self._verify, self._proves = verify, True
        self._items = Items.of(plan)
        self._generations = Generations(layout.extent_counts(self._items))
        self._written = [0] * len(self._items)  # bytes of each, from its begin
        self._commits = Commits(drives, uuid.uuid4().hex) if len(layout.generations) == 2 else None
        self._sums = self._fresh_sums()
        self._explain_lost: Callable[[Item], str] = lambda item: ""
        self._imbalance_told = False
        self.path = drives[0].directory.path

    def _fresh_sums(self) -> Checksums | None:
        if not self._verify and self._commits is None:
            return None
        block_bytes = BLOCK_BYTES if self._verify else COMMIT_BLOCK_BYTES
        return Checksums(self._layout, self._plan, block_bytes=block_bytes)

    @classmethod
    def open(
        cls,
        paths: SwapPaths,
        plan: MemoryPlan,
        aio: Aio,
        ledger: Ledger,
        *,
        verify: bool = False,
        rank: int = 0,
    ) -> SwapStore:
        """Makes the directories and the files, with all their space, or leaves nothing behind.

        Args:
            verify: whether every read is held against the checksums of what was written.

        Raises:
            StoreError: a path cannot be used, or there is too little free space.
            TransferError: a file cannot be made or given its space.
        """
        drives = open_drives([path.path for path in paths.all], aio, ledger, rank=rank)
        try:
            if len(drives) == 1:
                drives[0].directory.check_space(plan.bytes_total("nvme"))
            shares = fit_shares(shares_of(paths.all, drives), plan.bytes_total("nvme"), drives)
            layout = StoreLayout(plan, paths.among(shares, "weights"), paths.among(shares, "states"))
            for drive, size in zip(drives, layout.sizes, strict=True):
                drive.queue.preallocate(size)
            return cls(drives, layout, plan, ledger, verify=verify)
        except BaseException:
            for drive in drives:
                drive.close()
            raise

    # -- weights ------------------------------------------------------------------------------------------

    def read_weight(self, unit: int, slot: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of a slot (uint8) with the unit's weight plane."""
        size = self._layout.weights[unit].size
        runs, planes = [*self._weight_runs(unit, 0, size)], [("weight", size)]
        ticket = self._read(slot, runs, planes, priority)
        if self._sums is None:
            return ticket
        return self._checked(ticket, self._sums.weights[unit], slot, runs, planes, unit)

    def write_weight(
        self, unit: int, slot: torch.Tensor, begin: int, end: int, *, plane: str = "weight"
    ) -> Ticket:
        """Writes bytes [begin, end) of the unit's weight plane, which lies at the front of ``slot``.

        Of an item that goes to its other extent, all bytes are written. See `generations`, Note [Generations].

        Args:
            plane: as what the ledger counts them.
        """
        if unit == 0:
            self.update_seconds()
        return self._tracked(lambda: self._write_weight(unit, slot, begin, end, plane))

    def keep_weight(self, unit: int, plane: torch.Tensor) -> Iterator[tuple[int, Ticket]]:
        """Writes a weight plane that is at home in memory, for the next commit: bytes and ticket of each write.

        What is frozen is written once, and again where its checksum says that somebody has changed it.
        """
        trained = self._plan.inventory.units[unit].elements * self._plan.inventory.weight_itemsize
        for item in self._items.weights[unit]:
            if item.begin < trained or self._is_changed(unit, item, plane):
                write = self.write_weight(unit, plane, item.begin, item.end, plane="commit")
                yield item.end - item.begin, write

    def _is_changed(self, unit: int, item: Item, plane: torch.Tensor) -> bool:
        if self._generations.current(item.index) is None:
            return True
        cuts = np.array([item.begin, item.end], np.uint64)
        return int(crc32c(plane, cuts)[0]) != self._blocks("weights", unit).total(item.begin, item.end)

    def _write_weight(self, unit: int, slot: torch.Tensor, begin: int, end: int, plane: str) -> Ticket:
        for item in _touched(self._items.weights[unit], begin, end):
            if self._generations.lacks_extent(item.index):
                self._grow(unit, item)
            if self._generations.moves(item.index):
                begin, end = min(begin, item.begin), max(end, item.end)
            self._generations.write(item.index)
            self._written[item.index] = item.end - item.begin
        if self._sums is not None:
            self._sums.weights[unit].record(slot, begin, end)
        return self._write(slot, [*self._weight_runs(unit, begin, end)], [(plane, end)])

    def _weight_runs(self, unit: int, begin: int, end: int) -> Iterator[Run]:
        """Where bytes [begin, end) of the weight plane are: in one piece where one generation holds them."""
        touched = _touched(self._items.weights[unit], begin, end)
        for extent, items in groupby(touched, lambda item: self._generations.current(item.index) or 0):
            first, *others = items
            last = others[-1] if others else first
            yield max(begin, first.begin), min(end, last.end), self._layout.generations[extent].weights[unit]

    def _grow(self, unit: int, item: Item) -> None:
        path = self._layout.grow(unit)
        size = format_bytes(item.end - item.begin)
        name = self._plan.inventory.units[unit].name
        logger.info("frozen weights of %s are written: %s more on nvme than planned", name, size)
        self._drives[path].queue.preallocate(self._layout.sizes[path])
        self._generations.add_extent(item.index)

    # -- state of chunks ----------------------------------------------------------------------------------

    def state_bytes(self, chunk: Chunk) -> int:
        """Bytes of the chunk's planes together."""
        return self._items.states[chunk.index].end

    def read_state(self, chunk: Chunk, buffer: torch.Tensor, *, priority: int = AHEAD) -> Ticket:
        """Fills the front of ``buffer`` with the chunk's planes. Moments never written are zeros, unread."""
        item, planes = self._items.states[chunk.index], state_planes(self._plan, chunk)
        if self._written[item.index] < item.end:
            planes = [plane for plane in planes if plane[0] == "residual"]
            stored = sum(size for _, size in planes)
            buffer[stored : item.end].zero_()
        runs = self._state_runs(chunk, sum(size for _, size in planes))
        ticket = self._read(buffer, runs, planes, priority)
        if self._sums is None or not planes:
            return ticket
        return self._checked(ticket, self._sums.states[chunk.index], buffer, runs, planes, chunk)

    def write_state(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        """Writes the chunk's planes from the front of ``buffer``."""
        if chunk.index == 0:
            self.update_seconds()  # once a step: a drive that falls behind is told of while the run goes on
        planes = state_planes(self._plan, chunk)
        return self._tracked(lambda: self._write_state(chunk, buffer, planes))

    def keep_state(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        """Writes the chunk's planes, which are at home in memory, for the next commit."""
        planes = [("commit", self.state_bytes(chunk))]
        return self._tracked(lambda: self._write_state(chunk, buffer, planes))

    def write_residual(self, chunk: Chunk, residual: torch.Tensor) -> Ticket:
        """Writes the residual plane alone (it is the first in the extent): ``residual`` is uint8."""
        planes = [("residual", residual.numel())]
        return self._tracked(lambda: self._write_state(chunk, residual, planes))

    def _write_state(self, chunk: Chunk, buffer: torch.Tensor, planes: Sequence[tuple[str, int]]) -> Ticket:
        item, size = self._items.states[chunk.index], sum(size for _, size in planes)
        if self._generations.moves(item.index) and size < self._written[item.index]:
            raise AssertionError(
                f"chunk {chunk.index} goes to another extent, and {size} bytes are not all of it"
            )
        self._generations.write(item.index)
        self._written[item.index] = max(self._written[item.index], size)
        if self._sums is not None:
            self._sums.states[chunk.index].record(buffer, 0, size)
        return self._write(buffer, self._state_runs(chunk, size), planes)

    def _state_runs(self, chunk: Chunk, size: int) -> list[Run]:
        extent = self._generations.current(self._items.states[chunk.index].index) or 0
        return [(0, size, self._layout.generations[extent].states[chunk.index])]

    # -- transfers over runs ------------------------------------------------------------------------------

    def _read(
        self, buffer: torch.Tensor, runs: Sequence[Run], planes: Sequence[tuple[str, int]], priority: int
    ) -> Ticket:
        """Fills the front of ``buffer`` with planes that lie side by side in ``runs``."""

        def start(extent: Extent, piece: torch.Tensor, inside: Sequence[tuple[str, int]]) -> Ticket:
            return self._drives[extent.path].links.read(piece, extent.offset, inside, priority=priority)

        return self._each(buffer, runs, planes, start)

    def _write(self, buffer: torch.Tensor, runs: Sequence[Run], planes: Sequence[tuple[str, int]]) -> Ticket:
        def start(extent: Extent, piece: torch.Tensor, inside: Sequence[tuple[str, int]]) -> Ticket:
            return self._drives[extent.path].links.write(piece, extent.offset, inside)

        return self._each(buffer, runs, planes, start)

    @staticmethod
    def _each(
        buffer: torch.Tensor,
        runs: Sequence[Run],
        planes: Sequence[tuple[str, int]],
        start: Callable[[Extent, torch.Tensor, Sequence[tuple[str, int]]], Ticket],
    ) -> Ticket:
        """One transfer for each extent that holds bytes of the runs."""
        tickets = [
            start(extent, buffer[first:last], _planes_within(planes, first, last))
            for begin, end, stripes in runs
            for first, last, extent in stripes.part(begin, end)
        ]
        if not tickets:
            return DoneTicket()
        return tickets[0] if len(tickets) == 1 else AllTickets(tickets)

    def _tracked(self, write: Callable[[], Ticket]) -> Ticket:
        return write() if self._commits is None else self._commits.track(write)

    def _checked(
        self,
        read: Ticket,
        blocks: Blocks,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        planes: Sequence[tuple[str, int]],
        owner: int | Chunk,
    ) -> Ticket:
        """The read, held against its sums where that is asked for. ``owner``: a unit's number, or a chunk."""
        if not (self._verify or (self._proves and blocks.is_unproven)):
            return read

        def check() -> TransferError | None:
            found = blocks.mismatch(buffer, sum(size for _, size in planes))
            return None if found is None else self._explain(found, runs, planes, owner)

        return CheckedTicket(read, check)

    def _explain(
        self, found: Mismatch, runs: Sequence[Run], planes: Sequence[tuple[str, int]], owner: int | Chunk
    ) -> TransferError:
        stripes = next(stripes for begin, end, stripes in runs if begin <= found.begin < end)
        extent = next(extent for _, _, extent in stripes.part(found.begin, found.end))
        unit = owner if isinstance(owner, int) else owner.unit
        items = self._items.weights[unit] if isinstance(owner, int) else [self._items.states[owner.index]]
        what, more = name_of(self._owner(owner), planes, found), ""
        if found.is_whole:
            more = self._explain_lost(_touched(items, found.begin, found.end)[0])
        path = str(self._drives[extent.path].queue.path)
        return explain(found, what, path, extent.offset, more=more)

    def _owner(self, owner: int | Chunk) -> Owner:
        unit = self._plan.inventory.units[owner if isinstance(owner, int) else owner.unit]
        params = [(param.info.name, param.offset, param.offset + param.info.nbytes) for param in unit.params]
        if isinstance(owner, int):
            return Owner(unit.name, params, None)
        itemsize = self._plan.inventory.weight_itemsize
        return Owner(unit.name, params, (owner.index, owner.begin * itemsize, owner.end * itemsize))

    # -- commits ------------------------------------------------------------------------------------------

    @property
    def directories(self) -> list[Path]:
        """Of this run, one on each path, the one with the manifests first."""
        return [drive.directory.path for drive in self._drives]

    @property
    def serial(self) -> int:
        """Of the last commit; 0 where nothing was committed."""
        return 0 if self._commits is None else self._commits.serial

    @property
    def is_changed(self) -> bool:
        """Whether anything was written since the last commit."""
        return any(self._generations.changed())

    def commit(self, shapes: Shapes, *, step: int, training: dict[str, Any]) -> Manifest:
        """Makes what is written now the state that the next start finds. See `commits`, Note [Commit].

        What it gives stays as it is until the next commit, and so do all bytes that it names.

        Args:
            shapes: of the plan, with the types of everything.
            training: JSON for whoever goes on from it.

        Raises:
            TransferError, StoreError: it failed: the commit before stands.
        """
        if self._commits is None:
            raise AssertionError("what is committed has two generations")
        files = zip(self._drives, self._layout.sizes, strict=True)
        first, second = self._layout.generations
        manifest = Manifest(
            run=self._commits.run,
            serial=self._commits.serial + 1,
            step=step,
            time=int(time.time()),
            files=tuple(FileEntry(str(drive.directory.path), size) for drive, size in files),
            shapes=shapes,
            extents=(first, second),
            items=tuple(self._entries()),
            training=training,
        )
        self._commits.commit(manifest, self._generations.commit)
        return manifest

    def _entries(self) -> Iterator[ItemEntry | None]:
        for kind, owner, item in self._items.each():
            extent, written = self._generations.current(item.index), self._written[item.index]
            if extent is None:
                yield None
            else:
                total = self._blocks(kind, owner).total(item.begin, item.begin + written)
                yield ItemEntry(extent, written, total)

    def restore(
        self, manifest: Manifest, *, proves: bool = True, explain_lost: Callable[[Item], str] | None = None
    ) -> None:
        """Goes back to a commit, whose layout this store has. Nothing is in flight.

        Args:
            proves: hold everything against the commit's sums when it is first read.
            explain_lost: what to say besides of an item that is damaged.
        """
        self._proves = proves
        self._explain_lost = explain_lost or self._explain_lost
        self._commits = Commits(self._drives, manifest.run, serial=manifest.serial)
        self._sums = self._fresh_sums()
        self._generations.restore([None if entry is None else entry.extent for entry in manifest.items])
        self._written = [entry.written if entry else 0 for entry in manifest.items]
        for kind, owner, item in self._items.each():
            if (entry := manifest.items[item.index]) is not None:
                blocks = self._blocks(kind, owner)
                blocks.expect(item.begin, item.begin + entry.written, entry.crc32c)

    def _blocks(self, kind: PlaneKind, owner: int) -> Blocks:
        if self._sums is None:
            raise AssertionError("the store keeps no sums")
        return (self._sums.weights if kind == "weights" else self._sums.states)[owner]

    # -- end ----------------------------------------------------------------------------------------------

    def start_steps(self) -> None:
        """The set-up is over: from now on seconds count."""
        for drive in self._drives:
            drive.links.start_steps()

    def update_seconds(self) -> None:
        """Brings the ledger's busy seconds up to date: on a link, those of its busiest path."""
        by_path = [drive.links.seconds() for drive in self._drives]
        for index, link in enumerate(("nvme_read", "nvme_write")):
            self._ledger.seconds[link] = max(seconds[index] for seconds in by_path)
        self._tell_imbalance([sum(seconds) for seconds in by_path])

    def _tell_imbalance(self, seconds: Sequence[float]) -> None:
        if self._imbalance_told or min(seconds) <= 0:
            return
        if max(seconds) < max(IMBALANCE_SECONDS_MIN, IMBALANCE_MAX * min(seconds)):
            return
        if not self._layout.is_striped:  # last: it looks at every extent, and this is asked in every step
            return
        self._imbalance_told = True
        slow, fast = (self._drives[list(seconds).index(pick(seconds))] for pick in (max, min))
        logger.warning(
            "%s was busy for %.1f s with its share and %s for %.1f s: give the first a smaller weight",
            slow.directory.root,
            max(seconds),
            fast.directory.root,
            min(seconds),
        )

    def close(self) -> None:
        """Ends all transfers and removes files and directories, unless something was committed. Idempotent."""
        for drive in self._drives:
            drive.close()

    def discard(self) -> None:
        """As :meth:`close`, and removes what was committed too."""
        for drive in self._drives:
            drive.queue.close()
            drive.directory.remove()
            drive.close()


def _touched(items: Sequence[Item], begin: int, end: int) -> Sequence[Item]:
    """Items that have bytes in [begin, end)."""
    if begin == end:
        return ()
    first = bisect_right(items, begin, key=attrgetter("begin")) - 1
    return items[first : bisect_left(items, end, key=attrgetter("begin"))]


def _planes_within(planes: Sequence[tuple[str, int]], begin: int, end: int) -> list[tuple[str, int]]:
    """What of planes that lie side by side is in bytes [begin, end)."""
    inside, at = [], 0
    for name, size in planes:
        length = min(end, at + size) - max(begin, at)
        if length > 0:
            inside.append((name, length))
        at += size
    return inside
