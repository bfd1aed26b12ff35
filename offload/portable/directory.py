"""Where checkpoints lie: ``DIR/TAG/`` and the file ``DIR/latest``, as DeepSpeed has them.

Note [Saving in place of another]
A saving writes files of names that no other has, brings them to stable storage, and then puts its `checkpoint.json`
in the place of the one before, which is what counts: a crash at any moment leaves the one or the other, whole. Only
then `latest` is written, and what is not named any more is removed. What a saving that broke off has left behind is
removed by the next one to the same tag, and by a rotation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ..bytesize import format_bytes
from ..errors import CheckpointError, ConfigError, StoreError
from ..store.durable import put_in_place, sync_directory, write_beside
from ..untrusted import read_small_file, shown
from .manifest import NAME, Checkpoint
from .reader import FILE_NAME, read_checkpoint

logger = logging.getLogger("offload")

LATEST = "latest"
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,199}")
_OF_DEEPSPEED = re.compile(r".*(model|optim)_states\.pt|zero_to_fp32\.py|offloaded_tensors|zero")


def check_tag(tag: str) -> str:
    """The tag, where it is the name of a directory and of nothing else.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag == LATEST:
        raise ConfigError(
            f"tag {shown(tag)}: a tag is a name of letters, digits and _ . @ + = -, not {LATEST!r} and not longer than"
            " 200; give another one"
        )
    return tag


@contextmanager
def saving_to(directory: Path, tag: str) -> Iterator[Path]:
    """The directory of a tag, made where it is not there, for one saving at a time. Mode 0700.

    Raises:
        StoreError: it cannot be written, or another process saves there.
    """
    folder = directory / check_tag(tag)
    made = False
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            made = True
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(error, folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_unnamed(folder)
        yield folder
    except BlockingIOError as error:
        text = "another process is saving there; give another tag, or wait for it"
        raise StoreError(error.errno, text, str(folder)) from None
    except BaseException:
        with contextlib.suppress(OSError):
            _remove_unnamed(folder)
            if made:
                folder.rmdir()
        raise
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(lock)


def _unusable(error: OSError, folder: Path) -> StoreError:
    what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
    return StoreError(
        error.errno, f"no checkpoint can be written there: {what}; give another one", str(folder)
    )


def check_space(directory: Path, size: int) -> None:
    """Raises StoreError where a checkpoint of ``size`` bytes does not fit beside what is there."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < size:
        raise StoreError(
            errno.ENOSPC,
            f"the checkpoint needs {format_bytes(size)} and {format_bytes(free)} are free; free some, or give another"
            " directory",
            str(directory),
        )


def finish(folder: Path, checkpoint: bytes, *, latest: bool) -> None:
    """What was written to a directory of :func:`saving_to` is what counts from now on.

    See Note [Saving in place of another].

    Raises:
        StoreError: it could not be brought to stable storage.
    """
    try:
        sync_directory(folder)
        write_beside(folder / NAME, checkpoint)
        put_in_place(folder / NAME)
        sync_directory(folder.parent)
        if latest:
            write_beside(folder.parent / LATEST, folder.name.encode() + b"\n")
            put_in_place(folder.parent / LATEST)
    except OSError as error:
        raise StoreError(error.errno, f"saving failed: {error.strerror}", str(folder)) from error
    _remove_unnamed(folder)


def _remove_unnamed(folder: Path) -> None:
    """Removes files of ours that the checkpoint in a directory does not name."""
    try:
        named = {file.name for file in read_checkpoint(folder).files}
    except FileNotFoundError:
        named = set()
    except CheckpointError as error:
        logger.warning("%s; its files are left there", error)
        return
    for path in folder.iterdir():
        if FILE_NAME.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)
    (folder / f".{NAME}.new").unlink(missing_ok=True)


def rotate(directory: Path, keep_last: int, *, but: str) -> None:
    """Removes the oldest checkpoints in a directory, so that ``keep_last`` stay.

    Args:
        but: a tag that stays whatever its age.
    """
    age = {
        tag: (checkpoint.time, os.lstat(directory / tag / NAME).st_mtime_ns)
        for tag, checkpoint in checkpoints_in(directory)
    }
    found = sorted(age, key=lambda tag: (tag == but, age[tag]))
    for tag in found[: max(len(found) - keep_last, 0)]:
        _remove(directory, tag, f"removed, as {keep_last} stay")
    for path in directory.iterdir():
        if TAG.fullmatch(path.name) and path.name != but and is_folder(path) and _is_debris(path):
            _remove(directory, path.name, "removed what a saving had left that broke off")


def _remove(directory: Path, tag: str, why: str) -> None:
    try:
        with saving_to(directory, tag) as folder:
            (folder / NAME).unlink(missing_ok=True)  # first: nobody takes what is left for a checkpoint
            _remove_unnamed(folder)
            folder.rmdir()
    except OSError as error:
        logger.warning("%s: the old checkpoint was not removed: %s", directory / tag, error.strerror)
    else:
        logger.info("%s: %s", directory / tag, why)


def _is_debris(folder: Path) -> bool:
    """Whether there are files of ours in a directory, and nothing else."""
    names = os.listdir(folder)
    return bool(names) and all(FILE_NAME.fullmatch(name) or name == f".{NAME}.new" for name in names)


def checkpoints_in(directory: Path) -> Iterator[tuple[str, Checkpoint]]:
    """The checkpoints of a directory and their tags; what cannot be read is none."""
    for path in sorted(directory.iterdir()):
        if TAG.fullmatch(path.name) and is_folder(path):
            with contextlib.suppress(CheckpointError, OSError):
                yield path.name, read_checkpoint(path)


def is_folder(path: Path) -> bool:
    """Whether there is a directory, and no link to one."""
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def find(directory: Path, tag: str | None = None) -> Path:
    """The directory of a checkpoint: of a tag, of the latest one, or ``directory`` itself where it is one.

    Raises:
        CheckpointError: there is none; says what is there instead.
        FileNotFoundError: no tag is given, and nothing was ever saved there.
    """
    if tag is None and os.path.lexists(directory / NAME):
        return directory
    if tag is None:
        try:
            tag = read_small_file(directory / LATEST, 4096).decode(errors="replace").strip()
        except FileNotFoundError:
            if directory.is_dir():
                _refuse_foreign(directory)
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{directory / LATEST}: {error}") from None
        if not TAG.fullmatch(tag):
            raise CheckpointError(f"{directory / LATEST}: {shown(tag)} is no tag")
    folder = directory / check_tag(tag)
    if not is_folder(folder):
        others = ", ".join(other for other, _ in checkpoints_in(directory)) if directory.is_dir() else ""
        raise CheckpointError(f"{folder}: there is no such checkpoint; there is {others or 'none'}")
    if not os.path.lexists(folder / NAME):
        _refuse_foreign(folder)
        raise CheckpointError(f"{folder}: it has no {NAME}: saving broke off, or it is no checkpoint")
    return folder


def _refuse_foreign(folder: Path) -> None:
    if is_of_deepspeed(folder):
        refuse_deepspeed(folder)


def is_of_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed has written there."""
    return any(_OF_DEEPSPEED.fullmatch(name) for name in os.listdir(folder))


def refuse_deepspeed(folder: Path) -> NoReturn:
    """Says what to do with a checkpoint of DeepSpeed ZeRO."""
    raise CheckpointError(
        f"{folder}: a checkpoint of DeepSpeed ZeRO is made of pickles, which can run code, and is not read; make"
        " weights of it with its zero_to_fp32.py --safe_serialization, where you trust it, and start from these"
    )
