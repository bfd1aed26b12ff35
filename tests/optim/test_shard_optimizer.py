"""The optimizer class: its planes, its bytes, and the same mathematics as torch."""

from __future__ import annotations

import pytest
import torch
from planes import HYPER

from offload import ConfigError
from offload.optim import Adam, Segment


@pytest.mark.parametrize(("weight_format", "bytes_per_parameter"), [("bf16", 10), ("fp32", 8)])
def test_state_bytes_per_parameter(weight_format: str, bytes_per_parameter: int) -> None:
    specs = Adam(weight_format=weight_format).state_specs(1000)
    assert sum(spec.size_bytes for spec in specs) == 1000 * bytes_per_parameter


@pytest.mark.parametrize("weight_format", ["bf16", "fp32"])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_trains_like_torch(weight_format: str, adamw_mode: bool) -> None:
    optimizer = Adam(weight_format=weight_format, adamw_mode=adamw_mode, threads=2)
    numel = 3000
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(numel, generator=generator)
    planes = {"weight": torch.empty(numel, dtype=optimizer.weight_dtype)}
    for spec in optimizer.state_specs(numel):
        planes[spec.name] = torch.full((numel,), 7, dtype=spec.dtype)
    optimizer.init_state(planes, param)
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    reference = kind([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])
    for step in range(1, 6):
        param.grad = torch.randn(numel, generator=generator)
        reference.step()
        optimizer.update(planes, [Segment(0, numel, step, **HYPER)], param.grad * 8, grad_scale=1 / 8)
    torch.testing.assert_close(
        planes["weight"].float(), param.to(optimizer.weight_dtype).float(), rtol=2e-6, atol=1e-7
    )
    torch.testing.assert_close(planes["exp_avg"], reference.state[param]["exp_avg"], rtol=2e-6, atol=1e-7)


def test_weights_without_a_master_are_taken_as_they_are() -> None:
    optimizer = Adam()
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    planes = {"weight": weight.clone()}
    planes |= {spec.name: torch.ones(100, dtype=spec.dtype) for spec in optimizer.state_specs(100)}
    optimizer.init_state(planes)
    assert torch.equal(planes["weight"], weight)
    assert all(not planes[spec.name].any() for spec in optimizer.state_specs(100))


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_format must be 'bf16' or 'fp32', got 'fp8'"):
        Adam(weight_format="fp8")
