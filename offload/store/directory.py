"""The directory of one run and rank: made, locked, checked, and removed again.

Note [Who owns a directory]
The owner holds a lock (flock) on `owner.json` in it for as long as it lives; the kernel gives the lock
back however the owner dies, so a directory whose lock can be taken is stale. A new directory gets its
lock under a hidden name and is then renamed, so nobody can mistake it for a stale one in between.
A forked child shares the lock, so it lets go at once: a worker that outlives its parent owns nothing.
A stale directory is removed by the next start, and its own by a run that ends, unless it belongs to a commit
(`commits`): then it is what somebody may go on from, and only the user removes it, or a run that took it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
import weakref
from pathlib import Path

from .. import lifetime
from ..bytesize import format_bytes
from ..errors import StoreError
from ..metrics import mount_of

logger = logging.getLogger("offload.store")

PREFIX = "offload-"
OWNER_FILE = "owner.json"
MANIFEST_NAMES = ("manifest-0.json", "manifest-1.json")
MEMBER_NAME = "member.json"
"""Says on the other paths of a run where its manifest is."""
HIDDEN_AGE_SECONDS_MAX = 600.0
"""A directory that is still under its hidden name after this time was left by an owner that died early."""


class SwapDirectory:
    """A locked directory ``<nvme_path>/offload-<time>-<pid>-rank<r>``. Close it to remove it.

    One that belongs to a commit stays.
    """

    def __init__(self, nvme_path: str | os.PathLike[str], *, rank: int = 0) -> None:
        """Makes and locks the directory, after removing those of dead owners.

        Raises:
            StoreError: the path cannot be used; says which and why, and leaves nothing behind.
        """
        self.root = Path(os.path.abspath(os.path.expanduser(nvme_path)))
        self._made_root = _usable_root(self.root)
        self._owner_pid = os.getpid()
        self._lock_fd = -1
        _open_directories.add(self)
        name = f"{PREFIX}{time.time_ns():x}-{os.getpid()}-rank{rank}"
        self.path = self.root / name
        self._hidden = hidden = self.root / f".{name}"
        lifetime.register(self)  # first: a signal may end the run at any moment from here
        try:
            _remove_stale(self.root)
            hidden.mkdir(mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_fd = os.open(hidden / OWNER_FILE, flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.sign(rank)
            hidden.rename(self.path)
        except OSError as error:
            self.close()
            raise StoreError(
                error.errno, f"cannot make a swap directory: {error.strerror}", str(self.root)
            ) from error

    @classmethod
    def take(cls, path: str | os.PathLike[str]) -> SwapDirectory:
        """The directory of a run that has ended, locked and not changed: :meth:`sign` makes it ours.

        Raises:
            StoreError: it is none, or its owner lives.
        """
        self = cls.__new__(cls)
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        self.root, self._hidden = self.path.parent, self.path.with_name(f".{self.path.name}")
        self._made_root, self._owner_pid, self._lock_fd = [], os.getpid(), -1
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
                self._lock_fd = os.open(OWNER_FILE, flags, dir_fd=folder)
            finally:
                os.close(folder)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what = f"it cannot be taken over: {error.strerror}"
            if isinstance(error, BlockingIOError):
                owner = os.read(self._lock_fd, 4096).decode(errors="replace").strip()
                what = f"it is in use by {ascii(owner)[1:-1]}"
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            raise StoreError(error.errno, what, str(self.path)) from error
        _open_directories.add(self)
        lifetime.register(self)
        return self

    def sign(self, rank: int = 0) -> None:
        """Says in it who owns it."""
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": rank,
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": sys.argv[:1],
        }
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, (json.dumps(owner) + "\n").encode(), 0)

    def free_bytes(self) -> int | None:
        """Free space of the file system; None where it has no size to tell (ramfs, network)."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def check_space(self, size: int) -> None:
        """Raises StoreError where less than ``size`` bytes are free."""
        free = self.free_bytes()
        if free is not None and size > free:
            mount = mount_of(self.root)
            raise StoreError(
                28,
                f"the swap file needs {format_bytes(size)} and {format_bytes(free)} are free on {mount.point}"
                f" ({mount.filesystem}); free some, or choose another nvme_path",
                str(self.root),
            )

    def close(self) -> None:
        """Removes the directory, unless it belongs to a commit, and gives the lock back.

        Idempotent; does nothing in a forked child.
        """
        if os.getpid() != self._owner_pid:
            return
        if self._lock_fd >= 0:
            if is_committed(self.path):
                logger.info("%s holds what was committed last, and stays", self.path)
            else:
                self.remove()
        shutil.rmtree(self._hidden, ignore_errors=True)
        self._unlock()

    def remove(self) -> None:
        """Removes the directory, whatever is in it. Does nothing in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        # The manifest goes first: half a directory must not look like a commit.
        with contextlib.suppress(OSError):
            for name in (*MANIFEST_NAMES, MEMBER_NAME):
                (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            logger.warning("could not remove %s; the next run with this nvme_path will try again", self.path)

    def release(self) -> None:
        """Gives the lock back and leaves the directory as it is. Idempotent."""
        self._unlock()
        lifetime.forget(self)

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        for made in self._made_root:
            try:
                made.rmdir()
            except OSError:  # another run uses it by now
                break
        self._made_root = []
        lifetime.forget(self)

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of the lock, which stays the parent's."""
        if self._lock_fd >= 0 and os.getpid() != self._owner_pid:
            os.close(self._lock_fd)
            self._lock_fd = -1


_open_directories: weakref.WeakSet[SwapDirectory] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for directory in list(_open_directories):
        directory.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _usable_root(root: Path) -> list[Path]:
    """Checks the nvme_path; makes it where its parent exists. Returns what was made."""
    try:
        if root.is_dir():
            made = []
        elif root.exists() or root.is_symlink():
            raise StoreError(20, "nvme_path is not a directory", str(root))
        elif root.parent.is_dir():
            root.mkdir(mode=0o700)
            made = [root]
        else:
            raise StoreError(
                2,
                f"nvme_path does not exist and neither does {root.parent}; make it, or mount the drive",
                str(root),
            )
        if not os.access(root, os.W_OK | os.X_OK):
            raise StoreError(13, "nvme_path is not writable by this user", str(root))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(error.errno, f"nvme_path cannot be used: {error.strerror}", str(root)) from error
    mount = mount_of(root)
    logger.info("swap goes to %s, on %s (%s, %s)", root, mount.point, mount.filesystem, mount.source)
    if mount.is_memory:
        logger.warning("%s is on %s: what is swapped there still takes RAM", root, mount.filesystem)
    return made


def _remove_stale(root: Path) -> None:
    """Removes the directories of dead owners and says so."""
    for path in sorted(root.glob(f"{PREFIX}*-rank*")):
        _remove_if_unlocked(path)
    for path in sorted(root.glob(f".{PREFIX}*-rank*")):
        try:
            old = time.time() - path.stat().st_mtime > HIDDEN_AGE_SECONDS_MAX
        except OSError:
            continue
        if old:
            _remove_if_unlocked(path)


def is_committed(path: Path) -> bool:
    """Whether a swap directory belongs to a commit. See Note [Who owns a directory]."""
    return any(os.path.lexists(path / name) for name in (*MANIFEST_NAMES, MEMBER_NAME))


def is_in_use(path: Path) -> bool:
    """Whether the owner of a swap directory lives, as far as can be seen."""
    try:
        lock_fd = os.open(path / OWNER_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock_fd)
    return False


def _remove_if_unlocked(path: Path) -> None:
    try:
        lock_fd = os.open(path / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # not a directory of ours, or gone already
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_committed(path):
            is_part = not any(os.path.lexists(path / name) for name in MANIFEST_NAMES)
            logger.warning(
                "%s holds %s of a run that has ended, %s: go on from it, or remove it with `rm -r %s`",
                path,
                "its part of a commit" if is_part else "the last commit",
                format_bytes(sum(file.stat().st_blocks * 512 for file in path.iterdir())),
                shlex.quote(str(path)),
            )
            return
        owner = os.read(lock_fd, 4096).decode(errors="replace").strip()
        logger.warning("removing the swap directory of a run that has ended: %s %s", path, owner)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return  # its owner lives
    finally:
        os.close(lock_fd)
