"""Writes a state of training to a portable checkpoint: here a live engine's, chunk by chunk; see also `background`.

Note [Memory of saving]
A unit's weights are written from the slot in which they lie anyway, and state from one chunk while the next is read:
what saving takes beside the plan is two chunks and a small buffer, less than the ring. One thread sums and writes
(`files`), so that the drives that are read and the one that is written work at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ..access import cut
from ..bytesize import MiB, format_bytes
from ..engine import OffloadEngine
from ..models.safetensors_file import TensorSpec
from ..partition import StoredParam
from ..placement import Formats, in_plane
from ..plan import Chunk
from . import directory as places
from .files import Writer, wait_for
from .layout import plan_files
from .manifest import WEIGHT, Checkpoint, SavedParam, SavedTensor, planes_of

logger = logging.getLogger("offload")

MANIFEST_ROOM = 1 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a checkpoint is written to, and how.

    Raises:
        ConfigError: the tag is none.
    """

    directory: Path
    tag: str
    """It is written to ``directory/tag``, in place of one that is there."""
    exclude_frozen: bool = False
    """Leave out frozen weights, which are then only summed; loading needs the same base."""
    keep_last: int | None = None
    """So many checkpoints stay in ``directory``; all of them where it is None."""
    latest: bool = True
    """Make it the one that is loaded where no tag is given."""

    def __post_init__(self) -> None:
        places.check_tag(self.tag)


@dataclass(frozen=True, slots=True)
class Content:
    """What is saved beside values of parameters, their state, and tensors."""

    step: int
    training: dict[str, Any] = field(default_factory=dict)
    """JSON, given back at loading."""
    model: dict[str, Any] = field(default_factory=dict)
    """The configuration of the model, for export."""


class Source(Protocol):
    """A state of training from which a checkpoint is written."""

    formats: Formats
    units: Sequence[Sequence[SavedParam]]

    def tensor_specs(self) -> Mapping[str, TensorSpec]:
        """The tensors that are no parameters, such as buffers, by name."""

    def write(self, writer: Writer) -> None:
        """Gives a writer each plane of each parameter, and all tensors; each piece after those before it."""


class Saving:
    """A checkpoint that is being written: there is room for it, and nobody else writes in its place."""

    def __init__(self, source: Source, content: Content, to: Destination) -> None:
        """
        Raises:
            StoreError: it does not fit, or cannot be written: the checkpoint before is what it was.
        """
        self._source, self._content, self._to, self._began = source, content, to, time.monotonic()
        self._specs = source.tensor_specs()
        self._plan = plan_files(
            source.units,
            source.formats,
            self._specs,
            nonce=secrets.token_hex(4),
            exclude_frozen=to.exclude_frozen,
        )
        with ExitStack() as stack:
            self.folder = stack.enter_context(places.saving_to(to.directory, to.tag))
            places.check_space(self.folder, self._plan.bytes_total + MANIFEST_ROOM)
            self._writer = stack.enter_context(Writer(self.folder, self._plan))
            self._stack = stack.pop_all()

    def write(self) -> Path:
        """Writes it, and makes it the one that counts.

        Raises:
            StoreError: it cannot be written: the checkpoint before is what it was.
            TransferError: what is saved cannot be read, likewise.
        """
        self._source.write(self._writer)
        self._writer.finish()
        places.finish(self.folder, self._checkpoint().encode(), latest=self._to.latest)
        if self._to.keep_last is not None:
            places.rotate(self._to.directory, self._to.keep_last, but=self._to.tag)
        size, seconds = format_bytes(self._plan.bytes_total), time.monotonic() - self._began
        logger.info("%s: saved step %d, %s in %.1f s", self.folder, self._content.step, size, seconds)
        return self.folder

    def _checkpoint(self) -> Checkpoint:
        formats, params = self._source.formats, [*chain.from_iterable(self._source.units)]
        place = self._writer.place
        return Checkpoint(
            step=self._content.step,
            time=int(time.time()),
            formats=formats,
            files=tuple(self._writer.entries()),
            params=tuple(params),
            places=tuple(
                {plane: place(param.name, plane) for plane in planes_of(formats, param)} for param in params
            ),
            tensors=tuple(
                SavedTensor(spec.name, spec.shape, spec.dtype.removeprefix("torch."), place("", spec.name))
                for spec in self._specs.values()
            ),
            model=self._content.model,
            training=self._content.training,
        )

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


class LiveState:
    """The state of an engine between two steps: it must not go on meanwhile."""

    def __init__(self, engine: OffloadEngine, tensors: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            tensors: that are no parameters, by name; in host memory while they are saved.
        """
        self._engine, self._tensors = engine, tensors
        self.formats = engine.plan.placement.formats
        self.units: Sequence[Sequence[SavedParam]] = [
            [saved_param(stored) for stored in unit] for unit in engine.partition.units
        ]

    def tensor_specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype))
            for name, tensor in self._tensors.items()
        }

    def write(self, writer: Writer) -> None:
        self._engine.settle()
        for unit in range(len(self.units)):
            _write_unit(self._engine, unit, writer)
        for name, tensor in self._tensors.items():
            writer.put("", name, 0, tensor.detach().cpu().contiguous())
            writer.drain()  # of copies, one is in memory


def saved_param(stored: StoredParam) -> SavedParam:
    """A live parameter as a checkpoint names it."""
    dtype = str(stored.dtype).removeprefix("torch.")
    shape, names = stored.placed.info.shape, stored.names
    return SavedParam(names[0], shape, tuple(stored.stride), dtype, stored.trainable, names[1:])


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
            at, _ = in_plane(name, first, first)
            yield from writer.put(stored.name, name, at * values.itemsize, values)


def members(engine: OffloadEngine, chunk: Chunk) -> Iterator[tuple[StoredParam, int, int]]:
    """The parameters that have elements in a chunk, and which of the chunk's elements those are."""
    for stored in engine.partition.trained[chunk.unit]:
        begin, end = max(stored.placed.begin, chunk.begin), min(stored.placed.end, chunk.end)
        if begin < end:
            yield stored, begin - chunk.begin, end - chunk.begin
