"""Cases of what a machine or a model is too small or too large for: I05, I11, and M13 over saves."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import offload

ROOT = Path(offload.__file__).parents[1]


class BigEmb(nn.Module):
    """An embedding of twice the elements that `buffer_size` asks for, and a small layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(3125, 64), nn.Linear(64, 2)

    def forward(self, ids):
        return self.head(self.embedding(ids)).square().mean()


def trained(path, backend="auto", **hints):
    place = {"device": "nvme", "nvme_path": str(path), **hints} if path else {"device": "cpu"}
    settings = {
        "aio": {"backend": backend},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 10_000, "offload_param": place, "offload_optimizer": {**place},
        },
    }  # fmt: skip
    settings["zero_optimization"]["offload_optimizer"].pop("buffer_size", None)
    model, optimizer = offload.prepare(BigEmb(), settings)
    with contextlib.closing(optimizer.engine) as engine:
        for step in range(3):
            model(torch.tensor([1, 5 + step, 3124])).backward()
            optimizer.step()
            optimizer.zero_grad()
        slots = {(line.purpose, line.size) for line in engine.plan.lines if line.tier == "host"}
        return model.state_dict(), slots


@pytest.mark.parametrize("buffer_size", [100_000, 1e5, 1000])
def test_i05_a_parameter_larger_than_the_buffers_of_the_configuration(swap_path, buffer_size):
    """Slots are as large as the largest unit, whatever is written there; its state goes chunk by chunk."""
    values, slots = trained(swap_path, buffer_size=buffer_size)
    for name, value in trained(None)[0].items():
        assert torch.equal(value, values[name]), name
    sizes = dict(slots)
    largest = 3125 * 64 * 4
    assert any(size >= largest for purpose, size in sizes.items() if "weight" in purpose)
    assert all(size < largest for purpose, size in sizes.items() if "state" in purpose), "chunks, not units"


WITHOUT = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(name)s: %(message)s")
sys.modules["offload._aio"] = None
import offload
from test_io_limits import digest, trained
for backend in ("auto", "auto", "io_uring"):
    try:
        print(digest(trained(sys.argv[1], backend)[0]))
    except offload.OffloadError as error:
        print("refused:", error)
"""


def digest(values):
    return [value.double().sum().item() for value in values.values()]


def test_i11_training_without_the_compiled_core(swap_path):
    """One line says why and how to mend it; then the same bits, through Python. By name it is refused at once."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", WITHOUT, str(swap_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == 4, result.stdout + result.stderr
    assert lines[0].startswith("offload.aio: ") and "_aio" in lines[0] and "pip install -e ." in lines[0]
    assert lines[1] == lines[2] == str(digest(trained(None)[0]))
    assert lines[3].startswith("refused: I/O backend 'io_uring' cannot be used: ") and "_aio" in lines[3]
    assert list(swap_path.iterdir()) == []


def open_files():
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd):
    return Path(f"/proc/self/fd/{fd}").exists()


def test_m13_saves_with_rotation_keep_no_descriptor_and_no_space(tmp_path, swap_path):
    """Fifty exports of which two are kept: no descriptor more, and none of a file that is gone."""
    place = {"device": "nvme", "nvme_path": str(swap_path)}
    settings = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    model, optimizer = offload.prepare(BigEmb(), settings)
    with contextlib.closing(optimizer.engine) as engine:
        before, kept = None, []
        for save in range(50):
            model(torch.tensor([save])).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(tmp_path / f"save{save}")
            offload.export(engine, kept[-1], config={})
            if len(kept) > 2:
                shutil.rmtree(kept.pop(0))
            before = before or len(open_files())
        assert len(open_files()) == before
        assert not any("deleted" in target for target in open_files().values() if str(tmp_path) in target)
        assert sorted(path.name for path in tmp_path.glob("save*")) == ["save48", "save49"]
