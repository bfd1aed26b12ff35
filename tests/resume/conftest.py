"""Tests of resuming share their runs, and the models of tests/step."""

import sys
from pathlib import Path

import pytest

from offload import aio

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "step")]


@pytest.fixture
def failing(monkeypatch):
    """Every swap file is opened with these faults; none, when the test takes them away."""
    faults = {}

    def open_queue(path, **settings):
        return aio.Queue(path, **{**settings, "faults": dict(faults) or None})

    monkeypatch.setattr("offload.store.drives.Queue", open_queue)
    return faults
