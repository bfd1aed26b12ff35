"""Moments out of the planes that store them, and back, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ..placement import MOMENTS
from . import kernels

__all__ = ["ADAM_MOMENTS", "decoded", "encode"]

ADAM_MOMENTS: Final = MOMENTS["adam"]


def decoded(
    planes: Mapping[str, torch.Tensor], names: Sequence[str] = ADAM_MOMENTS
) -> dict[str, torch.Tensor]:
    """The fp32 values, flat, of the moments ``names``. Those that are fp32 already are the planes themselves."""
    flat = {name: planes[name].detach().contiguous().view(-1) for name in names}
    if all(plane.is_floating_point() for plane in flat.values()):
        return {name: plane.float() for name, plane in flat.items()}
    first, second = names
    values = {name: torch.empty(plane.numel()) for name, plane in flat.items()}
    kernels.decode_moments(flat[first], flat[second], planes.get("scale"), values[first], values[second])
    return values


def encode(
    values: Mapping[str, torch.Tensor],
    planes: Mapping[str, torch.Tensor],
    names: Sequence[str] = ADAM_MOMENTS,
) -> None:
    """Writes flat fp32 values of the moments ``names`` into their planes, rounded to the nearest.

    A scale is the largest value of its block, and such a value, read back, may differ from it in the last bit: with
    the ``scale`` that values were read with, the planes are what they were then.
    """
    flat = {name: planes[name].view(-1) for name in names}
    if len(names) == 1 or flat[names[0]].dtype is torch.float32:
        for name, plane in flat.items():
            plane.copy_(values[name])
        return
    first, second = names
    kernels.encode_moments(values[first], values[second], flat[first], flat[second], planes.get("scale"))
    if "scale" in values and "scale" in planes:
        same = torch.isclose(values["scale"], planes["scale"], rtol=1e-6, atol=0.0)
        planes["scale"].copy_(values["scale"].where(same, planes["scale"]))
