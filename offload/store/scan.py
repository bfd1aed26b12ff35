"""Reads all that a commit names and holds it against its sums: without its model, and beside a run that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..aio import PREFETCH, Queue
from ..bytesize import MiB
from ..errors import TransferError
from ..links import Ticket, buffer_of, wait_for_end
from ..optim.checksum import crc32c
from ..slab import map_slab
from .checksums import COMMIT_BLOCK_BYTES, Mismatch, Owner, explain, name_of
from .commits import check_member, find_commits
from .crc import join
from .drives import FILE_NAME
from .layout import Item, PlaneKind
from .manifest import ITEMSIZES, Manifest, Shapes
from .recovery import check_file

PIECE_BYTES = 16 * MiB


class Scanned(NamedTuple):
    """One item that was read."""

    manifest: Manifest
    """The commit that it belongs to: the newest when it was read."""
    size: int
    damage: TransferError | None


def committed_bytes(manifest: Manifest) -> int:
    """What :func:`scan` reads."""
    return sum(entry.written for entry in manifest.items if entry is not None)


def scan(directory: Path) -> Iterator[Scanned]:
    """Every item of the last commit in a swap directory, checked.

    Where a run goes on meanwhile and commits, what is not what the commit says is looked up in the newer one.

    Raises:
        CheckpointError: there is no commit, or a file is missing.
    """
    with ExitStack() as stack:
        reader = _Reader(directory, stack)
        for kind, owner, item in reader.manifest.shapes.items().each():
            while True:
                scanned = reader.check(kind, owner, item)
                if scanned.damage is None or not reader.renew():
                    break
            yield scanned


class _Reader:
    """The files of a commit, open for reading."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self.manifest = find_commits(directory).newest
        self._queues = []
        for path, entry in enumerate(self.manifest.files):
            folder = Path(entry.directory) if path else directory
            if path:
                check_member(folder, self.manifest, path)
            check_file(folder / FILE_NAME, entry.size)
            self._queues.append(stack.enter_context(closing(Queue(folder / FILE_NAME, create=False))))
        slabs = (map_slab(PIECE_BYTES) for _ in range(2))
        self._buffers = [torch.frombuffer(slab, dtype=torch.uint8) for slab in slabs]

    def renew(self) -> bool:
        """Takes the newest commit; whether it is another one than before."""
        before, self.manifest = self.manifest, find_commits(self._directory).newest
        return before.serial != self.manifest.serial

    def check(self, kind: PlaneKind, owner: int, item: Item) -> Scanned:
        """Reads an item and says what is wrong with it."""
        entry = self.manifest.items[item.index]
        if entry is None:
            return Scanned(self.manifest, 0, None)
        stripes = self.manifest.extents[entry.extent].of(kind, owner)
        pieces = [
            (extent.path, extent.offset + at, min(PIECE_BYTES, extent.size - at))
            for _, _, extent in stripes.part(item.begin, item.begin + entry.written)
            for at in range(0, extent.size, PIECE_BYTES)
        ]
        try:
            total = self._total(pieces)
        except TransferError as error:
            return Scanned(self.manifest, entry.written, error)
        damage = None
        if total != entry.crc32c:
            found = Mismatch(item.begin, item.begin + entry.written, entry.crc32c, total, is_whole=True)
            what = name_of(*owner_of(self.manifest.shapes, kind, owner), found)
            path, offset, _ = pieces[0]
            damage = explain(found, what, self._queues[path].path, offset)
        return Scanned(self.manifest, entry.written, damage)

    def _total(self, pieces: Sequence[tuple[int, int, int]]) -> int:
        """The sum of pieces that follow each other; the next one is read while one is summed."""
        sums: list[int] = []
        flying = deque([self._start(0, *pieces[0])])
        try:
            for number, (_, _, size) in enumerate(pieces):
                if number + 1 < len(pieces):
                    flying.append(self._start(number + 1, *pieces[number + 1]))
                flying[0].wait()
                flying.popleft()
                cuts = np.array([*range(0, size, COMMIT_BLOCK_BYTES), size], np.uint64)
                found = crc32c(self._buffers[number % 2][:size], cuts)
                sums.append(join(found.tolist(), np.diff(cuts).tolist()))
        finally:
            wait_for_end(flying)
        return join(sums, (size for _, _, size in pieces))

    def _start(self, number: int, path: int, offset: int, size: int) -> Ticket:
        return self._queues[path].read(buffer_of(self._buffers[number % 2][:size]), offset, priority=PREFETCH)


def owner_of(shapes: Shapes, kind: PlaneKind, owner: int) -> tuple[Owner, list[tuple[str, int]]]:
    """Whose a unit's weight plane or a chunk's state is, and the planes in it."""
    itemsize = ITEMSIZES[shapes.weight_dtype]
    if kind == "weights":
        unit, chunk, planes = shapes.units[owner], None, [("weight", shapes.units[owner].weight_bytes)]
    else:
        unit, begin, end = shapes.chunk(owner)
        chunk = (owner, begin * itemsize, end * itemsize)
        names = (plane.name for plane in shapes.planes)
        planes = list(zip(names, shapes.plane_bytes[owner], strict=True))
    params = [(param.name, param.offset, param.offset + param.size) for param in unit.params]
    return Owner(unit.name, params, chunk), planes
