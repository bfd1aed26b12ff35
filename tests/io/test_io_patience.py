"""Drives that tear writes, lie, or never answer: said, and nothing hangs for ever."""

from __future__ import annotations

import errno
import gc
import re
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from io_buffers import page_aligned

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import ConfigError, TransferError

OLD, NEW = 0x11, 0x22


def written(path: str, backend: str, direct_io: str, faults: dict[str, int]) -> tuple[bytes, int]:
    """Eight requests of new bytes over old ones, under faults: the file, and the errno of the write."""
    size = 8 * 16 * KiB
    Path(path).write_bytes(bytes([OLD]) * size)
    source = page_aligned(size)
    source[:] = NEW
    code = 0
    with aio.Queue(
        path, backend=backend, request_bytes=16 * KiB, direct_io=direct_io, faults=faults
    ) as queue:
        try:
            queue.write(source, 0).wait()
        except TransferError as error:
            code = error.errno or 0
    return Path(path).read_bytes(), code


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_torn_write(path, backend, direct_io, seed):
    """A part is stored, and the write says that it failed."""
    faults = {"seed": seed, "tear_at": 3, "fail_errno": errno.EIO}
    data, code = written(path, backend, direct_io, faults)
    assert code == errno.EIO
    assert set(data) == {OLD, NEW}
    assert data[: 2 * 16 * KiB] == bytes([NEW]) * 2 * 16 * KiB


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_write_torn_in_silence(path, backend, direct_io):
    """The write says that all is well, and one request has left old bytes: what checksums are for."""
    data, code = written(path, backend, direct_io, {"seed": 1, "tear_silently_at": 3})
    assert code == 0
    begin, end = 2 * 16 * KiB, 3 * 16 * KiB
    torn = data[begin:end]
    stored = torn.count(NEW)
    assert torn == bytes([NEW]) * stored + bytes([OLD]) * (16 * KiB - stored)
    assert stored < 16 * KiB
    assert data[:begin] + data[end:] == bytes([NEW]) * 7 * 16 * KiB


def test_seeded_tears(path, backend):
    first = written(path, backend, "auto", {"seed": 5, "tear_silently_one_in": 3})
    assert first == written(path, backend, "auto", {"seed": 5, "tear_silently_one_in": 3})
    assert OLD in first[0]
    assert written(path, backend, "auto", {"seed": 5, "tear_one_in": 3})[1] == errno.EIO


def stalls(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "still waiting" in r.getMessage()]


def test_a_long_wait_is_reported(path, backend, caplog):
    """One line that names the oldest request; the next one only after twice the time; then all is well."""
    with aio.Queue(
        path, backend=backend, stall_seconds=0.2, faults={"delay_at": 2, "delay_ms": 1100}
    ) as queue:
        queue.write(b"x" * 100, 0).wait()
        assert not stalls(caplog)
        queue.write(b"y" * 300, 700).wait()
    lines = stalls(caplog)
    assert 1 <= len(lines) <= 3  # at 0.2, 0.4 and 0.8 s
    assert f"{path}: waiting for write since " in lines[0]
    assert re.search(r"the oldest request is a write of 300 bytes at offset 700, for [01]\.\d s", lines[0])
    assert f"({backend})" in lines[0]


def test_a_long_close_is_reported(path, backend, caplog):
    queue = aio.Queue(path, backend=backend, stall_seconds=0.2, faults={"delay_ms": 500})
    queue.write(b"x", 0)
    queue.close()
    assert "waiting for close" in stalls(caplog)[0]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_lost_completion(path, backend, operation, caplog):
    """The transfer fails after the limit and says why; what memory it had stays alive and guarded; the other
    transfers go on; close gives up in the end."""
    Path(path).write_bytes(bytes(1 * MiB))
    begun = time.monotonic()
    faults = {"lose_at": 2}
    queue = aio.Queue(
        path, backend=backend, queue_depth=4, threads=4, timeout_seconds=0.6, stall_seconds=0.2, faults=faults
    )
    submit = queue.read if operation == "read" else queue.write
    buffer = np.zeros(64 * KiB, dtype=np.uint8)
    submit(page_aligned(4096), 512 * KiB).wait()
    lost = submit(buffer, 4096)
    with pytest.raises(TimeoutError):
        lost.wait(0.05)
    for _ in range(2):
        with pytest.raises(
            TransferError, match=r"has not been answered for 0\.6 s.*memory stays in use"
        ) as caught:
            lost.wait()
        assert (caught.value.errno, caught.value.operation) == (errno.ETIMEDOUT, operation)
    assert (caught.value.offset, caught.value.size) == (4096, 64 * KiB)
    assert lost.done()
    assert 0.6 <= time.monotonic() - begun < 60
    assert f"the oldest request is a {operation} of " in stalls(caplog)[0]
    other = page_aligned(64 * KiB)
    queue.write(other, 512 * KiB).wait()  # the queue has three slots left
    queue.read(other, 512 * KiB).wait()
    with pytest.raises(TransferError) as caught:
        queue.read(buffer, 0)  # the drive may still use this memory
    assert caught.value.errno == errno.ETIMEDOUT
    alive = weakref.ref(buffer)
    del buffer, caught
    queue.close(cancel=True)
    queue.close()
    del queue, lost, submit
    gc.collect()
    assert alive() is not None
    assert "closed with requests that were not answered within 0.6 s" in caplog.text
    assert time.monotonic() - begun < 60


def test_all_slots_lost(path, backend):
    """The queue does nothing any more: tickets that never got their turn fail as well, and can be cancelled."""
    begun = time.monotonic()
    queue = aio.Queue(
        path, backend=backend, queue_depth=1, request_bytes=4096, timeout_seconds=0.5, faults={"lose_at": 1}
    )
    lost, waiting, cancelled = (queue.write(page_aligned(4096), i * 4096) for i in range(3))
    sync = queue.sync()
    cancelled.cancel()
    with pytest.raises(TransferError) as caught:
        cancelled.wait()
    assert caught.value.errno == errno.ECANCELED
    for ticket in (lost, waiting, sync):
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.ETIMEDOUT
    polled = queue.write(page_aligned(4096), 0)
    while not polled.done():  # one who never waits notices, too
        time.sleep(0.01)
    with pytest.raises(TransferError):
        polled.wait()
    queue.close()
    assert time.monotonic() - begun < 60


def usable(queue: aio.Queue, buffer: object) -> bool:
    try:
        queue.read(buffer, 0).wait()
    except TransferError as error:
        assert error.errno == errno.ETIMEDOUT
        return False
    return True


def test_a_late_answer_frees_the_memory(path, backend):
    """Late is not lost: the ticket has failed, the memory may be used again once the answer is there."""
    with aio.Queue(
        path, backend=backend, timeout_seconds=0.5, faults={"delay_at": 1, "delay_ms": 1500}
    ) as queue:
        buffer = page_aligned(4096)
        ticket = queue.write(buffer, 0)
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.ETIMEDOUT
        while not usable(queue, buffer):
            time.sleep(0.05)
        with pytest.raises(TransferError):
            ticket.wait()


def test_a_slow_drive_is_not_a_dead_one(path, backend):
    """Every request is answered soon, and the last transfer waits for long: it does not fail."""
    with aio.Queue(
        path, backend=backend, queue_depth=1, request_bytes=4096, timeout_seconds=1.0, faults={"delay_ms": 40}
    ) as queue:
        tickets = [queue.write(page_aligned(4096), i * 4096) for i in range(40)]
        for ticket in tickets:
            ticket.wait()
        assert tickets[-1].seconds > 1.5


EXIT = """
import sys
from offload import aio
queue = aio.Queue(sys.argv[1], backend=sys.argv[2], faults={"lose_at": 1}, timeout_seconds=0.3)
ticket = queue.write(bytes(4096), 0)
if sys.argv[3] == "drop":
    del queue, ticket
"""


@pytest.mark.parametrize("how", ["drop", "keep"])
def test_the_process_ends(path, backend, run_python, how):
    result = run_python(EXIT, path, backend, how)
    assert result.returncode == 0, result.stderr


def test_limits_from_the_environment(path, monkeypatch, caplog):
    monkeypatch.setenv("OFFLOAD_IO_STALL_SECONDS", "0.1")
    monkeypatch.setenv("OFFLOAD_IO_TIMEOUT_SECONDS", "0.4")
    queue = aio.Queue(path, faults={"lose_at": 1})
    with pytest.raises(TransferError, match=r"for 0\.4 s"):
        queue.write(b"x", 0).wait()
    assert stalls(caplog)
    queue.close()
    monkeypatch.setenv("OFFLOAD_IO_TIMEOUT_SECONDS", "soon")
    with pytest.raises(
        ConfigError, match="OFFLOAD_IO_TIMEOUT_SECONDS must be a number of seconds above 0, got 'soon'"
    ):
        aio.Queue(path)
    monkeypatch.delenv("OFFLOAD_IO_TIMEOUT_SECONDS")
    with pytest.raises(ConfigError, match="stall_seconds must be a number of seconds above 0, got -1"):
        aio.Queue(path, stall_seconds=-1)
