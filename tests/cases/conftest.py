"""Fixtures of the cases: with an accelerator, and with an engine at one of its homes."""

import sys
from pathlib import Path

import pytest
from devices import Counting

import offload

sys.path.append(str(Path(__file__).parents[1] / "step"))


@pytest.fixture
def simulate(monkeypatch):
    """Makes an accelerator the one that `prepare` finds; all are closed at the end."""
    opened = []

    def use(kind=Counting, seed=0, **settings):
        accelerator = kind(seed, **settings)
        opened.append(accelerator)
        monkeypatch.setattr(
            "offload.api.open_accelerator", lambda setting: None if setting == "cpu" else accelerator
        )
        return accelerator

    yield use
    for accelerator in opened:
        accelerator.close()


@pytest.fixture
def prepare(swap_path):
    """Prepares a model at a home (``nvme-backward``: updated in backward); closes the engines at the end."""
    engines = []

    def call(model, home, params=None, *, precision="fp32", chunk=1000, merge=None, **settings):
        device, _, update = home.partition("-")
        place = {"device": device, "nvme_path": str(swap_path)}
        config = {
            "bf16": {"enabled": precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": chunk,
                "offload_param": place,
                "offload_optimizer": {**place, "update": update or "step"},
            },
            **settings,
        }
        for name, values in (merge or {}).items():
            section = config["zero_optimization"]
            section[name] = {**section[name], **values} if isinstance(values, dict) else values
        model, optimizer = offload.prepare(model, config, params)
        engines.append(optimizer.engine)
        return model, optimizer

    yield call
    for engine in engines:
        engine.close()
