"""Fixtures of the I/O tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload import aio
from offload.bytesize import MiB

BACKENDS = [
    pytest.param(
        name,
        marks=[pytest.mark.skipif(reason is not None, reason=f"{name} does not work here: {reason}")],
    )
    for name, reason in aio.probe().items()
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "swap")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter, where limits and signals can be changed."""

    def run(script: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", script, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(aio.__file__).parents[2])}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )

    return run


MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system of the kind asked for; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def do(kind: str, options: str, device: str | None = None) -> Path:
        target = tmp_path / kind
        target.mkdir()
        source = device or kind
        if kind in MKFS:
            if shutil.which(MKFS[kind][0]) is None:
                pytest.skip(f"no {MKFS[kind][0]}")
            if device is None:
                source = str(tmp_path / "image")
                with open(source, "wb") as file:
                    file.truncate(16 * MiB)
            subprocess.run([*MKFS[kind], source], check=True)
        command = ["mount", "-t", kind, "-o", options, source, str(target)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"may not mount {kind}")
        mounted.append(target)
        return target

    yield do
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True)


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Callable[[int, int], str]]:
    """Makes a block device with sectors of a given size; skips the test where that is not allowed."""
    made: list[str] = []

    def do(sector: int, size: int) -> str:
        image = tmp_path / "disk"
        with open(image, "wb") as file:
            file.truncate(size)
        command = ["losetup", "--find", "--show", "--direct-io=on", "--sector-size", str(sector), str(image)]
        if shutil.which("losetup") is None:
            pytest.skip("no losetup")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            pytest.skip(f"may not make a loop device: {result.stderr.strip()}")
        made.append(result.stdout.strip())
        return made[-1]

    yield do
    for device in made:
        subprocess.run(["losetup", "--detach", device], check=True)
