"""Memory that configurations ask for, and what is taken: case M09."""

from __future__ import annotations

import pytest
from loops import mlp_a, rows, same_step, seeded

from offload import PlanError


def test_m09_buffers_are_sized_from_the_model(prepare):
    """buffer_count x buffer_size would be 14 GB: it is a hint, and nothing of the kind is taken."""
    sizes = {"buffer_count": 6, "buffer_size": 600_000_000}
    zero = {"stage": 3, "offload_param": sizes, "offload_optimizer": {"buffer_count": 6}}
    model, optimizer = prepare(seeded(mlp_a), "nvme", memory={"host_bytes": "64MiB"}, merge=zero)
    same_step(lambda m: m(rows(4)).square().mean(), 2)(model, optimizer)
    assert optimizer.engine.plan.bytes_total("host") < 64 << 20


def test_m09_a_budget_that_is_too_small_is_refused_with_one_that_works(prepare):
    with pytest.raises(PlanError, match=r"host.*KiB.*(memory\.host_bytes|fits)"):
        prepare(seeded(mlp_a), "nvme", memory={"host_bytes": "4KiB"})
