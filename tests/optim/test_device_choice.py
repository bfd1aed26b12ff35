"""Which Adam pass a device gets: Triton's only where it has just computed the right bits."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.errors import OffloadError
from offload.optim import device_check, device_kernels

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None

choose = device_check.choose_adam_segments.__wrapped__


def triton_pass() -> None: ...


@pytest.fixture
def device_with_triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if Triton were installed and both passes computed what they should."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(device_check, "_triton", lambda: triton_pass)
    monkeypatch.setattr(device_check, "check_torch", lambda device: [])
    monkeypatch.setattr(device_check, "check_triton", lambda device: [])
    return monkeypatch


def test_triton_is_used_where_it_is_right_and_only_on_cuda(device_with_triton: pytest.MonkeyPatch) -> None:
    assert choose(CUDA) is triton_pass
    assert choose(torch.device("xpu", 0)) is device_kernels.adam_segments
    device_with_triton.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose(CUDA) is device_kernels.adam_segments


@pytest.mark.parametrize("broken", ["wrong", "raises"])
def test_a_wrong_triton_is_named_once_and_not_used(
    device_with_triton: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def check(device: torch.device) -> list[str]:
        if broken == "raises":
            raise RuntimeError("exp_avg: no compiler")
        return ["exp_avg differs in 3 elements"]

    device_with_triton.setattr(device_check, "check_triton", check)
    device_check.choose_adam_segments.cache_clear()
    with caplog.at_level(logging.INFO, "offload.optim"):
        for _ in range(3):
            assert device_check.choose_adam_segments(CUDA) is device_kernels.adam_segments
    device_check.choose_adam_segments.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Triton's Adam on cuda:0 is not used")
    assert "exp_avg" in message


def test_a_device_that_computes_other_bits_is_refused(device_with_triton: pytest.MonkeyPatch) -> None:
    device_with_triton.setattr(device_check, "check_torch", lambda device: ["weight differs in 1 elements"])
    with pytest.raises(
        OffloadError, match=r"Adam on cuda:0 .*weight differs.*keep the optimizer state in host"
    ):
        choose(CUDA)


INTERPRETED = """
import warnings, torch
warnings.simplefilter("ignore")  # numpy speaks of overflow
from offload.optim import device_check
found = device_check.check_triton(torch.device("cpu"))
raise SystemExit("; ".join(found) or 0)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_triton_kernel_as_its_interpreter_runs_it() -> None:
    from triton._C.libtriton import interpreter

    if not hasattr(interpreter, "fma_fp32"):
        pytest.skip("this Triton's interpreter rounds the product of an fma")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, timeout=120, cwd=ROOT, env=environment)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_computes_the_bits_of_the_cpu() -> None:
    assert device_check.check_torch(CUDA) == []
    if HAS_TRITON:
        assert device_check.check_triton(CUDA) == []
