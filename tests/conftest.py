"""Fixtures for all tests."""

import os
import threading
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_for_torch():
    """Small models are faster on one thread, and sums then have one order."""
    torch.set_num_threads(1)


@pytest.fixture
def swap_path(tmp_path):
    """A directory for swap files, which must be empty again when the test ends."""
    path = tmp_path / "swap"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == [], "swap files were left behind"


@pytest.fixture
def nothing_left_behind():
    """Threads and descriptors after the test are those before it."""

    def descriptors():
        return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}

    threads_before, descriptors_before = _kernel_threads(), descriptors()
    yield
    assert _kernel_threads() <= threads_before, threading.enumerate()
    assert set(descriptors().values()) <= set(descriptors_before.values())


def _is_open(fd):
    return Path(f"/proc/self/fd/{fd}").exists()


def _kernel_threads():
    return len(os.listdir("/proc/self/task"))
