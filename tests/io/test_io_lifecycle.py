"""Opening, closing, forking, signals and limits: nothing is left behind, and nothing hangs."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from io_buffers import page_aligned, random_bytes
from leaks import assert_as, held

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import ConfigError, TransferError


def test_many_open_and_close(path, backend):
    before = held()
    for turn in range(300):
        with aio.Queue(path, backend=backend, queue_depth=4, threads="auto") as queue:
            queue.write(b"x" * 100, turn)
    assert_as(before)


def test_refused_open_leaves_nothing(path, backend, tmp_path):
    before = held()
    for _ in range(20):
        with pytest.raises(TransferError):
            aio.Queue(tmp_path / "missing" / "swap", backend=backend)
        with pytest.raises(ConfigError):
            aio.Queue(path, backend=backend, request_bytes=4097)
        with pytest.raises(TransferError):
            aio.Queue(path, backend=backend, size=1 << 60)
    assert_as(before)


def test_close_completes_what_is_pending(path, backend):
    data = random_bytes(1 * MiB, seed=0)
    queue = aio.Queue(path, backend=backend, queue_depth=1, request_bytes=16 * KiB)
    ticket = queue.write(data, 0)
    queue.close()
    assert ticket.done()
    ticket.wait()
    assert Path(path).read_bytes() == data.tobytes()
    queue.close()


def test_close_with_cancel(path, backend):
    """What is in flight ends; what is pending ends with ECANCELED; a sync is no exception."""
    faults = {"delay_at": 1, "delay_ms": 400}
    queue = aio.Queue(path, backend=backend, queue_depth=1, request_bytes=4096, faults=faults)
    whole, begun, pending = queue.write(b"a" * 10, 0), queue.write(bytes(1 * MiB), 8192), queue.sync()
    while queue.stats().write.seconds_busy == 0:  # the first one is in flight
        time.sleep(0.001)
    queue.close(cancel=True)
    whole.wait()
    for ticket in (begun, pending):
        with pytest.raises(TransferError, match="closed before it was its turn") as caught:
            ticket.wait()
        assert caught.value.errno == errno.ECANCELED


def test_an_exception_in_the_with_block_cancels(path, backend):
    faults = {"delay_at": 1, "delay_ms": 100}
    with (
        pytest.raises(KeyError),
        aio.Queue(path, backend=backend, queue_depth=1, request_bytes=4096, faults=faults) as queue,
    ):
        ticket = queue.write(bytes(64 * MiB), 0)
        raise KeyError
    assert ticket.done()
    assert Path(path).stat().st_size < 64 * MiB


def test_use_after_close(path, backend):
    queue = aio.Queue(path, backend=backend)
    queue.write(b"abc", 0).wait()
    queue.close()
    assert queue.closed
    for use in (
        lambda: queue.read(bytearray(1), 0),
        lambda: queue.write(b"x", 0),
        lambda: queue.sync(),
        lambda: queue.preallocate(10),
    ):
        with pytest.raises(ValueError, match=r"the queue of .*swap is closed"):
            use()
    assert queue.stats().write.bytes == 3
    assert "closed" in repr(queue)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"backend": "libaoi"},
            "backend must be 'auto' or one of 'io_uring', 'libaio', 'threads', 'python', got 'libaoi'",
        ),
        ({"queue_depth": 0}, "queue_depth must be 'auto' or a number from 1, got 0"),
        ({"request_bytes": 1000}, "request_bytes must be a multiple of 4096"),
        ({"direct_io": "yes"}, "direct_io must be 'auto', 'required' or 'off', got 'yes'"),
        ({"threads": "many"}, "threads must be"),
    ],
)
def test_wrong_settings(path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        aio.Queue(path, **arguments)


def test_wrong_arguments(path, backend):
    with aio.Queue(path, backend=backend) as queue:
        with pytest.raises(ValueError, match="got -1"):
            queue.read(bytearray(1), -1)
        with pytest.raises(ValueError, match="priority must be 0, 1 or 2, got 3"):
            queue.read(bytearray(1), 0, priority=3)
        with pytest.raises(ValueError, match="beyond the largest file offset"):
            queue.write(b"xy", (1 << 63) - 2)
        with pytest.raises(TransferError, match="File too large"):
            queue.write(b"xy", (1 << 63) - 3).wait()
        assert queue.direct


def test_open_errors_name_the_path(tmp_path):
    with pytest.raises(TransferError, match="No such file") as caught:
        aio.Queue(tmp_path / "missing", create=False)
    assert (caught.value.errno, caught.value.operation) == (errno.ENOENT, "open")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(TransferError, match="directory"):
        aio.Queue(tmp_path)


# Python 3.12 warns of the very thing that these tests are about.
FORKS_WITH_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@FORKS_WITH_THREADS
def test_fork(path, backend):
    """A child says what is wrong, exits at once, and the parent's transfers go on."""
    queue = aio.Queue(path, backend=backend, faults={"delay_at": 1, "delay_ms": 400})
    data = random_bytes(1 * MiB, seed=1)
    ticket = queue.write(data, 0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in (ticket.wait, queue.sync, queue.stats, lambda: queue.read(bytearray(1), 0)):
                try:
                    use()
                except ValueError as error:
                    status = 0 if "belongs to process" in str(error) else 2
                else:
                    status = 3
                if status != 0:
                    break
            queue.close()
            del ticket, queue, use
            aio.queue._close_all()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    ticket.wait()
    queue.close()
    assert Path(path).read_bytes() == data.tobytes()


@FORKS_WITH_THREADS
def test_child_opens_its_own_queue(path, backend):
    with aio.Queue(path, backend=backend) as queue:
        queue.write(b"parent", 0).wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with aio.Queue(path, backend=backend) as own:
                    own.write(b"child!", 100).wait()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        buffer = bytearray(6)
        queue.read(buffer, 100).wait()
        assert buffer == b"child!"


INTERRUPTED = """
import os, signal, sys, threading, time
from offload import aio
faults = {"delay_ms": 1500}
queue = aio.Queue(sys.argv[1], backend=sys.argv[2], faults=faults, queue_depth=1, request_bytes=4096)
ticket = queue.write(bytes(1 << 20), 0)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ticket.wait() if sys.argv[3] == "wait" else queue.close()
except KeyboardInterrupt:
    print("interrupted", ticket.done())
"""


@pytest.mark.parametrize("where", ["wait", "close"])
def test_ctrl_c(path, backend, run_python, where):
    """Ctrl-C ends a wait at once; a close only lets end what is in flight. The exit is quiet and soon."""
    result = run_python(INTERRUPTED, path, backend, where)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    done = where == "close"  # in time: the whole transfer would take 256 times 1.5 s
    assert result.stdout == f"interrupted {done}\n"


AT_EXIT = """
import sys
from offload import aio
faults = {"delay_ms": 20}
queue = aio.Queue(sys.argv[1], backend=sys.argv[2], faults=faults, queue_depth=1, request_bytes=4096)
keep = [queue.write(bytes(1 << 20), 0), queue.read(bytearray(4096), 0), queue.sync()]
"""


def test_exit_in_the_middle(path, backend, run_python):
    result = run_python(AT_EXIT, path, backend)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_signals_reach_the_main_thread(path, backend):
    """Our threads block signals: a handler runs in the main thread, also with transfers in flight."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.get_ident()))
    try:
        with aio.Queue(path, backend=backend, request_bytes=4096) as queue:
            ticket = queue.write(page_aligned(4 * MiB), 0)
            for _ in range(50):
                os.kill(os.getpid(), signal.SIGUSR1)
            ticket.wait()
            blocked = [
                int(line.split()[1], 16)
                for task in Path("/proc/self/task").iterdir()
                for line in (task / "status").read_text().splitlines()
                if line.startswith("SigBlk")
            ]
        usr1 = 1 << (signal.SIGUSR1 - 1)
        assert sum(1 for mask in blocked if mask & usr1) >= 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {threading.main_thread().ident}


FILE_LIMIT = """
import errno, resource, signal, sys
from offload import aio
from offload.errors import TransferError
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a host program may not
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with aio.Queue(sys.argv[1], backend=sys.argv[2], direct_io=sys.argv[3]) as queue:
    queue.write(bytes(1 << 20), 0).wait()
    try:
        queue.write(bytes(1 << 20), 1 << 20).wait()
    except TransferError as error:
        assert error.errno == errno.EFBIG, error
        assert error.done == 0, error.done
        print(error)
    queue.read(bytearray(1 << 20), 0).wait()
"""


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_file_size_limit(path, backend, run_python, direct_io):
    """EFBIG, with a hint at the limit, and not the end of the process by SIGXFSZ."""
    result = run_python(FILE_LIMIT, path, backend, direct_io)
    assert result.returncode == 0, result.stderr
    assert "File too large" in result.stdout
    assert "RLIMIT_FSIZE is 1.00 MiB" in result.stdout
