"""What runs leave behind, for tests that look at it: a swap store that was committed, and a checkpoint."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from models import Placement, Training, steps

import offload
from offload.placement import placement_of
from offload.portable.commit import formats_of
from offload.portable.manifest import state_dtypes
from offload.portable.save import Content, save
from offload.store import SwapDirectory
from offload.store.manifest import ParamDetail, shapes_of
from offload.training_state import capture


def shapes_for(engine):
    details = {
        stored.name: ParamDetail(str(stored.dtype).removeprefix("torch."), stored.stride, stored.names[1:])
        for unit in engine.partition.units
        for stored in unit
    }
    placement = engine.plan.placement
    dtypes = state_dtypes(placement.precision, placement.state_format)
    shapes = shapes_of(engine.plan, details, dtypes)
    assert formats_of(shapes) == (placement.precision, placement.state_format)
    return shapes


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


def state_of(model, engine, **more):
    return capture(engine, model, step=engine.ledger.steps, skipped_steps=0, parts={}, **more)


def saved(model, optimizer, folder, tag="step", client_state=None, config=None, **more):
    engine = optimizer.engine
    state = state_of(model, engine, client_state=client_state)
    content = Content(state.step, training=state.values, tensors=state.tensors, model=config or {})
    return save(engine, content, folder, tag, **more)


@contextmanager
def committed_run(training, swap_path, monkeypatch, commits=2, **model):
    """A run that commits after each of its last steps; its swap directory is removed at the end."""

    def doubled(*args, **more):
        return dataclasses.replace(placement_of(*args, **more), generations=2)

    monkeypatch.setattr("offload.api.placement_of", doubled)
    placed = Placement("nvme", "nvme", chunk=4096)
    model, optimizer = offload.prepare(training.model(), training.config(placed, swap_path), **model)
    engine = optimizer.engine
    for number, batch in enumerate(training.batches()):
        steps(model, optimizer, [batch])
        engine.settle()
        if number >= training.steps - commits:
            training_state = state_of(model, engine, client_state={"epoch": number}).values
            engine._store.commit(shapes_for(engine), step=engine.ledger.steps, training=training_state)
    values = values_of(model, optimizer)
    masters = {
        stored.name: offload.read_master(engine, stored) for stored in engine.partition.of_param.values()
    }
    path = engine._store.path
    run = SimpleNamespace(
        path=path, engine=engine, values=values, masters=masters, model=model, optimizer=optimizer
    )
    try:
        yield run
    finally:
        engine.close()
        if path.exists():
            directory = SwapDirectory.take(path)
            directory.remove()
            directory.release()


TRAINING = Training("bf16", steps=3, tied=True, frozen="blocks.0 blocks.2.norm")
