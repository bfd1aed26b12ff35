"""Reads all that a checkpoint names and holds it against its sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import TransferError
from ..slab import map_slab
from ..store.committed import sum_of
from ..store.crc import join
from .manifest import Place
from .saved import PIECE_BYTES, CheckpointFiles


class Scanned(NamedTuple):
    """One plane, tensor or header that was read."""

    size: int
    damage: TransferError | None


def scanned_bytes(files: CheckpointFiles) -> int:
    """What :func:`scan` reads."""
    return sum(size for _, _, size in _each(files))


def scan(folder: Path) -> Iterator[Scanned]:
    """Everything in a checkpoint, checked.

    Raises:
        CheckpointError: there is none, or a file is missing or has another size.
    """
    buffer = torch.frombuffer(map_slab(PIECE_BYTES), dtype=torch.uint8)
    with CheckpointFiles(folder) as files:
        for what, place, size in _each(files):
            try:
                found = _sum(files, place, size, buffer)
            except TransferError as error:
                yield Scanned(size, error)
                continue
            damage = None if found == place.crc32c else files.damage(what, place, size, found)
            yield Scanned(size, damage)


def _each(files: CheckpointFiles) -> Iterator[tuple[str, Place, int]]:
    checkpoint = files.checkpoint
    for number, file in enumerate(checkpoint.files):
        yield "the header", Place(number, 0, file.header_crc32c), file.header_bytes
    for param, plane, place, size in checkpoint.each():
        yield f"{plane} of {param.name}", place, size
    for tensor in checkpoint.tensors:
        yield tensor.name, tensor.place, tensor.size


def _sum(files: CheckpointFiles, place: Place, size: int, buffer: torch.Tensor) -> int:
    total = at = 0
    while at < size:
        piece = buffer[: min(PIECE_BYTES, size - at)]
        files.fill(place, at, piece)
        total = join((total, sum_of(piece)), (at, piece.numel()))
        at += piece.numel()
    return total
