"""Every way in which Python can look at a parameter that is absent: its value, or an error that names it.

Oracle: the same question asked of the plain model.
"""

from __future__ import annotations

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from loops import Branches, adamw, close, mlp_a, rows, same_step, seeded
from torch import nn
from torch.nn import functional as F

import offload
from offload import OffloadError


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


WAYS = {
    "norm": lambda p: p.norm(),
    "index": lambda p: p[0],
    "repr": repr,
    "format": lambda p: f"{p}",
    "torch.save": through_a_file,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "numpy force": lambda p: torch.from_numpy(p.numpy(force=True).copy()),
    "asarray": lambda p: torch.from_numpy(np.asarray(p.detach()).copy()),
    "item": lambda p: p[1, 2].item(),
    "float": lambda p: float(p.detach().sum()),
    "eq": lambda p: int((p == p.detach().clone()).sum()),
    "equal": lambda p: torch.equal(p, p.detach().clone()),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data.clone(),
    "iter": lambda p: torch.stack(list(p)),
    "cat": lambda p: torch.cat([p, p]),
    "as_tensor": lambda p: torch.as_tensor(p).clone(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).clone(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "data_ptr": lambda p: p.data_ptr() % 64 == 0 and p.data_ptr() != 0,
    "is_contiguous": lambda p: p.is_contiguous(),
    "stride": lambda p: p.stride(),
    "matmul": lambda p: p @ p.T,
    "linear": lambda p: F.linear(torch.ones(2, p.shape[1]), p),
    "foreach": lambda p: torch._foreach_norm([p, p])[0],
    "aten": lambda p: torch.ops.aten.sum(p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "isfinite": lambda p: bool(torch.isfinite(p).all()),
    "dtype": lambda p: p.double(),
    "into another": lambda p: torch.no_grad()(lambda: torch.zeros(p.shape).lerp_(p, 0.25))(),
    "own function": Doubled.apply,
    "gradient": lambda p: torch.autograd.grad(p.square().sum(), p)[0],
    "shape": lambda p: (p.shape, p.ndim, p.numel(), p.dtype, len(p), p.nbytes, p.type(), p.is_leaf),
    "zeros_like": torch.zeros_like,
    "fan": nn.init._calculate_fan_in_and_fan_out,
}


@pytest.fixture(scope="module")
def absent(tmp_path_factory):
    """Gives the name of a matrix that is absent now, and the matrix: of a model that does not fit its slots."""
    model = seeded(Branches)
    place = {"device": "nvme", "nvme_path": str(tmp_path_factory.mktemp("swap"))}
    config = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    model, optimizer = offload.prepare(model, config)
    stored = optimizer.engine.partition.of_param

    def any_absent():
        return next((name, p) for name, p in model.named_parameters() if p.ndim == 2 and stored[p].is_absent)

    yield any_absent
    optimizer.engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_s16_reading_an_absent_parameter_gives_its_value(way, absent):
    name, param = absent()
    expected = WAYS[way](seeded(Branches).get_parameter(name))
    got = WAYS[way](param)
    if isinstance(expected, torch.Tensor):
        close(got.detach(), expected.detach())
    else:
        assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)


WRITES = {
    "add_": lambda p: p.add_(1),
    "setitem": lambda p: p.__setitem__(0, 0.0),
    "data =": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "init": nn.init.kaiming_uniform_,
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(p.numel()), [p]),
    "share_memory_": lambda p: p.share_memory_(),
    "resize_": lambda p: p.resize_(3, 3),
}


@pytest.mark.parametrize("way", WRITES)
def test_s16_writing_to_an_absent_parameter_is_refused_at_once(way, absent):
    name, param = absent()
    with torch.no_grad(), pytest.raises(OffloadError, match=rf"{re.escape(name)}\b.*offload\.gather"):
        WRITES[way](param)
    assert torch.equal(param, seeded(Branches).get_parameter(name)), "it is as it was"


PAST_TORCH = {
    "data": lambda p: p.data.clamp_(0),
    "detach": lambda p: p.detach().mul_(2),
}


@pytest.mark.parametrize("way", PAST_TORCH)
def test_s16_writing_past_torch_is_found_later(way, prepare):
    model, optimizer = prepare(seeded(Branches), "nvme")
    with torch.no_grad():
        PAST_TORCH[way](dict(model.named_parameters())["layers.3.0.weight"])
    with pytest.raises(OffloadError, match=r"layers\.3\.0\.weight was written to .*offload\.gather"):
        with torch.no_grad():
            model(rows(4), range(6))
            model(rows(4), range(6))
        same_step(lambda m: m(rows(4), range(6)), 3)(model, optimizer)


@pytest.mark.parametrize("home", ["none", "nvme", "nvme-backward"])
def test_s05_an_average_of_the_weights(home, prepare):
    """`ema.add_(p)` over parameters that come and go: it was NaN."""

    def loop(model, optimizer):
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(3):
            same_step(lambda m: m(rows(4), range(6)), 1)(model, optimizer)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    average[name].mul_(0.9).add_(p, alpha=0.1)
        return average

    plain, (model, optimizer) = seeded(Branches), prepare(seeded(Branches), home)
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))


@pytest.mark.parametrize("home", ["nvme", "nvme-backward"])
def test_s05_gradients_that_autograd_gives_and_users_assign(home, prepare):
    """`autograd.grad` over all parameters needs none of them; where nothing would take the gradients, it is said."""

    def loop(model, optimizer):
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(model(rows(8)).sum(), params), strict=True):
            param.grad = grad
        optimizer.step()
        return [p.detach().clone() for p in model.state_dict().values()]

    plain, (model, optimizer) = seeded(mlp_a), prepare(seeded(mlp_a), home)
    if home == "nvme-backward":
        with pytest.raises(OffloadError, match=r"0\.weight\.grad has been assigned.* to 'step'"):
            loop(model, optimizer)
    else:
        close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))


def test_s16_after_close_the_error_says_what_is_gone(prepare):
    model, optimizer = prepare(seeded(mlp_a), "nvme")
    weight = dict(model.named_parameters())["2.weight"]
    optimizer.engine.close()
    for look in (repr, lambda p: p.norm(), lambda p: p.tolist()):
        with pytest.raises(OffloadError, match=r"2\.weight: its value was on nvme and went with its engine"):
            look(weight)
    assert weight.shape == (13, 31)
