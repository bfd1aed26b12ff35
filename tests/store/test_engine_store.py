"""The engine over two generations, committed between steps: the same bits, no byte more, all of it in the store."""

import contextlib

import pytest
import torch
from mirrored import PLANE_DTYPES
from models import Placement, Training

import offload
from offload.config.schema import Aio
from offload.ledger import Ledger
from offload.pipeline import state_planes
from offload.resuming import shapes_for
from offload.store.recovery import recover
from offload.store.scan import scan


def values_of(model, optimizer):
    """Weights, moments and masters by name."""
    values = {("weight", name): value.clone() for name, value in model.state_dict().items()}
    names = {param: name for name, param in model.named_parameters()}
    for param, state in optimizer.state_dict()["state"].items():
        stored = optimizer.engine.partition.trainable[param]
        for plane in ("exp_avg", "exp_avg_sq"):
            values[plane, names[stored.param]] = state[plane].clone()
    return values


def one_step(model, optimizer, batch, *, commits):
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine = optimizer.engine
    engine.settle()
    if commits:
        engine.save_checkpoint()
    return loss.item()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_and_values_written_between_steps(update, precision, swap_path):
    """As on one generation, with a commit after every step; then everything is read from what the last one says."""
    tied = update == "step"  # in backward, how often a tied weight is fetched depends on the drive
    training = Training(precision=precision, tied=tied, frozen="blocks.0 blocks.2.norm", steps=3)
    placement = Placement("nvme", "nvme", update, chunk=2048)
    outcomes = []
    for commits in (False, True):
        config = training.config(placement, swap_path)
        config["durability"] = {"generations": 2 if commits else 1}
        model, optimizer = offload.prepare(training.model(), config)
        engine = optimizer.engine
        losses = [one_step(model, optimizer, batch, commits=commits) for batch in training.batches()]
        outcomes.append((losses, engine.report().moved))
        if not commits:
            engine.close()
    assert outcomes[0] == outcomes[1]
    with contextlib.closing(engine):
        for param in (model.blocks[1].norm1.weight, model.blocks[2].norm1.weight):  # the second one is frozen
            with offload.gather(param, modify=True), torch.no_grad():
                param.mul_(0.5)
        engine.settle()
        values = values_of(model, optimizer)
        engine.save_checkpoint(client_state={"at": 3})
        with offload.gather(model.blocks[1].norm1.weight, modify=True), torch.no_grad():
            model.blocks[1].norm1.weight.zero_()
        directory, shapes = engine.commits_to, shapes_for(engine.partition, engine.plan)
    assert not any(item.damage for item in scan(directory))
    store, manifest = recover(directory, engine.plan, shapes, Aio(), Ledger())
    assert (manifest.step, manifest.training["state"]["client_state"]) == (3, {"at": 3})
    found = {}
    for unit, members in enumerate(engine.partition.units):
        plane = torch.empty(engine.plan.inventory.units[unit].weight_bytes, dtype=torch.uint8)
        store.read_weight(unit, plane).wait()
        moments = {name: torch.empty(engine.plan.inventory.units[unit].elements) for name in PLANE_DTYPES}
        for chunk in engine.plan.chunks_of[unit]:
            buffer = torch.empty(store.state_bytes(chunk), dtype=torch.uint8)
            store.read_state(chunk, buffer).wait()
            for name, piece in state_planes(engine.optimizer, chunk, buffer).items():
                moments[name][chunk.begin : chunk.end] = piece
        for stored in members:
            for name in stored.names:
                found["weight", name] = stored.view(plane).clone()
            for name in ("exp_avg", "exp_avg_sq") if stored.trainable else ():
                piece = moments[name][stored.placed.begin : stored.placed.end]
                found[name, stored.name] = piece.view(stored.placed.info.shape)
    store.discard()
    assert {name for kind, name in values if kind == "weight"} <= {name for _, name in found}
    for key, value in values.items():
        assert torch.equal(found[key], value), key
