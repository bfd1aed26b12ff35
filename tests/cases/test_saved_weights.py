"""Weights saved by users' own code: state dicts, adapters, copies of parameters.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from loops import (
    ALL,
    STEP,
    Adapted,
    Unbiased,
    adamw,
    close,
    compare,
    ids,
    mlp_a,
    rows,
    same_step,
    saved,
    seeded,
)
from torch import nn

import offload


@pytest.mark.parametrize("home", ALL)
def test_k03_frozen_weights_are_in_the_checkpoint(home, prepare):
    model = seeded(Adapted)
    with torch.no_grad():
        for layer in model.layers:
            layer.base.weight.fill_(0.0123456789)
    plain, loop = copy.deepcopy(model), same_step(lambda m: m(rows(6, 24)), 3)
    model, optimizer = prepare(model, home)
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))
    fresh = Adapted()
    fresh.load_state_dict(saved(model), strict=True)
    close(dict(fresh.state_dict()), dict(plain.state_dict()))
    partial = {name: value for name, value in saved(model).items() if "base" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(partial, strict=True)


@pytest.mark.parametrize("home", ALL)
def test_k04_the_tied_head_is_saved_and_stays_tied(home, prepare):
    loop = same_step(lambda m: m(ids(0)), 3)
    model, optimizer, plain = compare(prepare, home, UnbiasedTied, loop)
    state = saved(model)
    for fresh in (UnbiasedTied(), Unbiased0()):
        fresh.load_state_dict(state, strict=True)
        close(fresh(ids(1)), plain(ids(1)))
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert model.head.weight is model.embed.weight
    stored = [s for s in optimizer.engine.partition.trainable if "embed.weight" in s.names]
    assert [s.names for s in stored] == [("embed.weight", "head.weight")]
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


class Unbiased0(Unbiased):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 67, bias=False)


class UnbiasedTied(Unbiased0):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("home", ALL)
def test_k05_state_dict_in_the_middle_of_training_is_full(home, prepare):
    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(ids(step))
            seen.append(saved(model))  # between forward and backward
            loss.backward()
            optimizer.step()
            seen.append(saved(model))
            optimizer.zero_grad()
        return seen

    compare(prepare, home, Unbiased, loop)


@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_and_resumed(home, prepare):
    loop = same_step(lambda m: m(rows(6, 24)), 3)
    model, optimizer = prepare(seeded(Adapted), home)
    loop(model, optimizer)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    adapter = {name: value for name, value in saved(model).items() if name in names}
    state = copy.deepcopy(optimizer.state_dict())
    rest = loop(model, optimizer)
    optimizer.engine.close()
    again = seeded(Adapted)
    result = again.load_state_dict(adapter, strict=False)
    assert all("base" in name for name in result.missing_keys) and not result.unexpected_keys
    again, optimizer = prepare(again, home)
    optimizer.load_state_dict(state)
    assert loop(again, optimizer) == rest


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS_TO_COPY = [saved_and_loaded, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("way", WAYS_TO_COPY, ids=["torch.save", "deepcopy", "pickle"])
@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_from_the_parameters_themselves(home, way, prepare):
    """Not from the state dict: full tensors all the same, and the attributes that users hang on them."""
    model, optimizer, plain = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24)), 2))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = way({**trained, "again": next(iter(trained.values()))})
    assert copied.pop("again") is next(iter(copied.values()))
    expected = {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    close({name: p.detach() for name, p in copied.items()}, expected)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copied.values())
    same_step(lambda m: m(rows(6, 24)), 1)(model, optimizer)
    close({name: p.detach() for name, p in copied.items()}, expected)  # copies


@pytest.mark.parametrize("home", STEP)
def test_k06_a_saved_parameter_keeps_its_attributes(home, prepare):
    model, _ = prepare(seeded(mlp_a), home)
    model[0].weight.tag = "first"
    copied = pickle.loads(pickle.dumps(model[0].weight))
    assert copied.__dict__ == {"tag": "first"}
    with offload.gather(model[0].weight):
        model[0].weight.data.fill_(2.0)
        assert bool((copy.deepcopy(model[0].weight) == 2.0).all())


@pytest.mark.parametrize("home", ALL)
def test_k06_an_adapter_saved_inside_gather(home, prepare):
    model, _, plain = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24)), 2))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    buffer = io.BytesIO()
    with offload.gather(trained.values()):
        torch.save(trained, buffer)
    buffer.seek(0)
    for name, param in torch.load(buffer).items():
        close(param.detach(), plain.get_parameter(name).detach())
