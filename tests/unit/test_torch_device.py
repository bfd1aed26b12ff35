"""The calls to torch's devices, with the runtime replaced: what a GPU is asked, and what its answers become."""

import contextlib

import pytest
import torch

from offload import OffloadError
from offload.accel import open_accelerator
from offload.accel.torch_device import TorchAccelerator
from offload.errors import ConfigError
from offload.optim import block_square_sums, device_kernels


class Runtime:
    """What ``torch.cuda.cudart()`` gives."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.calls.append((address, size, flags))
        return self.answer

    def cudaGetErrorString(self, error):  # noqa: N802
        return {2: "out of memory"}[error]


@pytest.fixture
def cuda(monkeypatch):
    """An accelerator "cuda:1" whose every call to the device is recorded."""
    launches = []

    def launch(*_args, device):
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")  # what the runtime had kept

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", launch)
    accelerator = TorchAccelerator(torch.device("cuda:1"))
    accelerator.launches = launches
    return accelerator


def test_memory_is_pinned_for_every_device(cuda, monkeypatch):
    runtime, slab = Runtime(0), torch.empty(4096, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    cuda.register(slab)
    assert runtime.calls == [(slab.data_ptr(), 4096, 1)] and not cuda.launches


def test_a_refused_pin_is_not_left_for_the_next_kernel(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(OffloadError, match=r"^cudaHostRegister: out of memory \(2\)$"):
        cuda.register(torch.empty(4096, dtype=torch.uint8))
    assert cuda.launches == [torch.device("cuda:1")]


def test_what_torch_keeps_for_itself_can_be_allocated(cuda, monkeypatch):
    """After an engine is closed its memory is torch's cache: the next plan may use it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 20)
    assert cuda.memory() == (40, 100)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="'cuda:2': there are 2 here"):
        open_accelerator("cuda:2")
    with pytest.raises(ConfigError, match="'xpu': torch finds 'cuda' here"):
        open_accelerator("xpu")


def test_gradients_on_a_device_are_summed_there(monkeypatch):
    """The C++ kernel cannot read them, and the host asks for the sums once."""
    asked = []

    def on_device(*grads):
        asked.append(len(grads))
        return torch.tensor([1.0, 2.0])

    monkeypatch.setattr(device_kernels, "block_square_sums", on_device)
    grads = [torch.empty(100, device="meta") for _ in range(3)]
    assert block_square_sums(grads) == [1.0, 2.0] and asked == [3]
