"""What a process holds, and must hold no more of when a test ends.

A thread that has been joined is still known to the kernel for a moment, longer on a busy machine: whoever counts
has to look again.
"""

import os
import time
from collections.abc import Callable
from typing import Any

LOOKS = 10
"""At what is held before: the least counts."""
SECONDS_MAX = 5.0


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def held() -> tuple[int, int]:
    """Descriptors and threads, without threads that are on their way out."""
    looks = []
    for _ in range(LOOKS):
        looks.append(descriptors_and_threads())
        time.sleep(0.001)
    descriptors, threads = zip(*looks, strict=True)
    return min(descriptors), min(threads)


def assert_as(before: Any, now: Callable[[], Any] = descriptors_and_threads) -> None:
    """Waits until what is held is what was held before."""
    end = time.monotonic() + SECONDS_MAX
    while (found := now()) != before and time.monotonic() < end:
        time.sleep(0.001)
    assert found == before
