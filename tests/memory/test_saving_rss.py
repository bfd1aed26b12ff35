"""Resident memory while a checkpoint is saved and loaded: training's own peak and one ring of chunks.

In the background it is a ring of pieces instead, while training has all that it has.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offload
from offload.portable import background, files

ROOT = Path(offload.__file__).parents[1]
MiB = 1 << 20

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import offload
from offload import metrics
torch.set_num_threads(1)
layers, width, swap, folder, device = int(sys.argv[1]), 1024, *sys.argv[2:5]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()

def begin():
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "memory": {"host_bytes": "2GiB" if device == "cpu" else "100MiB"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": device, "nvme_path": swap},
            "offload_optimizer": {"device": device, "nvme_path": swap, "update": "backward"},
        },
    }
    with offload.init(config):
        model = Net()
    model, optimizer = offload.prepare(model, config)
    def step():
        model(torch.ones(8, width)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        step()
    optimizer.engine.settle()
    return optimizer.engine, step

def peak_of(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return metrics.rss_peak_bytes() - metrics.rss_file_bytes()

Path(folder).mkdir()
before = metrics.rss_bytes() - metrics.rss_file_bytes()
engines = []
peaks = {"train": peak_of(lambda: engines.append(begin()))}
(engine, step), = engines
peaks["save"] = peak_of(lambda: engine.save_checkpoint(folder, "tag"))
peaks["load"] = peak_of(lambda: engine.load_checkpoint(folder))
if device == "nvme":
    def save_and_train():
        engine.save_checkpoint(folder, "tag", background=True)
        for _ in range(2):
            step()
        engine.wait_for_checkpoint()
    peaks["background"] = peak_of(save_and_train)
plan = engine.plan
print(json.dumps({
    "before": before, **peaks, "ring": min(plan.chunk_slots, 3) * plan.placement.state_bytes(plan.chunk_elements),
    "saved": sum(file.stat().st_size for file in Path(folder).glob("tag/*")),
}))
engine.discard()
"""


def measure(layers, swap_path, device):
    # Large pieces go back to the system when they are freed: what is measured is what is in use.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    folder = swap_path.parent / f"saved-{layers}"
    arguments = [str(layers), str(swap_path), str(folder), device]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True, text=True, check=False, env=environment, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_saving_and_loading_take_one_ring_more_than_training(swap_path, device):
    """30M parameters, 12 bytes each: 360 MB written and read; twice the layers take no more of it."""
    for layers in (15, 30):
        run = measure(layers, swap_path, device)
        assert run["saved"] > layers * 12 * 1024 * 1024
        for name in ("save", "load"):
            taken = (run[name] - run["train"]) / MiB
            assert taken <= run["ring"] / MiB + 1, (name, layers, taken, run)
        if device == "nvme":
            taken = run["background"] - run["train"]
            assert taken <= background.RING_BYTES + files.PIECE_BYTES + MiB, (layers, taken / MiB, run)
