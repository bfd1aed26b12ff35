"""The block device under a path, as /sys describes it. What /sys does not say is None."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from .metrics import Mount, mount_of, read, read_number

_SECTOR_BYTES = 512
"""The unit of /sys/.../size, whatever the device's own sectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """A whole device, not a partition of it."""

    name: str
    model: str | None
    size: int | None
    logical_block_bytes: int | None
    """The smallest transfer that it takes."""
    physical_block_bytes: int | None
    """The smallest that it writes without reading first."""
    scheduler: str | None
    read_ahead_bytes: int | None
    is_rotational: bool | None
    """As the kernel believes; virtual disks often say True."""


def device_under(
    path: str | os.PathLike[str], mount: Mount | None = None, *, sys: Path = Path("/sys")
) -> BlockDevice | None:
    """The device that holds an existing path; None for memory, network and stacked file systems.

    Args:
        mount: of the path, where it is known already.
        sys: where sysfs is mounted.
    """
    numbers = [Path(path).stat().st_dev]
    try:
        source = Path((mount or mount_of(path)).source)
        # btrfs and others give their files a number of their own; the mount table names the device.
        if source.is_absolute() and stat.S_ISBLK(source.stat().st_mode):
            numbers.append(source.stat().st_rdev)
    except OSError:
        pass
    for number in numbers:
        entry = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        if entry.exists():
            return _describe(entry.resolve())
    return None


def _describe(entry: Path) -> BlockDevice:
    whole = entry.parent if (entry / "partition").exists() else entry
    queue = whole / "queue"
    sectors, ahead_kib = read_number(whole / "size"), read_number(queue / "read_ahead_kb")
    rotational = read_number(queue / "rotational")
    scheduler = read(queue / "scheduler") or None
    chosen = re.search(r"\[([\w-]+)\]", scheduler or "")
    return BlockDevice(
        name=whole.name,
        model=read(whole / "device" / "model") or None,
        size=None if sectors is None else sectors * _SECTOR_BYTES,
        logical_block_bytes=read_number(queue / "logical_block_size"),
        physical_block_bytes=read_number(queue / "physical_block_size"),
        scheduler=chosen[1] if chosen else scheduler,
        read_ahead_bytes=None if ahead_kib is None else ahead_kib * 1024,
        is_rotational=None if rotational is None else rotational == 1,
    )
