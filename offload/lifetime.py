"""Leaving a run: whatever way Python allows, engines are closed, so that no thread or swap file stays behind.

Covered are the end of the interpreter, an exception, ``sys.exit``, Ctrl-C (all through atexit), and SIGTERM,
which by default would end the process without any of these: while an engine is open, a SIGTERM that nobody
else handles closes the engines first and then ends the process as it would have ended. What cannot be
covered (kill -9, a power cut) leaves a directory whose lock the kernel has given back; the next run removes it, unless
something was committed in it.

A forked child (a DataLoader worker) owns nothing: closing does nothing in it, and its copies of queues refuse
every transfer. It does share the swap file's descriptor, so the file's space is free only when it has ended too.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from types import FrameType
from typing import Protocol

logger = logging.getLogger("offload")


class Closable(Protocol):
    def close(self) -> None: ...


_open: dict[int, Closable] = {}
_owner_pid = os.getpid()


def register(resource: Closable) -> None:
    """Keeps a resource to be closed at the end; :func:`forget` it once it is closed."""
    global _owner_pid
    if _owner_pid != os.getpid():  # a forked child starts with its parent's entries, which are not its own
        _open.clear()
        _owner_pid = os.getpid()
    _open[id(resource)] = resource
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def forget(resource: Closable) -> None:
    """The resource has been closed. Idempotent."""
    _open.pop(id(resource), None)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not _open and on_main_thread and signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def opened() -> list[Closable]:
    """Everything that is open now, the first opened first."""
    return list(_open.values())


@atexit.register
def close_all() -> None:
    """Closes everything that is still open, the last opened first. Does nothing in a forked child."""
    if _owner_pid != os.getpid():
        return
    for resource in reversed(list(_open.values())):
        try:
            resource.close()
        except Exception:  # the others must be closed too
            logger.exception("could not close %r", resource)


def _terminate(number: int, _frame: FrameType | None) -> None:
    close_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
