"""Reads all that a commit names and holds it against its sums: without its model, and beside a run that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from ..bytesize import MiB
from ..errors import CheckpointError, TransferError
from ..links import Ticket, wait_for_end
from ..slab import map_slab
from .committed import CommittedFiles, sum_of
from .crc import join
from .layout import Item, PlaneKind
from .manifest import Manifest
from .tensors import Tensors

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
        files = stack.enter_context(CommittedFiles(directory))
        scanner = _Scanner(files)
        for kind, owner, item in files.manifest.shapes.items().each():
            while True:
                scanned = scanner.check(kind, owner, item)
                if scanned.damage is None or not files.renew():
                    break
            yield scanned
        yield from _scan_tensors(directory, files)


def _scan_tensors(directory: Path, files: CommittedFiles) -> Iterator[Scanned]:
    """Those that are in no plane; :func:`committed_bytes` does not count them."""
    while True:
        manifest = files.manifest
        if "tensors" not in manifest.training:
            return
        try:
            tensors = Tensors(directory, manifest.training["tensors"])
            found = [Scanned(manifest, 0, _damage(tensors, name)) for name in tensors]
        except CheckpointError:
            if not files.renew():
                raise
            continue
        if not any(scanned.damage for scanned in found) or not files.renew():
            yield from found
            return


def _damage(tensors: Tensors, name: str) -> TransferError | None:
    try:
        tensors[name]
    except TransferError as error:
        return error
    return None


class _Scanner:
    """Reads items in pieces, and keeps nothing of them."""

    def __init__(self, files: CommittedFiles) -> None:
        self._files = files
        slabs = (map_slab(PIECE_BYTES) for _ in range(2))
        self._buffers = [torch.frombuffer(slab, dtype=torch.uint8) for slab in slabs]

    def check(self, kind: PlaneKind, owner: int, item: Item) -> Scanned:
        """Reads an item and says what is wrong with it."""
        manifest = self._files.manifest
        entry = manifest.items[item.index]
        if entry is None:
            return Scanned(manifest, 0, None)
        pieces = [
            (extent.path, extent.offset + at, min(PIECE_BYTES, extent.size - at))
            for extent in self._files.extents(kind, owner, item, entry)
            for at in range(0, extent.size, PIECE_BYTES)
        ]
        try:
            total = self._total(pieces)
        except TransferError as error:
            return Scanned(manifest, entry.written, error)
        damage = None
        if total != entry.crc32c:
            damage = self._files.damage(kind, owner, item, entry, total)
        return Scanned(manifest, entry.written, damage)

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
                sums.append(sum_of(self._buffers[number % 2][:size]))
        finally:
            wait_for_end(flying)
        return join(sums, (size for _, _, size in pieces))

    def _start(self, number: int, path: int, offset: int, size: int) -> Ticket:
        return self._files.start(path, offset, self._buffers[number % 2][:size])
