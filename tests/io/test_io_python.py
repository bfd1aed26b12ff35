"""The core in Python: both of its engines, and the compiled core as its oracle."""

from __future__ import annotations

import errno
import logging
import threading

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio, aio_python
from offload.aio_python import engines
from offload.bytesize import KiB, MiB
from offload.errors import TransferError

REFUSAL = aio_python.libaio_refusal()
ENGINES = [
    pytest.param("libaio", marks=pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))),
    "threads",
]
ROUGH = {"short_one_in": 3, "eintr_one_in": 7, "eagain_one_in": 11}


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    if request.param == "threads":
        monkeypatch.setattr(engines, "libaio_refusal", lambda: "hidden by the test")
    return request.param


def busy(path, backend, seed, direct_io="auto"):
    """Odd and even transfers under faults against a mirror; what was counted."""
    random = np.random.default_rng(seed)
    mirror = random_bytes(1 * MiB, seed)
    settings = {"request_bytes": 16 * KiB, "queue_depth": 4, "direct_io": direct_io}
    with aio.Queue(path, backend=backend, faults={"seed": seed, **ROUGH}, **settings) as queue:
        queue.write(mirror, 0).wait()
        for turn in range(30):
            offset = int(random.integers(0, mirror.size - 1))
            size = int(random.integers(1, min(100_000, mirror.size - offset) + 1))
            if turn % 2:
                offset, size = offset - offset % 4096, max(4096, size - size % 4096)
            source, target = page_aligned(size), page_aligned(size)
            source[:] = random.integers(0, 256, size)
            ticket = queue.write(source, offset)
            ticket.wait()
            mirror[offset : offset + size] = source
            queue.read(target, offset).wait()
            np.testing.assert_array_equal(target, source)
        stats = queue.stats()
    np.testing.assert_array_equal(np.fromfile(path, dtype=np.uint8), mirror)
    return [
        (d.bytes, d.requests, d.resumed, d.retried, d.buffered, d.failed) for d in (stats.read, stats.write)
    ]


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("seed", range(2))
def test_both_engines_do_what_the_compiled_core_does(tmp_path, engine, seed, direct_io):
    """Under the same faults the two cores cut, resume and retry alike, request for request."""
    python = busy(tmp_path / "python", "python", seed, direct_io)
    assert python == busy(tmp_path / "compiled", aio.backends()[0], seed, direct_io)
    assert min(python[0][2:4]) > 0, "the faults were felt"


@pytest.mark.parametrize("operation", ["read", "write"])
def test_nth_operation_fails_on_both_engines(path, engine, operation):
    data = random_bytes(40_000, seed=2)
    with aio.Queue(path, backend="python") as queue:
        queue.write(data, 0).wait()
    for n in range(1, 12):
        settings = {"request_bytes": 4096, "queue_depth": 4, "faults": {"fail_at": n}}
        with aio.Queue(path, backend="python", **settings) as queue:
            buffer = data.copy()
            ticket = getattr(queue, operation)(buffer, 0)
            if n == 11:  # ten pages, the last one not whole
                ticket.wait()
                break
            with pytest.raises(TransferError) as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.operation) == (errno.EIO, operation)
            getattr(queue, operation)(buffer, 0).wait()
            np.testing.assert_array_equal(buffer, data)


def test_i12_an_aio_context_that_is_refused(path, monkeypatch, caplog):
    """Others have used up fs.aio-max-nr: threads stand in, and the log says why."""

    def refused(depth):
        raise OSError(errno.EAGAIN, "io_queue_init")

    monkeypatch.setattr(engines, "libaio_refusal", lambda: None)
    monkeypatch.setattr(engines, "LibaioEngine", refused)
    with (
        caplog.at_level(logging.INFO, logger="offload.aio"),
        aio.Queue(path, backend="python", threads=2) as queue,
    ):
        queue.write(b"abc", 0).wait()
        assert queue.queue_depth == 2
    assert "preadv on threads: io_queue_init: Resource temporarily unavailable" in caplog.text
    assert "fs.aio-max-nr" in caplog.text


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_a_request_that_the_kernel_does_not_take(path, monkeypatch):
    """io_submit refuses for the moment, for good, and in the middle of a batch."""
    import libaio

    real, refusals = libaio.AIOContext.submit, [errno.EAGAIN, errno.EINTR, errno.EAGAIN, errno.EAGAIN]

    def submit(self, blocks):
        if refusals and len(blocks) < 4:
            raise OSError(refusals.pop(), "io_submit")
        return real(self, blocks[:3])

    monkeypatch.setattr(libaio.AIOContext, "submit", submit)
    data = random_bytes(64 * KiB, seed=1)
    with aio.Queue(path, backend="python", request_bytes=4096, queue_depth=8) as queue:
        queue.write(data, 0).wait()
        assert not refusals
        refusals[:] = [errno.EIO]
        with pytest.raises(TransferError, match="Input/output error"):
            queue.write(b"x", 0).wait()
        target = page_aligned(data.size)
        queue.read(target, 0).wait()
    np.testing.assert_array_equal(target, data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_the_worker_leaves_nobody_waiting(path, monkeypatch):
    both_wait = threading.Event()
    monkeypatch.setattr("offload.aio_python.worker.Worker._advanced", lambda *_: both_wait.wait(10) and 1 / 0)
    queue = aio.Queue(path, backend="python", queue_depth=1, request_bytes=4096)
    tickets = [queue.write(bytes(10_000), 0), queue.sync()]
    both_wait.set()
    for ticket in tickets:
        with pytest.raises(TransferError):
            ticket.wait(10)
    with pytest.raises(ValueError, match="closed"):
        queue.write(b"x", 0)
    queue.close()
