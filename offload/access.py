"""Reading and writing parameters and their state wherever they are, between steps.

Everything here waits for what is in flight first, so a value read is that after the last step, and a value
written is what the next step starts from. One unit, or one chunk, is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .bytesize import PAGE_BYTES, align_up
from .engine import OffloadEngine
from .errors import OffloadError
from .optim import kernels
from .optim.moments import decoded, encode
from .partition import GATHER_LOSS, StoredParam
from .placement import in_plane
from .plan import Chunk


def stored_of(engine: OffloadEngine, param: nn.Parameter) -> StoredParam:
    """What the engine knows of a parameter. OffloadError where it is not the engine's."""
    stored = engine.partition.of_param.get(param)
    if stored is None:
        raise OffloadError(
            f"a parameter of shape {tuple(param.shape)} does not belong to this engine's model"
        )
    return stored


def read_weight(engine: OffloadEngine, stored: StoredParam) -> torch.Tensor:
    """A copy of the weight in its compute type, in host memory."""
    engine.settle_updates()
    hold = engine.lease_unannounced(stored.unit)
    try:
        return stored.view(engine.weights.host_plane(stored.unit)).clone()
    finally:
        hold.close()


def read_master(engine: OffloadEngine, stored: StoredParam) -> torch.Tensor:
    """A copy of the exact fp32 value that is trained; of a frozen parameter, its weight as fp32."""
    if not stored.trainable or stored.dtype is torch.float32:
        weight = read_weight(engine, stored)
        return weight.float() if weight.is_floating_point() else weight
    return join_master(engine, stored, ChunkAccess(engine).read(stored, "residual")["residual"])


def join_master(engine: OffloadEngine, stored: StoredParam, residual: torch.Tensor) -> torch.Tensor:
    """The exact fp32 value of a trained bf16 parameter, whose residual has been read."""
    weight = read_weight(engine, stored)
    return stored.join(weight.as_strided((weight.numel(),), (1,)), residual)


def write_weight(
    engine: OffloadEngine,
    stored: StoredParam,
    value: torch.Tensor,
    *,
    access: ChunkAccess | None = None,
) -> None:
    """Writes a parameter. Elements that do not change keep their exact master value.

    Args:
        value: of the parameter's shape, in its compute type, or in fp32 for a new exact master.
        access: through which other parameters of the chunk have been written; a new one by default.
    """
    if value.shape != stored.placed.info.shape:
        raise OffloadError(f"{stored.name} has shape {stored.placed.info.shape}, not {tuple(value.shape)}")
    value = value.detach().cpu()
    engine.before_change()
    engine.settle_updates()
    unit = stored.unit
    engine.weights.begin_write(unit)
    try:
        plane = engine.weights.host_plane(unit)
        begin, end = stored.placed.offset, stored.placed.offset + stored.placed.info.nbytes
        has_residual = stored.trainable and stored.dtype is torch.bfloat16
        if has_residual and value.numel():
            access = access or ChunkAccess(engine)
            residual = access.read(stored, "residual")["residual"]
            if value.dtype is stored.dtype:
                kernels.assign_weight(stored.flat_view(plane), residual, stored.flatten(value))
            else:
                whole = residual.new_empty(stored.placed.end)
                stored.write(plane, whole, value)
                residual = whole[stored.placed.begin :]
            access.write(stored, {"residual": residual})
        else:
            stored.view(plane).copy_(value)
        first = begin // PAGE_BYTES * PAGE_BYTES
        engine.put_weight(unit, plane, first, align_up(end, PAGE_BYTES))
    finally:
        engine.weights.end_update(unit)


class ChunkAccess:
    """State planes of single parameters, read and written through the chunks that hold them.

    Moments are fp32 outside, however they are stored. The last chunk stays in memory for the next parameter: use
    one for as long as nothing else changes state.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        engine.settle_updates()
        self._engine = engine
        self._moments = engine.optimizer.moments
        self._chunk: Chunk | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, stored: StoredParam, *names: str) -> dict[str, torch.Tensor]:
        """Copies of the parameter's elements in state planes, flat: of moments their values, in fp32."""
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for chunk, begin, end in self._pieces(stored):
            planes = cut(self._planes(chunk), begin, end)
            if any(name in self._moments for name in names):
                planes |= decoded(planes, self._moments)
            for name in names:
                pieces[name].append(planes[name].clone().cpu())
        return {name: torch.cat(found) if found else torch.empty(0) for name, found in pieces.items()}

    def write(self, stored: StoredParam, planes: dict[str, torch.Tensor]) -> None:
        """Writes flat values into the parameter's elements of the named planes: moments in fp32, and both.

        They are rounded to the nearest that the format has. Where the scales are among the planes that values
        were read with, the planes are what they were then, bit for bit.
        """
        self._engine.before_change()
        self._engine.pipeline.cancel_announced()
        done = 0
        for chunk, begin, end in self._pieces(stored):
            own = cut(self._planes(chunk), begin, end)
            given = cut(planes, done, done + end - begin)
            if self._moments and self._moments[0] in given:
                encode(given, own, self._moments)
            for name in given.keys() - {*self._moments, "scale"}:
                own[name].copy_(given[name])
            self._engine.write_chunk(chunk, self._buffer)
            done += end - begin

    def _pieces(self, stored: StoredParam) -> Iterator[tuple[Chunk, int, int]]:
        """Chunks that hold elements of the parameter, and which of the chunk's elements those are."""
        for chunk in self._engine.plan.chunks_of[stored.unit]:
            begin, end = max(stored.placed.begin, chunk.begin), min(stored.placed.end, chunk.end)
            if begin < end:
                yield chunk, begin - chunk.begin, end - chunk.begin

    def _planes(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        if chunk is not self._chunk:
            self._buffer = self._engine.read_chunk(chunk)
            self._chunk = chunk
        return self._engine.state_planes(chunk, self._buffer)


def cut(planes: Mapping[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Elements [begin, end) of state planes; ``begin`` is where a block of 8-bit moments begins."""
    return {name: plane[slice(*in_plane(name, begin, end))] for name, plane in planes.items()}


@contextmanager
def gathered(engine: OffloadEngine, params: Sequence[nn.Parameter], *, modify: bool) -> Iterator[None]:
    """Gives parameters their full values as ordinary tensors; keeps what was written to them if ``modify``.

    The memory for them is taken outside the plan. See :func:`offload.gather`.
    """
    stored_params = list(dict.fromkeys(stored_of(engine, param) for param in params))
    for stored in stored_params:
        if stored.gathered is not None:
            raise OffloadError(f"{stored.name} is gathered already")
    values: dict[StoredParam, torch.Tensor] = {}
    try:
        for stored in stored_params:
            value = read_weight(engine, stored).to(stored.absent.device)
            values[stored] = stored.gathered = value
        for unit in {stored.unit for stored in stored_params}:
            engine.weights.refresh(unit)
        yield
        if modify:
            for stored in stored_params:
                write_weight(engine, stored, stored.param.data)
    finally:
        for stored in values:
            stored.gathered = None
        for unit in {stored.unit for stored in values}:
            engine.weights.refresh(unit)
    needed = [stored.name for stored in stored_params if stored.is_saved and stored.is_absent]
    if needed:
        raise OffloadError(
            f"a loss that was computed inside gather and not differentiated needs {', '.join(needed)};"
            f" {GATHER_LOSS}, or detach() what is kept"
        )
