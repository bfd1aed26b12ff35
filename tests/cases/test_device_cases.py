"""Cases of compute with memory of its own, on the simulated accelerator: named as in the log of cases.

The oracle is the CPU run (the same kernel, so the same bits), a formula, or the accelerator's own books.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from devices import (
    HOMES,
    Counting,
    InTurn,
    Late,
    assert_same_bits,
    bits,
    config,
    rows,
    train,
    wide,
)
from torch import nn

import offload
from offload import ConfigError, OffloadError, PlanError
from offload.api import _move_buffers
from offload.links import DeviceLinks
from offload.tiers.host import HostTier

pytestmark = pytest.mark.timeout(120)
PAGE = 4096


@pytest.fixture
def simulate(monkeypatch):
    """Makes an accelerator the one that `prepare` finds; all are closed at the end."""
    opened = []

    def use(kind=Counting, seed=0, **settings):
        accelerator = kind(seed, **settings)
        opened.append(accelerator)
        monkeypatch.setattr(
            "offload.api.open_accelerator", lambda setting: None if setting == "cpu" else accelerator
        )
        return accelerator

    yield use
    for accelerator in opened:
        accelerator.close()


def on_cpu(steps=3, *, micro_batches=1, layers=4, **settings):
    """The oracle: losses and bits of the same loop with the CPU as the compute device."""
    settings = {"accelerator": "cpu", "gradient_accumulation_steps": micro_batches, **settings}
    plain = config("/unused", ("none", "none", "step"), **settings)
    model, optimizer = offload.prepare(wide(layers=layers), plain)
    with contextlib.closing(optimizer.engine):
        return train(model, optimizer, steps, micro_batches=micro_batches), bits(optimizer.engine)


# -- numerics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES[1:], ids="-".join)
def test_n14_copies_that_overlap_or_not_give_the_same_bits(home, swap_path, simulate):
    losses, expected = on_cpu()
    for seed in range(10):
        for kind in (InTurn, Late) if seed == 0 else (Late, Counting):
            simulate(kind, seed)
            model, optimizer = offload.prepare(wide(), config(swap_path, home))
            with contextlib.closing(optimizer.engine):
                assert train(model, optimizer) == losses
                assert_same_bits(bits(optimizer.engine), expected)


def test_n15_what_a_copy_reads_lives_until_the_copy_has_run(swap_path, simulate):
    """Weights on their way to the device when the run is closed and everything of it is given up."""
    accelerator = simulate(Late)
    model, optimizer = offload.prepare(wide(), config(swap_path, ("cpu", "cpu", "step")))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.layers[0](rows())  # starts the lifts of what comes next
    assert any(stream._work for name, stream in accelerator._streams.items() if name == "h2d")
    optimizer.engine.close()
    del optimizer
    gc.collect()
    blocks = [torch.full((1 << 16,), 7.0) for _ in range(64)]
    accelerator.close()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(blocks) == 64


def test_n15_a_gradient_on_its_way_outlives_every_reference_to_it(swap_path, simulate):
    """Late copies to the host; the memory that autograd has given up is filled with sevens meanwhile."""
    _, expected = on_cpu(1)
    simulate(Late)
    model, optimizer = offload.prepare(wide(), config(swap_path, ("cpu", "cpu", "step")))
    with contextlib.closing(optimizer.engine):
        loss = model(rows(seed=0))
        loss.backward()
        del loss
        gc.collect()
        blocks = [torch.full((64, 64), 7.0) for _ in range(64)]
        optimizer.step()
        assert_same_bits(bits(optimizer.engine), expected)
        assert len(blocks) == 64


class FusedAdam(torch.optim.Optimizer):
    """A kernel for states on a GPU: it must never see others."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def step(self, closure=None):
        raise AssertionError("ran")


@pytest.mark.parametrize("as_callable", [False, True])
def test_n24_an_unknown_fused_adam_is_refused(as_callable, swap_path, simulate):
    accelerator = simulate()
    model = wide()
    given = FusedAdam if as_callable else FusedAdam(model.parameters())
    with pytest.raises(
        ConfigError, match=r"a FusedAdam,? cannot be taken over; accepted are torch.optim.AdamW"
    ):
        offload.initialize(
            model=model, optimizer=given, config=config(swap_path, ("cpu", "cpu", "step"), optimizer=None)
        )
    assert accelerator.live_bytes == accelerator.registered_bytes == 0


def test_n24_torchs_fused_adam_is_replaced_and_said_so(swap_path, simulate, caplog):
    """Its groups count; the object itself never runs, and the update is the kernel's, where the state is."""
    simulate()
    model = wide()
    client = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    with caplog.at_level(logging.INFO, "offload"):
        engine, optimizer, _, _ = offload.initialize(
            model=model,
            optimizer=client,
            config=config(swap_path, ("cpu", "cpu", "step"), optimizer=None),
        )
    assert "fused chooses among torch's implementations; this AdamW is replaced" in caplog.text
    with contextlib.closing(optimizer.engine):
        for step in range(3):
            engine.backward(engine(rows(seed=100 * step)))
            engine.step()
        assert_same_bits(bits(optimizer.engine), on_cpu()[1])
        assert client.state == {}
        with pytest.raises(OffloadError, match=r"this AdamW was handed to offload.initialize"):
            client.step()


# -- memory -----------------------------------------------------------------------------------------------


def test_m01_pinned_memory_is_what_was_asked_for(simulate):
    """Sizes that an allocator of powers of two doubles nearly."""
    accelerator = simulate()
    tier = HostTier(accelerator)
    sizes = [1, PAGE, 129_500_001, (64 << 20) + 1, 33 << 20]
    for count, size in enumerate(sizes, 1):
        (piece,) = tier.allocate("weights", [size], pinned=True)
        assert piece.numel() == size
        assert tier.is_pinned(piece)
        asked = sum(sizes[:count])
        assert asked <= accelerator.registered_bytes <= asked + 2 * PAGE * count
    tier.allocate("ordinary", [PAGE])
    assert accelerator.registered_bytes <= sum(sizes) + 2 * PAGE * len(sizes)
    tier.close()
    assert accelerator.registered_bytes == 0


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_m01_the_plan_counts_the_bytes_that_are_taken(home, swap_path, simulate):
    """Line by line, on the host and on the device; what is pinned is part of it."""
    accelerator = simulate()
    model, optimizer = offload.prepare(wide(), config(swap_path, home))
    engine = optimizer.engine
    uncounted = ("gradients on their way", "update scratch")
    for tier in (engine._tiers.host, engine._tiers.device):
        name = "host" if isinstance(tier, HostTier) else "device"
        planned = {
            line.purpose: line.total
            for line in engine.plan.lines
            if line.tier == name and line.purpose not in uncounted
        }
        assert dict(tier.allocated) == planned
    on_host = sum(engine._tiers.host.allocated.values())
    assert accelerator.live_bytes == sum(engine._tiers.device.allocated.values())
    assert accelerator.registered_bytes <= on_host + PAGE * 8 * len(engine.plan.inventory.units)
    train(model, optimizer, 2)
    engine.close()
    assert accelerator.registered_bytes == 0


def resources():
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_m05_ten_runs_in_one_process_leave_nothing(home, swap_path, simulate):
    start = None
    for run in range(10):
        accelerator = simulate()
        model, optimizer = offload.prepare(wide(256), config(swap_path, home))
        for step in range(2):
            model(rows(width=256, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.engine.close()
        optimizer.engine.close()
        del model, optimizer
        gc.collect()
        assert accelerator.live_bytes == accelerator.registered_bytes == 0
        start = start or resources()  # after the first run: torch and the kernels keep their threads
        assert resources() == start
        assert list(swap_path.iterdir()) == []
        del accelerator
        if run == 2:
            begin = resident_bytes()
    assert resident_bytes() - begin < 50 << 20


def failing(monkeypatch, accelerator, what, number):
    """Call number ``number`` of one kind fails, later ones do not; returns how many there were."""
    calls = itertools.count(1)

    def wrap(call, kind, *args_of_error):
        def maybe(*args, **kwargs):
            if next(calls) == number:
                raise kind(*args_of_error)
            return call(*args, **kwargs)

        return maybe

    if what == "device memory":
        failing_call = wrap(accelerator.allocate, torch.OutOfMemoryError, "CUDA out of memory")
        monkeypatch.setattr(accelerator, "allocate", failing_call)
    elif what == "pinning":
        failing_call = wrap(accelerator.register, OffloadError, "cudaHostRegister: invalid argument (1)")
        monkeypatch.setattr(accelerator, "register", failing_call)
    elif what == "host memory":
        failing_call = wrap(mmap.mmap, OSError, 12, "Cannot allocate memory")
        monkeypatch.setattr("offload.tiers.host.mmap.mmap", failing_call)
    else:
        failing_call = wrap(offload.construct.initial_value, MemoryError, "no more")
        monkeypatch.setattr("offload.construct.initial_value", failing_call)
    return calls


@pytest.mark.parametrize("what", ["device memory", "pinning", "host memory", "a value"])
@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_m05_a_set_up_that_fails_anywhere_leaves_nothing(home, what, swap_path, simulate, monkeypatch):
    """The N-th call fails, for N = 1, 2, 3, ...: the model is as it was, and can be prepared again."""
    model = wide()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, failures = rows(), 0
    expected = model(x).item()
    on_cpu(1)
    start = resources()
    for number in itertools.count(1):
        accelerator = simulate()
        with monkeypatch.context() as patch:
            calls = failing(patch, accelerator, what, number)
            try:
                _, optimizer = offload.prepare(model, config(swap_path, home))
            except (PlanError, MemoryError) as error:
                failures += 1
                assert "\n" not in str(error)
            else:
                optimizer.engine.close()
                if next(calls) <= number:
                    break  # the call that should have failed has not come
                model = wide()
        gc.collect()
        assert accelerator.live_bytes == accelerator.registered_bytes == 0
        assert not accelerator._is_open
        assert resources() == start
        assert list(swap_path.iterdir()) == []
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        loss = model(x)
        assert loss.item() == expected
        loss.backward()
        model.zero_grad()
    on_host = home[:2] != ("none", "none")
    assert number > 1 or (what in ("pinning", "host memory") and not on_host)
    assert (failures > 0) == (what != "pinning" and (on_host or what != "host memory"))


@pytest.mark.parametrize("bytes_max", [0, 20_000, 1 << 20])
@pytest.mark.parametrize("home", HOMES[1:], ids="-".join)
def test_m10_where_memory_cannot_be_pinned_the_bits_are_the_same(
    home, bytes_max, swap_path, simulate, monkeypatch, caplog
):
    """One warning with the limit, and a staging buffer that could be pinned, or none where nothing can."""
    micro_batches = 2 if home[2] == "step" else 1
    losses, expected = on_cpu(2, precision="bf16", micro_batches=micro_batches)
    settings = {"precision": "bf16", "gradient_accumulation_steps": micro_batches}
    accelerator = simulate()
    accelerator.register_bytes_max = bytes_max
    monkeypatch.setattr(DeviceLinks, "STAGING_BYTES", (1 << 16, 1 << 13))
    with caplog.at_level(logging.WARNING, "offload"):
        model, optimizer = offload.prepare(wide(), config(swap_path, home, **settings))
        with contextlib.closing(optimizer.engine):
            got = train(model, optimizer, 2, micro_batches=micro_batches)
            state = bits(optimizer.engine)
    assert got == losses
    assert_same_bits(state, expected)
    warnings = [r.getMessage() for r in caplog.records if "cannot be pinned" in r.getMessage()]
    assert len(warnings) == (1 if bytes_max < 1 << 20 else 0)
    assert all("(memlock)" in text and "ulimit -l, now " in text for text in warnings)


def test_m12_a_closed_run_gives_the_device_memory_of_its_state_back(swap_path, simulate):
    """Between two phases: values go to host memory, the device has the weights only; then training goes on."""
    home, precision = ("none", "none", "step"), "bf16"
    losses, expected = on_cpu(4, precision=precision)
    accelerator = simulate()
    model, optimizer = offload.prepare(wide(), config(swap_path, home, precision=precision))
    engine = optimizer.engine
    got = train(model, optimizer, 2)
    weights, state = model.state_dict(), optimizer.state_dict()
    before = accelerator.live_bytes
    sizes = {line.purpose: line.total for line in engine.plan.lines if line.tier == "device"}
    assert before == sizes["weights"] + sizes["gradients"] + sizes["optimizer state"]
    engine.close()
    assert before - accelerator.live_bytes == sizes["gradients"] + sizes["optimizer state"]

    again = simulate()
    model, optimizer = offload.prepare(model, config(swap_path, home, precision=precision))
    assert accelerator.live_bytes == 0
    with contextlib.closing(optimizer.engine):
        optimizer.load_state_dict(state)
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), name
        assert again.live_bytes == before
        assert got + train(model, optimizer, 2, first=2) == losses
        assert_same_bits(bits(optimizer.engine), expected)


def test_m12_less_on_the_device_is_less_device_memory(swap_path, simulate):
    """What a plan says that it saves is saved."""
    taken = {}
    for home in HOMES:
        accelerator = simulate()
        model, optimizer = offload.prepare(wide(layers=8), config(swap_path, home))
        lines = [line for line in optimizer.engine.plan.lines if line.tier == "device"]
        planned = sum(
            line.total for line in lines if line.purpose not in ("gradients on their way", "update scratch")
        )
        train(model, optimizer, 1)
        assert accelerator.live_peak == accelerator.live_bytes == planned
        optimizer.engine.close()
        taken[home] = planned
    assert taken["none", "none", "step"] > taken["cpu", "none", "step"]
    assert taken["none", "cpu", "step"] > taken["cpu", "cpu", "step"] == taken["cpu", "cpu", "backward"]


# -- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_k09_loaded_state_goes_where_the_configuration_says(home, swap_path, simulate):
    """From a run that was elsewhere; not a byte more is taken on the device, and training goes on the same."""
    losses, expected = on_cpu(4, precision="bf16")
    saved = {}
    for source in (HOMES[0], HOMES[3]):
        simulate()
        model, optimizer = offload.prepare(wide(), config(swap_path, source, precision="bf16"))
        train(model, optimizer, 2)
        saved[source] = model.state_dict(), optimizer.state_dict()
        optimizer.engine.close()
    for weights, state in saved.values():
        accelerator = simulate()
        model, optimizer = offload.prepare(wide(), config(swap_path, home, precision="bf16"))
        engine = optimizer.engine
        with contextlib.closing(engine):
            before = accelerator.live_bytes
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            assert accelerator.live_peak == accelerator.live_bytes == before
            on_device = [accelerator.is_device(engine.read_chunk(chunk)) for chunk in engine.plan.chunks]
            assert set(on_device) == {home[1] == "none"}
            assert train(model, optimizer, 2, first=2) == losses[2:]
            assert_same_bits(bits(engine), expected)
            assert accelerator.live_peak == before


# -- model structure --------------------------------------------------------------------------------------


class Dequantize(torch.autograd.Function):
    """A product with a frozen weight that only its code and its side state describe."""

    @staticmethod
    def forward(ctx, x, weight):
        scale, zero = weight.quant_state
        ctx.weight = weight
        return x @ ((weight.to(torch.float32) - zero) * scale).T.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        scale, zero = ctx.weight.quant_state
        return grad @ ((ctx.weight.to(torch.float32) - zero) * scale).to(grad.dtype), None


class Quantized(nn.Module):
    """A quantised layer with a trained adapter beside it, as QLoRA has."""

    def __init__(self):
        super().__init__()
        code = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
        self.weight = nn.Parameter(code, requires_grad=False)
        self.weight.quant_state = (0.01, 128)
        self.weight.blocksize = 64
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return Dequantize.apply(x, self.weight) + self.up(self.down(x))


class QuantizedStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Quantized() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def quantized():
    torch.manual_seed(0)
    return QuantizedStack()


@pytest.mark.parametrize("has_device", [True, False])
@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_s12_quantised_weights_keep_their_type_bytes_and_attributes(home, has_device, swap_path, simulate):
    plain = quantized()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    expected = train(plain, reference)
    simulate()
    settings = config(swap_path, home, accelerator="auto" if has_device else "cpu")
    model, optimizer = offload.prepare(quantized(), settings)
    states = [layer.weight.quant_state for layer in model.layers]
    with contextlib.closing(optimizer.engine):
        torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-5, atol=0)
        for layer, other, state in zip(model.layers, plain.layers, states, strict=True):
            assert layer.weight.dtype is torch.uint8
            assert layer.weight.quant_state is state
            assert layer.weight.blocksize == 64
            assert not layer.weight.requires_grad
            with offload.gather(layer.weight):
                assert torch.equal(layer.weight, other.weight)
        weights = model.state_dict()
    for index, other in enumerate(plain.layers):
        assert weights[f"layers.{index}.weight"].dtype is torch.uint8
        assert torch.equal(weights[f"layers.{index}.weight"], other.weight)


class Buffered(nn.Module):
    """Running statistics, a counter that forward advances, a cache that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
        angles = torch.outer(torch.arange(8.0), 1 / 100 ** (torch.arange(32.0) / 32))
        self.register_buffer("rotary", torch.cat([angles.cos(), angles.sin()], dim=1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        x = self.first(x) * self.rotary[: x.shape[0]]
        return self.last(torch.tanh(self.norm(x))).square().mean()


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_s15_buffers_stay_with_compute_and_update(home, swap_path, simulate):
    torch.manual_seed(0)
    plain = Buffered()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    expected = train(plain, reference)
    torch.manual_seed(0)
    accelerator = simulate()
    model, optimizer = offload.prepare(Buffered(), config(swap_path, home))
    with contextlib.closing(optimizer.engine):
        torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-5, atol=0)
        own, others = dict(model.named_buffers()), dict(plain.named_buffers())
        assert own.keys() == others.keys()
        for name, value in own.items():
            assert value.device == accelerator.device
            assert not accelerator.knows(value)  # neither in a slot nor in a plane
            torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-7)
        assert model.calls == 3
        assert "rotary" not in model.state_dict()
        torch.testing.assert_close(model.state_dict()["norm.running_var"], plain.norm.running_var)
        model.eval()
        plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(rows()), plain(rows()), rtol=1e-5, atol=0)


def test_s15_every_buffer_moves_to_the_device():
    """Nested, not persistent, of integers: wherever it is, it ends on the device and keeps its type."""
    model = nn.Sequential(Buffered(), Buffered())
    types = {name: value.dtype for name, value in model.named_buffers()}
    _move_buffers(model, torch.device("meta"))
    assert {name: value.dtype for name, value in model.named_buffers()} == types
    assert all(value.is_meta for value in model.buffers())
    assert not any(param.is_meta for param in model.parameters())


# -- performance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_type", [None, "fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_p02_gradients_cross_in_two_bytes(accumulation_type, micro_batches, swap_path, simulate):
    """Per parameter and micro-batch, whatever they are added up in; measured at the copies themselves."""
    accelerator = simulate()
    settings = {
        "gradient_accumulation_steps": micro_batches,
        "data_types": {"grad_accum_dtype": accumulation_type},
    }
    model, optimizer = offload.prepare(
        wide(), config(swap_path, ("cpu", "cpu", "step"), precision="bf16", **settings)
    )
    with contextlib.closing(optimizer.engine):
        parameters = sum(param.numel() for param in model.parameters())
        train(model, optimizer, 2, micro_batches=micro_batches)
        assert accelerator.copied["d2h"] == 2 * 2 * micro_batches * parameters


@pytest.mark.parametrize("home", [("cpu", "cpu", "step"), ("nvme", "nvme", "step")], ids="-".join)
def test_p04_generation_inside_gather_moves_no_weight(home, swap_path, simulate):
    """Twenty tokens outside move the model twenty times over; inside `offload.gather` it is read once."""
    accelerator = simulate()
    model, optimizer = offload.prepare(wide(layers=8), config(swap_path, home))
    engine = optimizer.engine

    def generate():
        x = rows(1)
        with torch.no_grad():
            for _ in range(20):
                for layer in model.layers:
                    x = layer(x)
                model(x)
        return x

    with contextlib.closing(engine):
        whole = engine.plan.inventory.weight_bytes
        outside = generate()
        per_token = accelerator.copied["h2d"] / 20
        assert whole / 2 < per_token <= 2 * whole  # two passes; of each, what is not in a slot
        engine.settle()
        accelerator.copied.clear()
        moved, on_device = engine.ledger.link_bytes(), accelerator.live_bytes
        with offload.gather(model):
            storages = [param.data.untyped_storage() for param in model.parameters()]
            gathered = engine.ledger.link_bytes() - moved
            inside = generate()
            assert engine.ledger.link_bytes() - moved == gathered
        assert not accelerator.copied["h2d"]
        assert gathered["nvme_read"] <= whole * 2  # each parameter on its own, its unit at most once for each
        assert torch.equal(inside, outside)
        assert all(torch._C._storage_Use_Count(storage._cdata) == 1 for storage in storages)
        assert accelerator.live_bytes == on_device
        assert engine.report().link_bytes() - moved == gathered
        train(model, optimizer, 1)


# -- back-pressure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_on_their_way_never_take_more_than_the_plan_says(
    micro_batches, swap_path, simulate, monkeypatch
):
    """A link on which nothing arrives before it is waited for: the host waits, rather than making more."""
    simulate(Late)
    in_flight, peak = [], 0
    to_host = DeviceLinks.to_host

    def watched(self, host, device, plane):
        nonlocal peak
        ticket = to_host(self, host, device, plane)
        in_flight[:] = [(other, size) for other, size in in_flight if other._source is not None]
        in_flight.append((ticket, device.nbytes))
        peak = max(peak, sum(size for _, size in in_flight))
        return ticket

    monkeypatch.setattr(DeviceLinks, "to_host", watched)
    losses, expected = on_cpu(micro_batches=micro_batches, precision="bf16")
    settings = {"precision": "bf16", "gradient_accumulation_steps": micro_batches}
    model, optimizer = offload.prepare(wide(), config(swap_path, ("cpu", "cpu", "step"), **settings))
    engine = optimizer.engine
    with contextlib.closing(engine):
        # Reported as done only when waited for: polling moves nothing on.
        monkeypatch.setattr("offload.links.CopyTicket.done", lambda ticket: ticket._source is None)
        assert train(model, optimizer, micro_batches=micro_batches) == losses
        assert_same_bits(bits(engine), expected)
        unit = max(unit.elements for unit in engine.plan.inventory.units) * 2
        assert unit < peak <= engine.plan.grad_crossing_bytes == 2 * unit
        assert engine.ledger.stalls["gradients"] > 0


# -- budget -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_a_device_budget_is_hard_and_nothing_is_created_before_it_is_checked(home, swap_path, simulate):
    model = wide()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = simulate()
    settings = config(swap_path, home, memory={"device_bytes": "20KiB"})
    with pytest.raises(
        PlanError, match=r"^device memory needs at least .* = .*; memory.device_bytes is 20.0 KiB; "
    ):
        offload.prepare(model, settings)
    assert accelerator.live_peak == accelerator.registered_bytes == 0
    assert not accelerator._is_open
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])


def test_a_device_budget_holds_whatever_is_asked_for(swap_path, simulate):
    """Random budgets: refused, or never exceeded."""
    rng, refused = random.Random(0), 0
    for _ in range(12):
        budget = rng.randint(20_000, 200_000) if rng.random() < 0.5 else (64 << 20) + rng.randint(0, 400_000)
        home = rng.choice(HOMES)
        accelerator = simulate()
        settings = config(swap_path, home, memory={"device_bytes": budget})
        try:
            model, optimizer = offload.prepare(wide(), settings)
        except PlanError:
            refused += 1
            assert accelerator.live_peak == 0
            continue
        train(model, optimizer, 1)
        optimizer.engine.close()
        assert accelerator.live_peak <= budget
    assert 0 < refused < 12


# -- a part of the optimizer state on the device ----------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize(
    ("params", "update", "micro_batches"),
    [
        ("none", "step", 1),
        ("cpu", "step", 3),
        ("cpu", "backward", 1),
        ("nvme", "step", 1),
        ("nvme", "backward", 1),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ratio_divides_the_state_by_units_and_changes_no_bit(
    ratio, params, update, micro_batches, precision, swap_path, simulate
):
    """Ten equal layers: 1 - ratio of them have state and gradients on the device, and are updated there."""
    layers = 10
    losses, expected = on_cpu(
        micro_batches=micro_batches, precision=precision, layers=layers, gradient_clipping=clipping(update)
    )
    accelerator = simulate(seed=int(10 * ratio))
    settings = config(
        swap_path,
        (params, "cpu", update),
        precision=precision,
        gradient_accumulation_steps=micro_batches,
        gradient_clipping=clipping(update),
    )
    settings["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    model, optimizer = offload.prepare(wide(layers=layers), settings)
    engine = optimizer.engine
    with contextlib.closing(engine):
        there = round(layers * (1 - ratio))
        assert engine.plan.on_device == frozenset(range(there))
        for chunk in engine.plan.chunks:
            assert accelerator.is_device(engine.read_chunk(chunk)) == (chunk.unit < there)
        planned = {
            line.purpose: line.total
            for line in engine.plan.lines
            if line.tier == "device" and line.purpose not in ("gradients on their way", "update scratch")
        }
        assert dict(engine._tiers.device.allocated) == planned
        assert train(model, optimizer, micro_batches=micro_batches) == losses
        ledger = engine.report()
        assert +ledger.moved == ledger.predicted
        parameters = sum(param.numel() for param in model.parameters())
        itemsize = 2 if precision == "bf16" else 4
        crossed = 3 * micro_batches * parameters * itemsize * (layers - there) // layers
        assert ledger.moved["d2h", "grad"] == crossed
        assert_same_bits(bits(engine), expected)


def clipping(update):
    return 0.1 if update == "step" else None


def test_ratio_with_gradients_that_user_code_edits(swap_path, simulate):
    """`p.grad` is a true view on the device and fetched from the host elsewhere: a loop does not see which."""

    def loop(model, optimizer):
        for step in range(3):
            for micro_batch in range(2):
                model(rows(seed=10 * step + micro_batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for param in model.parameters():
                param.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()

    plain = wide()
    loop(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01))
    simulate()
    settings = config(swap_path, ("cpu", "cpu", "step"))
    settings["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    model, optimizer = offload.prepare(wide(), settings)
    with contextlib.closing(optimizer.engine):
        assert optimizer.engine.plan.on_device == {0, 1}
        loop(model, optimizer)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-7)
