"""Finds the commit that a run goes on from, and makes the plan fit it.

Note [Which commit]
A swap directory is given, or a path on which there are some: then it is the newest commit of this model among the
runs that have ended; those of other models, and of runs that live, are left alone. Chunks stay as the run has cut
them, whatever the budget is now; where planes are at home, and how many slots there are, may change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .config import OffloadConfig
from .config.schema import Aio, Durability
from .errors import CheckpointError, ConfigError, NoCheckpointError, StoreError
from .inventory import Inventory
from .ledger import Ledger
from .optim import make_optimizer
from .partition import Partition
from .placement import STATE_BLOCK, Placement, SwapPaths, swap_paths_of
from .plan import MemoryPlan
from .portable.commit import CommitFiles
from .portable.directory import find
from .portable.saved import CheckpointFiles
from .store.commits import Found, find_commits
from .store.directory import MANIFEST_NAMES, PREFIX, is_in_use
from .store.manifest import Manifest, ParamDetail, Shapes, shapes_of
from .store.recovery import recover
from .store.swap import SwapStore
from .store.tensors import Tensors
from .training_state import TrainingState

logger = logging.getLogger("offload")

Where = bool | str | os.PathLike[str]
"""What to go on from: False is nothing, True the newest commit on the configuration's swap paths."""


def shapes_for(partition: Partition, plan: MemoryPlan) -> Shapes:
    """What a store of this model and plan holds."""
    placement = plan.placement
    optimizer = make_optimizer(
        placement.rule, weight_format=placement.precision, state_format=placement.state_format
    )
    details: Mapping[str, ParamDetail] = {
        stored.name: ParamDetail(_name(stored.dtype), stored.stride, stored.names[1:])
        for unit in partition.units
        for stored in unit
    }
    dtypes = {spec.name: _name(spec.dtype) for spec in optimizer.state_specs(STATE_BLOCK)}
    return shapes_of(plan, details, dtypes)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Target:
    """A commit to go on from. See Note [Which commit]."""

    directory: Path
    found: Found
    plan: MemoryPlan
    shapes: Shapes
    """Of this model and the plan."""
    previous: bool
    """Whether it is the commit before the newest one."""

    def open(self, aio: Aio, durability: Durability, ledger: Ledger) -> tuple[SwapStore, TrainingState]:
        """The store, as it was at the commit, and what goes with it.

        Raises:
            StoreError, CheckpointError, TransferError: it cannot be opened.
        """
        store, manifest = recover(
            self.directory, self.plan, self.shapes, aio, ledger, verify=durability.verify,
            previous=self.previous, found=self.found,
        )  # fmt: skip
        try:
            return store, read_training(store.path, manifest)
        except BaseException:
            store.close()
            raise


def read_training(directory: Path, manifest: Manifest) -> TrainingState:
    """What a commit keeps beside planes.

    Raises:
        CheckpointError: it is damaged, or of a program of another kind.
    """
    try:
        tensors = Tensors(directory, manifest.training.get("tensors"))
        return TrainingState.of(manifest.training.get("state"), tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: commit {manifest.serial}: {error}") from None


def find_target(
    where: Where,
    roots: Sequence[str],
    partition: Partition,
    placement: Placement,
    inventory: Inventory,
    *,
    previous: bool = False,
    tag: str | None = None,
) -> Target:
    """See Note [Which commit].

    Args:
        roots: the configuration's swap paths.
        previous: the commit before the newest one of the run.
        tag: what the commit has to be called.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: there is none of this model; says what differs.
        StoreError: the run that has it lives.
    """
    given = [*map(Path, roots)] if isinstance(where, bool) else [Path(where).expanduser()]
    candidates = [directory for path in given for directory in _directories(path)]
    if not candidates:
        raise NoCheckpointError(f"{', '.join(map(str, given))}: there is no commit to go on from")
    refusals: list[Exception] = []
    for directory in sorted(candidates, key=_time, reverse=True):
        try:
            if is_in_use(directory):
                raise StoreError(16, "the run that has committed there is still going on", str(directory))
            return _fit(directory, partition, placement, inventory, previous=previous, tag=tag)
        except (CheckpointError, StoreError) as error:
            refusals.append(error)
    for refusal in refusals[1:]:
        logger.info("not gone on from: %s", refusal)
    raise refusals[0]


def _fit(
    directory: Path,
    partition: Partition,
    placement: Placement,
    inventory: Inventory,
    *,
    previous: bool,
    tag: str | None,
) -> Target:
    found = find_commits(directory)
    manifest = found.before() if previous else found.newest
    if manifest is None:
        raise CheckpointError(f"{directory}: there is no commit before number {found.newest.serial}")
    chunks = [unit.chunk_ends[0] for unit in manifest.shapes.units if unit.chunk_ends]
    if not chunks:
        raise CheckpointError(f"{directory}: nothing was trained in it")
    fixed = replace(placement, generations=2, chunk_elements=max(chunks))
    plan = MemoryPlan.build(fixed, inventory)
    shapes = shapes_for(partition, plan)
    if difference := manifest.shapes.difference(shapes):
        raise CheckpointError(f"{directory}: its commit is of another model or plan: {difference}")
    if tag is not None and (saved := read_training(directory, manifest).tag) != tag:
        is_called = "has no tag" if saved is None else f"is called {saved!a}"
        raise CheckpointError(f"{directory}: its commit {is_called}, not {tag!a}")
    return Target(directory, found, plan, shapes, previous)


def _directories(path: Path) -> Iterator[Path]:
    """Swap directories with a manifest: the one given, or all on a path."""
    for directory in (path, *sorted(path.glob(f"{PREFIX}*-rank*"))):
        if has_manifest(directory):
            yield directory


def has_manifest(directory: Path) -> bool:
    """Whether it is a swap directory in which something was committed."""
    return any(os.path.lexists(directory / name) for name in MANIFEST_NAMES)


def open_saved(root: Path, tag: str | None) -> CheckpointFiles | CommitFiles:
    """A commit or a checkpoint, to be copied. Raises CheckpointError where there is none."""
    if has_manifest(root):
        return CommitFiles(root)
    try:
        return CheckpointFiles(find(root, tag))
    except FileNotFoundError:
        raise NoCheckpointError(f"{root}: nothing was saved there") from None


def _time(directory: Path) -> float:
    """When something was committed there last."""
    times = (directory / name for name in MANIFEST_NAMES)
    return max((os.lstat(path).st_mtime for path in times if os.path.lexists(path)), default=0.0)


def check_resumable(config: OffloadConfig) -> SwapPaths:
    """The swap paths on which there may be something to go on from.

    Raises:
        ConfigError: the configuration says that there is nothing.
    """
    paths = swap_paths_of(config)
    if paths is None or config.durability.generations == 1:
        why = "no swap path" if paths is None else "durability.generations 1"
        raise ConfigError(
            f"nothing can be gone on from: there is {why}; set durability.generations = 2 and an nvme_path"
        )
    return paths
