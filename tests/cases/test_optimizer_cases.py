"""Cases of the optimizer: N08, N09, N13, N16, N17, N21, N24, N25, A03.

The others stand where their kernels are tested.
"""

import contextlib
import logging
import math
import subprocess
import sys
from functools import cache

import pytest
import torch
from fused_adam import FUSED_ADAM_IS_OURS
from models import Placement, Training, prepared, steps, train_offloaded, train_plain
from torch import nn

import offload
from offload.errors import ConfigError

LONG = Training(steps=200)


@cache
def long_run(placement):
    return train_offloaded(LONG, placement, "/unused")


def test_n17_the_loss_curve_is_that_of_plain_pytorch_all_the_way():
    """State in host memory, or none offloaded: 200 steps with the same losses as torch's AdamW."""
    plain = train_plain(LONG)
    for placement in (Placement("none", "none"), Placement("cpu", "cpu")):
        losses = long_run(placement).losses
        if FUSED_ADAM_IS_OURS:
            assert losses == plain.losses
        else:
            torch.testing.assert_close(losses, plain.losses, rtol=1e-3, atol=0)
    assert sum(plain.losses[-20:]) < sum(plain.losses[:20])


@pytest.mark.parametrize(
    ("read", "write", "count"), [(True, True, 200), (True, False, 20), (False, True, 20), (False, False, 20)]
)
def test_n08_state_on_nvme_trains_like_state_in_memory(read, write, count, swap_path):
    """More than five swaps in each step, whatever DeepSpeed's switches for its pipeline say."""
    config = LONG.config(Placement("none", "nvme", chunk=8192), swap_path)
    config["zero_optimization"]["offload_optimizer"] |= {"pipeline_read": read, "pipeline_write": write}
    model, optimizer = offload.prepare(LONG.model(), config)
    expected = long_run(Placement("cpu", "cpu"))
    try:
        assert len(optimizer.engine.plan.chunks) >= 5
        assert steps(model, optimizer, LONG.batches()[:count]) == expected.losses[:count]
        for stored, state in offload.optimizer_state(optimizer.engine):
            moments = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
            assert count < LONG.steps or torch.equal(moments, expected.moments[stored.name])
    finally:
        optimizer.engine.close()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_n09_every_chunk_gets_its_gradient(precision, update, swap_path):
    """Oracle: autograd's own gradients, chunk by chunk, in units of many chunks."""
    training = Training(precision, steps=1)
    with prepared(training, Placement("nvme", "nvme", update, chunk=2048), swap_path) as (model, optimizer):
        engine = optimizer.engine
        given, run = [], engine.optimizer.update

        def update_and_keep(planes, segments, grad, grad_scale):
            given.append((segments[0].element, [grad[s.begin : s.end].clone() for s in segments]))
            run(planes, segments, grad, grad_scale)

        engine.optimizer.update = update_and_keep
        expected = {}
        for stored in engine.partition.trainable:
            stored.param.register_hook(
                lambda grad, stored=stored: expected.update({stored: stored.flatten(grad)})
            )
        steps(model, optimizer, training.batches())
        assert len(engine.plan.chunks) > 3 * len(engine.plan.inventory.units)
        found = torch.cat([part for _, parts in sorted(given, key=lambda item: item[0]) for part in parts])
        wanted = torch.cat(
            [expected[stored] for stored in sorted(expected, key=lambda stored: stored.element)]
        )
        assert torch.equal(found, wanted.to(found.dtype))


def test_n13_fp16_is_refused_by_name_before_anything_changes():
    """Its loss scale, and so the path of the scale, is not built; bf16 needs none."""
    model = nn.Linear(4, 4)
    weight = model.weight.data_ptr()
    fp16 = {
        "enabled": True,
        "initial_scale_power": 32,
        "loss_scale_window": 5,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    with pytest.raises(ConfigError, match=r"fp16\.enabled: fp16 training is not built yet; use bf16"):
        offload.initialize(model=model, config={"fp16": fp16, "train_batch_size": 1})
    assert model.weight.data_ptr() == weight and model.weight.dtype is torch.float32


N16 = [
    ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
    ("Adam", {"adam_w_mode": True}, torch.optim.AdamW),
    ("Adam", {}, torch.optim.AdamW),
    ("AdamW", {}, torch.optim.AdamW),
]


@pytest.mark.parametrize("weight_decay", [0.0, 0.5, None])
@pytest.mark.parametrize(("name", "mode", "kind"), N16, ids=str)
def test_n16_the_decay_is_that_of_the_type(name, mode, kind, weight_decay):
    """50 steps of random gradients with a large decay; a decay that the file does not name is none."""
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    torch.manual_seed(0)
    model, plain = nn.Linear(64, 33), nn.Linear(64, 33)
    plain.load_state_dict(model.state_dict())
    config = {"optimizer": {"type": name, "params": {"lr": 1e-2, **decay, **mode}}}
    model, optimizer = offload.prepare(model, config)
    reference = kind(plain.parameters(), lr=1e-2, weight_decay=weight_decay or 0.0)
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(50):
            grads = [torch.randn(p.shape, generator=generator) for p in plain.parameters()]
            for module, stepper in ((model, optimizer), (plain, reference)):
                sum((p * g).sum() for p, g in zip(module.parameters(), grads, strict=True)).backward()
                stepper.step()
                stepper.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-6, atol=1e-7)
    finally:
        optimizer.engine.close()


def test_n16_adam_without_bias_correction_is_refused():
    params = {"lr": 1e-2, "bias_correction": False}
    with pytest.raises(ConfigError, match="Adam without bias correction is not available"):
        offload.prepare(nn.Linear(4, 4), {"optimizer": {"type": "Adam", "params": params}})


def n21_groups(model):
    """The usual split, with parameters of one block in several groups."""
    named = dict(model.named_parameters())
    rest = [p for n, p in named.items() if "blocks" not in n]
    return [
        {
            "params": [p for n, p in named.items() if "blocks" in n and p.ndim == 2],
            "lr": 1e-3,
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in named.items() if "blocks" in n and p.ndim == 1],
            "lr": 1e-3,
            "weight_decay": 0.0,
        },
        {"params": rest, "lr": 1e-1, "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]


def test_n21_groups_keep_their_numbers_through_save_and_load(swap_path):
    """Three groups, a schedule for each, small chunks; the state leaves and comes back half-way."""
    training = Training(steps=8)
    rates = [lambda step: 1.0 / (1 + step), lambda step: 0.9**step, lambda step: 1.0]
    plain = training.model()
    reference = torch.optim.AdamW(n21_groups(plain), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, rates)
    expected = []
    for batch in training.batches():
        expected += steps(plain, reference, [batch])
        schedule.step()

    losses, saved = [], None
    for half in (training.batches()[:4], training.batches()[4:]):
        model = training.model()
        groups = n21_groups(model)
        model, optimizer = offload.prepare(
            model, training.config(Placement("nvme", "nvme", chunk=2048), swap_path), groups
        )
        with contextlib.closing(optimizer.engine):
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
            if saved is not None:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                schedule.load_state_dict(saved["schedule"])
            for batch in half:
                losses += steps(model, optimizer, [batch])
                schedule.step()
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
    if FUSED_ADAM_IS_OURS:
        assert losses == expected
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(saved["optimizer"]["param_groups"], reference.param_groups, strict=True):
        assert [ours[key] for key in ("lr", "weight_decay", "betas")] == [
            theirs[key] for key in ("lr", "weight_decay", "betas")
        ]


def test_n24_a_fused_optimizer_of_torch_is_replaced_with_a_message(caplog):
    """It never runs: its own step() raises, and its state stays empty."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    given = torch.optim.AdamW(model.parameters(), fused=True)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    with caplog.at_level(logging.INFO, "offload"):
        engine, *_ = offload.initialize(model=model, optimizer=given, config=config)
    try:
        assert any("fused chooses among torch's implementations" in r.getMessage() for r in caplog.records)
        engine.backward(engine(torch.ones(8)).sum())
        engine.step()
        assert engine.was_step_applied() and not given.state
        with pytest.raises(offload.OffloadError, match=r"handed to offload\.initialize"):
            given.step()
    finally:
        engine.close()


@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("param", ["none", "nvme"])
def test_n25_small_contributions_count_in_fp32_accumulation(param, state, swap_path):
    """256 micro-batches: a gradient of 1, then 255 of 2^-9, which vanish beside 1 in bf16."""
    norms = {}
    for accumulate_in in ("fp32", "bf16"):
        model = nn.Linear(16, 16, bias=False)
        config = Training("bf16", accumulation=256).config(Placement(param, state), swap_path)
        config["data_types"] = {"grad_accum_dtype": accumulate_in}
        model, optimizer = offload.prepare(model, config)
        try:
            for size in (1.0, *[2.0**-9] * 255):
                x = torch.zeros(1, 16, dtype=torch.bfloat16)
                x[0, 3] = size  # the gradient of the column 3, of 16 elements
                model(x).float().sum().backward()
            optimizer.step()
            norms[accumulate_in] = optimizer.engine.grad_norm / math.sqrt(16)
        finally:
            optimizer.engine.close()
    assert norms["fp32"] == pytest.approx(1 + 255 * 2.0**-9, abs=1e-6)
    assert norms["bf16"] == pytest.approx(1.0, abs=1e-6)


A03 = """
import gc, sys
sys.modules["offload._adam"] = None  # an import of it raises
import offload
try:
    optimizer = offload.CPUAdam([])
except ImportError as error:
    print(error)
optimizer = None
gc.collect()
"""


def test_a03_a_missing_extension_is_the_first_error_and_the_only_one():
    """Nothing half-made is finalised afterwards, and no CUDA toolkit is asked for."""
    done = subprocess.run(
        [sys.executable, "-c", A03], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "offload's CPU kernels are not usable" in done.stdout
    assert "needs a C++20 compiler, no CUDA toolkit" in done.stdout
    assert "Exception ignored" not in done.stderr
