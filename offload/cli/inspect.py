"""``offload inspect``: what a swap store or a checkpoint holds. Reads manifests, takes no lock, changes nothing."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..bytesize import format_bytes
from ..errors import CheckpointError
from ..placement import Formats
from ..portable.commit import formats_of, params_of
from ..portable.manifest import WEIGHT, Checkpoint, SavedParam
from ..portable.reader import read_checkpoint
from ..store.commits import Found, find_commits
from ..store.directory import OWNER_FILE
from ..store.drives import FILE_NAME
from ..store.manifest import ITEMSIZES, Manifest
from .failures import STATUS_FAILED
from .stores import Held, held_in, is_locked, owner_of

VERSION = 1
"""Of the JSON."""
PARAMS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    path: Path
    params: bool
    json: bool


def run(request: Request) -> None:
    """Carries out the command. Exit status 1 where a part of what is there cannot be read.

    Raises:
        CheckpointError: the directory is none of ours, or nothing of it can be read.
    """
    found, problems = [], []
    for held in held_in(request.path):
        try:
            found.append(describe(held))
        except CheckpointError as error:
            problems.append(str(error))
    if not found:
        raise CheckpointError(problems[0])
    if request.json:
        typer.echo(json.dumps({"version": VERSION, "found": found, "problems": problems}, indent=2))
    else:
        for facts in found:
            for line in page(facts, all_params=request.params):
                typer.echo(line)
        for problem in problems:
            typer.echo(f"cannot be read: {problem}")
    if problems:
        sys.stdout.flush()
        raise typer.Exit(STATUS_FAILED)


def describe(held: Held) -> dict[str, Any]:
    """All that is known of a store or a checkpoint, as JSON.

    Raises:
        CheckpointError: it cannot be read.
    """
    if held.kind == "checkpoint":
        try:
            return _of_checkpoint(held.path, read_checkpoint(held.path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{held.path}: {error.strerror}") from None
    return _of_store(held.path, find_commits(held.path))


def _of_checkpoint(path: Path, found: Checkpoint) -> dict[str, Any]:
    planes: Counter[str] = Counter()
    for _, plane, _, size in found.each():
        planes[plane] += size
    left_out = [
        param.name
        for param, places in zip(found.params, found.places, strict=True)
        if places[WEIGHT].file is None
    ]
    return {
        "kind": "checkpoint",
        "path": str(path),
        "tag": path.name,
        "step": found.step,
        "time": found.time,
        **_model(found.params, found.formats),
        "left_out": left_out,
        "plane_bytes": dict(planes),
        "tensors": {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in found.tensors},
        "bytes": found.bytes_total,
        "files": [{"path": str(path / file.name), "bytes": file.size} for file in found.files],
        "training": _training(found.training),
    }


def _of_store(path: Path, commits: Found) -> dict[str, Any]:
    manifest, before, owner = commits.newest, commits.before(), owner_of(path)
    is_alive = owner.pid is not None and is_locked(path / OWNER_FILE)
    try:
        formats = formats_of(manifest.shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    files = []
    for number, entry in enumerate(manifest.files):
        file = (Path(entry.directory) if number else path) / FILE_NAME
        files.append({"path": str(file), "bytes": entry.size, "is_there": file.is_file()})
    return {
        "kind": "swap store",
        "path": str(path),
        "owner": {"pid": owner.pid, "host": owner.host, "is_alive": is_alive},
        "run": manifest.run,
        "commit": manifest.serial,
        "step": manifest.step,
        "time": manifest.time,
        "commit_before": None if before is None else _commit(before),
        "problems": commits.problems,
        **_model(params_of(manifest), formats),
        "units": [
            {
                "name": unit.name,
                "parameters": len(unit.params),
                "chunks": len(unit.chunk_ends),
                "weight_bytes": unit.weight_bytes,
            }
            for unit in manifest.shapes.units
        ],
        "plane_bytes": _plane_bytes(manifest),
        "bytes": sum(entry.written for entry in manifest.items if entry is not None),
        "files": files,
        "training": _training(manifest.training.get("state")),
    }


def _commit(manifest: Manifest) -> dict[str, int]:
    return {"commit": manifest.serial, "step": manifest.step, "time": manifest.time}


def _plane_bytes(manifest: Manifest) -> dict[str, int]:
    """What the commit names of each plane, padding included; moments that were never written are not there."""
    shapes, items = manifest.shapes, manifest.shapes.items()
    found: Counter[str] = Counter()
    for kind, owner, item in items.each():
        entry = manifest.items[item.index]
        left = 0 if entry is None else entry.written
        if kind == "weights":
            found[WEIGHT] += left
            continue
        for plane, size in zip(shapes.planes, shapes.plane_bytes[owner], strict=True):
            found[plane.name] += min(size, left)
            left -= min(size, left)
    return dict(found)


def _model(params: Sequence[SavedParam], formats: Formats) -> dict[str, Any]:
    return {
        **formats._asdict(),
        "elements": sum(param.numel for param in params),
        "trained_elements": sum(param.numel for param in params if param.trainable),
        "params": [
            {
                "name": param.name,
                "aliases": list(param.aliases),
                "shape": list(param.shape),
                "dtype": param.dtype,
                "trained": param.trainable,
                "bytes": param.numel * ITEMSIZES[param.dtype],
            }
            for param in params
        ],
    }


def _training(state: Any) -> dict[str, Any]:
    """Of what whoever trains has kept, what can be shown in a line. It may be anybody's JSON."""
    values: dict[str, Any] = state if isinstance(state, dict) else {}
    optimizer, parts, client = (values.get(key) for key in ("optimizer", "parts", "client_state"))
    groups = optimizer.get("groups") if isinstance(optimizer, dict) else None
    rates = [
        numbers.get("lr")
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, dict) and isinstance(numbers := group.get("numbers"), dict)
    ]
    return {
        "learning_rates": [rate for rate in rates if type(rate) is float and math.isfinite(rate)],
        "skipped_steps": values.get("skipped_steps") if type(values.get("skipped_steps")) is int else None,
        "parts": sorted(map(_shown, parts)) if isinstance(parts, dict) else [],
        "client_state": sorted(map(_shown, client)) if isinstance(client, dict) else [],
    }


def _shown(text: str) -> str:
    return ascii(text)[1:-1][:80]


def page(facts: Mapping[str, Any], *, all_params: bool) -> Iterator[str]:
    """The lines for people."""
    yield typer.style(facts["path"], bold=True)
    when = f"step {facts['step']}, {_when(facts['time'])}"
    if facts["kind"] == "swap store":
        yield f"  swap store of run {facts['run']}: {_owner(facts['owner'])}"
        yield f"  commit {facts['commit']} of {when}"
        before = facts["commit_before"]
        if before is not None:
            yield f"  the commit before: {before['commit']} of step {before['step']}, {_when(before['time'])}"
        for problem in facts["problems"]:
            yield typer.style(f"  cannot be read: {problem}", fg="red")
    else:
        yield f"  checkpoint of {when}"
    trained, elements = facts["trained_elements"], facts["elements"]
    units = f" in {len(facts['units'])} units" if "units" in facts else ""
    yield (
        f"  {_count(elements)} parameters in {len(facts['params'])} tensors{units}, {_count(trained)} of them trained"
        f" in {facts['precision']} by {facts['rule']}, state kept as {facts['state_format']}"
    )
    if facts.get("left_out"):
        yield f"  {len(facts['left_out'])} frozen weights were left out: load it over the same base"
    planes = ", ".join(f"{plane} {format_bytes(size)}" for plane, size in facts["plane_bytes"].items())
    yield f"  {format_bytes(facts['bytes'])}: {planes}"
    for file in facts["files"]:
        is_missing = not file.get("is_there", True)
        yield f"  {file['path']}: {format_bytes(file['bytes'])}{', which is missing' * is_missing}"
    yield from _training_lines(facts["training"])
    yield from _param_lines(facts["params"], all_params=all_params)
    yield ""


def _training_lines(training: Mapping[str, Any]) -> Iterator[str]:
    rates = ", ".join(f"{rate:g}" for rate in training["learning_rates"])
    known = {
        "learning rate": rates,
        "steps refused": str(training["skipped_steps"] or ""),
        "with": ", ".join(training["parts"]),
        "client_state": ", ".join(training["client_state"]),
    }
    if shown := "; ".join(f"{name} {value}" for name, value in known.items() if value):
        yield f"  {shown}"


def _param_lines(params: Sequence[Mapping[str, Any]], *, all_params: bool) -> Iterator[str]:
    listed = params if all_params else params[:PARAMS_SHOWN]
    for param in listed:
        tied = f", also {', '.join(param['aliases'])}" if param["aliases"] else ""
        frozen = "" if param["trained"] else ", frozen"
        yield f"    {param['name']}{tied} {param['shape']} {param['dtype']}{frozen}"
    if len(params) > len(listed):
        yield f"    and {len(params) - len(listed)} more: --params shows all"


def _owner(owner: Mapping[str, Any]) -> str:
    if owner["pid"] is None:
        return "nobody says whose it is"
    state = "goes on" if owner["is_alive"] else "has ended"
    return f"process {owner['pid']} on {owner['host']}, which {state}"


def _when(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after 1970"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)
