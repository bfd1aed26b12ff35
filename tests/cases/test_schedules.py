"""Schedules of the configuration: case N22."""

import pytest
import torch
from torch import nn

import offload


@pytest.fixture
def opened():
    """Closes what a test opens."""
    engines = []
    yield engines.append
    for engine in engines:
        engine.close()


def train(engine, steps):
    """The learning rate that each step is taken with."""
    seen = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        seen.append(engine.get_lr())
        engine.step()
    return seen


def test_n22_schedule_without_a_maximum_keeps_the_optimizers_rate(opened):
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    }
    engine, optimizer, _, scheduler = offload.initialize(model=nn.Linear(4, 4), config=config)
    opened(engine)
    assert scheduler.get_last_lr() == engine.get_lr() == [0.0]  # step 1 trains at warmup_min_lr
    used, step = [], optimizer.engine.step

    def record():
        used.append(optimizer.param_groups[0]["lr"])
        return step()

    optimizer.engine.step = record
    train(engine, 5)
    assert used == [0.0, 0.0, 5e-7, 5e-7, 5e-7]


def test_n22_the_rate_in_the_groups_is_the_one_applied(opened):
    """Adam without decay moves a weight by lr * sign(gradient) in step 1: the first move shows the rate."""
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-12}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.25, "warmup_num_steps": 9}},
    }
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    engine, *_ = offload.initialize(model=model, config=config)
    opened(engine)
    assert train(engine, 1) == [[0.25]]
    moved = (engine.state_dict()["weight"] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25))
