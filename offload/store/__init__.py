"""The swap store: per run and rank one locked directory with one preallocated file of planes, and what was committed."""

from .directory import SwapDirectory
from .layout import Extent, StoreLayout
from .recovery import recover
from .swap import SwapStore

__all__ = ["Extent", "StoreLayout", "SwapDirectory", "SwapStore", "recover"]
