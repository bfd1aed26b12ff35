"""CPU optimizers: the kernels, and the classes that the engine drives."""

from .adam import Adam, PlaneSpec, ShardOptimizer
from .kernels import Segment

__all__ = ["Adam", "PlaneSpec", "Segment", "ShardOptimizer"]
