"""What user code does to a prepared model's parameters between steps: kept, or refused, and never lost unheard."""

import contextlib

import pytest
import torch
from models import Placement, Training, steps, train_plain
from tight import tight
from torch import nn
from torch.nn.utils import parametrize

import offload
from offload.errors import OffloadError

NVME = Placement("nvme", "nvme")
HOMES = [Placement(), NVME]


@contextlib.contextmanager
def prepared(training, placement, swap_path):
    model = training.model()
    config = tight(model, training.config(placement, swap_path))
    model, optimizer = offload.prepare(model, config)
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


@pytest.mark.parametrize("write", ["in place", "by index", "copied"])
def test_a_write_through_data_that_goes_with_its_slot_is_told(write, swap_path, the_cpu_computes):
    """torch does not count writes through `p.data`, and the layer's slot is the next one's before the next step."""
    training = Training(steps=1)
    writes = {
        "in place": lambda data: data.mul_(0.5),
        "by index": lambda data: data[0].zero_(),
        "copied": lambda data: data.copy_(torch.ones_like(data)),
    }
    with prepared(training, NVME, swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches())
        writes[write](model.blocks[1].up.weight.data)
        with pytest.raises(
            OffloadError, match=r"^blocks\.1\.up\.weight was written to .* inside `with offload"
        ):
            steps(model, optimizer, training.batches())


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_reading_between_steps_is_no_write(placement, swap_path):
    training = Training(steps=3)
    plain = train_plain(training)
    with prepared(training, placement, swap_path) as (model, optimizer):
        for batch, loss in zip(training.batches(), plain.losses, strict=True):
            for block in model.blocks:
                assert block.up.weight.data.isfinite().all() and not block.qkv.weight.isnan().any()
            assert steps(model, optimizer, [batch]) == [loss]


def test_what_the_engine_writes_between_a_look_and_the_next_step_is_no_write_of_the_user(swap_path):
    training = Training(steps=1)
    with prepared(training, NVME, swap_path) as (model, optimizer):
        weight = model.blocks[1].up.weight
        with offload.gather(weight, modify=True):
            weight.data.mul_(0.5)
            expected = weight.detach().cpu().clone()
        model.blocks[2].load_state_dict(training.model().blocks[0].state_dict())
        assert model.blocks[2].up.weight.isfinite().all()
        model.blocks[2].load_state_dict(training.model().blocks[1].state_dict())
        assert torch.equal(model.state_dict()["blocks.1.up.weight"], expected)
        steps(model, optimizer, training.batches())


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_data_assigned_inside_gather_is_kept_whatever_else_is_used(placement, swap_path):
    training = Training(steps=1)
    with prepared(training, placement, swap_path) as (model, _):
        weight, neighbour = model.blocks[1].up.weight, model.blocks[1].down.weight
        new = torch.full_like(weight, 0.25, memory_format=torch.contiguous_format)
        with offload.gather(weight, modify=True):
            weight.data = new
            with offload.gather(neighbour):
                pass  # the unit's parameters are pointed anew
        assert torch.equal(model.state_dict()["blocks.1.up.weight"], new)


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_a_tied_weight_is_one_tensor_in_a_state(placement, swap_path):
    """As in torch, which is how transformers, safetensors and peft see what is tied."""
    training = Training(steps=1, tied=True)
    with prepared(training, placement, swap_path) as (model, optimizer):
        state = model.state_dict()
        assert state["tokens.weight"] is state["head.weight"]
        steps(model, optimizer, training.batches())
        again = model.state_dict(destination=dict(state))
        assert again["tokens.weight"] is again["head.weight"]
        assert not torch.equal(again["head.weight"], state["head.weight"])
        model.head.state_dict(destination=state, prefix="head.")
        assert torch.equal(state["head.weight"], again["head.weight"]), "of now, not of then"


CASTS = {
    "half": lambda model: model.half(),
    "double of a block": lambda model: model.blocks[1].double(),
    "to a type": lambda model: model.to(torch.float16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_casts_after_prepare_are_refused_and_change_nothing(placement, cast, swap_path, the_cpu_computes):
    training = Training(steps=2)
    plain = train_plain(training)
    first, second = training.batches()
    with prepared(training, placement, swap_path) as (model, optimizer):
        assert steps(model, optimizer, [first]) == plain.losses[:1]
        with pytest.raises(
            OffloadError, match=r"torch\.float32 on cpu where the engine keeps it, .* before$"
        ):
            CASTS[cast](model)
        assert steps(model, optimizer, [second]) == plain.losses[1:]
    if placement is NVME:
        with pytest.raises(OffloadError, match="its value was on nvme and went with its engine"):
            model.half()
    else:
        assert model.half() is model, "of torch alone again"


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_moves_to_where_the_model_is_do_nothing(placement, swap_path):
    training = Training(steps=2)
    plain = train_plain(training)
    first, second = training.batches()
    with prepared(training, placement, swap_path) as (model, optimizer):
        assert steps(model, optimizer, [first]) == plain.losses[:1]
        assert model.to(optimizer.engine.device) is model and model.float() is model
        assert steps(model, optimizer, [second]) == plain.losses[1:]


class Halved(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


class Rescaled(nn.Module):
    """Frozen weights on which a parametrization is put in each forward, as adapters of single parameters do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def parametrized(model):
    def put_on(layer, _args):
        parametrize.register_parametrization(layer, "weight", Halved())

    def take_off(layer, _args, _output):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)

    for layer in model.layers:
        layer.weight.requires_grad_(False)
        layer.register_forward_pre_hook(put_on)
        layer.register_forward_hook(take_off)
    return model


def test_a_parametrization_put_on_in_forward_is_no_write(swap_path):
    def model():
        torch.manual_seed(0)
        return parametrized(Rescaled())

    plain, rows = model(), torch.randn(4, 16)
    reference = torch.optim.AdamW(
        [layer.bias for layer in plain.layers], lr=1e-3, weight_decay=0.01, fused=True
    )
    expected = steps(plain, reference, [rows] * 3)
    moved = model()
    moved, optimizer = offload.prepare(moved, tight(moved, Training().config(NVME, swap_path)))
    with contextlib.closing(optimizer.engine):
        torch.testing.assert_close(steps(moved, optimizer, [rows] * 3), expected, rtol=1e-6, atol=0)
