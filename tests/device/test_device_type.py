"""The path of real devices on a device type of its own, which a machine without a GPU can have. See backend.cpp.

What the test accelerator cannot show: its tensors are the CPU's, and it has no thread of autograd's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="torch has an accelerator of its own here"),
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="needs g++ and ninja"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("backend")


@pytest.mark.parametrize(
    ("device", "sections"),
    [
        ("hpu:0", "kernels,links,parity,lifetimes,pinned bytes,1.3b,8b,overlap"),
        ("hpu:1", "parity,lifetimes"),  # not the current device
    ],
)
def test_sections_of_the_gpu_check(device, sections, build, tmp_path):
    root, out = Path(__file__).parents[2], tmp_path / "check.json"
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja lies there
    script = Path(__file__).with_name("backend.py")
    done = subprocess.run(
        [sys.executable, str(script), str(build), device, sections, str(out)],
        env={**os.environ, "PATH": tools, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = {section["name"]: section["status"] for section in json.loads(out.read_text())["sections"]}
    assert statuses == dict.fromkeys(sections.split(","), "ok")
