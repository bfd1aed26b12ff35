"""Train and fine-tune models that fit neither the accelerator nor RAM.

Names are loaded on first use, so that ``offload plan`` starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> the module that defines it; the module itself where both are the same word
_HOME = {
    "ConfigError": "errors",
    "OffloadError": "errors",
    "PlanError": "errors",
    "TransferError": "errors",
    "CheckpointError": "errors",
    "StoreError": "errors",
    "OffloadConfig": "config",
    "CPUAdam": "optim.cpu_adam",
    "aio": "aio",
    "kernels": "optim.kernels",
    "prepare": "api",
    "initialize": "integrations.deepspeed",
    "init": "api",
    "from_pretrained": "api",
    "gather": "api",
    "export": "checkpoint",
    "optimizer_state": "checkpoint",
    "read_master": "access",
}

__all__ = [
    "CPUAdam",
    "CheckpointError",
    "ConfigError",
    "OffloadConfig",
    "OffloadError",
    "PlanError",
    "StoreError",
    "TransferError",
    "aio",
    "export",
    "from_pretrained",
    "gather",
    "init",
    "initialize",
    "kernels",
    "optimizer_state",
    "prepare",
    "read_master",
]

if TYPE_CHECKING:
    from . import aio
    from .access import read_master
    from .api import from_pretrained, gather, init, prepare
    from .checkpoint import export, optimizer_state
    from .config import OffloadConfig
    from .errors import CheckpointError, ConfigError, OffloadError, PlanError, StoreError, TransferError
    from .integrations.deepspeed import initialize
    from .optim import kernels
    from .optim.cpu_adam import CPUAdam


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOME[name]}", __name__)
    value = module if _HOME[name].rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
