"""Facts about a swap path for ``offload doctor``: its file system, its drive, what lies there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from .. import machine
from ..blockdevice import BlockDevice, device_under
from ..bytesize import PAGE_BYTES, GiB, format_bytes
from ..errors import ConfigError, OffloadError
from ..metrics import Mount, mount_of
from ..store.directory import OWNER_FILE, PREFIX, is_committed, is_in_use
from .facts import Fact
from .host import Host
from .loads import ScratchFile, check_directory, settings_text
from .stores import owner_of

FREE_BYTES_MIN = 10 * GiB
FREE_SHARE_MIN = 0.05
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "glusterfs", "beegfs", "afs",
    "fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.rclone", "fuse.gcsfuse",
)  # fmt: skip


def facts(path: Path, host: Host) -> Iterator[Fact]:
    """All of them, in the order of the page."""
    path = path.expanduser()
    try:
        check_directory(path)
    except ConfigError as error:
        reason, _, hint = str(error).removeprefix(f"{path}: ").partition("; ")
        yield Fact("directory", reason, "bad", hint)
        return
    mount = mount_of(path, table=host.proc / "self" / "mountinfo")
    device = device_under(path, mount, sys=host.sys)
    yield _file_system(mount)
    is_direct, direct = _direct_io(path)
    yield direct
    if not mount.is_memory:
        yield from _drive(device, is_direct=is_direct)
        yield _tuned(path)
    yield _space(path)
    yield from _left_behind(path)


def _file_system(mount: Mount) -> Fact:
    name, kind = "file system", mount.filesystem
    text = f"{kind} on {mount.source}, at {mount.point}"
    if kind == "unknown":
        return Fact.unknown(name)
    if mount.is_memory:
        return Fact(
            name, text, "slow", "it is memory: what is swapped there still takes RAM; give a path on a drive"
        )
    if kind in ("overlay", "aufs"):
        hint = "files of the container's image layer are slow: mount a drive, `docker run -v /mnt/nvme:/swap`"
        return Fact(name, text, "slow", hint)
    if kind in _NETWORK:
        return Fact(
            name, text, "slow", "the network is slower than a local drive, and shared: give a path on one"
        )
    if kind in ("btrfs", "bcachefs"):
        hint = "every write is copied and checksummed: `chattr +C DIR` on the empty directory spares that"
        return Fact(name, text, "slow", hint)
    return Fact(name, text)


def _direct_io(path: Path) -> tuple[bool, Fact]:
    """Whether the page cache is bypassed; tried out on a file without a name."""
    from .. import aio

    try:
        with ScratchFile(path, PAGE_BYTES) as file, aio.Queue(file.path_for(), create=False) as queue:
            queue.write(bytes(PAGE_BYTES), 0).wait()
            if queue.direct:
                return True, Fact("direct I/O", f"yes, in multiples of {queue.alignment} B")
    except (OffloadError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return False, Fact("direct I/O", f"no file can be written: {reason}", "bad")
    hint = "the page cache costs speed and memory: give a path on ext4 or xfs"
    return False, Fact("direct I/O", "refused; transfers go through the page cache", "slow", hint)


def _drive(device: BlockDevice | None, *, is_direct: bool) -> Iterator[Fact]:
    if device is None:
        yield Fact.unknown("drive", "none that /sys knows")
        return
    size = f", {format_bytes(device.size)}" if device.size else ""
    model = f" ({device.model})" if device.model else ""
    # Virtual disks say that they rotate, whatever is behind them.
    spins = bool(device.is_rotational) and not device.name.startswith(("vd", "xvd", "loop", "zram"))
    if spins:
        hint = "a spinning disk gives a tenth of an SSD or less: give a path on an SSD"
        yield Fact("drive", f"{device.name}{model}{size}, rotates", "slow", hint)
    else:
        yield Fact("drive", f"{device.name}{model}{size}")
    logical, physical = device.logical_block_bytes, device.physical_block_bytes
    if logical is None:
        yield Fact.unknown("sectors")
    else:
        yield Fact("sectors", f"{logical} B logical, {physical or 'unknown'} B physical")
    yield _scheduler(device, spins=spins)
    ahead = device.read_ahead_bytes
    if ahead is None:
        yield Fact.unknown("read-ahead")
    elif is_direct:
        yield Fact("read-ahead", f"{format_bytes(ahead)}; direct I/O does without it")
    elif ahead < 1 << 20:
        hint = f"the page cache wants more: `sudo blockdev --setra 8192 /dev/{device.name}`"
        yield Fact("read-ahead", format_bytes(ahead), "slow", hint)
    else:
        yield Fact("read-ahead", format_bytes(ahead))


def _scheduler(device: BlockDevice, *, spins: bool) -> Fact:
    name = device.scheduler
    if name is None:
        return Fact.unknown("I/O scheduler")
    is_fast = device.name.startswith("nvme") or device.is_rotational is False
    if name == "bfq" or (is_fast and not spins and name != "none"):
        better = "mq-deadline" if spins else "none"
        command = f"echo {better} | sudo tee /sys/block/{device.name}/queue/scheduler"
        return Fact("I/O scheduler", name, "slow", f"it costs time for each request: `{command}`")
    return Fact("I/O scheduler", name)


def _space(path: Path) -> Fact:
    status = os.statvfs(path)
    if not status.f_blocks:
        return Fact.unknown("free space", "the file system does not say")
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{format_bytes(free)} of {format_bytes(total)}"
    if free < FREE_BYTES_MIN or free < FREE_SHARE_MIN * total:
        shown = f"`du -xh -d 2 {shlex.quote(str(path))} | sort -h`"
        hint = f"SSDs slow down when they are nearly full: {shown} shows by what"
        return Fact("free space", text, "slow", hint)
    return Fact("free space", text)


def _left_behind(path: Path) -> Iterator[Fact]:
    """Swap directories: those in use, those that hold what a run has committed, and what is left of dead owners."""
    for folder in sorted(path.glob(f"{PREFIX}*-rank*")):
        if not os.access(folder / OWNER_FILE, os.R_OK):
            continue  # not one, or not ours to see
        owner = owner_of(folder)
        known = owner.pid is not None
        about = f"of process {owner.pid}, started {owner.started}" if known else "of an unknown process"
        size = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
        text = f"{folder.name}: {format_bytes(size)}, {about}"
        if is_in_use(folder):
            yield Fact("swap in use", text)
        elif is_committed(folder):
            yield Fact(
                "last commit", f"{text}; go on from it, or `rm -r {shlex.quote(str(folder))}` gives it up"
            )
        else:
            hint = f"the next run with this path removes it, or `rm -r {shlex.quote(str(folder))}`"
            yield Fact("left behind", text, "slow", hint)


def _tuned(path: Path) -> Fact:
    drive = machine.drive_of(path)
    entry = next((entry for entry in machine.load() if entry.drive == drive), None)
    if entry is None:
        if machine.profile_path() is None:
            return Fact("tuned", "no; the machine profile is switched off")
        return Fact("tuned", "no", "slow", f"find its best settings: `offload tune {shlex.quote(str(path))}`")
    rates = ", ".join(f"{load} {rate:.2f}" for load, rate in entry.gb_per_second.items())
    return Fact("tuned", f"{settings_text(entry.settings)}: {rates} GB/s ({entry.date})")
