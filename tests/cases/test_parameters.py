"""Parameters used and written outside their module's forward.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import re

import pytest
import torch
from loops import ALL, STEP, Adapted, Branches, close, compare, rows, same_step, seeded
from torch import nn
from torch.nn import functional as F

import offload
from offload import OffloadError


class Elsewhere(nn.Module):
    """Parameters used outside the forward of the module that owns them."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(17, 17)
        self.position = nn.Embedding(4, 17)
        self.bare = nn.Parameter(torch.randn(17))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(17)) for _ in range(2))
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.randn(17))})
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))

    def forward(self, x):
        x = F.linear(x, self.child.weight, self.child.bias) + self.position.weight[: x.shape[0]]
        x = x * self.bare + self.scales[0] * self.named["gain"]
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = F.linear(x, self.child.weight.T, self.scales[1])
        return x.square().mean() + 1e-2 * self.blocks[3].weight.norm()


@pytest.mark.parametrize("home", ALL)
def test_s05_parameters_used_outside_their_module(home, prepare):
    compare(prepare, home, Elsewhere, same_step(lambda m: m(rows(4))))


@pytest.mark.parametrize(
    ("home", "first"), [*((home, False) for home in ALL), *((home, True) for home in STEP)]
)
def test_s05_a_penalty_outside_forward_over_attributes(home, first, prepare):
    """Autograd saves the parameters themselves: their units stay until backward."""

    def loss_of(model):
        if first:  # the forward itself needs three units at once
            return 1e-2 * model.blocks[2].weight.norm() + model(rows(4))
        loss = model(rows(4))
        return loss + 1e-2 * (model.blocks[0].weight.norm() + model.blocks[2].weight.square().sum())

    _, optimizer, _ = compare(prepare, home, Elsewhere, same_step(loss_of))
    engine = optimizer.engine
    assert not any(engine.partition.is_saved(unit) for unit in range(len(engine.partition.units)))


@pytest.mark.parametrize("home", STEP)
def test_s05_a_penalty_that_nobody_may_pack(home, prepare):
    """Its graph holds the parameter itself, whose unit stays until backward."""

    def loss_of(model):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            penalty = model.blocks[4].weight.norm()  # differentiated last, when its unit has left
        return model(rows(4)) + 1e-2 * penalty

    compare(prepare, home, Elsewhere, same_step(loss_of))


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_over_more_than_fits(home, prepare):
    """Each weight is there while its norm is computed, and again when that is differentiated."""

    def loss_of(model):
        return model(rows(4)) + 1e-2 * sum(block.weight.norm() for block in model.blocks)

    _, optimizer, _ = compare(prepare, home, Elsewhere, same_step(loss_of))
    plan = optimizer.engine.plan
    assert home == "none" or plan.weight_slots < len(plan.inventory.units)


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_over_parameters_inside_gather(home, prepare):
    def loop(model, optimizer):
        seen = []
        for _ in range(3):
            with offload.gather(model):
                loss = model(rows(4)) + 1e-2 * sum(p.norm() for p in model.parameters())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(prepare, home, Elsewhere, loop)


@pytest.mark.parametrize("home", ALL)
def test_s05_a_penalty_differentiated_after_gather(home, prepare):
    def loss_of(model):
        with offload.gather(model):
            penalty = sum(p.norm() for p in model.parameters())
        return model(rows(4)) + 1e-2 * penalty

    if home == "none":
        compare(prepare, home, Elsewhere, same_step(loss_of))
        return
    model, optimizer = prepare(seeded(Elsewhere), home)
    with pytest.raises(
        OffloadError, match=r"inside gather .*needs .*blocks.1.weight.* call its backward, inside"
    ):
        loss_of(model)
    same_step(lambda m: m(rows(4)))(model, optimizer)


@pytest.mark.parametrize(
    ("home", "first"), [*((home, False) for home in ALL), *((home, True) for home in ALL)]
)
def test_s05_a_penalty_outside_forward_over_parameters(home, first, prepare):
    """``model.parameters()`` in a regulariser, before forward or after: plain PyTorch's loss and gradients."""

    def loss_of(model):
        if first:
            return 1e-2 * sum(p.norm() for p in model.parameters()) + model(rows(4))
        return model(rows(4)) + 1e-2 * sum(p.norm() for p in model.parameters())

    compare(prepare, home, Elsewhere, same_step(loss_of))


def test_s05_a_penalty_over_present_parameters(prepare):
    """Whatever way a present parameter was come by, its unit stays until the penalty is differentiated."""

    def loss_of(model):
        loss = model(rows(4))
        return loss + dict(model.named_parameters())["blocks.4.weight"].square().sum()

    _, optimizer, _ = compare(prepare, "nvme", Elsewhere, same_step(loss_of))
    assert optimizer.engine.plan.weight_slots < len(optimizer.engine.partition.units)


@pytest.mark.parametrize("home", ALL)
def test_s16_shapes_stay_true(home, prepare):
    plain, model = seeded(Adapted), seeded(Adapted)
    model, _ = prepare(model, home)
    for (name, param), (same_name, mine) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == same_name
        assert (mine.shape, mine.ndim, mine.numel(), mine.dtype, mine.device, mine.requires_grad) == (
            param.shape, param.ndim, param.numel(), param.dtype, param.device, param.requires_grad
        )  # fmt: skip
        assert mine.size(0) == len(mine) == param.size(0)
        assert mine.nelement() * mine.element_size() == param.nbytes


INITS = ["normal_", "zeros_", "xavier_uniform_"]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("home", STEP)
def test_s16_an_initialiser_inside_gather_is_kept(home, init, prepare):
    model, _ = prepare(seeded(Branches), home)
    written = seeded(Branches)
    for each in (model, written):
        with offload.gather(each, modify=True):
            for param in each.parameters():
                if param.ndim == 2:
                    torch.manual_seed(4)
                    getattr(nn.init, init)(param)
    close(dict(model.state_dict()), dict(written.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["absent", "present", "data"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("home", STEP)
def test_s16_an_initialiser_elsewhere_is_kept_or_refused(home, init, how, prepare):
    """Refused at once, or when the parameter is needed next; never lost without a word."""
    model, _ = prepare(seeded(Branches), home)
    name = "layers.0.0.weight"
    param = dict(model.named_parameters())[name]
    with torch.no_grad():
        model(rows(4), range(6))  # the first unit has left its slot
    if how == "present":
        assert model.layers[0][0].weight is param
    torch.manual_seed(10)
    expected = getattr(nn.init, init)(torch.empty(param.shape))
    try:
        torch.manual_seed(10)
        if how == "data":
            param.data = expected.clone()
        else:
            getattr(nn.init, init)(param)
        model(rows(4), [1])  # a forward of training, which does not need it
        for _ in range(2):
            with torch.no_grad():
                model(rows(4), range(6))
    except (OffloadError, RuntimeError) as error:
        assert re.search(rf"{name}.*gather", str(error))
        if how == "data" and home == "none":  # still assigned, and refused again
            with pytest.raises(OffloadError, match="gather"):
                model(rows(4), [1])
        else:
            with torch.no_grad():
                close(model(rows(4), range(6)), seeded(Branches)(rows(4), range(6)).detach())
    else:
        assert torch.equal(model.state_dict()[name], expected)
