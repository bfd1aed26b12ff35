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

    def run(script: str, *arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", script, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(aio.__file__).parents[2])}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a small file system of the kind asked for; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def do(kind: str, options: str) -> Path:
        target = tmp_path / kind
        target.mkdir()
        device = kind
        if kind == "ext4":
            image = tmp_path / "image"
            with open(image, "wb") as file:
                file.truncate(16 * MiB)
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("no mkfs.ext4")
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
            device = str(image)
        command = ["mount", "-t", kind, "-o", options, device, str(target)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"may not mount {kind}")
        mounted.append(target)
        return target

    yield do
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True)
