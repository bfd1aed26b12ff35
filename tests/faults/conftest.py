"""The models of tests/step are used here too."""

import functools
import sys
from pathlib import Path

import pytest

from offload import aio

sys.path.append(str(Path(__file__).parents[1] / "step"))


@pytest.fixture
def faulty(monkeypatch):
    """Opens every swap file with these faults."""

    def use(**faults):
        queue = functools.partial(aio.Queue, faults=faults)
        monkeypatch.setattr("offload.store.drives.Queue", queue)

    return use
