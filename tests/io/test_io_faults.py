"""Every result is looked at: short, refused, failing and reordered transfers, and the end of the file."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import KiB, MiB
from offload.errors import TransferError


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("seed", range(4))
def test_random_transfers_with_faults(path, backend, direct_io, seed):
    """Whatever the kernel does short of an error, the file and the buffers equal the mirror."""
    faults = {
        "seed": seed,
        "short_one_in": 3,
        "eintr_one_in": 7,
        "eagain_one_in": 11,
        "reorder": 1,
        "submit_one": seed % 2,
    }
    random = np.random.default_rng(seed)
    mirror = random_bytes(1 * MiB, seed)
    with aio.Queue(
        path, backend=backend, direct_io=direct_io, request_bytes=16 * KiB, queue_depth=6, faults=faults
    ) as queue:
        queue.write(mirror, 0).wait()
        for _ in range(25):
            reads, writes, taken = [], [], np.zeros(mirror.size // 4096 + 1, dtype=bool)
            for _ in range(8):
                offset = int(random.integers(0, mirror.size - 1))
                size = int(random.integers(1, min(100_000, mirror.size - offset) + 1))
                if random.random() < 0.5:  # aligned, so that it goes direct
                    offset -= offset % 4096
                    size = max(4096, size - size % 4096)
                pages = slice(offset // 4096, (offset + size - 1) // 4096 + 1)
                if taken[pages].any() or offset + size > mirror.size:
                    continue  # overlapping transfers have no order
                taken[pages] = True
                buffer = page_aligned(size)
                priority = int(random.integers(0, 3))
                if random.random() < 0.5:
                    buffer[:] = random.integers(0, 256, size)
                    writes.append(queue.write(buffer, offset, priority=priority))
                    mirror[offset : offset + size] = buffer
                else:
                    reads.append((buffer, offset, queue.read(buffer, offset, priority=priority)))
            for ticket in writes:
                ticket.wait()
            for buffer, offset, ticket in reads:
                ticket.wait()
                np.testing.assert_array_equal(buffer, mirror[offset : offset + buffer.size])
        stats = queue.stats()
    assert stats.write.resumed > 0 and stats.read.resumed > 0
    assert stats.write.retried > 0
    assert stats.read.failed == stats.write.failed == 0
    np.testing.assert_array_equal(np.fromfile(path, dtype=np.uint8), mirror)


def test_same_seed_same_faults(path, backend):
    def run(seed: int) -> tuple[int, int]:
        faults = {"seed": seed, "short_one_in": 2, "eintr_one_in": 5}
        with aio.Queue(path, backend=backend, request_bytes=8 * KiB, faults=faults) as queue:
            queue.write(page_aligned(1 * MiB), 0).wait()
            stats = queue.stats().write
            return stats.resumed, stats.retried

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_nth_operation_fails(path, backend, operation, code):
    """For n = 1, 2, 3 ... until it succeeds: the error says what and where, and the queue goes on."""
    data = random_bytes(40_000, seed=2)
    with aio.Queue(path, backend=backend) as queue:
        queue.write(data, 0).wait()
    for n in range(1, 100):
        faults = {"fail_at": n, "fail_errno": code}
        with aio.Queue(path, backend=backend, request_bytes=4096, queue_depth=4, faults=faults) as queue:
            buffer = page_aligned(data.size)
            buffer[:] = data
            submit = queue.read if operation == "read" else queue.write
            ticket = submit(buffer, 0)
            try:
                ticket.wait()
            except TransferError as error:
                assert (error.errno, error.operation, error.filename) == (code, operation, path)
                assert (error.offset, error.size) == (0, data.size)
                assert 0 <= error.done < data.size
                assert ("free on its file system" in str(error)) == (code == errno.ENOSPC)
                with pytest.raises(TransferError):
                    ticket.wait()
                assert ticket.done()
                failed = queue.stats()
                assert (failed.read.failed, failed.write.failed) == (
                    (1, 0) if operation == "read" else (0, 1)
                )
                submit(buffer, 0).wait()  # the fault is over, and nothing is left of it
                np.testing.assert_array_equal(buffer, data)
            else:
                assert n == 11  # ten pages, the last one not whole
                break
    else:
        pytest.fail("never succeeded")


def test_failure_of_one_ticket_leaves_the_others(path, backend):
    faults = {"fail_at": 5, "fail_errno": errno.EIO, "reorder": 1}
    data = random_bytes(40 * 4096, seed=8)
    with aio.Queue(path, backend=backend, request_bytes=4096, queue_depth=8, faults=faults) as queue:
        tickets = [
            queue.write(data[i : i + 4 * 4096], i, priority=i // 4096 % 3)
            for i in range(0, data.size, 4 * 4096)
        ]
        failed = 0
        for ticket in tickets:
            try:
                ticket.wait()
            except TransferError:
                failed += 1
        assert failed == 1


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_endless_refusal_is_an_error(path, backend, code):
    """Retries have a limit."""
    faults = {"fail_at": 1, "fail_count": 1 << 40, "fail_errno": code}
    with (
        aio.Queue(path, backend=backend, faults=faults) as queue,
        pytest.raises(TransferError) as caught,
    ):
        queue.write(page_aligned(4096), 0).wait()
    assert caught.value.errno == code


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("length", [0, 100, 4096, 10_000, 1 * MiB + 1])
def test_end_of_file(path, backend, direct_io, length):
    """A read past the end raises and says how far it got; it never leaves old bytes as if they were read."""
    with open(path, "wb") as file:
        file.write(b"x" * length)
    with aio.Queue(path, backend=backend, direct_io=direct_io) as queue:
        buffer = page_aligned(length + 1)
        with pytest.raises(TransferError, match=f"the file ends at {length} bytes") as caught:
            queue.read(buffer, 0).wait()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.done == length
        queue.read(buffer[:length], 0).wait()  # up to the very end is fine
        assert bytes(buffer[:length]) == b"x" * length


def test_end_of_file_with_faults(path, backend):
    """The same while results are cut short: short is not the end, and the end is not short."""
    with open(path, "wb") as file:
        file.write(b"y" * 50_000)
    faults = {"seed": 3, "short_one_in": 2}
    with aio.Queue(path, backend=backend, request_bytes=8 * KiB, faults=faults) as queue:
        buffer = page_aligned(50_001)
        with pytest.raises(TransferError) as caught:
            queue.read(buffer, 0).wait()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.done <= 50_000
        queue.read(buffer[:50_000], 0).wait()
        assert bytes(buffer[:50_000]) == b"y" * 50_000


def test_sync_error(path, backend):
    with aio.Queue(path, backend=backend, faults={"sync_errno": errno.EIO}) as queue:
        queue.write(b"abc", 0).wait()
        with pytest.raises(TransferError, match="fsync failed: Input/output error"):
            queue.sync().wait()


def test_unknown_fault_is_refused(path):
    with pytest.raises(ValueError, match="no fault is called 'shrot'"):
        aio.Queue(path, faults={"shrot": 1})
