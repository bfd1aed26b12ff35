"""Adam where the optimizer state is on an accelerator: the bits of the CPU kernel, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from . import device_kernels, kernels
from .adam import AdamPlanes
from .device_check import choose_adam_segments
from .kernels import Segment

__all__ = ["DeviceAdam", "block_square_sums", "square_sums_on_device"]


class DeviceAdam(AdamPlanes):
    """Adam and AdamW on the device of the planes: what :class:`Adam` computes, bit for bit.

    On CUDA with Triton one fused kernel, elsewhere torch operations. The first update on a device compares the
    two with the C++ kernel on a small sample; a kernel that differs is not used. That once, it waits
    for the device.
    """

    def scratch_bytes(self, numel: int) -> int:
        """Device memory that an update of ``numel`` elements takes besides the planes, at most."""
        return device_kernels.SCRATCH_BYTES_PER_ELEMENT * min(numel, device_kernels.SLICE_ELEMENTS)

    def update(
        self,
        planes: Mapping[str, torch.Tensor],
        segments: Sequence[Segment],
        grad: torch.Tensor,
        grad_scale: float | torch.Tensor = 1.0,
    ) -> None:
        """One step, in place. ``grad_scale`` may be a 0-d tensor on the device, so that clipping waits for nothing."""
        weight = planes["weight"]
        choose_adam_segments(weight.device)(
            weight,
            planes["residual"] if self.weight_dtype == torch.bfloat16 else None,
            planes["exp_avg"],
            planes["exp_avg_sq"],
            grad,
            segments,
            adamw_mode=self.adamw_mode,
            grad_scale=grad_scale,
        )

    def _split_master(self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        device_kernels.split_master(master, weight, residual)


def square_sums_on_device(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """As :func:`block_square_sums`, fp64 on the device of the gradients, without waiting for it."""
    return device_kernels.block_square_sums(*grads)


def block_square_sums(grads: Sequence[torch.Tensor]) -> list[float]:
    """The sums of squares of all blocks of gradients in one memory, in order; see ``kernels``.

    Of those on a device the host needs the values: that waits for the device, once for all of them.
    """
    if not grads or grads[0].device.type == "cpu":
        return [total for grad in grads for total in kernels.block_square_sums(grad).tolist()]
    sums: list[float] = device_kernels.block_square_sums(*grads).tolist()
    return sums
