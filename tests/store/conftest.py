"""Tests of commits share a small store with its mirror in memory, a disk that loses power, and the models of steps."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "step")]
