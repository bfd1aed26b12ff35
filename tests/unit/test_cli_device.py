"""The command line and accelerators: planned for wherever they are, and fed with batches where they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.cli import device as cli_device
from offload.cli.main import app
from offload.config import OffloadConfig

ROOT = Path(__file__).parents[2]


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "memory": {"host_bytes": "100GB", "device_bytes": "20GB"},
        "steps_per_print": 1,
        **changes,
    }


def test_a_device_that_is_elsewhere_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    path.write_text(json.dumps(config(accelerator="cuda")))
    script = (
        "import sys; from offload.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('torch', 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "plan", str(path), "--model", "preset:1b"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "  device  weight slots " in result.stdout and "of 18.6 GiB" in result.stdout
    assert " h2d " in result.stdout.replace("       ", " ") and result.stdout.endswith("torch False\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [["plan"], ["finetune", "--data", __file__, "--steps", "1"]])
def test_a_device_that_must_be_here_and_is_not(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    memory = {"host_bytes": "100GB", "device_bytes": "auto" if command == ["plan"] else "20GB"}
    path.write_text(json.dumps(config(accelerator="cuda", memory=memory)))
    name, *rest = command
    result = CliRunner().invoke(app, [name, str(path), "--model", "preset:10m", *rest])
    assert result.exit_code == 2
    assert "accelerator 'cuda': torch finds only the CPU here" in result.output


def test_auto_asks_torch_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = OffloadConfig.from_any(config())
    monkeypatch.delenv("OFFLOAD_ACCELERATOR", raising=False)
    monkeypatch.setattr(cli_device, "_DRIVERS", (str(tmp_path / "nvidiactl"),))
    assert cli_device.device_free_bytes(settings, is_here=True) is None
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "simulated")
    assert cli_device.device_free_bytes(settings, is_here=True) == 64 << 30


def test_finetune_computes_the_same_on_an_accelerator(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text(
        "".join(f"{n} green bottles hanging on the wall\n" for n in range(400))
    )
    reports = []
    for accelerator in ("cpu", "simulated"):
        (tmp_path / f"{accelerator}.json").write_text(json.dumps(config(accelerator=accelerator)))
        arguments = ["finetune", f"{accelerator}.json", "--model", "preset:10m", "--data", "data.txt"]
        subprocess.run(
            [sys.executable, "-m", "offload", *arguments, "--steps", "2", "--seq", "16", "--quiet"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        reports.append(json.loads((tmp_path / "runs" / accelerator / "report.json").read_text()))
    on_cpu, on_device = reports
    assert on_cpu["losses"] == on_device["losses"] and len(on_cpu["losses"]) == 2
    assert "h2d" in json.dumps(on_device) and "h2d" not in json.dumps(on_cpu)
