"""Registered memory and files, and submission by a thread of the kernel: faster ways to the same bytes."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import GiB, KiB, MiB


@pytest.fixture
def uring(path):
    reason = aio.probe()["io_uring"]
    if reason is not None:
        pytest.skip(f"io_uring does not work here: {reason}")
    with aio.Queue(path, backend="io_uring", request_bytes=64 * KiB) as queue:
        yield queue


def locked_bytes() -> int:
    """Memory pinned by this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmPin:")]
    return int(line.split()[1]) * 1024


def round_trip(queue: aio.Queue, memory: np.ndarray, seed: int) -> None:
    """Slots of odd and even places in one slab, and a transfer that is partly outside of it."""
    data = random_bytes(memory.size, seed)
    memory[:] = data
    size = memory.size // 4
    slots = [(0, size), (size, size), (2 * size + 3, size - 100), (3 * size, size)]
    for ticket in [queue.write(memory[at : at + n], at) for at, n in slots]:
        ticket.wait()
    memory[:] = 0
    for ticket in [queue.read(memory[at : at + n], at) for at, n in slots]:
        ticket.wait()
    for at, n in slots:
        np.testing.assert_array_equal(memory[at : at + n], data[at : at + n])


def test_registered_memory(uring):
    memory = page_aligned(1 * MiB)
    before = locked_bytes()
    assert uring.register(memory)
    assert uring.register(memory[4096:8192])  # lies in it already
    assert locked_bytes() - before == 1 * MiB
    round_trip(uring, memory, seed=1)
    uring.unregister(memory[4096:8192])
    uring.unregister(memory)
    assert locked_bytes() == before
    round_trip(uring, memory, seed=2)
    with pytest.raises(ValueError, match="not registered"):
        uring.unregister(memory)


def test_transfers_across_the_edge_of_registered_memory(uring):
    memory = page_aligned(1 * MiB)
    assert uring.register(memory[256 * KiB : 512 * KiB])
    assert uring.register(memory[768 * KiB :])
    round_trip(uring, memory, seed=3)
    for at, size in ((100 * KiB, 800 * KiB), (511 * KiB, 2 * KiB), (0, 1 * MiB)):
        data = random_bytes(size, seed=at)
        memory[at : at + size] = data
        uring.write(memory[at : at + size], 2 * MiB).wait()
        memory[at : at + size] = 0
        uring.read(memory[at : at + size], 2 * MiB).wait()
        np.testing.assert_array_equal(memory[at : at + size], data)


def test_memory_of_more_than_one_entry(uring):
    """The kernel registers 1 GiB at a time; a transfer over the seam is as good as any. One huge page of
    zeros stands for most of the memory, which is never written."""
    seam = 1 * GiB
    memory = np.frombuffer(mmap.mmap(-1, seam + 2 * MiB), dtype=np.uint8)
    before = locked_bytes()
    if not uring.register(memory):
        pytest.skip("the limit on locked memory is below 1 GiB")
    assert locked_bytes() - before == memory.size
    view = memory[seam - 100 * KiB : seam + 100 * KiB]
    data = random_bytes(view.size, seed=4)
    view[:] = data
    uring.write(view, 0).wait()
    view[:] = 0
    uring.read(view, 0).wait()
    np.testing.assert_array_equal(view, data)
    uring.unregister(memory)
    assert locked_bytes() == before


def test_registered_memory_lives_until_it_is_let_go(path, backend):
    """The kernel knows pages, not Python: what is registered may not be freed under it."""
    queue = aio.Queue(path, backend=backend)
    memory = np.zeros(64 * KiB, dtype=np.uint8)
    registered = queue.register(memory)
    assert registered == (backend == "io_uring")
    alive = weakref.ref(memory)
    del memory
    gc.collect()
    assert (alive() is not None) == registered
    queue.close()
    gc.collect()
    assert alive() is None
    with pytest.raises(ValueError, match="is closed"):
        queue.register(bytearray(10))


def test_dropped_queue_lets_go_of_registered_memory(path):
    if aio.probe()["io_uring"] is not None:
        pytest.skip("io_uring does not work here")
    before = locked_bytes()
    queue = aio.Queue(path, backend="io_uring")
    memory = page_aligned(1 * MiB)
    assert queue.register(memory)
    queue.write(memory, 0)
    del queue
    gc.collect()
    assert locked_bytes() == before


def test_read_only_memory_is_refused(uring):
    with pytest.raises(BufferError, match="read-only"):
        uring.register(b"abc")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_with_registered_memory(uring):
    """Parent and child each keep their own bytes; the parent's transfers go to the parent's memory."""
    memory = np.frombuffer(mmap.mmap(-1, 256 * KiB, flags=mmap.MAP_PRIVATE), dtype=np.uint8)
    assert uring.register(memory)
    memory[:] = 7
    child = os.fork()
    if child == 0:
        seen = bool((memory == 7).all())
        memory[:] = 9
        os._exit(0 if seen else 1)
    uring.write(memory, 0).wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory == 7).all()
    memory[:] = 0
    uring.read(memory, 0).wait()
    assert (memory == 7).all()


def test_closing_gives_the_file_back_at_once(path, mount, backend):
    """A registered descriptor would keep the file system busy: it can be unmounted right after close."""
    folder = mount("tmpfs", "size=4m")
    queue = aio.Queue(folder / "swap", backend=backend, size=1 * MiB)
    queue.write(page_aligned(64 * KiB), 0).wait()
    queue.close()
    (folder / "swap").unlink()
    about = os.statvfs(folder)
    assert about.f_bavail * about.f_frsize == 4 * MiB


def test_sqpoll(path, backend, caplog):
    """Where there is no such thing, one line says so; the bytes are the same."""
    aio.refusals._logged.discard("sqpoll")
    for turn in range(2):
        with aio.Queue(path, backend=backend, sqpoll=True, request_bytes=16 * KiB, queue_depth=5) as queue:
            polled = queue._core.sqpoll
            assert not polled or backend == "io_uring"
            round_trip(queue, page_aligned(1 * MiB), seed=turn)
            queue.sync().wait()
    lines = [record.getMessage() for record in caplog.records if "kernel thread" in record.getMessage()]
    assert len(lines) == (0 if polled else 1)
