"""What the tests of commits share: a small store with its mirror in memory, and a disk that loses power."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
