"""The fp32 master as two planes: exact over every kind of bit pattern, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planes import NUMELS, guarded, guards_intact, same_bits

from offload.optim import kernels

LOW_HALVES = (0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)


def all_patterns() -> np.ndarray:
    """Every upper half with every lower half at which rounding changes; denormals, inf and NaN among them."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return (high[:, None] | np.array(LOW_HALVES, np.uint32)[None, :]).ravel()


@pytest.mark.parametrize("isa", kernels.isas())
def test_split_follows_the_formula_and_join_undoes_it(isa: str) -> None:
    bits = all_patterns()
    master = bits.view(np.float32)
    weight, residual = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    kernels.split_master(master, weight, residual, isa=isa)
    nan = np.isnan(master)
    high = ((bits.astype(np.int64) + 0x8000) >> 16)[~nan]
    np.testing.assert_array_equal(weight[~nan], high)
    np.testing.assert_array_equal(residual[~nan], bits[~nan].astype(np.int64) - (high << 16))
    assert set(weight[nan]) == {0x7FC0}
    assert set(residual[nan]) == {0}
    joined = np.empty_like(master)
    kernels.join_master(weight, residual, joined, isa=isa)
    np.testing.assert_array_equal(joined[~nan].view(np.uint32), bits[~nan])
    assert np.isnan(joined[nan]).all()


def test_weight_is_the_nearest_bf16() -> None:
    master = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    weight, residual = torch.empty(10_000, dtype=torch.bfloat16), torch.empty(10_000, dtype=torch.int16)
    kernels.split_master(master, weight, residual)
    ties = residual == -0x8000  # halves go up here and to even in torch
    assert same_bits(weight[~ties], master.bfloat16()[~ties])


@pytest.mark.parametrize("isa", kernels.isas())
def test_conversions_of_every_length_stay_inside(isa: str) -> None:
    for numel in NUMELS:
        master = guarded(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
        weight = guarded(torch.zeros(numel, dtype=torch.bfloat16))
        residual, joined = guarded(torch.zeros(numel, dtype=torch.int16)), guarded(torch.zeros(numel))
        kernels.split_master(master, weight, residual, isa=isa)
        kernels.join_master(weight, residual, joined, isa=isa)
        assert same_bits(joined, master)
        fresh = guarded(weight)
        fresh[::3] += 1
        changed = weight != fresh
        expected = torch.where(changed, 0, residual)
        kernels.assign_weight(weight, residual, fresh, isa=isa)
        assert same_bits(weight, fresh)
        assert torch.equal(residual, expected)
        assert changed.sum() == len(changed[::3])
        assert all(guards_intact(plane) for plane in (master, weight, residual, joined, fresh))


def test_threads_do_not_show() -> None:
    master = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    results = []
    for threads in (1, 2, 5):
        weight, residual = torch.empty(300_001, dtype=torch.bfloat16), torch.empty(300_001, dtype=torch.int16)
        kernels.split_master(master, weight, residual, threads=threads)
        joined = torch.empty(300_001)
        kernels.join_master(weight, residual, joined, threads=threads)
        assert same_bits(joined, master)
        results.append((weight, residual))
    assert all(same_bits(a, b) for result in results for a, b in zip(result, results[0], strict=True))
