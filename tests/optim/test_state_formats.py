"""Moments in bf16 and int8: every instruction set, thread count and cut gives the bits of the oracle."""

from __future__ import annotations

import pytest
import torch
from planes import HYPER, NUMELS, gradient
from state_format_oracle import adam
from state_planes import FORMATS, StatePlanes

from offload.optim import kernels
from offload.optim.kernels import Segment


def check_against_oracle(
    start: StatePlanes, grad: torch.Tensor, segments: list[Segment], isa: str, **changed: object
) -> None:
    options = {"adamw_mode": True, "grad_scale": 0.37, "seed": 11, **changed}
    planes, state = start.clone(), start.to_oracle()
    planes.step_segments(grad, segments, isa=isa, **options)
    adam(state, segments, grad.float().numpy(), **options)
    planes.assert_equal_to_oracle(state)
    planes.assert_guarded()


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_every_length_equals_the_oracle(format_: str, adamw_mode: bool, isa: str) -> None:
    for numel in (*NUMELS[:-1], 127, 128, 129, 255, 256, 257):
        start, grad = (
            StatePlanes.midway(numel, format_, seed=numel),
            gradient(numel, format_.split("/")[2], numel),
        )
        segment = Segment(0, numel, 3, **HYPER, element=5 * 128)
        check_against_oracle(start, grad, [segment], isa, adamw_mode=adamw_mode)
