"""The swap store: per run, rank and path one locked directory with one preallocated file of planes; its commits."""

from .directory import SwapDirectory
from .layout import Extent, StoreLayout
from .recovery import recover
from .swap import SwapStore

__all__ = ["Extent", "StoreLayout", "SwapDirectory", "SwapStore", "recover"]
