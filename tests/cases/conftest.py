"""Fixtures of the cases with an accelerator."""

import sys
from pathlib import Path

import pytest
from devices import Counting

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
