"""The kernels of Lion, Adagrad and SGD against plain torch, against themselves, and at their edges."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from planes import NUMELS, same_bits, where_fused_adam_is_ours
from rule_planes import (
    FORMATS,
    KINDS,
    MOMENT_NAMES,
    RulePlanes,
    gradient,
    segment,
    torch_optimizer,
)

from offload.optim import kernels, rule_kernels

TOLERANCE = {"rtol": 2e-6, "atol": 1e-7}


def track_torch(
    kind: str, numel: int, format_: str, steps: int, **changed: object
) -> tuple[RulePlanes, torch.Tensor]:
    """Ours and torch's after so many steps from the same start: a moment that nothing is in yet."""
    weight_format, _, _ = format_.split("/")
    param = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    planes = RulePlanes.of(
        kind, param, torch.full((numel,), 7.0), weight_format
    )  # a plane not read in step 1
    if kind == "lion":
        planes.moment.zero_()
    reference = torch_optimizer(kind, param, **changed)
    for step in range(1, steps + 1):
        grad = gradient(numel, format_, step)
        param.grad = grad.float()
        reference.step()
        planes.step(grad, step, **{key: value for key, value in changed.items() if key != "fused"})
    planes.assert_guarded()
    if planes.moment is not None and numel:
        expected = reference.state[param][MOMENT_NAMES[kind]]
        torch.testing.assert_close(planes.moment, expected, **TOLERANCE)
    return planes, param


@where_fused_adam_is_ours
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_steps_are_torchs_bit_for_bit(kind: str) -> None:
    """Weights in fp32 and in two planes, each type of gradient, and a length that is no whole vector."""
    for format_ in ("fp32/fp32/fp32", "fp32/fp32/fp16", "bf16/fp32/bf16", "bf16/fp32/fp16", "bf16/fp32/fp32"):
        planes, param = track_torch(kind, 4097, format_, steps=100)
        assert same_bits(planes.master(), param), format_


CHANGED = [
    ("lion", {"weight_decay": 0.0}),
    ("lion", {"beta1": 0.0, "beta2": 0.5}),
    ("adagrad", {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "weight_decay": 0.0}),
    ("momentum", {"dampening": 0.0, "weight_decay": 0.0}),
    ("momentum", {"momentum": 1.5, "lr": 1e-5}),
    ("nesterov", {"weight_decay": 0.3}),
    ("sgd", {"weight_decay": 0.0}),
]


@where_fused_adam_is_ours
@pytest.mark.parametrize(("kind", "changed"), CHANGED, ids=str)
def test_numbers_are_where_torch_has_them(kind: str, changed: dict[str, float]) -> None:
    planes, param = track_torch(kind, 1025, "fp32/fp32/fp32", steps=20, **changed)
    assert same_bits(planes.master(), param)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_unfused_adagrad_is_at_most_two_units_away(weight_decay: float) -> None:
    """After 100 steps. Its square root is MKL's, an ulp off in one of five.

    A weight that has come near zero keeps the error that it had when it was larger: 0.4 % are further off in units of
    their own last place, as torch's fused and unfused Adagrad are from each other.
    """
    planes, param = track_torch(
        "adagrad", 4097, "fp32/fp32/fp32", steps=100, fused=False, weight_decay=weight_decay
    )
    units = (planes.master().view(torch.int32) - param.view(torch.int32)).abs()
    assert units[param.abs() > 0.25].max() <= 2
    assert (planes.master() - param).abs().max() <= 2 * 2.0**-23 * param.abs().max()


@pytest.mark.parametrize("numel", NUMELS)
def test_every_length_equals_torch_and_stays_inside(numel: int) -> None:
    """N18, over every rule."""
    for kind, format_ in itertools.product(KINDS, FORMATS[:5]):
        planes, param = track_torch(kind, numel, format_, steps=3)
        torch.testing.assert_close(planes.master(), param, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format_", FORMATS)
def test_instruction_sets_give_the_same_bits(kind: str, format_: str) -> None:
    """N19, over every rule."""
    for numel in NUMELS:
        start, grad = RulePlanes.midway(kind, numel, format_, seed=numel), gradient(numel, format_, numel)
        results = {}
        for isa in kernels.isas():
            results[isa] = start.clone()
            results[isa].step(grad, 3, element=5, isa=isa, grad_scale=0.37, seed=9)
            results[isa].assert_guarded()
        for planes in results.values():
            planes.assert_same(results["scalar"])


@pytest.mark.parametrize("format_", ["bf16/fp32/bf16", "bf16/bf16/bf16", "fp32/bf16/fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_cuts_do_not_show(kind: str, format_: str) -> None:
    """Whole on one thread == in segments == in separate calls on shifted views, on 1 to 8 threads."""
    numel, first = 2 * 65536 + 4097, (1 << 32) - 70_000  # the noise gets new keys in the midst
    start, grad = RulePlanes.midway(kind, numel, format_), gradient(numel, format_, 0)
    whole = start.clone()
    whole.step(grad, 7, element=first, threads=1, seed=3)
    rng = random.Random(5)
    for threads in range(1, 9):
        cuts = sorted({0, numel, *(rng.randrange(numel) for _ in range(threads))})
        in_segments, in_calls = start.clone(), start.clone()
        segments = [segment(kind, a, b, 7, element=first + a) for a, b in itertools.pairwise(cuts)]
        in_segments.run(grad, segments, threads=threads, seed=3)
        in_segments.assert_same(whole)
        for a, b in itertools.pairwise(cuts):
            in_calls.part(a, b).step(grad[a:b], 7, element=first + a, threads=threads, seed=3)
        in_calls.assert_same(whole)


def test_segments_keep_their_own_numbers_and_gaps_their_bits() -> None:
    """A group without momentum beside one with it: its part of the plane is left alone."""
    numel, format_ = 10_000, "bf16/fp32/bf16"
    start, grad = RulePlanes.midway("momentum", numel, format_), gradient(numel, format_, 0)
    chunk, apart = start.clone(), start.clone()
    groups = [
        (0, 3000, {"lr": 0.1}),
        (3000, 5001, {"momentum": 0.0}),
        (6000, 10_000, {"nesterov": True, "dampening": 0.0}),
    ]
    chunk.run(grad, [segment("momentum", a, b, 4, **numbers) for a, b, numbers in groups], threads=3)
    for a, b, numbers in groups:
        apart.part(a, b).step(grad[a:b], 4, **numbers)
    chunk.assert_same(apart)
    assert same_bits(chunk.moment[3000:6000], start.moment[3000:6000])
    assert same_bits(chunk.weight[5001:6000], start.weight[5001:6000])
    assert not torch.equal(chunk.weight[3000:5001], start.weight[3000:5001])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rate_and_no_decay_leave_the_master_bit_for_bit(kind: str) -> None:
    planes = RulePlanes.midway(kind, 4097, "bf16/fp32/bf16")
    before = planes.clone()
    planes.step(gradient(4097, "bf16", 0), 3, lr=0.0, weight_decay=0.0)
    assert same_bits(planes.master(), before.master())
    assert planes.moment is None or not torch.equal(planes.moment, before.moment)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_never_makes_a_plausible_weight(kind: str, bad: float) -> None:
    """Lion's step would have the same size as ever: its sign of what is not finite is NaN."""
    for isa in kernels.isas():
        planes = RulePlanes.midway(kind, 100, "bf16/fp32/bf16")
        grad = gradient(100, "bf16", 0)
        grad[[3, 98]] = bad  # one in a vector, one in the tail
        for step in (2, 3):
            planes.step(grad, step, isa=isa)
        assert not torch.isfinite(planes.master()[[3, 98]]).any()
        assert torch.isfinite(planes.weight).sum() == 98


def test_lions_sign_of_zero_and_of_denormals_is_torchs() -> None:
    values = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 1e-40, -1e-40, 3.0, -3.0] * 5)
    for isa in kernels.isas():
        planes = RulePlanes.of("lion", torch.zeros(40), torch.zeros(40), "fp32")
        planes.step(values, 1, beta1=0.0, lr=1.0, weight_decay=0.0, isa=isa)
        assert torch.equal(planes.master(), -values.sign())


# -- rounded moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lion", "adagrad", "momentum"])
def test_a_rounded_moment_is_a_neighbour_and_right_on_average(kind: str) -> None:
    """Each element next to the exact value, and the mean over seeds at it; the weight is that of the exact moment."""
    numel, seeds = 512, 400
    start = RulePlanes.midway(kind, numel, "fp32/bf16/fp32")
    exact = RulePlanes(kind, start.weight.clone(), None, start.moment.float())
    grad = gradient(numel, "fp32", 0)
    exact.step(grad, 3)
    total = torch.zeros(numel, dtype=torch.float64)
    unit = torch.exp2(exact.moment.abs().log2().floor() - 7)
    for seed in range(seeds):
        rounded = start.clone()
        rounded.step(grad, 3, seed=seed)
        assert same_bits(rounded.weight, exact.weight)
        assert bool(((rounded.moment.float() - exact.moment).abs() < unit).all())
        total += rounded.moment.double()
    error = (total / seeds - exact.moment.double()) / unit
    assert error.abs().max() < 5 * 0.5 / seeds**0.5  # the deviation of one draw is at most half a unit
    assert abs(float(error.mean())) < 5 * 0.5 / (seeds * numel) ** 0.5


def test_a_slow_moment_in_bf16_does_not_stand_still() -> None:
    """A sum that grows by less than half a unit of its last place in each step."""
    planes = RulePlanes.of("adagrad", torch.zeros(4096), torch.ones(4096, dtype=torch.bfloat16), "fp32")
    grad = torch.full((4096,), 0.03)
    for step in range(2, 102):
        planes.step(grad, step, weight_decay=0.0)
    assert float(planes.moment.float().mean()) == pytest.approx(1 + 100 * 0.03**2, rel=2e-3)


def test_a_finite_moment_stays_finite() -> None:
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    planes = RulePlanes.of("momentum", torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16), "fp32")
    planes.step(largest, 1, lr=0.0, weight_decay=0.0)
    assert torch.isfinite(planes.moment).all()


# -- what is refused --------------------------------------------------------------------------------------

BAD = [
    ("lion", {"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
    ("lion", {"lr": float("inf")}, "lr must be finite"),
    ("adagrad", {"lr_decay": -1.0}, "lr_decay must be finite and not negative"),
    ("adagrad", {"initial_accumulator_value": float("nan")}, "initial_accumulator_value must be"),
    ("adagrad", {"eps": -1e-8}, "eps must be"),
    ("momentum", {"momentum": -0.1}, "momentum must be finite and not negative"),
    ("momentum", {"dampening": float("nan")}, "dampening must be finite"),
    ("sgd", {"weight_decay": float("inf")}, "weight_decay must be finite"),
]


@pytest.mark.parametrize(("kind", "changed", "message"), BAD, ids=str)
def test_a_bad_number_is_refused_before_anything_is_written(
    kind: str, changed: dict[str, float], message: str
) -> None:
    planes = RulePlanes.midway(kind, 10, "bf16/fp32/bf16")
    before, grad = planes.clone(), gradient(10, "bf16", 0)
    segments = [segment(kind, 0, 4, 2), segment(kind, 4, 10, 2, **changed)]
    with pytest.raises(ValueError, match=f"segment 1: {message}"):
        planes.run(grad, segments)
    planes.assert_same(before)


def test_bad_segments_and_arrays_are_refused() -> None:
    planes, grad = RulePlanes.midway("momentum", 10, "bf16/fp32/bf16"), gradient(10, "bf16", 0)
    before = planes.clone()
    for segments, message in (
        ([segment("momentum", 0, 11, 1)], r"segment 0: \[0, 11\) must lie in \[0, 10\)"),
        (
            [segment("momentum", 0, 5, 1), segment("momentum", 4, 8, 1)],
            r"segment 1: \[4, 8\) must lie in \[5, 10\)",
        ),
        ([segment("momentum", -1, 5, 1)], "segment 0: begin and end must not be negative"),
        ([segment("momentum", 0, 5, 0)], "segment 0: step must be at least 1"),
        ([segment("momentum", 0, 5, 1, element=-1)], "segment 0: element must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            planes.run(grad, segments)
    arguments = [planes.weight, planes.residual, planes.moment, grad]
    for position, array, message in (
        (1, torch.zeros(10, dtype=torch.int8), r"residual is torch\.int8"),
        (2, torch.zeros(9), "momentum_buffer has 9 elements"),
        (2, torch.zeros(10, dtype=torch.int8), r"momentum_buffer is torch\.int8"),
        (2, None, "momentum 0.9 needs a momentum_buffer"),
        (3, torch.zeros(10, dtype=torch.float64), r"grad is torch\.float64"),
    ):
        changed = [*arguments[:position], array, *arguments[position + 1 :]]
        with pytest.raises(ValueError, match=message):
            rule_kernels.sgd_segments(*changed, [segment("momentum", 0, 10, 1)])
    with pytest.raises(ValueError, match="share memory"):
        shared = torch.zeros(10)
        rule_kernels.sgd_segments(shared, None, shared, grad.float(), [segment("momentum", 0, 10, 1)])
    planes.assert_same(before)
