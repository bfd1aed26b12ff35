"""accelerate, unchanged, around a prepared model. Oracle: the same loop with torch's fused AdamW."""

import contextlib

import pytest
import torch
from models import VOCABULARY, Placement, Training

pytest.importorskip("accelerate")

import accelerate
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import offload

NONE, NVME = Placement(), Placement("nvme", "nvme")
TRAINING = Training(accumulation=2, steps=3)


@contextlib.contextmanager
def accelerated(placement, swap_path, *, precision="fp32", mixed_precision="no"):
    """An accelerator, and what it has prepared."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the run before: one for a process otherwise
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=TRAINING.accumulation
    )
    model, closing = TRAINING.model(), contextlib.nullcontext()
    if placement is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    else:
        config = {**TRAINING.config(placement, swap_path), "bf16": {"enabled": precision == "bf16"}}
        model, optimizer = offload.prepare(model, config)
        closing = contextlib.closing(optimizer.engine)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = torch.randint(
        0, VOCABULARY, (10, 16), generator=torch.Generator().manual_seed(1)
    )  # 5 batches: 2, 2, 1
    data = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    with closing:
        yield accelerator, *accelerator.prepare(model, optimizer, data, schedule)


def train(accelerator, model, optimizer, data, schedule, *, skip=0, save=None):
    """One epoch: losses, norms, learning rates. Saves in the midst of it, or goes on from there."""
    logged = []
    torch.manual_seed(5)
    batches = accelerator.skip_first_batches(data, skip) if skip else data
    for number, ids in enumerate(batches, start=skip):
        with accelerator.accumulate(model):
            loss = model(ids)
            accelerator.backward(loss)
            logged.append(loss.item())
            if accelerator.sync_gradients:
                logged.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        logged.append(optimizer.param_groups[0]["lr"])
        if save is not None and number == 1:
            accelerator.save_state(save)
    return logged, dict(accelerator.unwrap_model(model).state_dict())


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_loop_equals_plain(mixed_precision, swap_path, tmp_path):
    with accelerated(None, swap_path, mixed_precision=mixed_precision) as parts:
        losses, weights = train(*parts)
    assert len(losses) == 5 + 3 + 5
    for placement in (NONE, NVME):
        with accelerated(placement, swap_path, mixed_precision=mixed_precision) as parts:
            ours, values = train(*parts)
            parts[0].save_model(parts[1], tmp_path / str(placement))
        assert ours == losses
        assert all(torch.equal(values[name], value) for name, value in weights.items())
        saved = load_file(tmp_path / str(placement) / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in weights.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", [NONE, NVME], ids=str)
def test_saved_state_is_gone_on_from(placement, precision, swap_path, tmp_path):
    with accelerated(placement, swap_path, precision=precision) as parts:
        losses, weights = train(*parts, save=tmp_path / "saved")
    with accelerated(placement, swap_path, precision=precision) as parts:
        parts[0].load_state(tmp_path / "saved")
        rest, values = train(*parts, skip=2)
    assert rest == losses[-len(rest) :]
    assert all(torch.equal(values[name], value) for name, value in weights.items())


def test_wrapping_an_optimizer_moves_none_of_its_state(swap_path):
    """accelerate takes the state of an optimizer and gives it back, which is all of a model's state in memory."""
    model, optimizer = offload.prepare(TRAINING.model(), TRAINING.config(NVME, swap_path))
    with contextlib.closing(optimizer.engine) as engine:
        model(torch.zeros(1, 16, dtype=torch.long)).backward()
        optimizer.step()
        moved = dict(engine.report().moved)
        accelerate.Accelerator(cpu=True).prepare(model, optimizer)
        assert dict(engine.report().moved) == moved
