"""The boundary: what is refused and how, instruction-set choice, the GIL, fork, and what was compiled."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from planes import HYPER, Planes, gradient

import offload
from offload import _adam
from offload.optim import kernels

BAD_ARRAYS = {
    "residual has 9 elements": {"residual": torch.zeros(9, dtype=torch.int16)},
    "exp_avg_sq has 11 elements": {"exp_avg_sq": torch.zeros(11)},
    "weight is torch.float16; it must be torch.bfloat16": {"weight": torch.zeros(10, dtype=torch.float16)},
    "exp_avg is torch.float64; it must be torch.float32": {"exp_avg": torch.zeros(10, dtype=torch.float64)},
    "grad is torch.int16; it must be torch.bfloat16 or torch.float16 or torch.float32": {
        "grad": torch.zeros(10, dtype=torch.int16)
    },
    "grad is float64; it must be uint16 for bf16 or float16 for fp16 or float32 for fp32": {
        "grad": np.zeros(10)
    },
    "exp_avg is not contiguous": {"exp_avg": torch.zeros(20)[::2]},
    "exp_avg must be flat, got shape (2, 5)": {"exp_avg": torch.zeros(2, 5)},
    "exp_avg is on meta": {"exp_avg": torch.zeros(10, device="meta")},
    "exp_avg starts at an address": {"exp_avg": np.zeros(41, np.uint8)[1:].view(np.float32)},
    "exp_avg is written to, but is read-only": {"exp_avg": np.frombuffer(bytes(40), np.float32)},
}


def arrays(numel: int = 10) -> dict[str, object]:
    planes = Planes.midway(numel, "bf16")
    return {**vars(planes), "grad": gradient(numel, "bf16", 0)}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_a_bad_array_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.adam(**{**arrays(), **BAD_ARRAYS[message]}, step=1, **HYPER)


def test_arrays_that_share_memory_are_refused() -> None:
    planes = arrays(10)
    moments = torch.zeros(15)
    with pytest.raises(ValueError, match="exp_avg and exp_avg_sq share memory"):
        kernels.adam(**{**planes, "exp_avg": moments[:10], "exp_avg_sq": moments[5:]}, step=1, **HYPER)
    kernels.adam(
        **{**planes, "exp_avg": torch.zeros(20)[:10], "exp_avg_sq": torch.zeros(20)[10:]}, step=1, **HYPER
    )


def test_fp32_weights_take_no_bf16_gradients() -> None:
    fp32 = {"weight": torch.zeros(10), "residual": None}
    with pytest.raises(
        ValueError, match=r"grad is torch.bfloat16; it must be torch.float16 or torch.float32"
    ):
        kernels.adam(**{**arrays(), **fp32}, step=1, **HYPER)


def test_numpy_and_torch_are_the_same_memory_and_result() -> None:
    tensors = arrays(100)
    as_numpy = {
        name: (t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy()).copy()
        for name, t in tensors.items()
    }
    kernels.adam(**tensors, step=1, **HYPER)
    kernels.adam(**as_numpy, step=1, **HYPER)
    np.testing.assert_array_equal(
        tensors["weight"].view(torch.int16).numpy(), as_numpy["weight"].view(np.int16)
    )
    np.testing.assert_array_equal(tensors["exp_avg"].numpy(), as_numpy["exp_avg"])


def test_the_extension_itself_refuses_sizes_that_do_not_fit() -> None:
    """Whoever calls, no write leaves the arrays."""
    short, right = np.zeros(9, np.float32), np.zeros(10, np.float32)
    options = {"adamw_mode": True, "grad_scale": 1.0, "seed": 0, "threads": 1, "isa": "scalar"}
    with pytest.raises(ValueError, match="exp_avg must hold 10 elements of 4 bytes, not 9 of 4"):
        _adam.adam(right, None, short, right, None, right, [], **options)
    bf16, code = np.zeros(10, np.uint16), np.zeros(10, np.int8)
    with pytest.raises(ValueError, match="scale must hold 2 elements of 4 bytes, not 9 of 4"):
        _adam.adam(bf16, code, code, code, short, right, [], **options)
    with pytest.raises(ValueError, match="residual must hold 10 elements of 1 bytes, not 10 of 2"):
        _adam.adam(bf16, bf16, code, code, right[:2], right, [], **options)
    with pytest.raises(ValueError, match="master must hold"):
        _adam.join_master(np.zeros(10, np.uint16), np.zeros(10, np.int16), short, threads=1, isa="scalar")


def test_n19_isas_end_with_scalar_and_an_unsupported_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """N19."""
    assert kernels.isas()[-1] == "scalar"
    assert set(kernels.isas()) <= {"avx512", "avx2", "scalar"}
    with pytest.raises(
        ValueError, match=r"isa='neon' is not supported on this machine; choose one of auto, .*scalar"
    ):
        kernels.adam(**arrays(), step=1, **HYPER, isa="neon")
    for missing in {"avx512", "avx2"} - set(kernels.isas()):
        with pytest.raises(ValueError, match=missing):
            kernels.adam(**arrays(), step=1, **HYPER, isa=missing)
    planes = arrays()
    monkeypatch.setenv("OFFLOAD_ISA", "sse9")
    with pytest.raises(ValueError, match=r"OFFLOAD_ISA='sse9' is not supported"):
        kernels.adam(**planes, step=1, **HYPER)
    kernels.adam(**planes, step=1, **HYPER, isa="scalar")  # an explicit argument wins


def test_the_choice_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """N19, P01."""
    kernels._log_choice.cache_clear()
    monkeypatch.setenv("OFFLOAD_ISA", "scalar")
    with caplog.at_level(logging.INFO, "offload.optim"):
        kernels.adam(**arrays(), step=1, **HYPER)
        kernels.adam(**arrays(), step=1, **HYPER)
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU optimizer kernels: isa=scalar, threads={kernels.default_threads()} by default"
    ]


@pytest.mark.parametrize(("threads", "level"), [(1, "WARNING"), (2, "INFO")])
def test_one_thread_is_warned_of(
    threads: int, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P01."""
    kernels._log_choice.cache_clear()
    monkeypatch.setattr(kernels, "default_threads", lambda: threads)
    with caplog.at_level(logging.INFO, "offload.optim"):
        kernels.adam(**arrays(), step=1, **HYPER)
    assert [record.levelname for record in caplog.records] == [level]
    kernels._log_choice.cache_clear()


def test_default_threads_share_the_cores_and_ignore_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    """P01."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    monkeypatch.setattr(kernels.psutil, "cpu_count", lambda logical: 16)
    monkeypatch.setattr(kernels, "_cgroup_cpus", lambda: 1024)
    fresh = kernels.default_threads.__wrapped__
    assert fresh() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert fresh() == 4
    monkeypatch.setattr(kernels, "_cgroup_cpus", lambda: 2)
    assert fresh() == 1


@pytest.mark.parametrize("threads", [0, -1, 1 << 20])
def test_thread_count_has_limits(threads: int) -> None:
    with pytest.raises(ValueError, match=r"threads must be in 1\.\.1024"):
        kernels.adam(**arrays(), step=1, **HYPER, threads=threads)


def test_gil_is_released_while_the_kernel_runs() -> None:
    """A Python thread counts on while one long call runs; with the GIL held it would stand still."""
    planes = arrays(2_000_000)
    ticks, running = 0, True

    def count() -> None:
        nonlocal ticks
        while running:
            ticks += 1
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = ticks
        start = time.perf_counter()
        kernels.adam(**planes, step=1, **HYPER, isa="scalar", threads=1)
        seconds, during = time.perf_counter() - start, ticks - before
    finally:
        running = False
        counter.join()
    assert seconds > 0.01
    assert during >= 3


def test_calls_from_many_threads_at_once() -> None:
    expected = Planes.midway(300_000, "bf16")
    grad = gradient(300_000, "bf16", 0)
    every = [expected.clone() for _ in range(8)]
    expected.step(grad, 1, threads=1)
    callers = [
        threading.Thread(target=planes.step, args=(grad, 1), kwargs={"threads": 3}) for planes in every
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for planes in every:
        planes.assert_same(expected)


FORK = """
import os, signal, sys, numpy as np
from offload.optim import kernels
def call():
    one, m, v, grad = (np.full(300_000, x, np.float32) for x in (1, 0, 0, 1))
    kernels.adam(one, None, m, v, grad, step=1, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8,
                 weight_decay=0.0, threads=3)
    return one.tobytes()
expected = call()          # starts the workers, which do not survive the fork
pid = os.fork()
if pid == 0:
    signal.alarm(20)       # a child that waits for the parent's workers dies here
    os._exit(0 if call() == expected and call() == expected else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(status or call() != expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_its_own_pool() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_workers_sleep_between_calls_and_take_no_signals() -> None:
    before = set(Path("/proc/self/task").iterdir())
    kernels.adam(**arrays(12 * 65536), step=1, **HYPER, threads=12)  # more than any test before it
    workers = set(Path("/proc/self/task").iterdir()) - before
    assert workers
    for worker in workers:
        status = (worker / "status").read_text()
        blocked = int(re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)[1], 16)
        assert blocked >> (signal.SIGINT - 1) & 1
        assert blocked >> (signal.SIGTERM - 1) & 1
    stat = [worker / "stat" for worker in workers]
    ticks = [path.read_text().rsplit(")", 1)[1].split()[11] for path in stat]
    time.sleep(0.2)
    assert [path.read_text().rsplit(")", 1)[1].split()[11] for path in stat] == ticks


def test_a_missing_extension_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A03: the module is loaded once more, under another name, while the extension cannot be."""
    monkeypatch.setitem(sys.modules, "offload._adam", None)
    monkeypatch.delattr(offload, "_adam")
    spec = importlib.util.spec_from_file_location("offload.optim.kernels_again", kernels.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="pip install") as raised:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert raised.value.__cause__ is not None


def test_a04_wide_instructions_stay_in_the_dispatched_kernels() -> None:
    """A04: a build dies of an illegal instruction elsewhere if one wide instruction leaks into common code."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump here")
    text = subprocess.run(
        [objdump, "-d", "-C", "--no-show-raw-insn", _adam.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "file format elf64-x86-64" not in text:
        pytest.skip("not an x86-64 build")
    if "VecAvx2" not in text:
        pytest.skip("the extension is stripped of its symbols")
    wide_in: dict[str, set[str]] = {}
    function = ""
    for line in text.splitlines():
        if line.endswith(">:"):
            function = line.split(" ", 1)[1]
        elif register := re.search(r"%([yz]mm)\d|\t(v[a-z]+[0-9a-z]*)\s+%?.*%xmm", line):
            wide_in.setdefault(function, set()).add(register[1] or "vex")
    for name, registers in wide_in.items():
        assert "VecAvx2" in name or "VecAvx512" in name, f"{name} uses {registers}"
        assert "zmm" not in registers or "VecAvx512" in name, name
