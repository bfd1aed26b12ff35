"""Facts about the machine for ``offload doctor``: kernel, cores, memory, I/O backends, torch.

Everything is read from /proc and /sys, works without root, and says "unknown" where a part is missing. torch is not
imported unless an accelerator may be there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import aio, machine
from ..bytesize import MiB, format_bytes
from ..metrics import read, read_number, read_table
from .device import may_have_accelerator
from .facts import Fact

IO_URING_KERNEL = (5, 6)
"""The first whose io_uring reads and writes files as we need it."""
MEMLOCK_BYTES_MIN = 64 * MiB
AIO_LEFT_MIN = 4096
MEMORY_LOW_SHARE = 0.1
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
_SECCOMP = "in a container allow it: `docker run --security-opt seccomp=unconfined`"


@dataclass(frozen=True)
class Host:
    """The machine as its files describe it."""

    root: Path = Path("/")
    """Where /proc and /sys are."""
    affinity: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Cores that this process may run on."""
    memlock: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    file_size: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_FSIZE)[0])
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    def group_limits(self, version_2: str, version_1: str) -> Iterator[tuple[Path, str]]:
        """Files of this name in our control group and all above it, and what they hold."""
        base = self.sys / "fs" / "cgroup"
        for line in (read(self.proc / "self" / "cgroup") or "0::/").splitlines():
            _, controllers, group = line.split(":", 2)
            controller, _, name = version_1.partition("/")
            if controllers and controller not in controllers.split(","):
                continue
            top, file = (base / controller, name) if controllers else (base, version_2)
            place = top / group.lstrip("/")
            for folder in (place, *place.parents):
                if (text := read(folder / file)) is not None:
                    yield folder / file, text
                if folder == top:
                    break

    def core_limit(self) -> float | None:
        """Cores' worth of time that control groups allow; None where they set no limit."""
        limits = []
        for path, text in self.group_limits("cpu.max", "cpu/cpu.cfs_quota_us"):
            quota, _, period = text.partition(" ")
            period = period or read(path.parent / "cpu.cfs_period_us") or "100000"
            if quota.isdecimal() and period.isdecimal():
                limits.append(int(quota) / int(period))
        return min(limits, default=None)

    def memory_limit(self) -> int | None:
        """Bytes that control groups allow; None where they set no limit."""
        found = self.group_limits("memory.max", "memory/memory.limit_in_bytes")
        limits = [int(text) for _, text in found if text.isdecimal() and int(text) < 1 << 60]
        return min(limits, default=None)

    def memory_used(self) -> int:
        """Bytes that our control group uses, where it says so."""
        found = self.group_limits("memory.current", "memory/memory.usage_in_bytes")
        return next((int(text) for _, text in found if text.isdecimal()), 0)


def facts(host: Host) -> Iterator[Fact]:
    """All of them, in the order of the page."""
    yield _kernel(host)
    yield from _processor(host)
    yield _memory(host)
    yield _huge_pages(host)
    yield _locked_memory(host)
    if host.file_size != resource.RLIM_INFINITY:
        hint = "swap files may not be larger: `ulimit -f unlimited`"
        yield Fact("file size limit", format_bytes(host.file_size), "slow", hint)
    yield from _backends(host)
    yield _profile()
    yield from _torch()


def _kernel(host: Host) -> Fact:
    release = read(host.proc / "sys" / "kernel" / "osrelease")
    if release is None:
        return Fact.unknown("kernel")
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) < IO_URING_KERNEL:
        return Fact("kernel", f"Linux {release}", "slow", "io_uring needs 5.6: update the kernel")
    return Fact("kernel", f"Linux {release}")


def _processor(host: Host) -> Iterator[Fact]:
    cpu = read_table(host.proc / "cpuinfo")
    name = cpu.get("model name") or platform.machine() or "unknown"
    limit = host.core_limit()
    cores = f"{host.affinity} core{'s' * (host.affinity != 1)}"
    if limit is not None and limit < host.affinity:
        hint = "kernels and I/O share them: raise the limit (`docker run --cpus N`, systemd's CPUQuota)"
        yield Fact("processor", f"{name}, {cores}, of which a control group allows {limit:g}", "slow", hint)
    else:
        yield Fact("processor", f"{name}, {cores}")
    if "flags" not in cpu:
        yield Fact.unknown("instruction sets")
        return
    flags = cpu["flags"].split()
    present = [name for name in _INSTRUCTIONS if name in flags]
    missing = [name for name in ("avx512f", "amx_bf16") if name not in flags]
    text = "; ".join(filter(None, [", ".join(present), ", ".join(f"no {name}" for name in missing)]))
    if {"avx2", "fma"} <= set(present):
        yield Fact("instruction sets", text)
    else:
        hint = "without avx2 and fma the optimizer runs its scalar kernel; a virtual machine may hide them"
        yield Fact("instruction sets", text, "slow", hint)


def _memory(host: Host) -> Fact:
    table = read_table(host.proc / "meminfo")
    try:
        total, free = (int(table[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return Fact.unknown("memory")
    limit = host.memory_limit()
    text = f"{format_bytes(free)} available of {format_bytes(total)}"
    if limit is not None and limit < total:
        free = min(free, max(limit - host.memory_used(), 0))
        text = f"{format_bytes(free)} available of {format_bytes(limit)} (control group; {format_bytes(total)} in all)"
        total = limit
    if free < MEMORY_LOW_SHARE * total:
        return Fact("memory", text, "slow", "most is in use: `ps aux --sort=-rss | head` shows by whom")
    return Fact("memory", text)


def _huge_pages(host: Host) -> Fact:
    enabled = read(host.sys / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    chosen = re.search(r"\[(\w+)\]", enabled or "")
    table = read_table(host.proc / "meminfo")
    reserved = int(table["HugePages_Total"]) if table.get("HugePages_Total", "").isdecimal() else 0
    unit = table.get("Hugepagesize", "2048 kB").split()[0]
    held = reserved * int(unit) * 1024 if unit.isdecimal() else 0
    text = f"transparent: {chosen[1] if chosen else 'unknown'}" + (
        f"; {format_bytes(held)} reserved" if held else ""
    )
    if chosen and chosen[1] == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        hint = f"buffers in small pages can halve what a drive gives: `echo madvise | sudo tee {path}`"
        return Fact("huge pages", text, "slow", hint)
    if held:
        hint = (
            "the engine uses transparent ones; reserved memory is lost to it: `sudo sysctl vm.nr_hugepages=0`"
        )
        return Fact("huge pages", text, "slow", hint)
    return Fact("huge pages", text) if chosen else Fact.unknown("huge pages", text)


def _locked_memory(host: Host) -> Fact:
    if host.memlock == resource.RLIM_INFINITY:
        return Fact("locked memory", "no limit")
    text = f"at most {format_bytes(host.memlock)}"
    if host.is_root:
        return Fact("locked memory", f"{text}, which does not bind root")
    if host.memlock < MEMLOCK_BYTES_MIN:
        hint = (
            "too little to pin buffers for io_uring and accelerators: `ulimit -l unlimited`, `docker run --ulimit"
            " memlock=-1`, or memlock in /etc/security/limits.conf"
        )
        return Fact("locked memory", text, "slow", hint)
    return Fact("locked memory", text)


def _backends(host: Host) -> Iterator[Fact]:
    probed = aio.probe()
    first = next(name for name, refusal in probed.items() if refusal is None)  # python works everywhere
    for name, refusal in probed.items():
        label = f"backend {name}"
        if refusal is None:
            yield Fact(label, "works" + ("; auto takes it, unless tuned otherwise" if name == first else ""))
        elif list(probed).index(name) < list(probed).index(first):
            yield Fact(label, f"off: {' '.join(refusal.split())}", "slow", _mend(host, name, refusal))
        else:
            yield Fact(label, f"off: {' '.join(refusal.split())}")
    yield from _aio_requests(host)


def _mend(host: Host, backend: str, refusal: str) -> str:
    if "cannot be loaded" in refusal:
        return "build it, which takes a C++ compiler and a minute: `pip install -e .`"
    if backend != "io_uring":
        return _SECCOMP
    if read_number(host.proc / "sys" / "kernel" / "io_uring_disabled"):
        return "the fastest backend is switched off: `sudo sysctl kernel.io_uring_disabled=0`"
    return f"the fastest backend; {_SECCOMP}, and `ulimit -l unlimited`"


def _aio_requests(host: Host) -> Iterator[Fact]:
    used, most = (read_number(host.proc / "sys" / "fs" / name) for name in ("aio-nr", "aio-max-nr"))
    if used is None or most is None:
        return
    text = f"{used} of {most} in use on this machine"
    if most - used < AIO_LEFT_MIN:
        yield Fact(
            "libaio requests", text, "slow", f"raise it: `sudo sysctl fs.aio-max-nr={max(2 * most, 1 << 20)}`"
        )
    else:
        yield Fact("libaio requests", text)


def _profile() -> Fact:
    path = machine.profile_path()
    if path is None:
        return Fact("machine profile", f"switched off ({machine.ENVIRONMENT})")
    entries = machine.load(path)
    if not entries:
        return Fact("machine profile", "none", "slow", "the settings of I/O are guesses: `offload tune PATH`")
    return Fact("machine profile", f"{path}, for {', '.join(entry.path for entry in entries)}")


def _torch() -> Iterator[Fact]:
    yield Fact("python", platform.python_version())
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        yield Fact("torch", "is not installed", "bad", "training needs it: `pip install torch`")
        return
    version = importlib.metadata.version("torch")
    about = read(Path(spec.origin).parent / "version.py") or ""
    built = [
        name
        for name in ("cuda", "hip", "xpu")
        if re.search(rf"^{name}\b.*= *['\"]", about, flags=re.MULTILINE)
    ]
    yield Fact("torch", f"{version}, built for {' and '.join([*built, 'the CPU'])}")
    if not may_have_accelerator():
        yield Fact("accelerator", "no driver of one: the CPU computes")
        return
    if not built and "OFFLOAD_ACCELERATOR" not in os.environ:
        hint = "this torch is for the CPU only; see https://pytorch.org/get-started for one for your device"
        yield Fact("accelerator", "a driver is there, and torch cannot use it", "slow", hint)
        return
    yield _accelerator()


def _accelerator() -> Fact:
    from ..accel import open_accelerator
    from ..errors import OffloadError

    try:
        accelerator = open_accelerator("auto")
    except (OffloadError, RuntimeError) as error:
        return Fact("accelerator", " ".join(str(error).split()), "slow", "see what `nvidia-smi` says")
    if accelerator is None:
        return Fact("accelerator", "torch finds none: the CPU computes")
    try:
        free, total = accelerator.memory()[:2]
        return Fact(
            "accelerator", f"{accelerator.device}, {format_bytes(free)} free of {format_bytes(total)}"
        )
    finally:
        accelerator.close()
