"""Writes the weights of a model in training to files that need nothing of ours to be read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import checkpoint, metrics
from ..access import read_weight
from ..bytesize import format_bytes
from ..engine import OffloadEngine
from ..errors import ConfigError, NoCheckpointError, OffloadError, StoreError
from ..models.pretrained import config_of, persistent_buffers
from ..models.safetensors_file import write_file
from ..partition import StoredParam
from ..saving import SavedEngine

logger = logging.getLogger("offload")


def export_model(
    engine: OffloadEngine, module: nn.Module, path: str | Path, dtype: torch.dtype | None
) -> None:
    """Writes a directory: with ``config.json`` where the model has one, else ``model.safetensors`` alone."""
    path = Path(path)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"export: weights cannot be written as {dtype}; give a floating-point type")
    config = config_of(module)
    if config is not None:
        config["dtype"] = str(dtype or engine.partition.dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)  # what dtype was called before
        checkpoint.export(engine, path, config=config, buffers=persistent_buffers(module), dtype=dtype)
        return
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{path} exists and is not empty; give another directory")
    write_safetensors(engine, module, path / "model.safetensors", dtype=dtype)


def write_safetensors(
    engine: OffloadEngine,
    module: nn.Module,
    file: Path,
    *,
    dtype: torch.dtype | None = None,
    exclude_frozen: bool = False,
) -> None:
    """Writes one file, one tensor in memory at a time. A tied weight is in it once, under its first name."""
    params, buffers = _params(engine, exclude_frozen), persistent_buffers(module)
    specs, fetch = checkpoint.exported(engine, params, buffers, dtype)
    with _replacing(file) as temporary:
        write_file(temporary.path, specs, fetch)


def write_pickle(engine: OffloadEngine, module: nn.Module, file: Path, *, exclude_frozen: bool) -> None:
    """Writes what ``torch.load`` reads. The weights, in their compute type, are all in memory for it."""
    stored_params = list(_params(engine, exclude_frozen))
    need = sum(stored.placed.info.nbytes for stored in stored_params)
    available = metrics.memory_available_bytes()
    if need > available:
        raise OffloadError(
            f"{file.name} as a pickle needs {format_bytes(need)} of memory at once, {format_bytes(available)}"
            " are available; give a name that ends in .safetensors, which is written tensor by tensor"
        )
    state: dict[str, torch.Tensor] = {}
    for stored in stored_params:
        value = read_weight(engine, stored)
        state.update(dict.fromkeys(stored.names, value))
    state.update({name: tensor.detach() for name, tensor in persistent_buffers(module)})
    with _replacing(file) as temporary:
        torch.save(state, temporary.path)


def load_checkpoint(
    engine: SavedEngine,
    directory: str | Path | None,
    tag: str | None,
    *,
    strict: bool,
    weights_only: bool,
    schedule: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict[str, Any]]:
    """As ``SavedEngine.load_checkpoint``, with what DeepSpeed's has besides; None where there is nothing to load."""
    if custom_load_fn is not None:
        raise ConfigError(
            "load_checkpoint: custom_load_fn is not called; write weights inside offload.gather"
        )
    if not schedule and not weights_only:
        raise ConfigError(
            "load_checkpoint: the optimizer's state is taken over with its schedule; leave load_lr_scheduler_states"
            " out, and set the schedule afterwards"
        )
    try:
        return engine.load_checkpoint(directory, tag, strict=strict, weights_only=weights_only)
    except NoCheckpointError as error:
        logger.warning("nothing was loaded: %s", error)
        return None, {}


class _replacing:  # noqa: N801  (used as a statement)
    """A temporary file beside ``file`` that takes its place if all goes well, and leaves no trace if not."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.path = file.with_name(f".{file.name}.{os.getpid()}.tmp")

    def __enter__(self) -> _replacing:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self._file.parent} cannot be written: {error.strerror}; give another directory"
            ) from error
        return self

    def __exit__(self, kind: Any, _error: Any, _trace: Any) -> None:
        if kind is None:
            self.path.replace(self._file)
        else:
            self.path.unlink(missing_ok=True)


def _params(engine: OffloadEngine, exclude_frozen: bool) -> Iterator[StoredParam]:
    for unit in engine.partition.units:
        yield from (stored for stored in unit if stored.trainable or not exclude_frozen)
