"""Decides how many generations the swap files keep, where the configuration leaves that open.

Note [One generation or two]
Two are twice the space, no byte more to write, and a run that survives every crash: `auto` takes them where optimizer
state is at home on nvme anyway and the drives have room. On a file system in memory they would take RAM and outlive
nothing. A run that asks for two gets them, or is refused by whoever counts the space.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .bytesize import format_bytes
from .config import OffloadConfig
from .errors import PlanError
from .inventory import Inventory
from .metrics import mount_of
from .placement import Placement, swap_paths_of
from .plan import MemoryPlan

FREE_SHARE_MAX = 0.9
"""Of the free space, which a choice of ours may take."""


def choose_generations(
    config: OffloadConfig, placement: Placement, inventory: Inventory
) -> tuple[Placement, str]:
    """The placement with its number of generations, and in one line why. See Note [One generation or two].

    Returns:
        The line is empty where there was nothing to choose.
    """
    paths = swap_paths_of(config)
    if config.durability.generations != "auto" or paths is None:
        return placement, ""
    one, two = replace(placement, generations=1), replace(placement, generations=2)
    if placement.state_home != "nvme":
        return one, _chosen(1, "optimizer state is not at home on nvme")
    roots = [Path(path.path).expanduser() for path in paths.all]
    for root in roots:
        if root.exists() and mount_of(root).is_memory:
            return one, _chosen(1, f"{root} is memory, which does not outlive the machine")
    try:
        need = MemoryPlan.build(two, inventory).bytes_total("nvme")
    except PlanError:
        return one, _chosen(1, "memory.nvme_bytes does not hold two")
    free = _free_bytes(roots)
    if free is not None and need > free * FREE_SHARE_MAX:
        return one, _chosen(1, f"two take {format_bytes(need)}, and {format_bytes(free)} are free")
    room = "" if free is None else f" of {format_bytes(free)} free"
    return two, _chosen(2, f"they take {format_bytes(need)}{room}")


def _chosen(count: int, why: str) -> str:
    gives = {
        1: "a crash loses the run",
        2: "after a crash a run goes on from its last commit",
    }[count]
    return f"durability.generations: {count} chosen, {why}; {gives}"


def _free_bytes(roots: Iterable[Path]) -> int | None:
    """Free space of all file systems together; None where one is not there yet, or has no size to tell."""
    free: dict[int, int] = {}
    for root in roots:
        existing = root if root.exists() else root.parent
        if not existing.exists():
            return None
        status = os.statvfs(existing)
        if not status.f_blocks:
            return None
        free[existing.stat().st_dev] = status.f_bavail * status.f_frsize
    return sum(free.values())
