"""What is written is what is read, whatever the size, place and address, on every backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from io_buffers import page_aligned, random_bytes

from offload import aio
from offload.bytesize import KiB, MiB

# Sizes of case log I01 among them: never a multiple of a block by luck.
SIZES = [1, 511, 512, 4095, 4096, 4097, 8192, 513000 * 4, 1 * MiB, 3 * MiB + 17]
OFFSETS = [0, 1, 511, 4096, 5000, 1 * MiB + 3]


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_sizes_and_offsets(path, backend, direct_io):
    """Odd or even, a transfer changes exactly its own bytes, seen by other descriptors as well."""
    mirror = np.zeros(8 * MiB, dtype=np.uint8)
    mirror[:] = random_bytes(mirror.size, seed=0)
    with aio.Queue(path, backend=backend, direct_io=direct_io, request_bytes=128 * KiB) as queue:
        queue.write(mirror, 0).wait()
        direct = queue.direct
        for case, (size, offset) in enumerate(itertools.product(SIZES, OFFSETS)):
            source, target = page_aligned(size), page_aligned(size)
            source[:] = random_bytes(size, seed=case + 1)
            queue.write(source, offset).wait()
            mirror[offset : offset + size] = source
            queue.read(target, offset).wait()
            np.testing.assert_array_equal(target, source, err_msg=f"{size=} {offset=}")
        whole = page_aligned(mirror.size)
        queue.read(whole, 0).wait()
        np.testing.assert_array_equal(whole, mirror)
        assert queue.direct == direct  # no odd transfer was offered to O_DIRECT and refused
    np.testing.assert_array_equal(np.fromfile(path, dtype=np.uint8), mirror)


@pytest.mark.parametrize("shift", [1, 64, 512, 4095])
def test_odd_memory_address(path, backend, shift):
    size = 1 * MiB + 4096 + 77
    source = page_aligned(size + 4096)[shift : shift + size]
    target = page_aligned(size + 4096)[shift : shift + size]
    source[:] = random_bytes(size, seed=shift)
    with aio.Queue(path, backend=backend) as queue:
        direct = queue.direct
        queue.write(source, 4096).wait()
        queue.read(target, 4096).wait()
        assert queue.direct == direct
    np.testing.assert_array_equal(target, source)


def test_aligned_transfers_bypass_the_page_cache(path, backend):
    """Not one request of an aligned transfer is buffered; of an unaligned one, only head and tail are."""
    with aio.Queue(path, backend=backend, size=4 * MiB) as queue:
        if not queue.direct:
            pytest.skip("no direct I/O on this file system")
        queue.write(page_aligned(4 * MiB), 0).wait()
        assert queue.stats().write.buffered == 0
        assert queue.stats().write.requests == 4
        queue.read(page_aligned(2 * MiB + 200)[100:], 100 + 4096).wait()
        read = queue.stats().read
        assert (read.requests - read.buffered, read.buffered) == (2, 2)


def test_neighbours_within_one_block(path, backend):
    """Many unaligned writes in flight at once share blocks, and none loses another's bytes."""
    step = 1000
    mirror = random_bytes(400 * step, seed=3)
    with aio.Queue(path, backend=backend, size=mirror.size) as queue:
        tickets = [queue.write(mirror[i : i + step], i) for i in range(0, mirror.size, step)]
        for ticket in tickets:
            ticket.wait()
        target = page_aligned(mirror.size)
        queue.read(target, 0).wait()
    np.testing.assert_array_equal(target, mirror)


def test_direct_and_buffered_parts_stay_coherent(path, backend):
    """Odd transfers leave pages in the cache; direct ones neither read stale pages nor are hidden by them."""
    mirror = random_bytes(256 * KiB, seed=5)
    random = np.random.default_rng(6)
    with aio.Queue(path, backend=backend) as queue:
        queue.write(mirror, 0).wait()
        for turn in range(60):
            page = 4096 * int(random.integers(0, mirror.size // 4096 - 1))
            odd = page + int(random.integers(1, 4000))
            for offset, size in ((odd, 50), (page, 4096), (odd, 4500)):
                size = min(size, mirror.size - offset)
                source = page_aligned(size)
                source[:] = random_bytes(size, seed=1000 + turn)
                queue.write(source, offset).wait()
                mirror[offset : offset + size] = source
            for offset, size in ((page, 4096), (odd, 70)):
                target = page_aligned(size)
                queue.read(target, offset).wait()
                np.testing.assert_array_equal(target, mirror[offset : offset + size])
        whole = page_aligned(mirror.size)
        queue.read(whole, 0).wait()
    np.testing.assert_array_equal(whole, mirror)
    np.testing.assert_array_equal(np.fromfile(path, dtype=np.uint8), mirror)


def test_offsets_above_4_gib(path, backend):
    source, target = random_bytes(10_000, seed=9), page_aligned(10_000)
    offset = (5 << 30) + 123
    with aio.Queue(path, backend=backend) as queue:
        queue.write(source, offset).wait()
        queue.read(target, offset).wait()
        hole = page_aligned(4096)
        hole[:] = 1
        queue.read(hole, offset % (1 << 32)).wait()
    np.testing.assert_array_equal(target, source)
    assert not hole.any()  # an offset cut to 32 bits would have written here


def test_nothing_to_transfer(path, backend):
    with aio.Queue(path, backend=backend) as queue:
        queue.read(bytearray(), 10).wait()
        queue.write(b"", 0).wait()
        queue.sync().wait()
        assert queue.stats().read.requests == 0


def test_buffer_kinds(path, backend):
    """Whatever exports bytes; what does not, or would be changed against its will, is refused."""
    with aio.Queue(path, backend=backend) as queue:
        queue.write(b"0123456789", 0).wait()
        array = bytearray(4)
        queue.read(array, 2).wait()
        assert bytes(array) == b"2345"
        array.extend(b"x")  # a finished ticket holds no export
        words = np.zeros((2, 2), dtype=np.int16)
        queue.read(memoryview(words), 0).wait()
        assert words.tobytes() == b"01234567"
        with pytest.raises(BufferError, match="read-only"):
            queue.read(b"1234", 0)
        with pytest.raises(BufferError, match="contiguous"):
            queue.write(np.zeros((4, 4), dtype=np.uint8)[:, ::2], 0)
        with pytest.raises(TypeError, match="bytes-like"):
            queue.write(12, 0)  # type: ignore[arg-type]


def test_many_small_requests(path, backend):
    """More pieces than slots, many times over."""
    mirror = random_bytes(2 * MiB, seed=1)
    with aio.Queue(path, backend=backend, queue_depth=3, request_bytes=4096) as queue:
        queue.write(mirror, 0).wait()
        target = page_aligned(mirror.size)
        queue.read(target, 0).wait()
        stats = queue.stats()
    np.testing.assert_array_equal(target, mirror)
    assert stats.read.bytes == stats.write.bytes == mirror.size
    assert stats.read.requests == mirror.size // 4096
    assert 0 < stats.read.seconds_busy <= stats.read.seconds_latency
    assert stats.read.seconds_latency_max <= stats.read.seconds_busy
