"""Sum of squares and the finite check: against exact sums, and the same bits however it is computed."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from planes import NUMELS, guarded

from offload.optim import kernels

LENGTHS = (*NUMELS, kernels.SQUARE_BLOCK, kernels.SQUARE_BLOCK + 1, 100_003)


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return guarded(torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_exact_sum_on_every_instruction_set(dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        grad = values(numel, dtype)
        exact = math.fsum(x * x for x in grad.tolist())
        results = {
            kernels.sum_of_squares(grad, isa=isa, threads=t) for isa in kernels.isas() for t in (1, 2, 7)
        }
        assert len(results) == 1
        total, finite = results.pop()
        assert finite
        assert total == pytest.approx(exact, rel=1e-14)


def test_pieces_in_any_order_give_the_sum_of_the_whole() -> None:
    grad = values(20 * kernels.SQUARE_BLOCK + 777, torch.bfloat16)
    cuts = [0, *sorted(random.Random(1).sample(range(1, 21), 6)), 21]
    pieces = [grad[a * kernels.SQUARE_BLOCK : b * kernels.SQUARE_BLOCK] for a, b in itertools.pairwise(cuts)]
    sums = [kernels.block_square_sums(piece) for piece in reversed(pieces)]
    assert math.fsum(np.concatenate(sums)) == kernels.sum_of_squares(grad).sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    grad = values(40_000, dtype)
    for isa in kernels.isas():
        for position in (0, 5, 16_383, 16_384, 39_999):
            kept = grad[position].clone()
            grad[position] = bad
            assert not kernels.sum_of_squares(grad, isa=isa).finite
            grad[position] = kept
        assert kernels.sum_of_squares(grad, isa=isa).finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_and_smallest_values_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    largest = torch.full((50_000,), torch.finfo(dtype).max, dtype=dtype)
    total, finite = kernels.sum_of_squares(largest)
    assert finite
    assert total == pytest.approx(50_000 * torch.finfo(dtype).max ** 2)
    smallest = torch.full((50_000,), torch.finfo(dtype).smallest_normal, dtype=dtype) / 2
    assert kernels.sum_of_squares(smallest).sum == pytest.approx(50_000 * (2.0**-127) ** 2)
