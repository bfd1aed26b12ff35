"""Writes a live engine's state to a portable checkpoint, chunk by chunk.

Note [Memory of saving]
A unit's weights are written from the slot in which they lie anyway, and state from one chunk while the next is read:
what saving takes beside the plan is two chunks and a small buffer, less than the ring. One thread sums and writes
(`files`), so that the drives that are read and the one that is written work at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bytesize import MiB, format_bytes
from ..engine import OffloadEngine
from ..models.safetensors_file import TensorSpec
from ..partition import StoredParam
from ..placement import STATE_BLOCK
from ..plan import Chunk
from . import directory as places
from .files import Writer, wait_for
from .layout import plan_files
from .manifest import WEIGHT, Checkpoint, SavedParam, SavedTensor, planes_of

logger = logging.getLogger("offload")

MANIFEST_ROOM = 1 * MiB


@dataclass(frozen=True, slots=True)
class Content:
    """What is saved beside the parameters and their state."""

    step: int
    training: dict[str, Any] = field(default_factory=dict)
    """JSON, given back at loading."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Such as buffers, by name; in host memory while they are saved."""
    model: dict[str, Any] = field(default_factory=dict)
    """The configuration of the model, for export."""


def saved_param(stored: StoredParam) -> SavedParam:
    """A live parameter as a checkpoint names it."""
    dtype = str(stored.dtype).removeprefix("torch.")
    shape, names = stored.placed.info.shape, stored.names
    return SavedParam(names[0], shape, tuple(stored.stride), dtype, stored.trainable, names[1:])


def save(
    engine: OffloadEngine,
    content: Content,
    directory: str | os.PathLike[str],
    tag: str,
    *,
    exclude_frozen: bool = False,
    keep_last: int | None = None,
    latest: bool = True,
) -> Path:
    """Writes a checkpoint to ``directory/tag``, in place of one that is there. Between two steps.

    Args:
        exclude_frozen: leave out frozen weights, which are then only summed; loading needs the same base.
        keep_last: so many checkpoints stay in ``directory``; all of them where it is None.
        latest: make it the one that is loaded where no tag is given.

    Raises:
        StoreError: it does not fit, or cannot be written: the checkpoint before is what it was.
        TransferError: the engine's own planes cannot be read, likewise.
    """
    root, began = Path(os.path.abspath(os.path.expanduser(directory))), time.monotonic()
    engine.settle()
    params = [[saved_param(stored) for stored in unit] for unit in engine.partition.units]
    placement = engine.plan.placement
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in content.tensors.items()
    }
    plan = plan_files(
        params,
        placement.formats,
        specs,
        nonce=secrets.token_hex(4),
        exclude_frozen=exclude_frozen,
    )
    with places.saving_to(root, tag) as folder:
        places.check_space(folder, plan.bytes_total + MANIFEST_ROOM)
        with Writer(folder, plan) as writer:
            for unit in range(len(params)):
                _write_unit(engine, unit, writer)
            for name, tensor in content.tensors.items():
                writer.put("", name, 0, tensor.detach().cpu().contiguous())
                writer.drain()  # of copies, one is in memory
            writer.finish()
        checkpoint = Checkpoint(
            step=content.step,
            time=int(time.time()),
            formats=placement.formats,
            files=tuple(writer.entries()),
            params=tuple(param for unit in params for param in unit),
            places=tuple(
                {plane: writer.place(param.name, plane) for plane in _planes(engine, param)}
                for unit in params
                for param in unit
            ),
            tensors=tuple(
                SavedTensor(
                    spec.name, spec.shape, spec.dtype.removeprefix("torch."), writer.place("", spec.name)
                )
                for spec in specs.values()
            ),
            model=content.model,
            training=content.training,
        )
        places.finish(folder, checkpoint.encode(), latest=latest)
    if keep_last is not None:
        places.rotate(root, keep_last, but=tag)
    size, seconds = format_bytes(plan.bytes_total), time.monotonic() - began
    logger.info("%s: saved step %d, %s in %.1f s", folder, content.step, size, seconds)
    return folder


def _planes(engine: OffloadEngine, param: SavedParam) -> dict[str, str]:
    return planes_of(engine.plan.placement.formats, param)


def _write_unit(engine: OffloadEngine, unit: int, writer: Writer) -> None:
    hold = engine.lease_unannounced(unit)
    try:
        plane = engine.weights.host_plane(unit)
        for stored in engine.partition.units[unit]:
            begin = stored.placed.offset
            writer.put(stored.name, WEIGHT, 0, plane[begin : begin + stored.placed.info.nbytes])
        of_last: list[Future[None]] = []
        for chunk in engine.plan.chunks_of[unit]:
            buffer = engine.read_chunk(chunk)
            wait_for(of_last)
            of_last = [*_write_chunk(engine, chunk, buffer, writer)]
        writer.drain()  # the slot is the mover's again, and chunks that live where they are may change
    finally:
        hold.close()


def _write_chunk(
    engine: OffloadEngine, chunk: Chunk, buffer: torch.Tensor, writer: Writer
) -> Iterator[Future[None]]:
    planes = {name: plane.cpu() for name, plane in engine.state_planes(chunk, buffer).items()}
    for stored, begin, end in members(engine, chunk):
        first = chunk.begin + begin - stored.placed.begin
        for name, values in cut(planes, begin, end).items():
            at = first // STATE_BLOCK * 2 if name == "scale" else first
            yield from writer.put(stored.name, name, at * values.itemsize, values)


def members(engine: OffloadEngine, chunk: Chunk) -> Iterator[tuple[StoredParam, int, int]]:
    """The parameters that have elements in a chunk, and which of the chunk's elements those are."""
    for stored in engine.partition.trained[chunk.unit]:
        begin, end = max(stored.placed.begin, chunk.begin), min(stored.placed.end, chunk.end)
        if begin < end:
            yield stored, begin - chunk.begin, end - chunk.begin


def cut(planes: Mapping[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Elements [begin, end) of a chunk's planes; of scales, those of the blocks that they begin and end."""
    scales = slice(begin // STATE_BLOCK * 2, -(-end // STATE_BLOCK) * 2)
    return {name: plane[scales if name == "scale" else slice(begin, end)] for name, plane in planes.items()}
