"""Keeps the process at what the plan says. For the command only: a library may not set this for its host.

glibc's malloc keeps what is freed. Its threshold for giving a block a mapping of its own, which goes back
when freed, rises to 32 MiB as soon as such a block is freed once, so activations then come from a heap that
is given back only from its end and never from its middle; and every thread gets another heap. The plan
promises the operating system's count, so the threshold is fixed, the heap is trimmed, and there are few
heaps. The price is that the kernel zeroes pages again.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from ..bytesize import KiB, MiB

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

MMAP_THRESHOLD_BYTES = 512 * KiB
TRIM_THRESHOLD_BYTES = 2 * MiB
ARENAS = 2


def limit_hoarding() -> bool:
    """Sets the limits, for the whole process; call it before threads start. False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_ARENA_MAX, ARENAS),
    )
    return all(mallopt(name, value) for name, value in settings)


def give_back() -> None:
    """Frees what nothing refers to, and returns free pages of the heaps and pages of code."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
    _forget_code()


# Note [Code that ran once]
# Importing torch runs 46 MiB of its code, training runs 30 MiB, and the kernel counts both as ours for ever;
# where its page cache has gathered a library in pieces of 2 MiB and it maps whole pieces, 116 and 140 MiB.
# The pages are the page cache's, are read-only and cost nothing to map again (some milliseconds in all). So
# mappings of code are emptied before and after the model is set up, and what a step does not run is not
# counted in it. Only mappings without a page of our own: a debugger's breakpoint makes one.

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp .* (/.*)")


def _forget_code() -> None:
    """See Note [Code that ran once]. Libraries stay loaded, so no mapping becomes another one meanwhile."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        with open("/proc/self/smaps") as smaps:
            mappings = list(_code_mappings(smaps))
    except OSError:
        return
    for begin, end in mappings:
        madvise(begin, end - begin, mmap.MADV_DONTNEED)  # refused for locked memory: it stays


def _code_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Address ranges of files mapped as code, without private pages."""
    found: tuple[int, int] | None = None
    for line in smaps:
        if mapping := _MAPPING.match(line):
            found = int(mapping[1], 16), int(mapping[2], 16)
        elif line.startswith("Anonymous:"):
            if found is not None and line.split()[1] == "0":
                yield found
            found = None


# Note [torch's compiler stays out]
# In torch, every optimizer and every checkpointed block asks `torch._dynamo` to leave it alone, and so loads
# the compiler (72 MiB and two seconds in torch 2.13, a third of torch itself) that this command never uses.
# Where nothing is being compiled, to be left alone is to be called as one is: so a module that says just that
# stands in for it. Whatever else is asked of it loads the real one, which then takes its place for good.
# Only for presets: transformers imports parts of the compiler in an order of its own, and loads it anyway.


class _NoCompiler(ModuleType):
    """Stands in for ``torch._dynamo``. See Note [torch's compiler stays out]."""

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        # Not there: a module that has these is taken for the package, and its submodules for ours.
        for name in ("__path__", "__file__"):
            self.__dict__.pop(name, None)
        self.config = _NoCompilerConfig()

    @staticmethod
    def disable(fn: Any = None, recursive: bool = True, **_options: Any) -> Any:
        return _as_it_is if fn is None else fn

    @staticmethod
    def graph_break(msg: str = "") -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # inspect asks every object
            raise AttributeError(name)
        return getattr(_load_compiler(), name)


class _NoCompilerConfig:
    """Stands in for ``torch._dynamo.config``: any setting is read from the real one."""

    error_on_nested_fx_trace = True

    def patch(self, **_settings: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(_load_compiler().config, name)


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def keep_compiler_out() -> None:
    """See Note [torch's compiler stays out]. Call it after importing torch; harmless where it is loaded."""
    torch = sys.modules["torch"]
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _NoCompiler()  # type: ignore[attr-defined]


def _load_compiler() -> Any:
    if isinstance(sys.modules.get("torch._dynamo"), _NoCompiler):
        del sys.modules["torch._dynamo"]
        importlib.import_module("torch._dynamo")  # binds itself to torch
    return sys.modules["torch._dynamo"]
