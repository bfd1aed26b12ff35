"""`python -m benchmarks`: runs every benchmark in a size that takes a few minutes, one after another."""

import sys

from . import adam, step

if __name__ == "__main__":
    sys.exit(adam.main([]) or step.main([]))
