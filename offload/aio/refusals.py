"""Which backends work on this machine, and why one does not."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from pathlib import Path
from typing import Any

from .. import aio_python
from ..bytesize import format_bytes
from ..errors import ConfigError, OffloadError

_missing = ""
try:
    from .. import _aio
except ImportError as refused:
    _missing = (
        f"the compiled core (offload._aio) cannot be loaded: {refused}; build it with `pip install -e .`"
    )

logger = logging.getLogger("offload.aio")

BackendErrors = (aio_python.BackendError, *(() if _missing else (_aio.BackendError,)))
"""Raised by :func:`open_core` where a backend is refused."""

_COMPILED = ("io_uring", "libaio", "threads")
"""What a build offers, for where none can be asked."""


def probe() -> dict[str, str | None]:
    """Every backend of this build, fastest first, and why it is off here; ``None`` where it works."""
    return {name: _refusal(name) for name in _names()}


def backends() -> list[str]:
    """The backends that work here, fastest first. ``python`` is always the last of them."""
    return [name for name, refusal in probe().items() if refusal is None]


def candidates(backend: str) -> list[str]:
    """The backends to try, in this order.

    Raises:
        ConfigError: there is none of this name.
        OffloadError: it is compiled, and nothing is.
    """
    names = _names()
    if backend != "auto" and backend not in names:
        raise ConfigError(f"backend must be 'auto' or one of {', '.join(map(repr, names))}, got {backend!r}")
    if _missing and backend == "auto":
        log_once("auto", f"I/O backend auto is refused: {_missing}; using python")
        return ["python"]
    if _missing and backend != "python":
        raise OffloadError(f"I/O backend {backend!r} cannot be used: {_missing}")
    return names if backend == "auto" else [backend]


def open_core(backend: str, path: str, **settings: Any) -> _aio.Queue | aio_python.Queue:
    """The queue behind a :class:`Queue`, compiled or in Python."""
    kind = aio_python.Queue if backend == "python" else _aio.Queue
    return kind(path=path, backend=backend, **settings)


def explain(error: OSError) -> str:
    """``io_setup: EAGAIN (fs.aio-max-nr is used up ...)``: what was refused, how, and why that may be."""
    call, code = error.strerror or "", error.errno or 0
    return f"{call}: {name_of(code)} ({_reason(call, code)})"


def name_of(code: int) -> str:
    """``EPERM`` for 1."""
    return errno.errorcode.get(code, str(code))


def memlock_hint() -> str:
    """The limit on locked memory, and how to raise it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return f"the locked-memory limit is {limit}; raise `ulimit -l`"


def log_once(topic: str, text: str) -> None:
    """One warning per topic and process: a job opens many queues, and all meet the same refusal."""
    if topic in _logged:
        return
    _logged.add(topic)
    logger.warning("%s", text)


_logged: set[str] = set()


def _names() -> list[str]:
    return [*(_COMPILED if _missing else _aio.backend_names()), "python"]


def _refusal(name: str) -> str | None:
    if name == "python":
        return None
    if _missing:
        return _missing
    try:
        _aio.probe(name)
    except _aio.BackendError as error:
        return explain(error)
    return None


def _reason(call: str, code: int) -> str:
    if call == "io_setup" and code == errno.EAGAIN:
        return f"fs.aio-max-nr is used up{_aio_requests()}; raise it with `sysctl`"
    if call == "pthread_create" and code == errno.EAGAIN:
        return "out of threads; raise `ulimit -u`"
    reasons = {
        errno.EPERM: "a seccomp profile (containers) forbids it",
        errno.EACCES: "a security module forbids it",
        errno.EMFILE: "out of file descriptors; raise `ulimit -n`",
        errno.ENOMEM: "out of memory",
    }
    if call.startswith("io_uring"):
        reasons |= {
            errno.ENOSYS: "the kernel has no io_uring, or a seccomp profile hides it",
            errno.EPERM: "a seccomp profile (containers) or the sysctl kernel.io_uring_disabled forbids it",
            errno.EOPNOTSUPP: "needs Linux 5.6 or newer",
            errno.ENOMEM: memlock_hint(),
        }
    elif call.startswith("io_"):
        reasons |= {
            errno.ENOSYS: "the kernel has no AIO, or a seccomp profile hides it",
            errno.EOPNOTSUPP: "needs Linux 4.18 or newer",
        }
    return reasons.get(code, os.strerror(code))


def _aio_requests() -> str:
    with contextlib.suppress(OSError):
        used, limit = (Path("/proc/sys/fs", name).read_text().strip() for name in ("aio-nr", "aio-max-nr"))
        return f" ({used} of {limit})"
    return ""
