"""Cases of compute with memory of its own, on the simulated accelerator: named as in the log of cases.

The oracle is the CPU run (the same kernel, so the same bits), a formula, or the accelerator's own books.
"""

from __future__ import annotations

import contextlib
import gc
import logging

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
    on_cpu,
    rows,
    train,
    wide,
)
from torch import nn

import offload
from offload import ConfigError, OffloadError
from offload.api import _move_buffers
from offload.links import DeviceLinks

pytestmark = pytest.mark.timeout(120)
PAGE = 4096


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
