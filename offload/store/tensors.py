"""Tensors that belong to a commit and to no plane: buffers, and gradients that wait. One safetensors file for each.

The file is on stable storage under its name before the manifest that names it, and has a name that no other commit
has: whatever happens, a commit's file is as that commit left it. The first commit that no manifest leads back to any
more takes it along.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, StoreError, TransferError
from ..models.safetensors_file import TensorEntry, TensorSpec, read_header, read_tensor, write_file
from ..optim.checksum import crc32c
from .durable import sync_directory

PREFIX, SUFFIX = "tensors-", ".safetensors"


def write_tensors(directory: Path, serial: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Writes the file of a commit, one tensor in memory at a time; what :class:`Tensors` needs to read it, as JSON.

    Raises:
        StoreError: it cannot be written; the commits before stand.
        ConfigError: a tensor is of a type that the format does not hold.
    """
    if not tensors:
        return {"file": None, "crc32c": {}}
    sums: dict[str, int] = {}

    def fetch(name: str) -> torch.Tensor:
        value = tensors[name].detach().cpu().contiguous()
        sums[name] = _sum_of(value)
        return value

    specs = [TensorSpec(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    name = f"{PREFIX}{serial}-{os.urandom(4).hex()}{SUFFIX}"
    path, beside = directory / name, directory / f".{name}.new"
    try:
        write_file(beside, specs, fetch)
        beside.chmod(0o600)
        beside.rename(path)
        sync_directory(directory)
    except OSError as error:
        beside.unlink(missing_ok=True)
        reason = error.strerror if not isinstance(error, TransferError) else str(error)
        raise StoreError(error.errno, f"commit {serial} failed: {reason}", str(path)) from error
    return {"file": name, "crc32c": sums}


def forget_tensors(directory: Path, kept: Collection[str]) -> None:
    """Removes the files of commits that are gone, and what a crash has left half-written."""
    for path in (*directory.glob(f"{PREFIX}*{SUFFIX}"), *directory.glob(f".{PREFIX}*{SUFFIX}.new")):
        if path.name not in kept:
            path.unlink(missing_ok=True)


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a commit, each read, and held against its checksum, when it is asked for."""

    def __init__(self, directory: Path, about: Any) -> None:
        """
        Args:
            about: what :func:`write_tensors` returned, or a stranger wrote.

        Raises:
            CheckpointError: the file is missing, damaged or another one.
        """
        self.file: str | None = None
        """Its name; None where there are no tensors."""
        self._entries: dict[str, TensorEntry] = {}
        self._sums: dict[str, int] = {}
        if type(about) is not dict or type(about.get("crc32c")) is not dict or "file" not in about:
            raise CheckpointError(f"{directory}: tensors: it is damaged")
        if about["file"] is None:
            return
        name, self._sums = about["file"], about["crc32c"]
        if type(name) is not str or name != Path(name).name or not name.startswith(PREFIX):
            raise CheckpointError(f"{directory}: tensors: {ascii(name)[:60]} is no file of a commit")
        path = directory / name
        if path.is_symlink():
            raise CheckpointError(f"{path}: it is a symbolic link")
        self._entries = read_header(path)
        if self._entries.keys() != self._sums.keys():
            raise CheckpointError(f"{path}: its tensors are not those that the commit names")
        self.file = name

    @property
    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each, without reading it."""
        return {name: (entry.spec.dtype, entry.spec.shape) for name, entry in self._entries.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        tensor = read_tensor(entry)
        if _sum_of(tensor) != self._sums[name]:
            raise TransferError(
                errno.EBADMSG, "read", str(entry.path), offset=entry.offset, size=entry.size, done=entry.size,
                hint=f"{name}: its crc32c is not that which was written; the drive, or another process, has changed"
                " the file: nothing of it was used",
            )  # fmt: skip
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _sum_of(tensor: torch.Tensor) -> int:
    flat = tensor.reshape(-1).view(torch.uint8)
    return int(crc32c(flat, np.array([0, flat.numel()], np.uint64))[0]) if flat.numel() else 0
