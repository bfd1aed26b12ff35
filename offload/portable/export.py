"""Writes the weights that lie in a checkpoint or a swap store as safetensors in the model's own names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import metrics
from ..bytesize import format_bytes
from ..errors import CheckpointError, ConfigError
from ..models.pretrained import TensorSpec, write_checkpoint
from .manifest import WEIGHT, SavedParam
from .saved import Saved, read_master, torch_dtype

logger = logging.getLogger("offload")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What weights can be written as."""


def export(
    saved: Saved,
    out: Path,
    *,
    dtype: str | None = None,
    only_trained: bool = False,
    config: Mapping[str, Any] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    tokenizer_files: Path | None = None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Writes a new directory, one tensor in memory at a time. A tied weight is in it once, under its first name.

    Args:
        dtype: one of :data:`DTYPES`, for floating-point weights; None for the type that they are computed in.
            ``fp32`` is the exact master of what is trained.
        only_trained: leave out what is frozen, and buffers.
        config: the model's ``config.json``; none is written where it is None or empty.
        tokenizer_files: a directory whose tokenizer files are copied.
        advance: called with (done, total) in bytes.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointError: weights that are wanted were left out.
        ConfigError, StoreError, TransferError: it cannot be written, or not be read; nothing half-done is left.
    """
    params = {param.name: param for param in saved.params if param.trainable or not only_trained}
    if not params:
        raise CheckpointError(f"{saved.where}: nothing in it is trained")
    if missing := [name for name, param in params.items() if saved.is_left_out(param)]:
        raise CheckpointError(
            f"{saved.where}: {missing[0]} and {len(missing) - 1} more frozen weights were left out of it; export only"
            " what was trained, or take a whole checkpoint"
        )
    kept = {} if only_trained or buffers is None else dict(buffers)
    specs = [TensorSpec(name, param.shape, _dtype(param, dtype)) for name, param in params.items()]
    specs += [TensorSpec(name, tuple(value.shape), str(value.dtype)) for name, value in kept.items()]
    _check_memory(saved, params)
    total, done = sum(spec.num_bytes for spec in specs), 0

    def fetch(name: str) -> torch.Tensor:
        nonlocal done
        value = kept[name] if name in kept else _value(saved, params[name], _dtype(params[name], dtype))
        done += value.nbytes
        advance(done, total)
        return value

    about = dict(config or {})
    if about:
        about["dtype"] = DTYPES.get(dtype or "", DTYPES[saved.formats.precision])
        about.pop("torch_dtype", None)  # what dtype was called before
    aliases = {alias: param.name for param in params.values() for alias in param.aliases}
    write_checkpoint(out, specs, fetch, about or None, aliases=aliases, tokenizer_files=tokenizer_files)
    return len(specs)


def _check_memory(saved: Saved, params: Mapping[str, SavedParam]) -> None:
    """One tensor is in memory at a time: as it was saved, with its residual, and as it is written."""
    largest = max(params.values(), key=lambda param: param.numel)
    need, available = largest.numel * 12, metrics.memory_available_bytes()
    if need > available:
        raise CheckpointError(
            f"{saved.where}: {largest.name} alone takes {format_bytes(need)} of memory, {format_bytes(available)} are"
            " available"
        )


def _dtype(param: SavedParam, wanted: str | None) -> str:
    is_number = torch_dtype(param.dtype).is_floating_point
    return DTYPES[wanted] if wanted is not None and is_number else param.dtype


def _value(saved: Saved, param: SavedParam, dtype: str) -> torch.Tensor:
    exact = dtype == "float32"
    flat = (read_master if exact else _read_weight)(saved, param, 0, param.numel)
    return flat.as_strided(param.shape, param.stride).to(torch_dtype(dtype)).contiguous()


def _read_weight(saved: Saved, param: SavedParam, begin: int, end: int) -> torch.Tensor:
    return saved.read(param, WEIGHT, begin, end)


def check_dtype(dtype: str | None) -> None:
    """Raises ConfigError where weights cannot be written as ``dtype``."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose {', '.join(DTYPES)}, or leave it out")
