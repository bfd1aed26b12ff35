"""Optimizers: the CPU kernels, the same kernels for devices, and the classes that the engine drives."""

from .adam import Adam
from .device import DeviceAdam, block_square_sums, square_sums_on_device
from .rules import SGD, Adagrad, Lion, make_optimizer
from .segments import Segment, Span
from .shard import PlaneSpec, ShardOptimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "DeviceAdam",
    "Lion",
    "PlaneSpec",
    "Segment",
    "ShardOptimizer",
    "Span",
    "block_square_sums",
    "make_optimizer",
    "square_sums_on_device",
]
