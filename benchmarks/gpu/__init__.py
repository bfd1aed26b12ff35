"""The sections of `benchmarks.gpu_check`, by what they look at."""
