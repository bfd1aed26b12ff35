"""``DeepSpeedCPUAdam`` by its own name and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from ..optim.cpu_adam import CPUAdam

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(CPUAdam):
    """:class:`offload.CPUAdam` with DeepSpeed's arguments and defaults.

    ``fp32_optimizer_states=False`` stores the moments in bf16, rounded stochastically. ``bias_correction=False`` and
    ``amsgrad=True`` are refused.
    """

    def __init__(
        self,
        model_params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        for name, refused in (("bias_correction=False", not bias_correction), ("amsgrad=True", amsgrad)):
            if refused:
                raise ConfigError(f"DeepSpeedCPUAdam: {name} is not built; leave it out")
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            adamw_mode=adamw_mode,
            state_format="fp32" if fp32_optimizer_states else "bf16",
        )
