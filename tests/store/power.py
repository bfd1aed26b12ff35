"""A disk that loses power: whatever no completed fsync covers may be there, or not, or in part, in any order.

It stands in for `aio.Queue` and for the system calls of `store.durable`. Everything is carried out on the real files,
and beside them it keeps what is sure. At a cut the files are made what a disk might have of them: of each write since
the last fsync all, nothing, or some of its 512-byte sectors; of names created and renamed since the directory's last
fsync some.
"""

import errno
import os
import shutil
from pathlib import Path

from offload import aio
from offload.errors import TransferError
from offload.links import DoneTicket

SECTOR = 512


class PowerCut(BaseException):
    """The machine is off."""


class Disk:
    """What is sure, what is not, and when the power goes. See the module."""

    def __init__(self, rng):
        self.rng = rng
        self.events = 0
        self.cut_at = self.fail_at = 0
        """The event at which the power goes, or a call fails; 0 is never. Each of a call's begin and end is one."""
        self.is_off = False
        self.planes = {}  # path -> bytearray that is sure
        self.pending = []  # (path, offset, bytes, ticket)
        self.names = {}  # directory -> {name: _Inode}, sure
        self.changes = []  # (directory, [(name, inode or None), ...])
        self.synced = set()  # directories that had an fsync

    def install(self, monkeypatch):
        monkeypatch.setattr("offload.store.drives.Queue", lambda *args, **more: CutQueue(self, *args, **more))
        monkeypatch.setattr("offload.store.durable.os", CutOs(self))
        return self

    def event(self, path="", operation="fsync"):
        if self.is_off:
            raise PowerCut
        self.events += 1
        if self.events == self.cut_at:
            self.is_off = True
            raise PowerCut
        if self.events == self.fail_at:
            raise TransferError(errno.EIO, operation, str(path), offset=0, size=0, done=0)

    def forget(self):
        """Another process: what the disk does from now on is counted anew."""
        self.events = self.cut_at = self.fail_at = 0
        self.is_off = False

    # -- what becomes sure --------------------------------------------------------------------------------

    def sync_planes(self, path):
        for entry in [entry for entry in self.pending if entry[0] == path and entry[3].is_seen]:
            self._apply(self.planes[path], entry[1], entry[2])
            self.pending.remove(entry)

    def sync_directory(self, directory):
        self.synced.add(directory)
        for where, names in self.changes:
            if where == directory:
                self._rename(self.names.setdefault(directory, {}), names)
        self.changes = [change for change in self.changes if change[0] != directory]

    @staticmethod
    def _apply(content, offset, data):
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data

    @staticmethod
    def _rename(names, changes):
        for name, inode in changes:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    # -- the cut ------------------------------------------------------------------------------------------

    def cut(self):
        """Makes the files what a disk might have of them, and goes on from there."""
        self.rng.shuffle(self.pending)
        for path, offset, data, _ in self.pending:
            self._lose(self.planes[path], offset, data)
        self.pending = []
        for directory, names in self.changes:
            if self.rng.random() < 0.5:
                self._rename(self.names.setdefault(directory, {}), names)
        self.changes = []
        for directory, names in self.names.items():
            for name in list(names):
                names[name] = names[name].after_cut(self)
            for path in directory.glob("*.json*"):
                if path.name != "owner.json":
                    path.unlink()
            for path in directory.glob(".*.new"):
                path.unlink()
            for name, inode in names.items():
                (directory / name).write_bytes(inode.sure)
        for path, content in self.planes.items():
            content.extend(bytes(path.stat().st_size - len(content)))
            path.write_bytes(content)
            if self.rng.random() < 0.5:
                if path.parent.parent not in self.synced:
                    shutil.rmtree(path.parent)
                elif path.parent not in self.synced:
                    path.unlink()

    def _lose(self, content, offset, data):
        kind = self.rng.choice(["nothing", "all", "sectors"])
        for at in range(0, len(data), SECTOR):
            if kind == "all" or (kind == "sectors" and self.rng.random() < 0.5):
                self._apply(content, offset + at, data[at : at + SECTOR])


class _Inode:
    def __init__(self):
        self.sure, self.now = b"", b""

    def after_cut(self, disk):
        found = _Inode()
        content = bytearray(self.sure)
        if self.now != self.sure:
            disk._lose(content, 0, self.now)
        found.sure = found.now = bytes(content)
        return found


class _CutTicket:
    """A write that the disk may forget; an fsync covers it once somebody has seen its end."""

    def __init__(self, disk, inner):
        self._disk, self._inner, self.is_seen = disk, inner, False

    def done(self):
        self.is_seen = self.is_seen or self._inner.done()
        return self.is_seen

    def wait(self):
        self._inner.wait()
        self.is_seen = True


class CutQueue:
    """A queue over a file on the disk."""

    def __init__(self, disk, path, **settings):
        self._disk, self.path = disk, Path(path)
        self._inner = aio.Queue(path, **settings)
        disk.planes.setdefault(self.path, bytearray(self.path.stat().st_size))

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, buffer, offset, **more):
        self._disk.event(self.path, "write")
        ticket = _CutTicket(self._disk, self._inner.write(buffer, offset, **more))
        self._disk.pending.append((self.path, offset, bytes(buffer), ticket))
        return ticket

    def sync(self):
        self._disk.event(self.path)
        self._inner.sync().wait()
        self._disk.event(self.path)
        self._disk.sync_planes(self.path)
        self._disk.event(self.path)
        return DoneTicket()


class CutOs:
    """The system calls of `store.durable`."""

    def __init__(self, disk):
        self._disk, self._open = disk, {}

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, mode=0o777):
        self._disk.event(path, "open")
        fd = os.open(path, flags, mode)
        path = Path(path)
        inode = None
        if flags & os.O_CREAT:
            inode = _Inode()
            self._disk.changes.append((path.parent, [(path.name, inode)]))
        self._open[fd] = (path, inode)
        return fd

    def write(self, fd, data):
        self._disk.event(self._open[fd][0], "write")
        written = os.write(fd, data[: max(1, len(data) // 2)])  # a short one
        self._open[fd][1].now += bytes(data[:written])
        return written

    def fsync(self, fd):
        path, inode = self._open[fd]
        self._disk.event(path)
        os.fsync(fd)
        if inode is None:
            self._disk.sync_directory(path)
        else:
            inode.sure = inode.now
        self._disk.event(path)

    def rename(self, source, target, *, src_dir_fd, dst_dir_fd):
        directory = self._open[src_dir_fd][0]
        self._disk.event(directory / target, "rename")
        inode = self._inode_of(directory, source)
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._disk.changes.append((directory, [(source, None), (target, inode)]))
        self._disk.event(directory / target, "rename")

    def _inode_of(self, directory, name):
        names = dict(self._disk.names.get(directory, {}))
        for where, changes in self._disk.changes:
            if where == directory:
                self._disk._rename(names, changes)
        return names[name]

    def close(self, fd):
        del self._open[fd]
        os.close(fd)
