"""CRC-32C against its definition, bit by bit, and against published sums."""

import itertools
import random

import numpy as np
import pytest
import torch

from offload.optim.checksum import crc32c, crc32c_ways


def by_definition(data):
    """A division of polynomials over GF(2), one bit at a time."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def bytes_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def sums(data, cuts, **settings):
    return crc32c(bytes_of(data), np.array(cuts, np.uint64), **settings).tolist()


@pytest.mark.parametrize("way", crc32c_ways())
@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this one and those below: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_sums(way, data, wanted):
    assert sums(data, [0, len(data)], way=way) == [wanted]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", crc32c_ways())
def test_blocks_of_any_size_and_address(way, threads):
    rng = random.Random(1)
    data = rng.randbytes(4000)
    for _ in range(30):
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(0, 60)))
        wanted = [by_definition(data[a:b]) for a, b in itertools.pairwise(cuts)]
        assert sums(data, cuts, way=way, threads=threads) == wanted


@pytest.mark.parametrize("way", crc32c_ways())
def test_every_flipped_bit_is_seen(way):
    data = bytearray(random.Random(2).randbytes(200))
    right = sums(data, [0, 200], way=way)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert sums(data, [0, 200], way=way) != right
        data[bit // 8] ^= 1 << bit % 8


def test_ways_and_wrong_arguments():
    assert crc32c_ways()[-1] == "table"
    with pytest.raises(ValueError, match="'abacus' does not work here"):
        sums(b"1234", [0, 4], way="abacus")
    for cuts in ([0, 5], [3, 1]):
        with pytest.raises(ValueError, match="cuts must ascend and lie within data"):
            sums(b"1234", cuts)
