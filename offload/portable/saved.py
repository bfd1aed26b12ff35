"""Values of parameters and their state that lie in a checkpoint or in a swap store, without a model or an engine.

Note [Pieces]
Elements of a parameter are asked for in the order in which they lie, from one number to another: whoever loads needs
those of a chunk, whoever exports all of them. What was read is held against the sum that was saved: of a checkpoint
when the last piece of a plane has come, of a swap store before anything of an item is given out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ..bytesize import PAGE_BYTES, MiB, align_up
from ..errors import CheckpointError, TransferError
from ..links import buffer_of
from ..optim import kernels
from ..optim.moments import decoded
from ..placement import MOMENTS, STATE_BLOCK, Formats
from ..slab import map_slab
from ..store.committed import sum_of
from ..store.crc import join
from ..store.manifest import ITEMSIZES
from .manifest import NAME, WEIGHT, Checkpoint, Place, SavedParam, plane_elements
from .reader import read_checkpoint

PIECE_BYTES = 8 * MiB


class Saved(Protocol):
    """A state of training that lies somewhere. See Note [Pieces]."""

    where: Path
    formats: Formats
    step: int
    params: Sequence[SavedParam]
    training: dict[str, Any]
    model: dict[str, Any]

    def planes(self, param: SavedParam) -> Mapping[str, str]:
        """The planes that a parameter has here, and the types of their elements."""

    def is_left_out(self, param: SavedParam) -> bool:
        """Whether its weight was not saved."""

    def weight_sum(self, param: SavedParam) -> int:
        """The CRC-32C of a weight that was left out."""

    def read(self, param: SavedParam, plane: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a plane, flat; of scales, those of the blocks that they begin and end.

        Raises:
            TransferError: they cannot be read, or are not what was saved.
        """

    def read_into(self, target: torch.Tensor, param: SavedParam, plane: str, begin: int, end: int) -> None:
        """As :meth:`read`, into flat elements of the plane's type."""

    def tensor_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The tensors that are no parameters, by name: type and shape."""

    def tensor(self, name: str) -> torch.Tensor:
        """One of them. Raises as :meth:`read`."""

    def __enter__(self) -> Saved: ...

    def __exit__(self, *exc_info: Any) -> None: ...


class TensorsOf(Mapping[str, torch.Tensor]):
    """The tensors that are no parameters; one is read whenever it is asked for, and none is kept."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._saved.tensor_specs():
            raise KeyError(name)
        return self._saved.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved.tensor_specs())

    def __len__(self) -> int:
        return len(self._saved.tensor_specs())


def read_moments(saved: Saved, param: SavedParam, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Elements [begin, end) of the moments, by name, in fp32."""
    first, last, names = begin, end, MOMENTS[saved.formats.rule]
    stored_as = names
    if saved.formats.state_format == "int8":
        first = begin // STATE_BLOCK * STATE_BLOCK
        last = min(-(-end // STATE_BLOCK) * STATE_BLOCK, param.numel)
        stored_as = (*names, "scale")
    values = decoded({plane: saved.read(param, plane, first, last) for plane in stored_as}, names)
    return {name: value[begin - first : end - first] for name, value in values.items()}


def read_master(saved: Saved, param: SavedParam, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of the fp32 value that is trained; of what is not trained, its weight as it is."""
    weight = saved.read(param, WEIGHT, begin, end)
    if "residual" not in saved.planes(param):
        return weight
    master = torch.empty(end - begin, dtype=torch.float32)
    if master.numel():
        kernels.join_master(weight, saved.read(param, "residual", begin, end), master)
    return master


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of a name that a manifest knows."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise AssertionError(f"torch has no type {name}")
    return dtype


class Reordered:
    """One parameter, its elements in the order of other strides. It is in memory as a whole: this is rare."""

    def __init__(self, saved: Saved, param: SavedParam, stride: tuple[int, ...]) -> None:
        self._saved, self._stride = saved, stride
        self.where, self.step = saved.where, saved.step
        self.params: Sequence[SavedParam] = [param]
        self.training, self.model = saved.training, saved.model
        self.formats = saved.formats._replace(state_format="fp32")
        """Blocks of rounded moments are other ones in another order: they are read as their values."""
        self._whole: dict[str, torch.Tensor] = {}

    def planes(self, param: SavedParam) -> Mapping[str, str]:
        kinds = self._saved.planes(param)
        moments = MOMENTS[self.formats.rule]
        values = {name: "float32" if name in moments else kind for name, kind in kinds.items()}
        values.pop("scale", None)
        return values

    def is_left_out(self, param: SavedParam) -> bool:
        return self._saved.is_left_out(param)

    def weight_sum(self, param: SavedParam) -> int:
        return self._saved.weight_sum(param)

    def read(self, param: SavedParam, plane: str, begin: int, end: int) -> torch.Tensor:
        if plane not in self._whole:
            self._take(param, plane)
        return self._whole[plane][begin:end]

    def read_into(self, target: torch.Tensor, param: SavedParam, plane: str, begin: int, end: int) -> None:
        target.copy_(self.read(param, plane, begin, end))

    def _take(self, param: SavedParam, plane: str) -> None:
        if plane in MOMENTS[self.formats.rule]:
            values = read_moments(self._saved, param, 0, param.numel)
        else:
            values = {plane: self._saved.read(param, plane, 0, param.numel)}
        for name, flat in values.items():
            ordered = torch.empty_like(flat)
            ordered.as_strided(param.shape, self._stride).copy_(flat.as_strided(param.shape, param.stride))
            self._whole[name] = ordered

    def tensor_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {}

    def tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} belongs to no parameter")

    def __enter__(self) -> Reordered:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._whole.clear()


class _Running:
    """The sum of a plane of which piece after piece is read."""

    __slots__ = ("at", "total")

    def __init__(self) -> None:
        self.at = self.total = 0

    def add(self, at: int, data: torch.Tensor) -> None:
        """Takes bytes from ``at`` on; what came before counts once, and only in order."""
        skip = self.at - at
        if 0 <= skip < data.numel():
            fresh = data[skip:]
            self.total = join((self.total, sum_of(fresh)), (self.at, fresh.numel()))
            self.at += fresh.numel()


class CheckpointFiles:
    """An open portable checkpoint: all of its files, so that nobody can take them away meanwhile."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: there is none, or it is damaged, or a file is missing or has another size.
        """
        self.where = folder
        with ExitStack() as stack:
            try:
                self.checkpoint: Checkpoint = read_checkpoint(folder)
            except FileNotFoundError:
                raise CheckpointError(f"{folder}: there is no {NAME}") from None
            self._fds = []
            for file in self.checkpoint.files:
                self._fds.append(_open(folder / file.name, file.size))
                stack.callback(os.close, self._fds[-1])
            self._buffer = torch.frombuffer(map_slab(PIECE_BYTES), dtype=torch.uint8)
            self._stack = stack.pop_all()
        found = self.checkpoint
        self.formats, self.step = found.formats, found.step
        self.params: Sequence[SavedParam] = found.params
        self.training, self.model = found.training, found.model
        self._places = dict(zip((param.name for param in found.params), found.places, strict=True))
        self._tensors = {tensor.name: tensor for tensor in found.tensors}
        self._running: dict[tuple[str, str], _Running] = {}

    def planes(self, param: SavedParam) -> Mapping[str, str]:
        return self.checkpoint.planes(param)

    def is_left_out(self, param: SavedParam) -> bool:
        return self._places[param.name][WEIGHT].file is None

    def weight_sum(self, param: SavedParam) -> int:
        return self._places[param.name][WEIGHT].crc32c

    def read(self, param: SavedParam, plane: str, begin: int, end: int) -> torch.Tensor:
        size = plane_elements(plane, end) - plane_elements(plane, begin)
        values = torch.empty(size, dtype=torch_dtype(self.planes(param)[plane]))
        self.read_into(values, param, plane, begin, end)
        return values

    def read_into(self, target: torch.Tensor, param: SavedParam, plane: str, begin: int, end: int) -> None:
        if not target.is_cpu:
            target.copy_(self.read(param, plane, begin, end))
            return
        place, data = self._places[param.name][plane], target.view(torch.uint8)
        at = plane_elements(plane, begin) * target.itemsize
        self.fill(place, at, data)
        running = self._running.setdefault((param.name, plane), _Running())
        running.add(at, data)
        if running.at == self._size(param, plane) and running.total != place.crc32c:
            raise self.damage(f"{plane} of {param.name}", place, running.at, running.total)

    def _size(self, param: SavedParam, plane: str) -> int:
        return plane_elements(plane, param.numel) * ITEMSIZES[self.planes(param)[plane]]

    def tensor_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        saved = self._tensors[name]
        data = torch.empty(saved.size, dtype=torch.uint8)
        self.fill(saved.place, 0, data)
        total = sum_of(data)
        if total != saved.place.crc32c:
            raise self.damage(saved.name, saved.place, saved.size, total)
        return data.view(torch_dtype(saved.dtype)).view(saved.shape)

    def fill(self, place: Place, at: int, data: torch.Tensor) -> None:
        """Reads the bytes from byte ``at`` of a place on."""
        if place.file is None:
            raise AssertionError("what was left out cannot be read")
        fd, begin, done = self._fds[place.file], place.offset + at, 0
        try:
            while done < data.numel():
                done += self._read(fd, begin + done, data[done:])
        except OSError as error:
            raise TransferError(
                error.errno or errno.EIO, "read", self.path(place), offset=begin, size=data.numel(), done=done
            ) from error

    def _read(self, fd: int, offset: int, data: torch.Tensor) -> int:
        """Fills the front of ``data``, through a buffer and past the page cache; says how much of it."""
        skip = offset % PAGE_BYTES
        wanted = min(self._buffer.numel(), align_up(skip + data.numel(), PAGE_BYTES))
        got = os.preadv(fd, [memoryview(buffer_of(self._buffer[:wanted]))], offset - skip) - skip
        if got <= 0:
            raise OSError(errno.EIO, "the file ended")
        got = min(got, data.numel())
        data[:got].copy_(self._buffer[skip : skip + got])
        return got

    def path(self, place: Place) -> str:
        """The file of a place."""
        if place.file is None:
            raise AssertionError("what was left out has no file")
        return str(self.where / self.checkpoint.files[place.file].name)

    def damage(self, what: str, place: Place, size: int, found: int) -> TransferError:
        """The error of bytes that are not those that were saved."""
        return TransferError(
            errno.EBADMSG, "read", self.path(place), offset=place.offset, size=size, done=size,
            hint=f"{what}: crc32c {place.crc32c:#010x} was written and {found:#010x} read: the file has changed;"
            " take another checkpoint",
        )  # fmt: skip

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _open(path: Path, size: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path}: {what}, and the checkpoint has its data there") from None
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size != size:
        os.close(fd)
        raise CheckpointError(
            f"{path}: it is no file of the {size} bytes that the checkpoint says: copy it again"
        )
    with suppress(OSError):  # the file system may know no direct I/O
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    return fd
