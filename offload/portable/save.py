"""Writes a live engine's state to a portable checkpoint, chunk by chunk.

Note [Memory of saving]
A unit's weights are written from the slot in which they lie anyway, and state from one chunk while the next is read:
what saving takes beside the plan is two chunks, less than the ring. One thread sums and writes, so that the drives
that are read and the one that is written work at once.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bytesize import MiB, format_bytes
from ..engine import OffloadEngine
from ..errors import StoreError
from ..links import buffer_of
from ..models.safetensors_file import TensorSpec
from ..partition import StoredParam
from ..placement import STATE_BLOCK
from ..plan import Chunk
from ..store.committed import sum_of
from ..store.crc import join
from . import directory as places
from .layout import FilePlan, plan_files
from .manifest import WEIGHT, Checkpoint, FileEntry, Place, SavedParam, SavedTensor, planes_of

logger = logging.getLogger("offload")

PIECE_BYTES = 16 * MiB
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
        placement.precision,
        placement.state_format,
        specs,
        nonce=secrets.token_hex(4),
        exclude_frozen=exclude_frozen,
    )
    with places.saving_to(root, tag) as folder:
        places.check_space(folder, plan.bytes_total + MANIFEST_ROOM)
        with _Writer(folder, plan) as writer:
            for unit in range(len(params)):
                _write_unit(engine, unit, writer)
            for name, tensor in content.tensors.items():
                writer.put("", name, 0, tensor.detach().cpu().contiguous())
                writer.drain()  # of copies, one is in memory
            writer.finish()
        checkpoint = Checkpoint(
            step=content.step,
            time=int(time.time()),
            precision=placement.precision,
            state_format=placement.state_format,
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
    placement = engine.plan.placement
    return planes_of(placement.precision, placement.state_format, param)


def _write_unit(engine: OffloadEngine, unit: int, writer: _Writer) -> None:
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
    engine: OffloadEngine, chunk: Chunk, buffer: torch.Tensor, writer: _Writer
) -> Iterator[Future[None]]:
    planes = {name: plane.cpu() for name, plane in engine.state_planes(chunk, buffer).items()}
    for stored, begin, end in members(engine, chunk):
        first = chunk.begin + begin - stored.placed.begin
        for name, plane in planes.items():
            span, at = slice(begin, end), first
            if name == "scale":
                span, at = (
                    slice(begin // STATE_BLOCK * 2, -(-end // STATE_BLOCK) * 2),
                    first // STATE_BLOCK * 2,
                )
            yield from writer.put(stored.name, name, at * plane.itemsize, plane[span])


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


def wait_for(writes: list[Future[None]]) -> None:
    """Waits for writes, and raises what went wrong."""
    for write in writes:
        write.result()


class _Writer:
    """The files of a checkpoint that is being written, and the thread that writes them."""

    def __init__(self, folder: Path, plan: FilePlan) -> None:
        self._folder, self._plan = folder, plan
        self._fds: list[int] = []
        self._sums: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._headers: list[int] = []
        self._thread = ThreadPoolExecutor(1, "offload-save")
        self._writes: list[Future[None]] = []

    def __enter__(self) -> _Writer:
        try:
            for file in self._plan.files:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fds.append(os.open(self._folder / file.name, flags, 0o600))
                header = torch.frombuffer(bytearray(file.layout.header), dtype=torch.uint8)
                self._headers.append(sum_of(header))
                self._write(len(self._fds) - 1, 0, header)
        except OSError as error:
            self.__exit__()
            raise self._failed(error, "make", len(self._fds)) from error
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        while self._fds:
            os.close(self._fds.pop())

    def put(self, param: str, plane: str, at: int, values: torch.Tensor) -> list[Future[None]]:
        """Writes values to byte ``at`` of a plane, after those before them. They must not change until then."""
        place = self._plan.places.get((param, plane))
        flat = values.reshape(-1).view(torch.uint8)
        sums = self._sums.setdefault((param, plane), ([], []))

        def work(piece: torch.Tensor, at: int) -> None:
            sums[0].append(sum_of(piece))
            sums[1].append(piece.numel())
            if place is not None:
                self._write(place[0], place[1] + at, piece)

        begun = [
            self._thread.submit(work, flat[first : first + PIECE_BYTES], at + first)
            for first in range(0, flat.numel(), PIECE_BYTES)
        ]
        self._writes += begun
        return begun

    def drain(self) -> None:
        """Waits for all writes, and raises what went wrong."""
        wait_for(self._writes)
        self._writes.clear()

    def finish(self) -> None:
        """Everything is on stable storage; its pages in the cache are given up."""
        self.drain()
        for number, fd in enumerate(self._fds):
            try:
                os.fsync(fd)
            except OSError as error:
                raise self._failed(error, "flush", number) from error
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def entries(self) -> Iterator[FileEntry]:
        """The files, as the checkpoint names them."""
        for file, crc in zip(self._plan.files, self._headers, strict=True):
            yield FileEntry(file.name, file.layout.size, len(file.layout.header), crc)

    def place(self, param: str, plane: str) -> Place:
        """Where a plane was written, and the sum of its bytes."""
        total = join(*self._sums.get((param, plane), ((), ())))
        file, offset = self._plan.places.get((param, plane), (None, 0))
        return Place(file, offset, total)

    def _write(self, file: int, offset: int, data: torch.Tensor) -> None:
        view, done = memoryview(buffer_of(data)), 0
        while done < len(view):
            try:
                done += os.pwrite(self._fds[file], view[done:], offset + done)
            except OSError as error:
                raise self._failed(error, f"write byte {offset + done} of", file) from error

    def _failed(self, error: OSError, what: str, file: int) -> StoreError:
        """The drive that is written failed, and not one of the engine's: training can go on."""
        if isinstance(error, StoreError):
            return error
        hint = "; free space or give another directory" if error.errno == errno.ENOSPC else ""
        name = self._plan.files[min(file, len(self._plan.files) - 1)].name
        return StoreError(
            error.errno, f"saving failed: cannot {what} it: {error.strerror}{hint}", str(self._folder / name)
        )
