"""What the operating system says about this process and this machine: memory, I/O, mounts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def rss_file_bytes() -> int:
    """Of these, pages of files: library code above all."""
    return _status_bytes("RssFile")


def rss_peak_bytes() -> int:
    """The largest resident memory this process has had (VmHWM)."""
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def memory_available_bytes() -> int:
    """What can still be taken without swapping: of the machine, or of the control group where that is less."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            available = min(available, max(int(limit) - int(usage), 0))
        break
    return int(available)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mounted file system that holds a path."""

    point: str
    filesystem: str
    source: str

    @property
    def is_memory(self) -> bool:
        """Whether "files" there take RAM."""
        return self.filesystem in ("tmpfs", "ramfs", "devtmpfs")


def mount_of(path: str | os.PathLike[str], *, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount that holds an existing path, by the longest mount point above it."""
    resolved = os.path.realpath(path)
    best = Mount("/", "unknown", "unknown")
    for line in table.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        filesystem, source = right.split()[:2]
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, filesystem, source)
    return best


def storage_bytes() -> tuple[int, int]:
    """(read, written) by this process from and to storage, as the kernel counts (/proc/self/io)."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def read(path: Path) -> str | None:
    """The text of a file of /proc or /sys; None where it cannot be had."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """As :func:`read`, for a file that holds one number."""
    text = read(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def read_table(path: Path) -> dict[str, str]:
    """The ``key: value`` lines of a file; the first of equal keys counts."""
    table: dict[str, str] = {}
    for line in (read(path) or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            table.setdefault(key.strip(), value.strip())
    return table
