"""Small files that are whole, old or new, after a crash at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_beside(path: Path, data: bytes) -> None:
    """Brings ``data`` to stable storage under another name, for :func:`put_in_place`."""
    fd = os.open(_beside(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(path: Path) -> None:
    """Makes what :func:`write_beside` wrote the file. Where this raises, either may be found after a crash."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.rename(_beside(path).name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_directory(path: Path) -> None:
    """Brings the names in a directory to stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
