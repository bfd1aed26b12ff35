"""How a command ends when it does not succeed: one line on stderr, an exit status, no traceback.

Exit status 2: the user can set it right by another argument, setting or path. 1: the world failed (a drive, a
full disk), or we did. 130: Ctrl-C. Another signal ends the process as it would have without us.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

import typer

from ..errors import CheckpointError, ConfigError, OffloadError, PlanError, StoreError

STATUS_USER = 2
STATUS_FAILED = 1
STATUS_CTRL_C = 130
"""128 + SIGINT, as shells have it."""


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def name(self) -> str:
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


class StopSignals:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into :class:`Stopped` where the program is; ignores more.

    More would interrupt the removal of the swap files. `kill -9` still works; the next run then removes them.
    """

    def __init__(self) -> None:
        self._previous: dict[int, object] = {}
        self._number: int | None = None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the user has decided
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raises again: where the signal came inside a destructor, Python has dropped the exception."""
        if self._number is not None:
            raise Stopped(self._number)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            raise Stopped(number)


class Failures:
    """Ends the command as this module says."""

    def __init__(self, traceback: bool) -> None:
        self._traceback = traceback

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, Stopped) and error.number != signal.SIGINT:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(error.number, signal.SIG_DFL)
            os.kill(os.getpid(), error.number)
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            if isinstance(error, KeyboardInterrupt):
                typer.echo("stopped by Ctrl-C before anything was created", err=True)
            raise typer.Exit(STATUS_CTRL_C) from error
        if self._traceback or not isinstance(error, Exception) or isinstance(error, typer.Exit):
            return
        for line in describe(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(status_of(error)) from error


def status_of(error: Exception) -> int:
    """2 where the user can set it right, else 1."""
    users = (ConfigError, PlanError, CheckpointError, StoreError)
    return STATUS_USER if isinstance(error, users) else STATUS_FAILED


def describe(error: Exception) -> str:
    """The message for people: one line, or one for each problem of a configuration."""
    if isinstance(error, OffloadError) and isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OffloadError, OSError)):
        return str(error)
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text}; --traceback shows where"
