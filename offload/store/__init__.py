"""The swap store: per run and rank one locked directory with one preallocated file of planes."""

from .directory import SwapDirectory
from .layout import Extent, StoreLayout
from .swap import SwapStore

__all__ = ["Extent", "StoreLayout", "SwapDirectory", "SwapStore"]
