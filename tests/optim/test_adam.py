"""The Adam kernel against torch.optim, against itself (instruction sets, threads, cuts), and at its edges."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from planes import FORMATS, HYPER, NUMELS, Planes, gradient, same_bits, where_fused_adam_is_ours

from offload.optim import kernels
from offload.optim.kernels import Segment

# torch's unfused Adam: a square root that is an ulp off in one of five, products rounded before they are added.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-7}


def torch_optimizer(
    param: torch.Tensor, adamw_mode: bool, fused: bool = False, **changed: float
) -> torch.optim.Optimizer:
    hyper = {**HYPER, **changed}
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(
        [param],
        lr=hyper["lr"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
        foreach=False,
        fused=fused,
    )


def assert_tracks_torch(
    numel: int, format_: str, steps: int, adamw_mode: bool = True, **changed: float
) -> None:
    weight_format, grad_format = format_.split("/")
    param = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    planes = Planes.start(param, weight_format)
    reference = torch_optimizer(param, adamw_mode, **changed)
    for step in range(1, steps + 1):
        grad = gradient(numel, grad_format, step)
        param.grad = grad.float()
        reference.step()
        planes.step(grad, step, adamw_mode=adamw_mode, **changed)
    torch.testing.assert_close(planes.master(), param, **TOLERANCE)
    if numel:
        torch.testing.assert_close(planes.exp_avg, reference.state[param]["exp_avg"], **TOLERANCE)
        torch.testing.assert_close(planes.exp_avg_sq, reference.state[param]["exp_avg_sq"], **TOLERANCE)
    planes.assert_guarded()


@pytest.mark.parametrize("format_", FORMATS)
def test_hundred_steps_equal_torch(format_: str) -> None:
    assert_tracks_torch(4097, format_, steps=100)


@where_fused_adam_is_ours
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize(
    "changed",
    [{}, {"weight_decay": 0.0}, {"beta1": 0.3, "eps": 1e-3}, {"beta1": 0.0, "beta2": 0.5}, {"lr": 10.0}],
    ids=str,
)
def test_hundred_steps_are_torchs_fused_adam_bit_for_bit(adamw_mode: bool, changed: dict[str, float]) -> None:
    """On fp32, in whole vectors of torch's."""
    numel = 64 * 100
    param = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    planes = Planes.start(param, "fp32")
    reference = torch_optimizer(param, adamw_mode, fused=True, **changed)
    for step in range(1, 101):
        grad = gradient(numel, "fp32", step)
        param.grad = grad.clone()
        reference.step()
        planes.step(grad, step, adamw_mode=adamw_mode, **changed)
    assert same_bits(planes.master(), param)
    for name in ("exp_avg", "exp_avg_sq"):
        assert same_bits(getattr(planes, name), reference.state[param][name])


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_decay_lands_where_torch_puts_it(adamw_mode: bool, weight_decay: float) -> None:
    """N16."""
    for format_ in FORMATS:
        assert_tracks_torch(1025, format_, steps=50, adamw_mode=adamw_mode, weight_decay=weight_decay)


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.95])
def test_any_beta1_equals_torch(beta1: float) -> None:
    assert_tracks_torch(257, "fp32/fp32", steps=20, beta1=beta1)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("format_", FORMATS)
def test_n18_every_length_equals_torch_and_stays_inside(format_: str, numel: int) -> None:
    """N18, with canaries around."""
    assert_tracks_torch(numel, format_, steps=3)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_n19_instruction_sets_give_the_same_bits(format_: str, adamw_mode: bool) -> None:
    """N19: N18 on each."""
    weight_format, grad_format = format_.split("/")
    for numel in NUMELS:
        start = Planes.midway(numel, weight_format, seed=numel)
        grad = gradient(numel, grad_format, numel)
        results = {}
        for isa in kernels.isas():
            results[isa] = start.clone()
            results[isa].step(grad, 3, isa=isa, adamw_mode=adamw_mode, grad_scale=0.37)
            results[isa].assert_guarded()
        for isa in kernels.isas():
            results[isa].assert_same(results["scalar"])


@pytest.mark.parametrize("format_", FORMATS)
def test_threads_and_cuts_do_not_show(format_: str) -> None:
    """Whole on one thread == in segments == in separate calls on shifted views, on 1 to 8 threads."""
    weight_format, grad_format = format_.split("/")
    numel = 3 * 65536 + 4097
    start, grad = Planes.midway(numel, weight_format), gradient(numel, grad_format, 0)
    whole = start.clone()
    whole.step(grad, 7, threads=1)
    rng = random.Random(5)
    for threads in range(1, 9):
        cuts = sorted({0, numel, *(rng.randrange(numel) for _ in range(threads))})
        segments = [Segment(a, b, 7, **HYPER) for a, b in itertools.pairwise(cuts)]
        in_segments = start.clone()
        in_segments.step_segments(grad, segments, threads=threads)
        in_segments.assert_same(whole)
        in_segments.assert_guarded()
        in_calls = start.clone()
        for a, b in itertools.pairwise(cuts):
            part = Planes(*(None if p is None else p[a:b] for p in vars(in_calls).values()))
            part.step(grad[a:b], 7, threads=threads)
        in_calls.assert_same(whole)


def test_denormals_do_not_depend_on_the_flush_setting_of_the_caller() -> None:
    start, grad = Planes.midway(200_000, "bf16"), gradient(200_000, "bf16", 0) * 1e-21
    start.exp_avg_sq.mul_(1e-38)
    expected = start.clone()
    expected.step(grad, 2, threads=1, weight_decay=0.0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero setting")
    try:
        flushing = start.clone()
        flushing.step(grad, 2, threads=2, weight_decay=0.0)
        assert torch.tensor([1e-39]).mul(1.0).item() == 0.0  # the caller's setting is back
    finally:
        torch.set_flush_denormal(False)
    flushing.assert_same(expected)
    assert (expected.exp_avg_sq[expected.exp_avg_sq > 0] < 1.1e-38).any()


def test_clones_updated_one_after_another_stay_equal() -> None:
    """N06: sub-groups that share a native step counter drift apart; here nothing is carried from call to call."""
    param = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    reference = torch_optimizer(param, adamw_mode=True)
    clones = [Planes.start(param, "bf16") for _ in range(3)]
    for step in range(1, 11):
        grad = gradient(1000, "bf16", step)
        param.grad = grad.float()
        reference.step()
        for clone in clones:
            clone.step(grad, step)
        clones[1].assert_same(clones[0])
        clones[2].assert_same(clones[0])
        torch.testing.assert_close(clones[0].master(), param, **TOLERANCE)


def test_steps_out_of_order_and_changed_betas_recompute_the_powers() -> None:
    """N06."""
    param = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    reference = torch_optimizer(param, adamw_mode=True)
    planes = Planes.start(param, "fp32")
    for call, (step, betas) in enumerate(
        [(2, (0.9, 0.999)), (5, (0.9, 0.999)), (3, (0.8, 0.95)), (1, (0.0, 0.5))]
    ):
        grad = gradient(1000, "fp32", call)
        param.grad = grad.clone()
        reference.param_groups[0]["betas"] = betas
        if reference.state[param]:
            reference.state[param]["step"].fill_(step - 1)
        else:
            reference.state[param].update(
                step=torch.tensor(float(step - 1)),
                exp_avg=torch.zeros_like(param),
                exp_avg_sq=torch.zeros_like(param),
            )
        reference.step()
        planes.step(grad, step, beta1=betas[0], beta2=betas[1])
        torch.testing.assert_close(planes.weight, param, **TOLERANCE)


def test_segments_keep_their_own_hyper_parameters_and_gaps_keep_their_bits() -> None:
    """N21: groups interleaved in one chunk, parameters without gradient between them, each at its own step."""
    numel = 100_000
    rng = random.Random(3)
    cuts = sorted({0, numel, *(rng.randrange(numel) for _ in range(40))})
    groups = [
        {"lr": 1e-3, "weight_decay": 0.1, "step": 1},
        {"lr": 1e-3, "weight_decay": 0.0, "step": 4, "beta2": 0.95},
        {"lr": 1e-1, "weight_decay": 0.0, "step": 9, "eps": 1e-6},
        None,
    ]
    start, grad = Planes.midway(numel, "bf16"), gradient(numel, "bf16", 0)
    chunk, apart = start.clone(), start.clone()
    segments = []
    for index, (a, b) in enumerate(itertools.pairwise(cuts)):
        group = groups[index % 4]
        if group is None:
            continue
        segments.append(Segment(a, b, **{**HYPER, **group}))
        Planes(*(p[a:b] for p in vars(apart).values())).step(grad[a:b], **group)
    chunk.step_segments(grad, segments, threads=3)
    chunk.assert_same(apart)
    chunk.assert_guarded()
    for a, b in list(itertools.pairwise(cuts))[3::4]:
        assert same_bits(chunk.weight[a:b], start.weight[a:b])
        assert same_bits(chunk.exp_avg_sq[a:b], start.exp_avg_sq[a:b])


@pytest.mark.parametrize("weight_format", ["bf16", "fp32"])
def test_no_rate_and_no_decay_leave_the_master_bit_for_bit(weight_format: str) -> None:
    planes = Planes.midway(4097, weight_format)
    before = planes.clone()
    planes.step(gradient(4097, "fp32", 0), 3, lr=0.0, weight_decay=0.0)
    assert same_bits(planes.master(), before.master())
    assert not torch.equal(planes.exp_avg, before.exp_avg)


def test_grad_scale_is_a_product_with_the_gradient() -> None:
    scaled, plain = Planes.midway(1000, "fp32"), Planes.midway(1000, "fp32")
    grad = gradient(1000, "fp32", 0)
    scaled.step(grad, 2, grad_scale=0.37)
    plain.step(grad * 0.37, 2)
    scaled.assert_same(plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_never_makes_a_plausible_weight(bad: float) -> None:
    """N12: the norm warns the caller; if the step is made nevertheless, that element, it alone, is not finite."""
    for isa in kernels.isas():
        planes, clean = Planes.midway(100, "bf16"), Planes.midway(100, "bf16")
        grad = gradient(100, "bf16", 0)
        clean.step(grad, 2, isa=isa)
        grad[[3, 98]] = bad  # one in a vector, one in the tail
        for step in (2, 3):
            planes.step(grad, step, isa=isa)
        assert not torch.isfinite(planes.weight[[3, 98]]).any()
        assert not torch.isfinite(planes.master()[[3, 98]]).any()
        assert torch.isfinite(planes.weight).sum() == 98


BAD_SEGMENTS = [
    ([Segment(0, 11, 1, **HYPER)], r"segment 0: \[0, 11\) must lie in \[0, 10\)"),
    ([Segment(5, 4, 1, **HYPER)], r"segment 0: \[5, 4\)"),
    ([Segment(-1, 4, 1, **HYPER)], "segment 0: begin and end must not be negative"),
    ([Segment(0, 5, 1, **HYPER), Segment(4, 8, 1, **HYPER)], r"segment 1: \[4, 8\) must lie in \[5, 10\)"),
    ([Segment(0, 5, 0, **HYPER)], "segment 0: step must be at least 1, got 0"),
    ([Segment(0, 5, 1, **{**HYPER, "beta1": 1.0})], r"beta1 must be in \[0, 1\), got 1"),
    ([Segment(0, 5, 1, **{**HYPER, "beta2": float("nan")})], "beta2 must be"),
    ([Segment(0, 5, 1, **{**HYPER, "eps": -1.0})], "eps must be finite and not negative"),
    ([Segment(0, 5, 1, **{**HYPER, "lr": float("inf")})], "lr must be finite"),
]


@pytest.mark.parametrize(("segments", "message"), BAD_SEGMENTS)
def test_a_bad_segment_is_refused_before_anything_is_written(segments: list[Segment], message: str) -> None:
    planes, before = Planes.midway(10, "bf16"), Planes.midway(10, "bf16")
    with pytest.raises(ValueError, match=message):
        planes.step_segments(gradient(10, "bf16", 0), segments)
    planes.assert_same(before)
