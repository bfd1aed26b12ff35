"""Drives with sectors of 512 and of 4096 bytes, file systems on them, and the drives themselves; large files."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import GiB, KiB, MiB


def check_transfers(queue: aio.Queue, room: int) -> None:
    """Sizes, offsets and addresses of every alignment, against a mirror."""
    mirror = random_bytes(room, seed=room)
    queue.write(mirror, 0).wait()
    random = np.random.default_rng(1)
    for turn in range(60):
        unit = int(random.choice([1, 512, 4096]))
        size = int(random.integers(1, 200 * KiB // unit)) * unit
        offset = int(random.integers(0, (room - size) // unit)) * unit
        shift = int(random.choice([0, 1, 512, 4095]))
        buffer = page_aligned(size + 4096)[shift : shift + size]
        buffer[:] = random_bytes(size, seed=turn)
        queue.write(buffer, offset).wait()
        mirror[offset : offset + size] = buffer
        buffer[:] = 0
        queue.read(buffer, offset).wait()
        np.testing.assert_array_equal(buffer, mirror[offset : offset + size])
    queue.sync().wait()
    whole = page_aligned(room)
    queue.read(whole, 0).wait()
    np.testing.assert_array_equal(whole, mirror)


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize(("kind", "size"), [("ext4", 32 * MiB), ("xfs", 320 * MiB), ("btrfs", 128 * MiB)])
def test_file_systems(mount, loop_device, backend, kind, size, sector):
    path = str(mount(kind, "rw", device=loop_device(sector, size)) / "swap")
    with aio.Queue(path, backend=backend, size=4 * MiB, request_bytes=64 * KiB) as queue:
        assert queue.direct
        assert queue.alignment % sector == 0
        check_transfers(queue, 4 * MiB)
        assert queue.direct  # nothing that the drive does not take was offered to it
    assert Path(path).stat().st_size == 4 * MiB


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_drive_without_a_file_system(loop_device, backend, sector):
    device = loop_device(sector, 8 * MiB)
    with aio.Queue(device, backend=backend, create=False, request_bytes=64 * KiB) as queue:
        assert queue.direct
        check_transfers(queue, 4 * MiB)
        assert queue.direct


def test_overlay(tmp_path, mount, backend):
    """The file system of containers."""
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    with aio.Queue(mount("overlay", options) / "swap", backend=backend, size=4 * MiB) as queue:
        check_transfers(queue, 4 * MiB)


def test_a_transfer_of_more_than_2_gib_elements(path, backend):
    """One read of a sparse file longer than 2**31 bytes into memory that is all zeros: its few bytes that are
    not come to where they belong, on both sides of 2 GiB. The kernel takes no more than 2 GiB at a time, and a
    request is as large as it may be."""
    size = 2 * GiB + 3 * MiB + 17
    marks = {0: 1, 1 * GiB + 5: 2, 2 * GiB - 1: 3, 2 * GiB: 4, size - 1: 5}
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, value in marks.items():
            file.seek(offset)
            file.write(bytes([value]))
    target = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    with aio.Queue(path, backend=backend, request_bytes=4 * GiB) as queue:
        queue.read(target, 0).wait()
        assert queue.stats().read.bytes == size
    assert {offset: int(target[offset]) for offset in marks} == marks
    assert np.count_nonzero(target) == len(marks)
