"""Which backends work on this machine, and why one does not."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from pathlib import Path

from .. import _aio
from ..bytesize import format_bytes
from ..errors import ConfigError

logger = logging.getLogger("offload.aio")


def probe() -> dict[str, str | None]:
    """Every backend of this build, fastest first, and why it is off here; ``None`` where it works."""
    return {name: _refusal(name) for name in _aio.backend_names()}


def backends() -> list[str]:
    """The backends that work here, fastest first. ``threads`` is always among them."""
    return [name for name, refusal in probe().items() if refusal is None]


def candidates(backend: str) -> list[str]:
    """The backends to try, in this order.

    Raises:
        ConfigError: there is none of this name.
    """
    names = _aio.backend_names()
    if backend == "auto":
        return names
    if backend not in names:
        raise ConfigError(f"backend must be 'auto' or one of {', '.join(map(repr, names))}, got {backend!r}")
    return [backend]


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


def _refusal(name: str) -> str | None:
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
