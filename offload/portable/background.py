"""Writes a checkpoint of what a run has committed in a thread of its own, while training goes on.

Note [Saving in the background]
The commit is the snapshot: until the next one nothing that training writes goes to an extent that it names (`store`,
`generations`). Whoever commits next, closes the store or takes another one in its place waits for the copy first.
It reads the swap files through queues of its own, by the manifest that was just committed, and nothing else of the
run: no slot, no state in memory, no device. Each item is held against the commit's sum.
Its memory is a ring of pieces and the writer's buffer, `RING_BYTES` and `files.PIECE_BYTES`, whatever the chunks and
units are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from ..bytesize import MiB
from ..config.schema import Aio
from ..errors import OffloadError, StoreError
from ..links import Ticket, wait_for_end
from ..models.safetensors_file import TensorSpec
from ..pace import Pace
from ..placement import in_plane
from ..slab import map_slab
from ..store.committed import CommittedFiles, sum_of
from ..store.crc import join
from ..store.layout import Item, PlaneKind
from ..store.manifest import ITEMSIZES, Manifest, ParamEntry, UnitEntry
from ..store.tensors import Tensors
from .commit import formats_of, units_of
from .files import Writer
from .manifest import WEIGHT, SavedParam
from .save import Content, Destination, Saving

logger = logging.getLogger("offload")

PIECE_BYTES, RING = 4 * MiB, 3
"""What is read at once, and the pieces in memory: one is written while those after it are read."""
RING_BYTES = RING * PIECE_BYTES
MOMENT_SECONDS = 1.0
"""Whoever waits longer for a copy is told so."""


class Span(NamedTuple):
    """Bytes [begin, end) of an item are those of a parameter's plane from its byte ``at`` on."""

    begin: int
    end: int
    param: str
    plane: str
    at: int


class _Part(NamedTuple):
    """Bytes [begin, end) of an item, which are read and written as one."""

    kind: PlaneKind
    owner: int
    item: Item
    spans: Sequence[Span]
    begin: int
    end: int


class CommitState:
    """The state that a commit holds, read item by item in the order in which it lies."""

    def __init__(
        self, files: CommittedFiles, tensors: Tensors, advance: Callable[[int], None] = lambda size: None
    ) -> None:
        """
        Args:
            tensors: those of the commit.
            advance: called with the bytes of each piece that has been written; may wait, or raise to end it.

        Raises:
            CheckpointError: the commit is in no format that is known.
        """
        self._files, self._tensors, self._advance = files, tensors, advance
        self.formats = formats_of(files.manifest.shapes)
        self.units: Sequence[Sequence[SavedParam]] = units_of(files.manifest)
        self._sums: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Of an item that is being read: sum and size of each part that has come."""

    def tensor_specs(self) -> Mapping[str, TensorSpec]:
        names = self._files.manifest.training["state"]["tensors"]  # in the order of whoever captured them
        specs = self._tensors.specs
        return {name: TensorSpec(name, specs[name][1], specs[name][0]) for name in names}

    def write(self, writer: Writer) -> None:
        with closing(self._arriving()) as arriving:
            for part, data in arriving:
                for span in part.spans:
                    begin, end = max(span.begin, part.begin), min(span.end, part.end)
                    if begin < end:
                        piece = data[begin - part.begin : end - part.begin]
                        writer.write(span.param, span.plane, span.at + begin - span.begin, piece)
                self._advance(part.end - part.begin)
        for name in self.tensor_specs():
            data = self._tensors[name].reshape(-1).view(torch.uint8)
            writer.write("", name, 0, data)
            self._advance(data.numel())

    def _arriving(self) -> Generator[tuple[_Part, torch.Tensor]]:
        """All parts, each until the next is asked for; those after it are being read meanwhile."""
        ring = [torch.frombuffer(map_slab(PIECE_BYTES), dtype=torch.uint8) for _ in range(RING)]
        flying: deque[tuple[_Part, torch.Tensor, list[Ticket]]] = deque()
        try:
            for number, part in enumerate(self._parts()):
                buffer = ring[number % RING][: part.end - part.begin]
                started = self._files.start_part(part.kind, part.owner, part.item, part.begin, buffer)
                flying.append((part, buffer, started))
                if len(flying) == RING:
                    yield self._arrived(*flying[0])
                    flying.popleft()
            while flying:
                yield self._arrived(*flying[0])
                flying.popleft()
        finally:
            wait_for_end(ticket for _, _, tickets in flying for ticket in tickets)

    def _arrived(self, part: _Part, data: torch.Tensor, tickets: list[Ticket]) -> tuple[_Part, torch.Tensor]:
        """Waits for a part, and holds an item against its sum when its last part has come."""
        for ticket in tickets:
            ticket.wait()
        entry, item = self._files.manifest.items[part.item.index], part.item
        if entry is not None and part.begin < entry.written:
            size = min(part.end, entry.written) - part.begin
            parts = self._sums[item.index]
            parts.append((sum_of(data[:size]), size))
            if part.begin + size == entry.written:
                total = join(*zip(*self._sums.pop(item.index), strict=True))
                if total != entry.crc32c:
                    raise self._files.damage(part.kind, part.owner, item, entry, total)
        return part, data

    def _parts(self) -> Iterator[_Part]:
        """Unit by unit, first its weights, then the state of its chunks."""
        for kind, owner, item, spans in self._items():
            size = item.end - item.begin
            for begin in range(0, size, PIECE_BYTES):
                yield _Part(kind, owner, item, spans, begin, min(begin + PIECE_BYTES, size))

    def _items(self) -> Iterator[tuple[PlaneKind, int, Item, list[Span]]]:
        shapes = self._files.manifest.shapes
        items, number = shapes.items(), 0
        for index, unit in enumerate(shapes.units):
            for item in items.weights[index]:
                yield "weights", index, item, [*weight_spans(unit, item)]
            for begin, end in pairwise((0, *unit.chunk_ends)):
                spans = [*self._state_spans(unit, number, begin, end)]
                yield "states", number, items.states[number], spans
                number += 1

    def _state_spans(self, unit: UnitEntry, number: int, begin: int, end: int) -> Iterator[Span]:
        shapes, at = self._files.manifest.shapes, 0
        for plane, size in zip(shapes.planes, shapes.plane_bytes[number], strict=True):
            for param in unit.params:
                if param.trainable:
                    first = param.offset // ITEMSIZES[shapes.weight_dtype]
                    yield from state_spans(param, first, plane.name, ITEMSIZES[plane.dtype], (begin, end), at)
            at += size


def weight_spans(unit: UnitEntry, item: Item) -> Iterator[Span]:
    """Whose weights lie in a part of a unit's weight plane."""
    for param in unit.params:
        begin, end = max(param.offset, item.begin), min(param.offset + param.size, item.end)
        if begin < end:
            yield Span(begin - item.begin, end - item.begin, param.name, WEIGHT, begin - param.offset)


def state_spans(
    param: ParamEntry, first: int, plane: str, itemsize: int, chunk: tuple[int, int], at: int
) -> Iterator[Span]:
    """Where in the state of a chunk a plane of a parameter lies, if it has elements there.

    Args:
        first: number of the parameter's first element in its unit.
        chunk: the elements of the unit that are in it.
        at: where the plane begins in it.
    """
    count = param.size // ITEMSIZES[param.dtype]
    begin, end = max(first, chunk[0]), min(first + count, chunk[1])
    if begin < end:
        low, high = in_plane(plane, begin - chunk[0], end - chunk[0])
        offset, _ = in_plane(plane, begin - first, end - first)
        yield Span(at + low * itemsize, at + high * itemsize, param.name, plane, offset * itemsize)


class _CancelledError(Exception):
    """Nobody wants the checkpoint any more."""


class BackgroundSaving:
    """A checkpoint that a thread writes while training goes on. See Note [Saving in the background]."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        aio: Aio,
        content: Content,
        to: Destination,
        *,
        bytes_per_second: int | None = None,
    ) -> None:
        """
        Args:
            directory: the swap directory of this run.
            manifest: of the commit that was just made there.
            aio: how the swap files are read.

        Raises:
            StoreError: it cannot be written there; the checkpoint before is what it was.
        """
        self._owner_pid = os.getpid()
        self._pace = Pace(bytes_per_second)
        self._cancelled, self._ended = threading.Event(), threading.Event()
        self._ended.set()
        self._failure: OffloadError | None = None
        with ExitStack() as stack:
            try:
                files = stack.enter_context(CommittedFiles(directory, manifest, aio))
                state = CommitState(files, Tensors(directory, manifest.training["tensors"]), self._advance)
                saving = stack.enter_context(Saving(state, content, to))
            except StoreError:
                raise
            except OffloadError as error:  # of the swap files, but none that training has come upon
                raise _explained(error, to.directory / to.tag) from error
            self.folder = saving.folder
            self._thread = threading.Thread(
                target=self._run, args=(stack.pop_all(), saving), name="offload-save"
            )

    def start(self) -> None:
        """Begins to write."""
        self._ended.clear()
        try:
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # the system has no thread for us
                self._cancelled.set()
                self._thread.run()
            raise

    @property
    def is_running(self) -> bool:
        """Whether it is still being written; never in a forked child."""
        return os.getpid() == self._owner_pid and not self._ended.is_set()

    def wait(self, *, or_cancel: bool = False) -> None:
        """Returns when it has ended, well or not; in a forked child at once.

        Args:
            or_cancel: where an exception breaks the waiting off, such as Ctrl-C, end it unfinished.
        """
        if os.getpid() != self._owner_pid:
            return
        try:
            if not self._ended.wait(MOMENT_SECONDS):
                logger.info("waiting for the checkpoint %s, which is saved in the background", self.folder)
                self._ended.wait()
        except BaseException:
            if or_cancel:
                self._cancelled.set()
                self._ended.wait()
            raise
        if self._thread.ident is not None:
            self._thread.join()

    def take_failure(self) -> OffloadError | None:
        """What went wrong, once; never in a forked child."""
        if os.getpid() != self._owner_pid:
            return None
        failure, self._failure = self._failure, None
        return failure

    def _run(self, stack: ExitStack, saving: Saving) -> None:
        try:
            with stack:
                self._advance(0)
                saving.write()
        except _CancelledError:
            logger.warning("%s: given up before it was written", self.folder)
        except BaseException as error:
            self._failure = _explained(error, self.folder)
            self._failure.__cause__ = error
            logger.warning("%s", self._failure)
        finally:
            self._ended.set()

    def _advance(self, size: int) -> None:
        if self._cancelled.wait(self._pace.delay(size)):
            raise _CancelledError


def _explained(error: BaseException, folder: Path) -> OffloadError:
    """The error of a saving in the background: none of training's own, whatever has failed."""
    after = "what was saved there before stands, and nothing of the run has changed"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        text = f"this checkpoint was not written in the background: {error.strerror or error}{where}; {after}"
        return StoreError(error.errno, text, str(folder))
    reason = f"{type(error).__name__}: {error}"
    return OffloadError(f"{folder}: this checkpoint was not written in the background: {reason}; {after}")
