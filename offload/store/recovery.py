"""Goes on from a commit: the directories of a run that has ended become those of this one.

Whatever the size of the store, opening reads one manifest; each item is held against its sum when it is first read.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..config.schema import Aio
from ..errors import CheckpointError, TransferError
from ..ledger import Ledger
from ..links import buffer_of
from ..optim.checksum import crc32c
from ..plan import MemoryPlan
from .commits import Found, check_member, find_commits
from .directory import MANIFEST_NAMES, SwapDirectory
from .drives import FILE_NAME, Drive
from .durable import sync_directory
from .layout import Item, StoreLayout
from .manifest import Manifest, Shapes
from .swap import SwapStore

logger = logging.getLogger("offload.store")


def recover(
    directory: str | os.PathLike[str],
    plan: MemoryPlan,
    shapes: Shapes,
    aio: Aio,
    ledger: Ledger,
    *,
    verify: Literal["off", "resume", "always"] = "resume",
    previous: bool = False,
    found: Found | None = None,
) -> tuple[SwapStore, Manifest]:
    """The store that a run left behind, as it was at its last commit, and what that commit says.

    Args:
        directory: of the run, on its first path.
        plan: two generations, and the units and chunks of the run.
        shapes: of the plan.
        previous: the commit before the last one, for good; of its data, what was written over is found at its
            first read.
        found: the commits there, where they have been read already.

    Raises:
        StoreError: the directory is none, or another run uses it.
        CheckpointError: it holds no commit, or one of another model.
        TransferError: a file cannot be opened.
    """
    with ExitStack() as undo:
        first = SwapDirectory.take(directory)
        undo.callback(first.release)
        if found is None or not found.is_current(first.path):
            found = find_commits(first.path)
        for problem in found.problems:
            logger.warning("%s", problem)
        manifest = found.before() if previous else found.newest
        if manifest is None:
            raise CheckpointError(f"{first.path}: there is no commit before number {found.newest.serial}")
        if difference := manifest.shapes.difference(shapes):
            raise CheckpointError(f"{first.path}: its commit is of another model or plan: {difference}")
        drives = []
        for path, entry in enumerate(manifest.files):
            owned = first
            if path:
                check_member(Path(entry.directory), manifest, path)
                owned = SwapDirectory.take(entry.directory)
                undo.callback(owned.release)
            check_file(owned.path / FILE_NAME, entry.size)
            drives.append(Drive(owned, aio, ledger, create=False))
            undo.callback(drives[-1].queue.close)
        layout = StoreLayout.of(manifest.extents, [entry.size for entry in manifest.files])
        store = SwapStore(drives, layout, plan, ledger, verify=verify == "always")
        explain = None if previous else partial(_explain_lost, store, drives, found)
        store.restore(manifest, proves=verify != "off", explain_lost=explain)
        if previous:
            give_up_newest(first.path, found)
        for drive in drives:
            drive.directory.sign()
        undo.pop_all()
    logger.info("%s: going on from commit %d, of step %d", first.path, manifest.serial, manifest.step)
    return store, manifest


def give_up_newest(directory: Path, found: Found) -> None:
    """Makes the commit before the newest one the newest, for good."""
    (directory / MANIFEST_NAMES[found.newest.serial % 2]).unlink()
    sync_directory(directory)


def check_file(path: Path, size: int) -> None:
    """Raises CheckpointError unless a swap file is there and as long as a commit says."""
    try:
        about = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}, and a commit has its data there") from None
    if not stat.S_ISREG(about.st_mode) or about.st_size < size:
        raise CheckpointError(f"{path}: it is no file of the {size} bytes that a commit says")


def _explain_lost(store: SwapStore, drives: Sequence[Drive], commits: Found, item: Item) -> str:
    """Whether the commit before still has an item, and all else as far as we know."""
    before = commits.before()
    if before is None:
        return "; there is no commit before it"
    if not _is_intact(drives, before, item):
        found = "has not got it any more either"
    elif store.is_changed:
        found = "has it intact, but not all else: this run has written over it"
    else:
        found = "has it intact: go on from that with previous=True (--previous)"
    return f"; the commit before, number {before.serial} of step {before.step}, {found}"


def _is_intact(drives: Sequence[Drive], manifest: Manifest, wanted: Item) -> bool:
    items = manifest.shapes.items()
    for kind, owner, item in items.each():
        entry = manifest.items[item.index]
        if item == wanted and entry is not None:
            buffer, at = torch.empty(entry.written, dtype=torch.uint8), 0
            stripes = manifest.extents[entry.extent].of(kind, owner)
            for _, _, extent in stripes.part(item.begin, item.begin + entry.written):
                try:
                    piece = buffer_of(buffer[at : at + extent.size])
                    drives[extent.path].queue.read(piece, extent.offset).wait()
                except TransferError:
                    return False
                at += extent.size
            return int(crc32c(buffer, np.array([0, at], np.uint64))[0]) == entry.crc32c
    return False
