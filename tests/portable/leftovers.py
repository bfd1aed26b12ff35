"""What runs leave behind, for tests that look at it: a swap store that was committed, and a checkpoint."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from models import Placement, Training, steps

import offload
from offload.store.directory import SwapDirectory

TRAINING = Training("bf16", steps=3, tied=True, frozen="blocks.0 blocks.2.norm")


def values_of(model, optimizer):
    """Every number of a run, by name."""
    values = {("weight", name): value.clone() for name, value in model.state_dict().items()}
    for stored, state in offload.optimizer_state(optimizer.engine):
        values |= {(plane, stored.name): value.clone() for plane, value in state.items()}
    return values


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def saved(optimizer, folder, tag="step", client_state=None, **how):
    """A checkpoint of a live engine."""
    return optimizer.engine.save_checkpoint(folder, tag, client_state, **how)


@contextmanager
def committed_run(training, swap_path, commits=2):
    """A run that commits after each of its last steps; its swap directory is removed at the end."""
    config = training.config(Placement("nvme", "nvme", chunk=4096), swap_path)
    config["durability"]["generations"] = 2
    model, optimizer = offload.prepare(training.model(), config)
    engine = optimizer.engine
    for number, batch in enumerate(training.batches()):
        steps(model, optimizer, [batch])
        if number >= training.steps - commits:
            path = engine.save_checkpoint(client_state={"epoch": number})
    values = values_of(model, optimizer)
    masters = {
        stored.name: offload.read_master(engine, stored) for stored in engine.partition.of_param.values()
    }
    try:
        yield SimpleNamespace(
            path=path, engine=engine, values=values, masters=masters, model=model, optimizer=optimizer
        )
    finally:
        engine.close()
        if path.exists():
            directory = SwapDirectory.take(path)
            directory.remove()
            directory.release()
