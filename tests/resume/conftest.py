"""Models and loops of tests/step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
