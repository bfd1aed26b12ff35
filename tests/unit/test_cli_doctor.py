"""``offload doctor``: on this machine, and on machines that are directories with the files of /proc and /sys."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload import aio, machine, metrics
from offload.cli import doctor, host, swap_facts
from offload.cli.facts import Fact
from offload.cli.host import Host
from offload.cli.main import app
from offload.store import directory

ROOT = Path(__file__).parents[2]

COMPILED = ("io_uring", "libaio", "threads")
MACHINE = {
    "proc/sys/kernel/osrelease": "6.12.0-amd64\n",
    "proc/cpuinfo": "processor : 0\nmodel name : Test CPU\nflags : fpu avx2 fma avx512f avx512_bf16 amx_bf16\n",
    "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB\n",
    "proc/self/cgroup": "0::/user/run\n",
    "proc/sys/fs/aio-nr": "0",
    "proc/sys/fs/aio-max-nr": "1048576",
    "proc/sys/kernel/io_uring_disabled": "0",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/fs/cgroup/user/run/cpu.max": "max 100000",
    "sys/fs/cgroup/user/run/memory.max": "max",
}
DISK = {
    "size": "1000215216",
    "device/model": "Samsung SSD 990 PRO\n",
    "queue/logical_block_size": "512",
    "queue/physical_block_size": "4096",
    "queue/scheduler": "[none] mq-deadline",
    "queue/read_ahead_kb": "128",
    "queue/rotational": "0",
}


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine profile, so that nothing is left to hint at."""
    monkeypatch.setenv(machine.ENVIRONMENT, str(tmp_path / "profile.json"))
    monkeypatch.delenv("OFFLOAD_ACCELERATOR", raising=False)
    monkeypatch.setattr("offload.cli.device._DRIVERS", ())
    settings = machine.IoSettings("io_uring", 1 << 20, 32, 1)
    rates = {"read": 3.0, "write": 2.0, "mixed": 2.5}
    machine.save(
        [machine.Tuned(machine.drive_of(tmp_path), str(tmp_path), settings, rates, 2.5, "2026-11-30")]
    )


def make(root: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)


def fake(tmp_path: Path, changes: Mapping[str, str | None] | None = None, **settings: Any) -> Host:
    """A machine with nothing to complain of, but for the changes. None: there is no such file."""
    root = tmp_path / "root"
    make(root, {**MACHINE, **(changes or {})})
    defaults = {
        "affinity": 8,
        "memlock": resource.RLIM_INFINITY,
        "file_size": resource.RLIM_INFINITY,
        "is_root": False,
    }
    return Host(root, **{**defaults, **settings})


def facts_of(host_: Host) -> dict[str, Fact]:
    return {fact.name: fact for fact in host.facts(host_)}


def test_a_machine_without_faults(tmp_path: Path) -> None:
    facts = facts_of(fake(tmp_path))
    assert {name: fact.state for name, fact in facts.items() if fact.state != "ok"} == {}
    assert facts["kernel"].value == "Linux 6.12.0-amd64"
    assert facts["processor"].value == "Test CPU, 8 cores"
    assert facts["instruction sets"].value == "avx2, fma, avx512f, avx512_bf16, amx_bf16"
    assert facts["memory"].value == "16.0 GiB available of 32.0 GiB"
    assert facts["huge pages"].value == "transparent: madvise"
    assert facts["locked memory"].value == "no limit"


HINTS: dict[str, tuple[dict[str, str | None], dict[str, Any], str, str, str]] = {
    "old kernel": ({"proc/sys/kernel/osrelease": "5.4.0"}, {}, "kernel", "5.4.0", "5.6: update the kernel"),
    "few cores": (
        {"sys/fs/cgroup/user/cpu.max": "150000 100000"}, {}, "processor",
        "8 cores, of which a control group allows 1.5", "docker run --cpus N",
    ),
    "few cores, version 1": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/box\n1:name=systemd:/\n",
         "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000",
         "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "50000"}, {}, "processor", "allows 4", "docker run --cpus N",
    ),
    "no avx2": (
        {"proc/cpuinfo": "model name : Old\nflags : sse2\n"}, {}, "instruction sets",
        "no avx512f, no amx_bf16", "scalar kernel",
    ),
    "memory in use": (
        {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 50000 kB\n"}, {}, "memory", "48.8 MiB available",
        "ps aux",
    ),
    "memory limit": (
        {"sys/fs/cgroup/user/run/memory.max": str(1 << 30), "sys/fs/cgroup/user/run/memory.current": str(1000 << 20)},
        {}, "memory", "24.0 MiB available of 1.00 GiB (control group; 32.0 GiB in all)", "ps aux",
    ),
    "no huge pages": (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, {}, "huge pages", "never",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    "reserved pages": (
        {"proc/meminfo": MACHINE["proc/meminfo"].replace("Total: 0", "Total: 512")}, {}, "huge pages",
        "1.00 GiB reserved", "sudo sysctl vm.nr_hugepages=0",
    ),
    "locked memory": ({}, {"memlock": 65536}, "locked memory", "at most 64.0 KiB", "ulimit -l unlimited"),
    "file size": ({}, {"file_size": 1 << 20}, "file size limit", "1.00 MiB", "ulimit -f unlimited"),
    "aio requests": (
        {"proc/sys/fs/aio-nr": "65000", "proc/sys/fs/aio-max-nr": "65536"}, {}, "libaio requests",
        "65000 of 65536", "sudo sysctl fs.aio-max-nr=1048576",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HINTS))
def test_what_costs_speed_gets_a_hint(name: str, tmp_path: Path) -> None:
    changes, settings, about, value, hint = HINTS[name]
    facts = facts_of(fake(tmp_path, changes, **settings))
    slow = {fact.name for fact in facts.values() if fact.state != "ok"}
    assert slow == {about} and facts[about].state == "slow"
    assert value in facts[about].value and hint in (facts[about].hint or "")


@pytest.mark.parametrize("gone", [*MACHINE, "everything"])
def test_parts_that_are_missing_are_unknown(gone: str, tmp_path: Path) -> None:
    nothing = dict.fromkeys(MACHINE) if gone == "everything" else {gone: None}
    facts = facts_of(fake(tmp_path, nothing))
    assert all(fact.state in ("ok", "unknown") for fact in facts.values())
    if gone == "everything":
        unknown = {name for name, fact in facts.items() if fact.state == "unknown"}
        assert unknown == {"kernel", "instruction sets", "memory", "huge pages"}


@pytest.mark.parametrize(
    ("refusals", "disabled", "states", "hint"),
    [
        ({"io_uring": "EPERM"}, "0", ["slow", "ok", "ok", "ok"], "seccomp=unconfined"),
        ({"io_uring": "EPERM"}, "2", ["slow", "ok", "ok", "ok"], "sudo sysctl kernel.io_uring_disabled=0"),
        ({"libaio": "ENOSYS"}, "0", ["ok", "ok", "ok", "ok"], ""),
        (dict.fromkeys(COMPILED, "it cannot be loaded"), "0", [*["slow"] * 3, "ok"], "`pip install -e .`"),
    ],
)
def test_a_backend_that_is_off(
    refusals: dict[str, str],
    disabled: str,
    states: list[str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio, "probe", lambda: {name: refusals.get(name) for name in (*COMPILED, "python")})
    here = fake(tmp_path, {"proc/sys/kernel/io_uring_disabled": disabled})
    facts = [fact for fact in host.facts(here) if fact.name.startswith("backend")]
    assert [fact.state for fact in facts] == states
    assert all(f"off: {refusals[name]}" in str(facts) for name in refusals)
    assert hint in "".join(fact.hint or "" for fact in facts)


def test_a_driver_without_a_torch_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "may_have_accelerator", lambda: True)
    monkeypatch.setattr(host, "read", lambda path: "cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    facts = {fact.name: fact for fact in host._torch()}
    assert facts["torch"].value.endswith("built for the CPU") and facts["accelerator"].state == "slow"
    monkeypatch.setattr(
        host, "read", lambda path: "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "simulated")
    facts = {fact.name: fact for fact in host._torch()}
    assert facts["torch"].value.endswith("built for cuda and the CPU")
    assert "64.0 GiB free of 64.0 GiB" in facts["accelerator"].value


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    (fact,) = [fact for fact in host._torch() if fact.name == "torch"]
    assert fact.state == "bad" and "pip install torch" in (fact.hint or "")


# ---- swap paths ----


def path_facts(path: Path, host_: Host) -> dict[str, Fact]:
    return {fact.name: fact for fact in swap_facts.facts(path, host_)}


def drive(
    tmp_path: Path, *, name: str = "nvme0n1", kind: str = "xfs", **changes: str | None
) -> tuple[Path, Host]:
    """A path on a drive that is described by files."""
    path = tmp_path / "swap"
    path.mkdir(exist_ok=True)
    number = path.stat().st_dev
    mount = f"22 1 8:1 / {path} rw - {kind} /dev/{name}p1 rw\n"
    here = fake(tmp_path, {"proc/self/mountinfo": f"21 1 8:1 / / rw - ext4 /dev/root rw\n{mount}"})
    entry = here.sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    files = {**DISK, **{key.replace("__", "/"): text for key, text in changes.items()}}
    make(here.sys / "devices" / name, {**files, "nvme0n1p1/partition": "1", "nvme0n1p1/size": "99"})
    entry.parent.mkdir(parents=True)
    entry.symlink_to(here.sys / "devices" / name / "nvme0n1p1")  # a partition: its drive is what counts
    return path, here


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space does not depend on the machine that runs the tests; neither does direct I/O."""
    monkeypatch.setattr(aio.Queue, "direct", property(lambda queue: True))
    _space(monkeypatch, free=500 << 30)


def _space(monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
    status = os.statvfs_result((4096, 4096, 1 << 28, free >> 12, free >> 12, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)


@pytest.mark.usefixtures("plenty")
def test_a_drive_without_faults(tmp_path: Path) -> None:
    facts = path_facts(*drive(tmp_path))
    assert {name: fact.state for name, fact in facts.items() if fact.state != "ok"} == {}
    assert facts["file system"].value == f"xfs on /dev/nvme0n1p1, at {tmp_path / 'swap'}"
    assert facts["drive"].value == "nvme0n1 (Samsung SSD 990 PRO), 477 GiB"
    assert facts["sectors"].value == "512 B logical, 4096 B physical"
    assert facts["I/O scheduler"].value == "none"
    assert facts["read-ahead"].value == "128 KiB; direct I/O does without it"
    assert facts["free space"].value == "500 GiB of 1.00 TiB"
    assert facts["tuned"].value == "io_uring 1 MiB x 32: read 3.00, write 2.00, mixed 2.50 GB/s (2026-11-30)"


DRIVE_HINTS = {
    "overlay": ({"kind": "overlay"}, "file system", "docker run -v"),
    "tmpfs": ({"kind": "tmpfs"}, "file system", "still takes RAM"),
    "nfs": ({"kind": "nfs4"}, "file system", "slower than a local drive"),
    "btrfs": ({"kind": "btrfs"}, "file system", "chattr +C"),
    "disk": ({"name": "sda", "queue__rotational": "1"}, "drive", "give a path on an SSD"),
    "scheduler": (
        {"queue__scheduler": "none [mq-deadline]"}, "I/O scheduler",
        "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler",
    ),
    "bfq": (
        {"name": "sda", "queue__rotational": "1", "queue__scheduler": "mq-deadline [bfq]"}, "I/O scheduler",
        "echo mq-deadline | sudo tee /sys/block/sda/queue/scheduler",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize("name", list(DRIVE_HINTS))
def test_a_drive_that_costs_speed_gets_a_hint(name: str, tmp_path: Path) -> None:
    changes, about, hint = DRIVE_HINTS[name]
    facts = path_facts(*drive(tmp_path, **changes))  # type: ignore[arg-type]
    slow = {fact.name for fact in facts.values() if fact.state != "ok"}
    assert about in slow <= {about, "drive"} and hint in (facts[about].hint or "")


@pytest.mark.usefixtures("plenty")
def test_virtual_disks_say_that_they_rotate(tmp_path: Path) -> None:
    changes = {"queue__rotational": "1", "queue__scheduler": "[mq-deadline] none", "device__model": None}
    facts = path_facts(*drive(tmp_path, name="vda", **changes))  # type: ignore[arg-type]
    assert {fact.state for fact in facts.values()} == {"ok"}


@pytest.mark.usefixtures("plenty")
def test_what_sys_does_not_say_is_unknown(tmp_path: Path) -> None:
    path, here = drive(tmp_path, **{key.replace("/", "__"): None for key in DISK})
    facts = path_facts(path, here)
    assert {n for n, f in facts.items() if f.state == "unknown"} == {"sectors", "I/O scheduler", "read-ahead"}
    shutil.rmtree(here.sys / "dev")
    assert path_facts(path, here)["drive"] == Fact.unknown("drive", "none that /sys knows")
    (here.proc / "self" / "mountinfo").write_text("")
    assert path_facts(path, here)["file system"].state == "unknown"


def test_refused_direct_io_and_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio.Queue, "direct", property(lambda queue: False))
    _space(monkeypatch, free=4 << 30)
    facts = path_facts(*drive(tmp_path))
    assert facts["direct I/O"].state == "slow" and "ext4 or xfs" in (facts["direct I/O"].hint or "")
    assert "sudo blockdev --setra 8192 /dev/nvme0n1" in (facts["read-ahead"].hint or "")
    assert facts["free space"].state == "slow" and "du -xh" in (facts["free space"].hint or "")


def test_another_drive_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, here = drive(tmp_path)
    monkeypatch.setenv(machine.ENVIRONMENT, str(tmp_path / "none.json"))
    assert path_facts(path, here)["tuned"].hint == f"find its best settings: `offload tune {path}`"
    assert facts_of(here)["machine profile"].state == "slow"
    monkeypatch.setenv(machine.ENVIRONMENT, "off")
    assert path_facts(path, here)["tuned"].state == "ok"


def test_swap_directories_of_the_living_and_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    path.mkdir()
    dead = path / "offload-1-2-rank0"
    dead.mkdir()
    (dead / "owner.json").write_text('{"pid": 77, "host": "here", "started": "yesterday"}')
    (dead / "planes.swap").write_bytes(bytes(1 << 20))
    kept = path / "offload-3-4-rank0"
    kept.mkdir()
    (kept / "owner.json").write_text("{}")
    (kept / "manifest-1.json").write_text("")
    (path / "offload-no-rank").mkdir()  # not one of ours
    # The living first: making it would remove the dead.
    (path / "aside").mkdir()
    dead.rename(path / "aside" / dead.name)
    living = directory.SwapDirectory(path)
    (path / "aside" / dead.name).rename(dead)
    try:
        facts = [
            fact
            for fact in swap_facts.facts(path, Host())
            if fact.name in ("left behind", "swap in use", "last commit")
        ]
    finally:
        living.close()
    by_name = {fact.name: fact for fact in facts}
    assert by_name["last commit"].state == "ok" and by_name["last commit"].value.endswith(
        f"of an unknown process; go on from it, or `rm -r {kept}` gives it up"
    )
    assert len(facts) == 3 and by_name["swap in use"].state == "ok"
    assert f"of process {os.getpid()}, started " in by_name["swap in use"].value
    gone = by_name["left behind"]
    assert gone.value == f"{dead.name}: 1.00 MiB, of process 77, started yesterday" and f"rm -r {dead}" in (
        gone.hint or ""
    )
    assert (dead / "planes.swap").exists(), "doctor changes nothing"


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("missing", "does not exist", "make it, or mount the drive"),
        ("file", "is not a directory", "give one on the drive"),
    ],
)
def test_a_path_that_cannot_be_used(name: str, value: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert path_facts(tmp_path / name, Host()) == {"directory": Fact("directory", value, "bad", hint)}
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / name)]).exit_code == 1


# ---- the page ----


def test_on_this_machine(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["version"] == 1 and data["usable"] is True
    assert [section["name"] for section in data["sections"]] == ["machine", str(tmp_path)]
    facts = [fact for section in data["sections"] for fact in section["facts"]]
    assert all(set(fact) == {"name", "value", "state", "hint"} for fact in facts)
    assert {fact["state"] for fact in facts} <= {"ok", "slow", "unknown"}
    named = {fact["name"]: fact["value"] for fact in facts}
    assert named["kernel"] == f"Linux {os.uname().release}"
    assert {f"backend {name}" for name in aio.probe()} <= set(named)
    assert metrics.mount_of(tmp_path).filesystem in named["file system"]
    assert set(tmp_path.iterdir()) == before, "doctor changes nothing"


def test_the_page_is_aligned_and_commands_are_whole() -> None:
    command = "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`"
    facts = [
        Fact("short", "value"),
        Fact(
            "long",
            "word " * 40,
            "slow",
            f"a hint with a command: {command} and more words behind it to be wrapped",
        ),
        Fact.unknown("else"),
    ]
    for width in (80, 100):
        lines = list(doctor.page([("machine", facts)], width=width))
        plain = [re.sub(r"\x1b\[\d*m", "", line) for line in lines]
        assert max(len(line) for line in plain if command not in line) <= width
        assert any(command in line for line in plain), "whole, to be copied"
        assert plain[1].startswith("  short") and plain[2].startswith("! long")
        assert {len(line) - len(line.lstrip()) for line in plain[3:6]} == {plain[1].index("value")}
        assert plain[-1] == "the engine works here; 1 thing (!) could be better"
        assert "offload doctor /mnt/nvme" in plain[-2]


def test_what_must_be_mended_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host, "facts", lambda host_: iter([Fact("torch", "is not installed", "bad", "`pip`")])
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "X torch" in result.output
    assert result.output.splitlines()[-1] == "1 thing (X) must be mended first; nothing costs speed"
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["usable"] is False


def test_without_torch_and_without_colours(tmp_path: Path) -> None:
    script = (
        "import sys; from offload.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OFFLOAD_ACCELERATOR"}
    result = subprocess.run(
        [sys.executable, "-c", script, "doctor", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    has_driver = any(
        Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD128")
    )
    assert result.stdout.splitlines()[-1] == "False" or has_driver
    assert "\x1b" not in result.stdout
