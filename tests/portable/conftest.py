"""The models of tests/step, and the small store of tests/store, are used here too."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(Path(__file__).parent), str(TESTS / "step"), str(TESTS / "store")]
