"""Fixtures for all tests."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from leaks import held

from offload import aio

TESTS = Path(__file__).parent

# A job in the background ("make test &") begins with Ctrl-C ignored, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread_for_torch():
    """Small models are faster on one thread, and sums then have one order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _collect_only_what_tests_make():
    """A full collection walks torch, transformers and every test module otherwise: half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """A test that draws random numbers draws the same in every run, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_machine_profile():
    """Tests, and the processes that they start, do not read what this machine was tuned to."""
    before = os.environ.get("OFFLOAD_PROFILE")
    os.environ["OFFLOAD_PROFILE"] = "off"
    yield
    if before is None:
        del os.environ["OFFLOAD_PROFILE"]
    else:
        os.environ["OFFLOAD_PROFILE"] = before


@pytest.fixture
def swap_path(tmp_path):
    """A directory for swap files, which must be empty again when the test ends."""
    path = tmp_path / "swap"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == [], "swap files were left behind"


FORKER = """
import gc, importlib.util, json, os, sys
import torch, torch._dynamo
import offload.cli.finetune, offload.cli.training
if importlib.util.find_spec("transformers"):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM
torch.set_num_threads(1)
gc.freeze()  # or every child would copy all of it when it ends
for line in sys.stdin:
    code, folder, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        exec(code, {"__name__": "__main__"})
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _drives():
    """Every backend, as it is and with a drive that shortens, refuses for a moment and answers in any order."""
    worst = {"seed": 1, "short_one_in": 3, "eintr_one_in": 7, "eagain_one_in": 11, "reorder": 1}
    for backend, reason in aio.probe().items():
        marks = [] if reason is None else [pytest.mark.skip(reason=str(reason))]
        yield pytest.param((backend, None), marks=marks, id=backend)
        yield pytest.param((backend, worst), marks=marks, id=f"{backend}-faulty")


@pytest.fixture(params=_drives())
def every_drive(request, monkeypatch):
    """Opens every swap file with one backend after the other, and once more with faults that must not show."""
    backend, faults = request.param

    def open_queue(path, **settings):
        return aio.Queue(path, **{**settings, "backend": backend, "faults": faults})

    monkeypatch.setattr("offload.store.drives.Queue", open_queue)


@pytest.fixture(scope="session")
def run_forked(tmp_path_factory):
    """Runs code in a process of its own, which begins with torch and transformers there: importing them would
    be most of its work.

    Such a process ends as any other, with a status, handlers and the interpreter's end.
    """
    log = tmp_path_factory.mktemp("forked")
    folders = [TESTS.parent, TESTS, TESTS / "faults", TESTS / "step"]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as forker:

        def run(code, folder=log):
            forker.stdin.write(json.dumps([code, str(folder), str(log)]) + "\n")
            forker.stdin.flush()
            status = int(forker.stdout.readline())
            output, errors = ((log / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(code, status, output, errors)

        yield run
        os.killpg(forker.pid, signal.SIGKILL)  # whatever a test that failed has left running, too


@pytest.fixture
def the_cpu_computes(monkeypatch):
    """Whatever OFFLOAD_ACCELERATOR says: on an accelerator "none" is its memory, where not every state can be."""
    monkeypatch.delenv("OFFLOAD_ACCELERATOR", raising=False)


@pytest.fixture
def nothing_left_behind():
    """Threads and descriptors after the test are those before it."""

    def descriptors():
        return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}

    (_, threads_before), descriptors_before = held(), descriptors()
    yield
    assert held()[1] <= threads_before, threading.enumerate()
    assert set(descriptors().values()) <= set(descriptors_before.values())


def _is_open(fd):
    return Path(f"/proc/self/fd/{fd}").exists()
