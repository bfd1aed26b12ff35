"""The kernels of a processor that this one is not, under an emulator: the same bits as the scalar ones there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    *(ROOT / f"aio_csrc/optim/{name}_{isa}.cpp" for name in ("adam", "rules") for isa in ("neon", "scalar")),
    ROOT / "tests/optim/native/compare_kernels.cpp",
]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"{COMPILER} and {EMULATOR} are not installed (apt install g++-aarch64-linux-gnu qemu-user)",
)
def test_neon_has_the_bits_of_scalar(tmp_path: Path) -> None:
    program = tmp_path / "compare"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-static"]
    include = f"-I{ROOT / 'aio_csrc'}"
    subprocess.run([COMPILER, *flags, include, *map(str, SOURCES), "-o", str(program)], check=True)
    result = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "0 differences\n"), result.stdout + result.stderr
