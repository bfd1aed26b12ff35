"""Every error the library raises on purpose.

User mistakes are :class:`ConfigError` and :class:`PlanError`; the world's are :class:`TransferError` and
:class:`CheckpointError`. Our own mistakes are ``AssertionError``, raised, never asserted. A message is one
line that says what, where, how much, and what to do.
"""

from __future__ import annotations

import os


class OffloadError(Exception):
    """Base of all errors of this library."""


class ConfigError(OffloadError, ValueError):
    """A setting is unknown, out of range, or contradicts another; names the setting and the way out."""


class PlanError(OffloadError, ValueError):
    """What was asked for does not fit a budget; carries the sum and the setting that would fit."""


class TransferError(OffloadError, OSError):
    """One read or write failed for good. Carries what an operator needs to act.

    Attributes: ``errno``, ``filename`` (as every OSError), ``operation`` ("read", "write", "fsync", ...),
    ``offset``, ``size`` (bytes wanted) and ``done`` (bytes transferred).
    """

    def __init__(
        self, errno_: int, operation: str, path: str, *, offset: int, size: int, done: int, hint: str = ""
    ) -> None:
        text = f"{operation} failed: {os.strerror(errno_)}; {done} of {size} bytes at offset {offset}"
        super().__init__(errno_, text + (f"; {hint}" if hint else ""), path)
        self.operation, self.offset, self.size, self.done = operation, offset, size, done


class CheckpointError(OffloadError):
    """A checkpoint or swap store cannot be read: names the file and the reason."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint, good or bad, where one was looked for."""


class StoreError(OffloadError, OSError):
    """The swap directory cannot be used (missing, not writable, owned by another run, too little space)."""
