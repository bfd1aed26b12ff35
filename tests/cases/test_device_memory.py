"""Cases of memory with an accelerator: what is pinned, taken, planned and given back; parts of the state there."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import mmap
import random
from pathlib import Path

import pytest
import torch
from devices import (
    HOMES,
    assert_same_bits,
    bits,
    config,
    on_cpu,
    rows,
    train,
    wide,
)
from leaks import assert_as, held

import offload
from offload import OffloadError, PlanError
from offload.links import DeviceLinks
from offload.tiers.host import HostTier

pytestmark = pytest.mark.timeout(120)
PAGE = 4096


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


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("home", HOMES, ids="-".join)
def test_m05_ten_runs_in_one_process_leave_nothing(home, swap_path, simulate):
    start, settings = None, config(swap_path, home)
    settings["zero_optimization"]["sub_group_size"] = 1 << 15
    for run in range(10):
        accelerator = simulate()
        model, optimizer = offload.prepare(wide(256), settings)
        for step in range(2):
            model(rows(width=256, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.engine.close()
        optimizer.engine.close()
        del model, optimizer
        gc.collect()
        assert accelerator.live_bytes == accelerator.registered_bytes == 0
        start = start or held()  # after the first run: torch and the kernels keep their threads
        assert_as(start)
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
    start = held()
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
        assert_as(start)
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
