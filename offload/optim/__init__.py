"""Optimizers: the CPU kernels, the same kernels for devices, and the classes that the engine drives."""

from .adam import Adam, PlaneSpec, ShardOptimizer
from .device import DeviceAdam, block_square_sums, square_sums_on_device
from .kernels import Segment

__all__ = [
    "Adam",
    "DeviceAdam",
    "PlaneSpec",
    "Segment",
    "ShardOptimizer",
    "block_square_sums",
    "square_sums_on_device",
]
