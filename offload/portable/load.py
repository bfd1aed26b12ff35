"""Brings what was saved into a live engine, whatever its placement, format of state, or chunks.

Note [Loading]
First everything is compared, then everything is changed: where loading is refused the engine is what it was, and
where it breaks off later (a drive fails, a sum is wrong) the engine stops, since its state is that of no step. Unit by
unit, weights go to the slot or plane where they belong and state to one chunk after another. Between equal formats
bits are copied; else by way of the fp32 master and fp32 moments, as `checkpoint.load_optimizer_state` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..access import cut
from ..bytesize import PAGE_BYTES, align_up
from ..engine import OffloadEngine
from ..errors import CheckpointError
from ..optim import kernels
from ..optim.moments import encode
from ..partition import StoredParam
from ..plan import Chunk
from ..store.committed import sum_of
from .manifest import WEIGHT, SavedParam
from .save import members
from .saved import PIECE_BYTES, Reordered, Saved, read_master, read_moments, torch_dtype

logger = logging.getLogger("offload")

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Match:
    """What goes where."""

    params: dict[StoredParam, SavedParam]
    is_whole: bool
    """Whether all that either side has is there, so that training goes on: optimizer state comes too."""


def match(engine: OffloadEngine, saved: Saved, *, strict: bool = True, weights_only: bool = False) -> Match:
    """Compares what was saved with an engine. Changes nothing.

    Args:
        strict: every parameter has to be on both sides, and trained on both or on neither.
        weights_only: leave optimizer state alone.

    Raises:
        CheckpointError: what was saved is of another model, or needs another base; names the parameters.
    """
    of_name = {name: param for param in saved.params for name in param.names}
    pairs: dict[StoredParam, SavedParam] = {}
    missing = []
    for stored in engine.partition.of_param.values():
        found = next((of_name[name] for name in stored.names if name in of_name), None)
        if found is None:
            missing.append(stored.name)
        else:
            pairs[stored] = found
    known = set(pairs.values())
    unknown = [param.name for param in saved.params if param not in known]
    is_whole = not (weights_only or missing or unknown)
    rules = saved.formats.rule, engine.plan.placement.rule
    if rules[0] != rules[1] and not weights_only:
        raise CheckpointError(f"its optimizer state is that of {rules[0]}, and {rules[1]} is trained here")
    if not pairs:
        raise CheckpointError(f"it has none of this model's parameters; it has {_named(unknown)}")
    if strict and missing:
        raise CheckpointError(f"it lacks {_named(missing)}, which this model has")
    if strict and unknown:
        raise CheckpointError(f"it has {_named(unknown)}, which this model lacks")
    for stored, param in pairs.items():
        if param.shape != stored.placed.info.shape:
            shapes = f"{list(param.shape)} there and {list(stored.placed.info.shape)} here"
            raise CheckpointError(f"{param.name} has shape {shapes}")
        kinds = [torch_dtype(param.dtype).is_floating_point, stored.dtype.is_floating_point]
        if kinds[0] != kinds[1] or (not kinds[0] and torch_dtype(param.dtype) is not stored.dtype):
            raise CheckpointError(f"{param.name} is {param.dtype} there and {stored.dtype} here")
    for is_trained, was, now in ((True, "frozen", "trained"), (False, "trained", "frozen")):
        odd = [
            stored.name
            for stored, param in pairs.items()
            if (stored.trainable, param.trainable) == (is_trained, not is_trained)
        ]
        if odd and strict and not weights_only:
            raise CheckpointError(f"{_named(odd)} was {was} there and is {now} here")
        is_whole = is_whole and not odd
    _check_bases(engine, saved, pairs)
    return Match(pairs, is_whole)


def _named(names: Iterable[str]) -> str:
    listed = [ascii(name)[1:-1] for name in names]
    if len(listed) > NAMED_MAX:
        listed[NAMED_MAX:] = [f"{len(listed) - NAMED_MAX} more"]
    return ", ".join(listed)


def _check_bases(engine: OffloadEngine, saved: Saved, pairs: dict[StoredParam, SavedParam]) -> None:
    """Holds the frozen weights of the engine against the sums of those that were left out."""
    for unit, params in enumerate(engine.partition.units):
        left_out = [stored for stored in params if stored in pairs and saved.is_left_out(pairs[stored])]
        if not left_out:
            continue
        hold = engine.lease_unannounced(unit)
        try:
            plane = engine.weights.host_plane(unit)
            for stored in left_out:
                _check_base(saved, stored, pairs[stored], plane)
        finally:
            hold.close()


def _check_base(saved: Saved, stored: StoredParam, param: SavedParam, plane: torch.Tensor) -> None:
    if stored.trainable:
        raise CheckpointError(f"{param.name} was frozen and left out there, and is trained here")
    if (torch_dtype(param.dtype), param.stride) != (stored.dtype, tuple(stored.stride)):
        raise CheckpointError(
            f"{param.name} was left out there as {param.dtype}, and is {stored.dtype} here, so it"
            " cannot be compared: train in the same precision, or save with frozen weights"
        )
    begin, end = stored.placed.offset, stored.placed.offset + stored.placed.info.nbytes
    if sum_of(plane[begin:end]) != saved.weight_sum(param):
        raise CheckpointError(
            f"{param.name} was left out there and has another value here: load the base model that"
            " was trained upon"
        )


def load(engine: OffloadEngine, saved: Saved, matched: Match) -> None:
    """Brings weights and optimizer state into the engine. See Note [Loading]. Between two steps.

    Args:
        matched: of :func:`match` with the same.

    Raises:
        TransferError: something cannot be read or written, or has changed; the engine has stopped.
    """
    engine.settle()
    there, here = saved.formats, engine.plan.placement.formats
    if matched.is_whole and there != here:
        how = "as it is" if here.state_format == "fp32" else "rounded to the nearest"
        logger.info(
            "optimizer state saved as %s is kept as %s from now on: taken over %s",
            there.state_format,
            here.state_format,
            how,
        )
    engine.pipeline.cancel_announced()
    try:
        for unit in range(len(engine.partition.units)):
            _load_unit(engine, unit, saved, matched)
    except BaseException as error:
        engine.stop(error)
        raise


def _load_unit(engine: OffloadEngine, unit: int, saved: Saved, matched: Match) -> None:
    params = [stored for stored in engine.partition.units[unit] if stored in matched.params]
    if all(saved.is_left_out(matched.params[stored]) for stored in params):
        return
    engine.weights.begin_write(unit)
    try:
        plane = engine.weights.host_plane(unit)
        for chunk in engine.plan.chunks_of[unit]:
            if any(stored in matched.params for stored, _, _ in members(engine, chunk)):
                _load_chunk(engine, chunk, plane, saved, matched)
        ranges = [(stored.placed.offset, stored.placed.info.nbytes) for stored in params]
        for stored in params:
            if not stored.trainable and not saved.is_left_out(matched.params[stored]):
                _load_frozen(plane, stored, saved, matched.params[stored])
        first = min(begin for begin, _ in ranges) // PAGE_BYTES * PAGE_BYTES
        engine.put_weight(
            unit, plane, first, align_up(max(begin + size for begin, size in ranges), PAGE_BYTES)
        )
    finally:
        engine.weights.end_update(unit)


def _load_frozen(plane: torch.Tensor, stored: StoredParam, saved: Saved, param: SavedParam) -> None:
    target, source = stored.flat_view(plane), _ordered_as(stored, saved, param)
    if str(stored.dtype) == f"torch.{param.dtype}":
        source.read_into(target, param, WEIGHT, 0, param.numel)
        return
    step = PIECE_BYTES // stored.dtype.itemsize
    for begin in range(0, param.numel, step):
        end = min(begin + step, param.numel)
        target[begin:end].copy_(read_master(source, param, begin, end))


def _load_chunk(
    engine: OffloadEngine, chunk: Chunk, plane: torch.Tensor, saved: Saved, matched: Match
) -> None:
    plan = engine.plan
    if matched.is_whole and plan.placement.state_home == "nvme":  # nothing of what is there stays
        buffer = torch.zeros(plan.chunk_bytes(chunk), dtype=torch.uint8)
    else:
        buffer = engine.read_chunk(chunk)
    planes = engine.state_planes(chunk, buffer)
    for stored, begin, end in members(engine, chunk):
        param = matched.params.get(stored)
        if param is None:
            continue
        source, own = _ordered_as(stored, saved, param), cut(planes, begin, end)
        first = chunk.begin + begin - stored.placed.begin
        weight = stored.flat_view(plane)[first : first + end - begin]
        _load_master(source, param, first, weight, own.get("residual"))
        if matched.is_whole:
            _load_moments(source, param, first, first + end - begin, own, engine.optimizer.moments)
    engine.write_chunk(chunk, buffer)


def _load_master(
    source: Saved, param: SavedParam, begin: int, weight: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """The elements from ``begin`` on, as exact as the planes hold them."""
    end, kinds = begin + weight.numel(), dict(source.planes(param))
    here = {WEIGHT: weight} if residual is None else {WEIGHT: weight, "residual": residual}
    if all(kinds.get(plane) == str(values.dtype).removeprefix("torch.") for plane, values in here.items()):
        for plane, values in here.items():
            source.read_into(values, param, plane, begin, end)
        return
    master = read_master(source, param, begin, end).float()
    if residual is None:
        weight.copy_(master)
        return
    rest = torch.empty(residual.numel(), dtype=residual.dtype)
    kernels.split_master(master, weight, rest)
    residual.copy_(rest)


def _load_moments(
    source: Saved,
    param: SavedParam,
    begin: int,
    end: int,
    planes: dict[str, torch.Tensor],
    names: Sequence[str],
) -> None:
    kinds = source.planes(param)
    own = {name: planes[name] for name in (*names, "scale") if name in planes}
    if all(kinds.get(name) == str(values.dtype).removeprefix("torch.") for name, values in own.items()):
        for name, values in own.items():
            source.read_into(values, param, name, begin, end)
        return
    encode(read_moments(source, param, begin, end), own, names)


def _ordered_as(stored: StoredParam, saved: Saved, param: SavedParam) -> Saved:
    """What was saved, with the parameter's elements in the order that they have here."""
    steps = zip(stored.stride, param.stride, param.shape, strict=True)
    if all(here == there for here, there, size in steps if size > 1):
        return saved
    return Reordered(saved, param, tuple(stored.stride))
