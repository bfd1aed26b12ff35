"""Runs sections of the GPU check on the device of backend.cpp, in a process of its own.

python backend.py BUILD_DIRECTORY DEVICE SECTIONS OUT
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load


def device_module(backend: Any) -> types.ModuleType:
    """What ``torch.hpu`` would be."""

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before = backend.current_device()
        backend.set_device(chosen.index)
        try:
            yield
        finally:
            backend.set_device(before)

    module = types.ModuleType("torch.hpu")
    vars(module).update(
        device=device,
        current_device=backend.current_device,
        set_device=backend.set_device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        synchronize=lambda _device=None: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda _seed: None,
        mem_get_info=lambda _device=None: ((8 << 30) - backend.allocated(), 8 << 30),
        memory_allocated=lambda _device=None: backend.allocated(),
        memory_reserved=lambda _device=None: backend.allocated(),
        max_memory_allocated=lambda _device=None: backend.peak(),
    )
    return module


def main(build: str, device: str, sections: str, out: str) -> int:
    Path(build).mkdir(exist_ok=True)
    source = str(Path(__file__).with_name("backend.cpp"))
    backend = load("offload_test_backend", [source], build_directory=build, extra_cflags=["-O0"])
    torch._register_device_module("hpu", device_module(backend))

    from benchmarks import gpu_check
    from benchmarks.gpu import common
    from offload.accel.torch_device import TorchAccelerator

    pinned: set[int] = set()
    TorchAccelerator.register = lambda _self, slab: pinned.add(slab.data_ptr())
    TorchAccelerator.unregister = lambda _self, slab: pinned.remove(slab.data_ptr())
    common.Run.accelerator = property(lambda _run: device)
    status = gpu_check.main(["--device", "test", "--smoke", "--only", sections, "--out", out])
    if pinned or backend.current_device() != 0:
        raise AssertionError(f"{len(pinned)} slabs are pinned, the device is {backend.current_device()}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
