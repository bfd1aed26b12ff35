"""The files of a commit, open for reading: without its model, and changing nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch

from ..aio import PREFETCH, Queue
from ..config.schema import Aio
from ..errors import TransferError
from ..links import Ticket, buffer_of, wait_for_end
from ..optim.checksum import crc32c
from .checksums import COMMIT_BLOCK_BYTES, Mismatch, Owner, explain, name_of
from .commits import check_member, find_commits
from .crc import join
from .drives import FILE_NAME, open_queue
from .layout import Extent, Item, PlaneKind
from .manifest import ITEMSIZES, ItemEntry, Manifest, Shapes
from .recovery import check_file


class CommittedFiles:
    """The last commit in a swap directory. A run that goes on meanwhile may write over it: see :meth:`renew`."""

    def __init__(self, directory: Path, manifest: Manifest | None = None, aio: Aio | None = None) -> None:
        """
        Args:
            manifest: of the commit, where it is known; nobody may commit again while it is read then.
            aio: how the swap files are read.

        Raises:
            CheckpointError: there is no commit, or a file is missing.
        """
        self._directory, aio = directory, aio or Aio()
        self.manifest: Manifest = manifest or find_commits(directory).newest
        self._queues: list[Queue] = []
        with ExitStack() as stack:
            for path, entry in enumerate(self.manifest.files):
                folder = Path(entry.directory) if path else directory
                if path:
                    check_member(folder, self.manifest, path)
                check_file(folder / FILE_NAME, entry.size)
                self._queues.append(
                    stack.enter_context(closing(open_queue(folder / FILE_NAME, aio, create=False)))
                )
            self._stack = stack.pop_all()

    def renew(self) -> bool:
        """Takes the newest commit; whether it is another one than before."""
        before, self.manifest = self.manifest, find_commits(self._directory).newest
        return before.serial != self.manifest.serial

    def extents(self, kind: PlaneKind, owner: int, item: Item, entry: ItemEntry) -> Iterator[Extent]:
        """Where the bytes of an item lie, in their order."""
        stripes = self.manifest.extents[entry.extent].of(kind, owner)
        for _, _, extent in stripes.part(item.begin, item.begin + entry.written):
            yield extent

    def start(self, path: int, offset: int, buffer: torch.Tensor) -> Ticket:
        """Starts a read from the file on a path."""
        return self._queues[path].read(buffer_of(buffer), offset, priority=PREFETCH)

    def start_part(
        self, kind: PlaneKind, owner: int, item: Item, begin: int, buffer: torch.Tensor
    ) -> list[Ticket]:
        """Starts to fill ``buffer`` with the bytes of an item from ``begin`` on; zeros what was never written."""
        entry = self.manifest.items[item.index]
        size = 0 if entry is None else max(0, min(buffer.numel(), entry.written - begin))
        buffer[size:].zero_()
        if entry is None or not size:
            return []
        stripes, at = self.manifest.extents[entry.extent].of(kind, owner), item.begin + begin
        return [
            self.start(extent.path, extent.offset, buffer[first - at : last - at])
            for first, last, extent in stripes.part(at, at + size)
        ]

    def read(self, kind: PlaneKind, owner: int, item: Item) -> torch.Tensor:
        """All bytes of an item, which are those of the commit; zeros where it was never written.

        Raises:
            TransferError: they cannot be read, or have changed.
        """
        found = torch.empty(item.end - item.begin, dtype=torch.uint8)
        flying = self.start_part(kind, owner, item, 0, found)
        try:
            while flying:
                flying[0].wait()
                flying.pop(0)
        finally:
            wait_for_end(flying)
        entry = self.manifest.items[item.index]
        if entry is not None and (total := sum_of(found[: entry.written])) != entry.crc32c:
            raise self.damage(kind, owner, item, entry, total)
        return found

    def damage(self, kind: PlaneKind, owner: int, item: Item, entry: ItemEntry, found: int) -> TransferError:
        """The error of an item whose bytes have another sum than the commit says."""
        mismatch = Mismatch(item.begin, item.begin + entry.written, entry.crc32c, found, is_whole=True)
        what = name_of(*owner_of(self.manifest.shapes, kind, owner), mismatch)
        first = next(self.extents(kind, owner, item, entry))
        return explain(mismatch, what, str(self._queues[first.path].path), first.offset)

    def __enter__(self) -> CommittedFiles:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stack.close()


def sum_of(data: torch.Tensor) -> int:
    """The CRC-32C of flat bytes."""
    cuts = np.array([*range(0, data.numel(), COMMIT_BLOCK_BYTES), data.numel()], np.uint64)
    return join(crc32c(data, cuts).tolist(), np.diff(cuts).tolist())


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
