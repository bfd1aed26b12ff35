"""``offload export``: the weights of a checkpoint, or of a run that has ended, as safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..errors import ConfigError
from ..models.pretrained import read_config
from ..portable import directory as checkpoints
from ..portable.commit import CommitFiles
from ..portable.export import check_dtype, export
from ..portable.saved import CheckpointFiles, TensorsOf
from ..training_state import BUFFER
from .outputs import check_export
from .progress import make_display
from .stores import Held, held_in


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    path: Path
    out: Path
    dtype: str | None
    only_trained: bool
    model: Path | None
    quiet: bool


def run(request: Request) -> None:
    """Carries out the command.

    Raises:
        ConfigError, CheckpointError, StoreError, TransferError: nothing half-done is left.
    """
    check_dtype(request.dtype)
    check_export(request.out, "OUT")
    config: dict[str, Any] = {} if request.model is None else read_config(request.model)
    held = _one_of(request.path)
    display = make_display(quiet=request.quiet)
    with _open(held) as saved, display.task(f"exporting step {saved.step} of {held.path}") as advance:
        config = config or saved.model
        count = export(
            saved,
            request.out,
            dtype=request.dtype,
            only_trained=request.only_trained,
            config=config,
            buffers={
                name.removeprefix(BUFFER): value
                for name, value in TensorsOf(saved).items()
                if name.startswith(BUFFER)
            },
            tokenizer_files=request.model
            if request.model is not None and _has_tokenizer(request.model)
            else None,
            advance=advance,
        )
    typer.echo(f"wrote {count} tensors of step {saved.step} to {request.out}")
    if not config:
        typer.echo(
            "without a config.json, which is not known: --model DIR takes that of the model it was trained from"
        )


def _open(held: Held) -> CheckpointFiles | CommitFiles:
    return CheckpointFiles(held.path) if held.kind == "checkpoint" else CommitFiles(held.path)


def _one_of(path: Path) -> Held:
    found = held_in(path)
    if len(found) == 1:
        return found[0]
    if found[0].kind == "checkpoint":
        return Held("checkpoint", checkpoints.find(path))
    names = ", ".join(held.path.name for held in found)
    raise ConfigError(f"{path} holds several runs: {names}; give one of them")


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    )
