"""File systems that lack something: space, direct I/O, fallocate."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import TransferError


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def pages_cached(path: str) -> int:
    """How many pages of the file are in memory, as mincore says."""
    size = os.path.getsize(path)  # noqa: PTH202
    pages = -(-size // mmap.PAGESIZE)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as view:
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_byte.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(flag & 1 for flag in flags)


def round_trip(queue: aio.Queue) -> None:
    for size, offset in ((1 * MiB, 0), (12_345, 4097), (64 * KiB, 2 * MiB)):
        source, target = page_aligned(size), page_aligned(size)
        source[:] = random_bytes(size, seed=size)
        queue.write(source, offset).wait()
        queue.read(target, offset).wait()
        np.testing.assert_array_equal(target, source)


SMALL = [pytest.param("tmpfs", "size=4m", id="tmpfs"), pytest.param("ext4", "loop", id="ext4")]


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize(("kind", "options"), SMALL)
def test_full_file_system(mount, backend, kind, options, direct_io):
    """The write that finds no room raises with the free space; what was written before is whole."""
    path = str(mount(kind, options) / "swap")
    data = page_aligned(3 * MiB)
    data[:] = random_bytes(data.size, seed=0)
    with aio.Queue(path, backend=backend, request_bytes=64 * KiB, direct_io=direct_io) as queue:
        queue.write(data, 0).wait()
        with pytest.raises(TransferError, match=r"No space left.*free on its file system") as caught:
            queue.write(page_aligned(32 * MiB), 3 * MiB).wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.done < 32 * MiB
        target = page_aligned(data.size)
        queue.read(target, 0).wait()
    np.testing.assert_array_equal(target, data)


@pytest.mark.parametrize(("kind", "options"), SMALL)
def test_preallocate_without_room(mount, backend, kind, options):
    """ENOSPC before the first byte, and the space that was claimed on the way is given back."""
    folder = mount(kind, options)
    with aio.Queue(folder / "swap", backend=backend) as queue:
        queue.write(b"x" * 100, 0).wait()
        with pytest.raises(TransferError, match=r"fallocate failed: No space left.*free on its file system"):
            queue.preallocate(64 * MiB)
        assert (folder / "swap").stat().st_size == 100
        about = os.statvfs(folder)
        assert about.f_bavail * about.f_frsize > 3 * MiB


def test_preallocate(path, backend):
    with aio.Queue(path, backend=backend, size=3 * MiB + 1) as queue:
        status = Path(path).stat()
        assert status.st_size == 3 * MiB + 1
        assert status.st_blocks * 512 >= 3 * MiB
        queue.preallocate(1 * MiB)  # never shrinks
        assert Path(path).stat().st_size == 3 * MiB + 1
        buffer = page_aligned(3 * MiB + 1)
        buffer[:] = 1
        queue.read(buffer, 0).wait()
        assert not buffer.any()


def test_preallocate_where_the_file_system_cannot(mount, backend, caplog):
    """ramfs has no fallocate: the file is long but sparse, and the log says why."""
    path = mount("ramfs", "size=8m") / "swap"
    with aio.Queue(path, backend=backend, size=1 * MiB) as queue:
        assert path.stat().st_size == 1 * MiB
        assert any("cannot reserve space" in text and str(path) in text for text in warnings_of(caplog))
        round_trip(queue)


def test_open_with_direct_refused(mount, backend, caplog):
    """ramfs refuses O_DIRECT when opening: one warning with path and errno, and all works buffered."""
    path = mount("ramfs", "size=8m") / "swap"
    with aio.Queue(path, backend=backend) as queue:
        assert not queue.direct
        round_trip(queue)
    (text,) = warnings_of(caplog)
    assert str(path) in text
    assert "EINVAL" in text
    with pytest.raises(TransferError, match=r"O_DIRECT failed: Invalid argument.*direct_io='auto'"):
        aio.Queue(path, backend=backend, direct_io="required")
    caplog.clear()
    with aio.Queue(path, backend=backend, direct_io="off") as queue:
        assert not queue.direct
    assert not warnings_of(caplog)


def test_direct_transfer_refused(path, backend, caplog):
    """Some file systems let O_DIRECT open and refuse the transfer: the same, found out at the first one."""
    faults = {"refuse_direct": 1}
    with aio.Queue(path, backend=backend, faults=faults) as queue:
        round_trip(queue)
        assert not queue.direct
    (text,) = warnings_of(caplog)
    assert path in text
    assert "EINVAL" in text


def test_direct_required_and_transfer_refused(path, backend):
    faults = {"refuse_direct": 1}
    with (
        aio.Queue(path, backend=backend, direct_io="required", faults=faults) as queue,
        pytest.raises(TransferError, match="Invalid argument"),
    ):
        queue.write(page_aligned(4096), 0).wait()


def test_tmpfs(mount, backend):
    """Whether this kernel's tmpfs takes O_DIRECT or not."""
    with aio.Queue(mount("tmpfs", "size=16m") / "swap", backend=backend, size=4 * MiB) as queue:
        round_trip(queue)
        queue.sync().wait()


@pytest.mark.parametrize(
    ("reads", "size"),
    [
        (range(0, 64 * MiB, 16 * MiB), 16 * MiB),
        (range(0, 64 * MiB, 192 * 1024), 192 * 1024),
        (range(60 * MiB, -1, -4 * MiB), 4 * MiB),
        (range(5000, 60 * MiB, 1_500_000), 1_500_000),
    ],
    ids=["large", "short", "backwards", "odd"],
)
def test_buffered_fallback_keeps_the_page_cache_small(path, backend, reads, size):
    """Where direct I/O is refused, the cache does not grow with the file; with "off" it may."""
    if pages_in_cache_are_shared(path):
        pytest.skip("this file system keeps its files in the page cache")
    total = 64 * MiB
    small = total // mmap.PAGESIZE // 100
    with aio.Queue(path, backend=backend, faults={"refuse_direct": 1}) as queue:
        source = page_aligned(total)
        source[:] = random_bytes(total, seed=1)
        queue.write(source, 0).wait()
        assert not queue.direct
        queue.sync().wait()
        assert pages_cached(path) < small
        target = page_aligned(size)
        for offset in reads:
            queue.read(target[: total - offset], offset).wait()
        assert pages_cached(path) < small
    with aio.Queue(path, backend=backend, direct_io="off") as queue:
        queue.read(source, 0).wait()
        assert pages_cached(path) > total // mmap.PAGESIZE * 9 // 10


def pages_in_cache_are_shared(path: str) -> bool:
    Path(path).write_bytes(b"x" * mmap.PAGESIZE)
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return pages_cached(path) > 0


def test_file_opened_for_reading_only(path, backend, run_python):
    """A checkpoint that may only be read can be read; a write to it says why not."""
    Path(path).write_bytes(b"z" * 5000)
    Path(path).chmod(0o444)
    Path(path).parent.chmod(0o755)
    script = """
import os, sys
from offload import aio
from offload.errors import TransferError
if os.getuid() == 0:
    for folder in reversed([sys.argv[1], *map(str, __import__("pathlib").Path(sys.argv[1]).parents)][:-1]):
        mode = os.stat(folder).st_mode
        os.chmod(folder, mode | 0o555 if os.path.isdir(folder) else 0o444)
    os.setresuid(65534, 65534, 65534)
with aio.Queue(sys.argv[1], backend=sys.argv[2], create=False) as queue:
    buffer = bytearray(5000)
    queue.read(buffer, 0).wait()
    assert buffer == b"z" * 5000
    try:
        queue.write(b"x", 0).wait()
    except TransferError as error:
        print(error)
"""
    result = run_python(script, path, backend)
    assert result.returncode == 0, result.stderr
    assert "open for reading only" in result.stdout


WITHOUT_THE_EXTENSION = """
import logging, sys
sys.modules["offload._aio"] = None
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
from offload import aio
from offload.errors import OffloadError

assert aio.backends() == ["python"], aio.backends()
assert "pip install" in aio.probe()["io_uring"], aio.probe()
for turn in range(2):
    with aio.Queue(sys.argv[1]) as queue:
        assert queue.backend == "python"
        queue.write(b"abc", 0).wait()
        buffer = bytearray(3)
        queue.read(buffer, 0).wait()
        assert buffer == b"abc"
try:
    aio.Queue(sys.argv[1], backend="threads")
except OffloadError as error:
    print("refused:", error)
"""


def test_i11_without_the_extension(path, run_python):
    """One line says what is missing and how to get it; all goes through Python. Asked by name, it is refused."""
    result = run_python(WITHOUT_THE_EXTENSION, path)
    assert result.returncode == 0, result.stderr
    logged, refused = result.stdout.splitlines()
    assert logged.startswith("offload.aio: I/O backend auto is refused: the compiled core (offload._aio)")
    assert logged.endswith("build it with `pip install -e .`; using python")
    assert refused.startswith("refused: I/O backend 'threads' cannot be used: the compiled core")
