"""Adam in torch operations against the C++ kernel: the same bits, for every format, mode and value."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from planes import FORMATS, HYPER, NUMELS, Planes, gradient, guarded, guards_intact, same_bits

from offload import ConfigError
from offload.optim import Adam, DeviceAdam, Segment, device_check, device_kernels, kernels
from offload.optim.coefficients import check_segments, make_coefficients, to_fp32

MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149
EDGES = [0.0, TINY, 3 * TINY, 2.0**-127, 2.0**-126 - TINY, 2.0**-126, 2.0**-75, 2.0**-24, 2.0**-23, 0.5]
EDGES += [1 - 2.0**-24, 1.0, 1 + 2.0**-23, 1.5, 2 - 2.0**-23, 3.0, 2.0**24, 2.0**103, 2.0**127, MAX]
EDGES += [math.inf, math.nan]
EDGES += [-edge for edge in EDGES]

# Significands whose product is just off a power of two: 2^46 + 1 and 2^46 - 1. Half a last place of an addend
# times that is a halfway point in fp64, and not in truth: whoever rounds twice is found out.
JUST_ABOVE = (8384513.0, 8392705.0)
JUST_BELOW = (2.0**23 + 1, 2.0**23 - 1)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_floats(numel: int, seed: int, exponents: tuple[int, int] = (-149, 127)) -> torch.Tensor:
    significand = torch.rand(numel, generator=rng(seed), dtype=torch.float64) + 1
    sign = torch.randint(2, (numel,), generator=rng(seed + 1)) * 2 - 1
    exponent = torch.randint(*exponents, (numel,), generator=rng(seed + 2))
    return (significand * sign * torch.exp2(exponent.double())).float()


def adversarial(numel: int, seed: int) -> torch.Tensor:
    """Half edge values, half of any magnitude."""
    edges = torch.tensor(EDGES)[torch.randint(len(EDGES), (numel,), generator=rng(seed + 3))]
    return torch.where(torch.rand(numel, generator=rng(seed + 4)) < 0.5, edges, random_floats(numel, seed))


def adversarial_planes(numel: int, weight_format: str, seed: int) -> Planes:
    planes = Planes.start(adversarial(numel, seed), weight_format)
    planes.exp_avg.copy_(adversarial(numel, seed + 10))
    planes.exp_avg_sq.copy_(adversarial(numel, seed + 20))
    return planes


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, any NaN for any NaN."""
    return same_bits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)) and torch.equal(
        a.isnan(), b.isnan()
    )


def assert_same_values(a: Planes, b: Planes) -> None:
    for name, one in vars(a).items():
        assert one is None or same_values(one, getattr(b, name)), name
    a.assert_guarded()


def device_step(planes: Planes, grad: torch.Tensor, segments: list[Segment], **options: object) -> None:
    device_kernels.adam_segments(*vars(planes).values(), grad, segments, **options)


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    out = torch.empty_like(a)
    device_kernels._fma(a, b, c, out, device_kernels._Scratch.empty(a.numel(), a.device))
    return out


def rounded(exact: Fraction) -> float:
    """The nearest fp32 value, ties to even: from the definition."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    value = round(exact / unit) * unit
    return math.copysign(math.inf, exact) if abs(value) > MAX else float(value)


def exact_fma(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c  # the product of finite fp32 values is finite in double
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # exact, with the sign of IEEE
    return rounded(exact) or math.copysign(0.0, exact)


def assert_fma_exact(triples: list[tuple[float, float, float]]) -> None:
    a, b, c = (torch.tensor(column) for column in zip(*triples, strict=True))
    expected = torch.tensor([exact_fma(*triple) for triple in triples], dtype=torch.float32)
    assert same_values(fma(a, b, c), expected)


def test_fma_of_all_edge_values_is_exact() -> None:
    edges = [*EDGES[:22], -1.0, -TINY, -0.0, -(2.0**-126), -MAX, -math.inf]
    assert_fma_exact(list(itertools.product(edges, repeat=3)))


def test_fma_at_halfway_points_is_exact() -> None:
    """A product of half a last place of the addend, or 2^-46 of it off, or further."""
    triples = []
    for addend in [*random_floats(400, 1, (-149, 126)).tolist(), MAX, -MAX, TINY, 1.0, 2.0**-126]:
        half = math.ldexp(1.0, max(math.frexp(addend)[1] - 24, -149) - 1)
        scale = 2.0 ** (math.frexp(half)[1] // 2)
        for one, other in (JUST_ABOVE, JUST_BELOW):
            a, b = one / 2**23 * scale, other / 2**23 * (half / scale)
            triples += [(a, b, addend), (a, -b, addend)]
        for near in (1.0, 1 + 2.0**-23, 1 - 2.0**-24, 0.5, 0.5 + 2.0**-24, 1.5, 3.0):
            triples += [(scale * near, half / scale, addend), (scale * near, -half / scale, addend)]
        triples += [(TINY, TINY, addend), (TINY, -TINY, addend)]
    assert_fma_exact(triples)


def test_a_million_random_fma_equal_the_hardware() -> None:
    """With beta1 = 0 the kernel's exp_avg is fma(master, weight_decay, gradient)."""
    runs, length = 1000, 1000
    numel = runs * length
    decays = random_floats(runs, 2, (-40, 40))
    decays[::4] = JUST_ABOVE[1]
    decays[1::4] = JUST_BELOW[1]
    a, b = random_floats(numel, 3, (-60, 60)), decays.repeat_interleave(length)
    for row, (one, _) in enumerate((JUST_ABOVE, JUST_BELOW)):
        rows = a.view(runs, length)[row::4]
        rows.copy_(
            one * torch.exp2(torch.randint(-60, 60, rows.shape, generator=rng(7)).float()) * rows.sign()
        )
    product = a.double() * b
    near = (product * torch.exp2(torch.randint(-30, 31, (numel,), generator=rng(4)).double())).float()
    cancelling = (-product * (1 + 2.0**-23 * torch.randint(-3, 4, (numel,), generator=rng(5)))).float()
    c = torch.where(torch.rand(numel, generator=rng(6)) < 0.6, near, cancelling)
    halfway = (product.abs() * random_floats(numel, 8, (24, 25)).double()).float()  # half a last place of it
    c.view(runs, length // 2, 2)[..., 0] = halfway.view(runs, length // 2, 2)[..., 0]
    segments = [
        Segment(i * length, (i + 1) * length, 1, 1e-3, 0.0, 0.999, 1e-8, decay)
        for i, decay in enumerate(decays.tolist())
    ]
    expected = torch.zeros(numel)
    kernels.adam_segments(
        a.clone(), None, expected, torch.zeros(numel), c, segments, adamw_mode=False, threads=1
    )
    known = expected.isfinite()  # 0 * inf in the kernel's interpolation
    assert known.float().mean() > 0.99
    assert same_values(fma(a, b, c)[known], expected[known])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_a_thousand_steps_apart_equal_the_kernel(format_: str, adamw_mode: bool) -> None:
    weight_format, grad_format = format_.split("/")
    numel = 5003
    for start in (Planes.midway(numel, weight_format), adversarial_planes(numel, weight_format, 7)):
        ours, kernel = start.clone(), start.clone()
        for step, (beta1, eps, decay) in zip(
            (1, 2, 3, 30, 999, 1000), itertools.product((0.9, 0.3), (1e-8, 0.0), (0.1, 0.0)), strict=False
        ):
            grad = gradient(numel, grad_format, step)
            if step != 3:
                grad[:2000] = adversarial(2000, step)
            segment = Segment(0, numel, step, 1e-2, beta1, 0.999, eps, decay)
            kernel.step_segments(grad, [segment], adamw_mode=adamw_mode, grad_scale=0.37, threads=1)
            device_step(ours, grad, [segment], adamw_mode=adamw_mode, grad_scale=0.37)
            assert_same_values(ours, kernel)


def test_coefficients_are_those_of_the_kernel() -> None:
    """400 segments of their own hyper-parameters; one last bit off in one of them would show."""
    draw = random.Random(8)
    length, segments = 48, []
    for index in range(400):
        betas = [draw.choice([0.0, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 2.0**-53, draw.random()]) for _ in "12"]
        eps, decay = (
            draw.choice([0.0, 1e-15, 1e-8, 1.0]),
            draw.choice([0.0, 0.1, -0.01, 1e-60, draw.random()]),
        )
        step, lr = (
            draw.choice([1, 2, 1000, 2**40, draw.randrange(1, 5000)]),
            draw.choice([1e-3, 1.0, draw.random()]),
        )
        segments.append(Segment(index * length, (index + 1) * length, step, lr, *betas, eps, decay))
    numel = 400 * length
    grad = gradient(numel, "fp32", 9)
    for adamw_mode in (True, False):
        ours, kernel = Planes.midway(numel, "fp32"), Planes.midway(numel, "fp32")
        kernel.step_segments(grad, segments, adamw_mode=adamw_mode, threads=1)
        device_step(ours, grad, segments, adamw_mode=adamw_mode)
        assert_same_values(ours, kernel)


def test_coefficients_are_fp32_values_and_overflow_to_infinity() -> None:
    coefficients = make_coefficients(Segment(0, 1, 3, **HYPER), adamw_mode=True)
    assert all(to_fp32(value) == value for value in coefficients)
    assert to_fp32(1e300) == math.inf
    assert to_fp32(TINY / 2) == 0.0


@pytest.mark.parametrize("format_", FORMATS)
def test_slices_and_segments_do_not_show(format_: str) -> None:
    weight_format, grad_format = format_.split("/")
    numel = 3001
    start, grad = Planes.midway(numel, weight_format), gradient(numel, grad_format, 1)
    kernel = start.clone()
    cuts = sorted({0, numel, *random.Random(10).sample(range(numel), 12)})
    segments = [
        Segment(a, b, 1 + i, **{**HYPER, "weight_decay": 0.1 * (i % 2)})
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
        if i % 3  # gaps keep their bits
    ]
    segments.insert(1, Segment(segments[0].end, segments[0].end, 1, **HYPER))
    kernel.step_segments(grad, segments, threads=1)
    for slice_elements in (63, 64, 1000, 3001, 1 << 20):
        ours = start.clone()
        device_step(ours, grad, segments, slice_elements=slice_elements)
        ours.assert_same(kernel)
        ours.assert_guarded()


@pytest.mark.parametrize("numel", NUMELS[:9])
def test_every_short_length_equals_the_kernel(numel: int) -> None:
    ours, kernel = Planes.midway(numel, "bf16"), Planes.midway(numel, "bf16")
    grad = gradient(numel, "bf16", 0)
    kernel.step(grad, 3, threads=1)
    device_step(ours, grad, [Segment(0, numel, 3, **HYPER)])
    ours.assert_same(kernel)


def test_a_scale_on_the_device_is_the_same_scale() -> None:
    grad = gradient(100, "bf16", 0)
    segment = Segment(0, 100, 2, **HYPER)
    results = []
    for scale in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1)):
        planes = Planes.midway(100, "bf16")
        device_step(planes, grad, [segment], grad_scale=scale)
        results.append(planes)
    results[1].assert_same(results[0])
    results[2].assert_same(results[0])
    with pytest.raises(ValueError, match=r"grad_scale has shape \(1,\) on cpu; it must be a float or a 0-d"):
        device_step(results[0], grad, [segment], grad_scale=torch.ones(1))


def test_denormals_survive_a_caller_that_flushes_them() -> None:
    start, grad = Planes.midway(1000, "bf16"), gradient(1000, "bf16", 0) * 1e-21
    start.exp_avg_sq.mul_(1e-38)
    ours, kernel, segment = start.clone(), start.clone(), Segment(0, 1000, 2, **HYPER)
    kernel.step_segments(grad, [segment], threads=1)
    tiny = torch.full((1000,), TINY)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero setting")
    try:
        device_step(ours, grad, [segment])
        sums = device_kernels.block_square_sums(tiny)
        assert torch.tensor([1e-39]).mul(1.0).item() == 0.0  # the caller's setting is back
    finally:
        torch.set_flush_denormal(False)
    ours.assert_same(kernel)
    assert sums.tolist() == [1000 * TINY**2]


BAD = [
    {"begin": -1},
    {"begin": 8, "end": 7},
    {"end": 11},
    {"step": 0},
    {"lr": math.inf},
    {"beta1": 1.0},
    {"beta2": math.nan},
    {"eps": -1.0},
    {"weight_decay": math.nan},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_segment_gets_the_message_of_the_kernel(bad: dict[str, float]) -> None:
    good = {"begin": 4, "end": 10, "step": 1, **HYPER}
    segments = [Segment(0, 4, 1, **HYPER), Segment(**{**good, **bad})]
    planes, before, grad = Planes.midway(10, "bf16"), Planes.midway(10, "bf16"), gradient(10, "bf16", 0)
    with pytest.raises(ValueError) as kernels_error:
        planes.step_segments(grad, segments)
    with pytest.raises(ValueError) as error:
        device_step(planes, grad, segments)
    assert str(error.value) == str(kernels_error.value)
    planes.assert_same(before)
    with pytest.raises(ValueError, match=r"segment 1: \[2, 8\) must lie in \[4, 10\)"):
        check_segments([segments[0], Segment(2, 8, 1, **HYPER)], 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"residual": torch.zeros(9, dtype=torch.int16)}, "residual has 9 elements; the first array"),
        ({"weight": torch.zeros(10)}, "weight is torch.float32; it must be torch.bfloat16"),
        ({"exp_avg": torch.zeros(20)[::2]}, "exp_avg must be flat and contiguous"),
        (
            {"grad": torch.zeros(10, dtype=torch.float16)},
            "grad is torch.float16; it must be torch.bfloat16 or",
        ),
        ({"exp_avg_sq": torch.zeros(10, device="meta")}, "exp_avg_sq is on meta; the first array"),
        ({"residual": None, "weight": torch.zeros(10)}, "grad is torch.bfloat16; it must be torch.float32"),
    ],
)
def test_a_bad_plane_is_refused_by_name(changed: dict[str, torch.Tensor], message: str) -> None:
    planes = {**vars(Planes.midway(10, "bf16")), "grad": gradient(10, "bf16", 0), **changed}
    with pytest.raises(ValueError, match=message):
        device_kernels.adam_segments(**planes, segments=[Segment(0, 10, 1, **HYPER)])


def test_split_join_and_assign_equal_the_kernel_on_every_pattern() -> None:
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    patterns = ((torch.arange(1 << 16)[:, None] << 16) | low).flatten()
    master = patterns.to(torch.int32).view(torch.float32)
    planes = [(guarded(master.bfloat16()), guarded(master.to(torch.int16))) for _ in "12"]
    device_kernels.split_master(master, *planes[0])
    kernels.split_master(master, *planes[1])
    assert all(same_bits(a, b) and guards_intact(a) for a, b in zip(*planes, strict=True))
    # Any pair can be joined, also one that no split makes: the sum wraps.
    weight = (patterns >> 16).to(torch.int16).view(torch.bfloat16)
    residual = low.to(torch.int16).repeat(1 << 16)
    joined = [guarded(torch.zeros(len(master))) for _ in "12"]
    device_kernels.join_master(weight, residual, joined[0])
    kernels.join_master(weight, residual, joined[1])
    assert same_bits(*joined)
    assert guards_intact(joined[0])
    fresh = planes[0][0].clone()
    fresh.view(torch.int16)[::3] += 1
    device_kernels.assign_weight(*planes[0], fresh)
    kernels.assign_weight(*planes[1], fresh)
    assert all(same_bits(a, b) and guards_intact(a) for a, b in zip(*planes, strict=True))
    assert planes[0][1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_square_sums_equal_the_kernel(dtype: torch.dtype) -> None:
    block = kernels.SQUARE_BLOCK
    for numel in (0, 1, 15, 17, 1025, block - 1, block, block + 1, 3 * block + 777):
        for values in (torch.randn(numel, generator=rng(numel)), random_floats(numel, 11)):
            grad = guarded(values.to(dtype))
            sums = device_kernels.block_square_sums(grad)
            assert sums.numpy().tobytes() == kernels.block_square_sums(grad, threads=1).tobytes()
            assert device_kernels.all_finite(sums).item() == grad.isfinite().all().item()


@pytest.mark.parametrize("rows_bytes", [1, 1 << 12, 1 << 30])
def test_square_sums_of_several_arrays_are_those_of_each(
    rows_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kernels, "ROWS_BYTES_MAX", rows_bytes)
    block = kernels.SQUARE_BLOCK
    grads = [guarded(random_floats(numel, numel)) for numel in (block + 1, 0, 5, 2 * block, 3 * block + 777)]
    alone = [kernels.block_square_sums(grad, threads=1).tobytes() for grad in grads]
    assert device_kernels.block_square_sums(*grads).numpy().tobytes() == b"".join(alone)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_on_the_device(bad: float) -> None:
    for position in (0, 16_383, 16_384, 39_999):
        grad = torch.zeros(40_000)
        assert device_kernels.all_finite(device_kernels.block_square_sums(grad))
        grad[position] = bad
        assert not device_kernels.all_finite(device_kernels.block_square_sums(grad))
    largest = device_kernels.block_square_sums(torch.full((20_000,), MAX))
    assert device_kernels.all_finite(largest)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor has no values: whatever asks for one raises."""
    monkeypatch.setattr(device_kernels, "SQUARE_BLOCK", 64)  # few rows: meta operations are slow

    def meta(*dtypes: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(1000, dtype=dtype, device="meta") for dtype in dtypes]

    fp32, bf16, int16 = torch.float32, torch.bfloat16, torch.int16
    scale = torch.empty((), device="meta")
    for adamw_mode in (True, False):
        planes = meta(bf16, int16, fp32, fp32, bf16)
        segments = [Segment(0, 1000, 1, **HYPER)]
        device_kernels.adam_segments(*planes, segments, adamw_mode=adamw_mode, grad_scale=scale)
    device_kernels.split_master(*meta(fp32, bf16, int16))
    device_kernels.join_master(*meta(bf16, int16, fp32))
    device_kernels.assign_weight(*meta(bf16, int16, bf16))
    assert device_kernels.all_finite(device_kernels.block_square_sums(*meta(bf16))).is_meta


@pytest.mark.parametrize(("weight_format", "grad_format"), [f.split("/") for f in FORMATS])
def test_scratch_is_what_the_plan_counts(
    weight_format: str, grad_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kernels, "SLICE_ELEMENTS", 10_000)
    planes, grad = Planes.midway(35_000, weight_format), gradient(35_000, grad_format, 0)
    segments = [Segment(0, 35_000, 1, **HYPER)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        device_step(planes, grad, segments, slice_elements=10_000)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    used = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    counted = DeviceAdam().scratch_bytes(35_000)
    assert counted * 0.95 < max(used) < counted + 4096  # scalars and alignment
    assert DeviceAdam().scratch_bytes(100) == 100 * device_kernels.SCRATCH_BYTES_PER_ELEMENT


@pytest.mark.parametrize("weight_format", ["bf16", "fp32"])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_the_class_is_the_cpu_class_elsewhere(weight_format: str, adamw_mode: bool) -> None:
    numel = 3000
    grads = [gradient(numel, "fp32", step) for step in (1, 2, 3)]
    master = torch.randn(numel, generator=rng(12))
    results = []
    for optimizer in (
        Adam(weight_format=weight_format, adamw_mode=adamw_mode, threads=1),
        DeviceAdam(weight_format=weight_format, adamw_mode=adamw_mode),
    ):
        planes = {"weight": torch.empty(numel, dtype=optimizer.weight_dtype)}
        for spec in optimizer.state_specs(numel):
            planes[spec.name] = torch.full((numel,), 7, dtype=spec.dtype)
        optimizer.init_state(planes, master)
        for step, grad in enumerate(grads, 1):
            optimizer.update(planes, [Segment(0, numel, step, **HYPER)], grad, grad_scale=0.5)
        results.append(planes)
    assert list(results[0]) == list(results[1])
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])
    with pytest.raises(ConfigError, match="weight_format must be 'bf16' or 'fp32', got 'fp8'"):
        DeviceAdam(weight_format="fp8")


def test_the_check_finds_one_product_rounded_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert device_check.check_torch(cpu) == []
    monkeypatch.setattr(device_kernels, "_fma", lambda a, b, c, out, scratch: out.copy_(a * b + c))
    found = device_check.check_torch(cpu)
    assert any("exp_avg differs in" in line for line in found)
    assert any("residual differs in" in line for line in found)
