"""What random models and loops have found (`test_random`), each shrunk to a few lines.

Oracle: the same lines in plain PyTorch, or the message that says what to do.
"""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadError

ALL = ["none", "nvme", "nvme-backward"]
ACCELERATORS = ["auto", "simulated:3"]


class Net(nn.Module):
    """Three layers, of which the last is used where the input says so."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x, last=True):
        for layer in self.layers[: 3 if last else 2]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture
def prepare(swap_path):
    """Prepares a model at a home; ``nvme-backward`` is updated in backward."""
    engines = []

    def call(model, home, *, state=None, accelerator="auto", chunk=2048, **settings):
        device, _, update = home.partition("-")
        path = {"nvme_path": str(swap_path)}
        config = {
            "accelerator": accelerator,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": chunk,
                "offload_param": {"device": device, **path},
                "offload_optimizer": {"device": state or device, "update": update or "step", **path},
            },
            "memory": {"host_bytes": "1GB", "device_bytes": "1GB"},
            **settings,
        }
        model, optimizer = offload.prepare(model, config)
        engines.append(optimizer.engine)
        return model, optimizer

    yield call
    for engine in engines:
        engine.close()


def seeded(build=Net, **kwargs):
    torch.manual_seed(0)
    return build(**kwargs)


def plain(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)


def rows(seed=0, width=8):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def assert_same(model, reference):
    close(dict(model.state_dict()), dict(reference.state_dict()))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Saving(Net):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(Product.apply(x, layer.weight) + layer.bias)
        return x.square().mean()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("home", ALL)
def test_training_after_inference_mode(home, gathers, prepare):
    """Views that were made in inference mode could not be saved for backward."""
    model, optimizer = prepare(seeded(Saving), home)
    reference, expected = plain(seeded(Saving))
    for step in range(3):
        for each, of in ((model, optimizer), (reference, expected)):
            with torch.inference_mode(), offload.gather(each) if gathers else contextlib.nullcontext():
                each(rows(step))
            assert not any(param.is_inference() for param in each.parameters())
            each(rows(step)).backward()
            of.step()
            of.zero_grad()
    assert_same(model, reference)


class Interrupted(Net):
    def forward(self, x):
        super().forward(x)
        raise KeyboardInterrupt


def test_close_after_a_forward_that_ctrl_c_has_ended(prepare):
    """Nobody has asked since: our saved-tensor hooks stayed active, for every model of the process."""
    model, optimizer = prepare(seeded(Interrupted), "nvme")
    with contextlib.suppress(KeyboardInterrupt):
        model(rows())
    optimizer.engine.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    seeded()(rows()).backward()


def test_checksums_of_a_chunk_while_the_next_one_arrives(prepare):
    """Updated on the device, chunk by chunk: the sum of one reads nothing of the other."""
    settings = {"accelerator": "simulated:654", "durability": {"verify": "always"}}
    model, optimizer = prepare(seeded(width=90), "nvme", state="none", **settings)
    reference, expected = plain(seeded(width=90))
    for step in range(3):
        for each, of in ((model, optimizer), (reference, expected)):
            each(rows(step, 90)).backward()
            of.step()
            of.zero_grad()
    assert_same(model, reference)


class Recomputed(Net):
    def forward(self, x):
        first, *others = self.layers
        x = checkpoint(first, x, use_reentrant=True)
        for layer in others:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_gradient_after_the_update_is_refused_by_name(accelerator, prepare):
    model, _ = prepare(seeded(Recomputed), "nvme-backward", accelerator=accelerator)
    with offload.gather(model):
        loss = model(rows().requires_grad_())
        loss = loss + sum(param.square().sum() for param in model.layers[0].parameters())
        with pytest.raises(OffloadError, match=r"layers.0.* got a gradient after .*update to 'step'"):
            loss.backward()


class Twice(Net):
    """A checkpoint within the forward, twice."""

    def forward(self, x):
        first, between, last = self.layers
        for layer in (first, last):
            x = checkpoint(between, layer(x), use_reentrant=True)
        return x.square().mean()


@pytest.mark.parametrize("seed", range(8))
def test_close_after_a_backward_that_was_refused_waits_for_gradients_on_their_way(seed, prepare):
    """Their sums are still being copied from the device."""
    model, optimizer = prepare(seeded(Twice), "none-backward", accelerator=f"simulated:{seed}")
    with pytest.raises(OffloadError, match="got a gradient after"):
        model(rows().requires_grad_()).backward()
    optimizer.engine.close()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_second_backward_is_refused_by_name_where_the_update_runs_in_backward(accelerator, prepare):
    model, _ = prepare(seeded(), "nvme-backward", accelerator=accelerator)
    model(rows()).backward()
    with pytest.raises(OffloadError, match=r"got a gradient after its unit was updated|were updated between"):
        model(rows()).backward()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_step_without_zero_grad_is_refused_where_the_update_runs_in_backward(accelerator, prepare):
    """The gradient is gone: torch would add to it. Nothing has changed, and the loop can go on."""
    model, optimizer = prepare(seeded(), "nvme-backward", accelerator=accelerator)
    reference, expected = plain(seeded())
    for step in range(3):
        if step:
            with pytest.raises(OffloadError, match=r"layers.0.weight still has its gradient.*zero_grad\(\)"):
                model(rows(step)).backward()
            if step == 2:
                with pytest.raises(OffloadError, match="still has its gradient"):
                    optimizer.step()
        for each, of in ((model, optimizer), (reference, expected)):
            of.zero_grad()
            each(rows(step)).backward()
            of.step()
    assert_same(model, reference)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ALL)
def test_gradients_set_to_zero_of_parameters_that_are_not_used_next(home, accelerator, prepare):
    """Gradients of zero are gradients: of a whole unit, of a part of one, and without any backward."""
    model, optimizer = prepare(seeded(), home, accelerator=accelerator)
    reference, expected = plain(seeded())
    for step, last in enumerate((True, False, None, False, True)):
        for each, of in ((model, optimizer), (reference, expected)):
            if step == 3:  # none for this one
                each.layers[2].bias.grad = None
            if last is not None:
                each(rows(step), last=last).backward()
            of.step()
            if step == 1:
                each.zero_grad(set_to_none=False)
            else:
                of.zero_grad(set_to_none=False)
        assert_same(model, reference)


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_autograd_grad_of_weights_leaves_gradients_that_wait(accelerator, home, prepare):
    model, optimizer = prepare(seeded(), home, state="cpu", accelerator=accelerator)
    reference, expected = plain(seeded())
    seen = []
    for each, of in ((model, optimizer), (reference, expected)):
        each(rows(0)).backward()
        grads = torch.autograd.grad(each(rows(1)), list(each.parameters()))
        waiting = [param.grad.clone() for param in each.parameters()]
        each(rows(2)).backward()
        of.step()
        seen.append([*grads, *waiting])
    close(*seen)
    assert_same(model, reference)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_views_of_gradients_that_wait_write_through(accelerator, prepare):
    """Where gradients wait in host memory a view was of a copy, and what was written to it was lost."""
    model, optimizer = prepare(seeded(), "cpu", accelerator=accelerator)
    reference, expected = plain(seeded())
    seen = []
    for each, of in ((model, optimizer), (reference, expected)):
        each(rows()).backward()
        first, second, third = (layer.weight.grad for layer in each.layers)
        first.view(-1)[3] = 0.5
        first[0].mul_(2)
        second.detach().t()[1].add_(0.25)
        second.data.clamp_(-0.1, 0.1)
        third.chunk(2)[1].zero_()
        for row in third.unbind(0):
            row[2:5].fill_(0.125)
        kept = first[1:3]
        first.neg_()
        seen.append([first + 0, second + 0, third + 0, kept.clone(), kept.shape])
        of.step()
    close(*seen)
    assert_same(model, reference)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_gradient_that_adds_up_in_fp32_says_so(accelerator, prepare):
    """On a device its type was that of the weight, and its value fp32: a changed copy could not be assigned."""
    settings = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    model, optimizer = prepare(seeded(), "cpu", accelerator=accelerator, **settings)
    model(rows().bfloat16()).backward()
    grad = model.layers[0].weight.grad
    assert grad.dtype is (grad + 0).dtype is torch.float32
    model.layers[0].weight.grad = grad.clone() * 2
    before = grad.norm().item()
    model(rows(1).bfloat16()).backward()
    assert model.layers[0].weight.grad.dtype is torch.float32 and before > 0
    optimizer.step()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ALL)
def test_a_graph_from_before_the_step_is_refused(home, accelerator, prepare):
    """As by torch: weights in memory changed where autograd did not see it, and its gradient was wrong."""
    model, optimizer = prepare(seeded(), home, accelerator=accelerator)
    old = model(rows())
    model(rows(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    refusal = r"modified by an inplace operation|were updated between a forward and its backward"
    with pytest.raises((RuntimeError, OffloadError), match=refusal):
        old.backward()


class WithEmpty(nn.Module):
    """An empty parameter that gets its gradient after one that lies at the same place."""

    def __init__(self):
        super().__init__()
        self.empty, self.gain = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head((x + self.empty.sum()) * self.gain).square().mean()


@pytest.mark.parametrize("home", ALL)
def test_an_empty_parameter(home, prepare):
    model, optimizer = prepare(seeded(WithEmpty), home)
    reference, expected = plain(seeded(WithEmpty))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch compares strides of an absent parameter with those of its gradient
        for step in range(3):
            for each, of in ((model, optimizer), (reference, expected)):
                each(rows(step)).backward()
                of.step()
                of.zero_grad()
    assert_same(model, reference)
    assert copy.deepcopy(model.empty).shape == (0, 3)


class Late(nn.Module):
    """Backward reads `gain` last of all, for the gradient of another unit."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.gain = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        early = torch.tanh(self.first(x)) * self.last.gain
        return (self.last(x) + early).square().mean()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ["nvme", "nvme-backward"])
def test_a_weight_frozen_since_and_read_after_its_units_update(home, accelerator, prepare):
    model, optimizer = prepare(seeded(Late), home, accelerator=accelerator)
    reference, expected = plain(seeded(Late))
    device = optimizer.engine.device
    for each, of, place in ((model, optimizer, device), (reference, expected, "cpu")):
        each(rows().to(place)).backward()
        of.step()
        of.zero_grad()
        each.last.gain.requires_grad_(False)
    loss = model(rows(1).to(device))
    refused = home == "nvme-backward"
    with pytest.raises(OffloadError, match="were updated between") if refused else contextlib.nullcontext():
        loss.backward()
    if not refused:
        optimizer.step()
        reference(rows(1)).backward()
        expected.step()
        assert_same(model, reference)


class Counting(nn.Module):
    """A checkpoint that counts its runs, between the last activation and the last weight that are saved."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("runs", torch.zeros(()))

    def block(self, x):
        x = torch.tanh(self.first(x))
        self.runs += 1
        return self.last(x)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ALL)
def test_a_checkpoint_runs_again_as_far_as_in_plain_pytorch(home, accelerator, prepare):
    seen = []
    for model, optimizer in (
        plain(seeded(Counting)),
        prepare(seeded(Counting), home, accelerator=accelerator),
    ):
        for step in range(2):
            model(rows(step).to(model.runs.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(model.runs.item())
    assert seen == [4, 4]


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ["none", "nvme"])
def test_a_checkpoint_from_before_the_step_runs_again_with_the_weights_of_now(home, accelerator, prepare):
    """Torch does not refuse it, because the checkpoint keeps no weight."""
    values = []
    for model, optimizer in (
        plain(seeded(Counting)),
        prepare(seeded(Counting), home, accelerator=accelerator),
    ):
        device = model.runs.device
        old = model(rows(1).to(device))
        model(rows(2).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        old.backward()
        values.append([param.grad.cpu() for param in model.parameters() if param.requires_grad])
        optimizer.zero_grad()
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("home", ["none", "nvme"])
def test_a_graph_that_holds_a_parameter_itself_is_refused_after_the_step(home, accelerator, prepare):
    model, optimizer = prepare(seeded(), home, accelerator=accelerator)
    weight = model.layers[0].weight
    with torch.autograd.graph.disable_saved_tensors_hooks("nobody may pack it"):
        old = weight.square().sum()
    model(rows().to(old.device)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
