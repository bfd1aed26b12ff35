"""What beside planes a run goes on from: it comes back through JSON, and a stranger's is refused in one line."""

import contextlib
import copy
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Placement, Training, prepared
from torch import nn

from offload import training_state
from offload.errors import CheckpointError, ConfigError
from offload.training_state import TrainingState

TRAINING = Training(groups=True, accumulation=2)


class Normed(nn.Module):
    """With buffers, one of them not for a file."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)).square().mean()


def capture(model, optimizer, **more):
    engine = optimizer.engine
    given = {"step": 7, "skipped_steps": 1, "parts": {}, **more}
    state = training_state.capture(engine, model, **given)
    values = json.loads(json.dumps(state.values, allow_nan=False))
    return TrainingState.of(values, {name: value.clone() for name, value in state.tensors.items()})


def restore(model, optimizer, state, **parts):
    training_state.restore(optimizer.engine, model, state, parts)


def draws():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(1)),
    )


def test_everything_comes_back(swap_path):
    batches = TRAINING.batches()
    placement = Placement("cpu", "cpu")
    with prepared(TRAINING, placement, swap_path) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        for batch in batches[:2]:
            model(batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        model(batches[2]).backward()  # a window that is half full
        optimizer.param_groups[0]["betas"] = (0.7, 0.97)
        draws()
        client = {"epoch": 3, "best": [0.5, None]}
        state = capture(model, optimizer, parts={"scheduler": scheduler}, client_state=client, tag="here")
        expected = draws()
        groups = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
        gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
        steps = [stored.step for stored in optimizer.engine.partition.trainable]
    with prepared(TRAINING, placement, swap_path) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        restore(model, optimizer, state, scheduler=scheduler)
        assert (state.step, state.skipped_steps, state.tag) == (7, 1, "here")
        assert state.client_state == client
        assert draws() == expected
        assert [{**group, "params": None} for group in optimizer.param_groups] == groups
        assert scheduler.last_epoch == 1
        assert [stored.step for stored in optimizer.engine.partition.trainable] == steps
        for name, param in model.named_parameters():
            assert torch.equal(param.grad, gradients[name]), name


def test_buffers_come_back_and_those_for_no_file_stay(swap_path):
    with prepared(Training(), Placement("cpu", "cpu"), swap_path, model=Normed()) as (model, optimizer):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = capture(model, optimizer)
        saved = {name: value.clone() for name, value in model.named_buffers()}
    assert state.tensor_names == [
        "buffer.norm.running_mean",
        "buffer.norm.running_var",
        "buffer.norm.num_batches_tracked",
    ]
    with prepared(Training(), Placement("cpu", "cpu"), swap_path, model=Normed()) as (model, optimizer):
        model.table.zero_()
        restore(model, optimizer, state)
        assert not model.table.any()
        for name, value in model.named_buffers():
            assert name == "table" or torch.equal(value, saved[name]), name


def test_what_is_attached_later_is_given_its_part_and_the_groups_theirs(swap_path):
    with prepared(Training(), Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        state, lr = capture(model, optimizer, parts={"scheduler": scheduler}), optimizer.param_groups[0]["lr"]
    with prepared(Training(), Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        restore(model, optimizer, state)
        later = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])  # which has a say in the learning rate
        training_state.restore_part(optimizer.engine, state, "scheduler", later)
        assert optimizer.param_groups[0]["lr"] == lr == pytest.approx(1e-5)
        assert later.state_dict() == scheduler.state_dict()


LR = torch.optim.lr_scheduler
SCHEDULERS = {
    "lambda": lambda optimizer: LR.LambdaLR(optimizer, lambda step: 0.9**step),
    "multiplicative": lambda optimizer: LR.MultiplicativeLR(optimizer, lambda step: 0.9),
    "step": lambda optimizer: LR.StepLR(optimizer, 2),
    "multi-step": lambda optimizer: LR.MultiStepLR(optimizer, [1, 4, 4]),
    "constant": lambda optimizer: LR.ConstantLR(optimizer, total_iters=4),
    "linear": lambda optimizer: LR.LinearLR(optimizer, total_iters=6),
    "exponential": lambda optimizer: LR.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: LR.PolynomialLR(optimizer, 7),
    "cosine": lambda optimizer: LR.CosineAnnealingLR(optimizer, 7),
    "restarts": lambda optimizer: LR.CosineAnnealingWarmRestarts(optimizer, 2),
    "cyclic": lambda optimizer: LR.CyclicLR(optimizer, 1e-4, 1e-2, 2, cycle_momentum=False),
    "one cycle": lambda optimizer: LR.OneCycleLR(optimizer, 1e-2, total_steps=12),
    "plateau": lambda optimizer: LR.ReduceLROnPlateau(optimizer, patience=1),
    "sequential": lambda optimizer: LR.SequentialLR(
        optimizer, [LR.ConstantLR(optimizer), LR.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chained": lambda optimizer: LR.ChainedScheduler(
        [LR.ConstantLR(optimizer), LR.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about the order of calls
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_goes_on(name, swap_path):
    """Learning rates and momenta of the next steps are those of the one that was not interrupted."""

    def numbers(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return found

    with prepared(TRAINING, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        scheduler = SCHEDULERS[name](optimizer)
        *_, last = numbers(optimizer, scheduler, 3)
        state = capture(model, optimizer, parts={"scheduler": scheduler})
        expected = numbers(optimizer, scheduler, 6)
    with prepared(TRAINING, Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        restore(model, optimizer, state)
        scheduler = SCHEDULERS[name](optimizer)
        training_state.restore_part(optimizer.engine, state, "scheduler", scheduler)
        assert numbers(optimizer, scheduler, 6) == expected
    assert any(each != last for each in expected)


def test_what_cannot_be_saved_is_named(swap_path):
    with prepared(Training(), Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        with pytest.raises(ConfigError, match=r"client_state\['model'\] is of type GPT"):
            capture(model, optimizer, client_state={"model": model})
        optimizer.param_groups[0]["hook"] = print
        with pytest.raises(ConfigError, match=r"parameter group 0\['hook'\] is of type builtin"):
            capture(model, optimizer)


OTHERS = [
    (Training(groups=True), "parameter groups"),
    (Training(adamw=False), "trained with AdamW, and this optimizer is Adam"),
    (Training(frozen="blocks.0.norm1"), "parameter group 0: blocks.0.norm1.bias is in it there and not here"),
]


@pytest.mark.parametrize(("other", "what"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_another_model_or_optimizer_is_refused_and_nothing_changes(other, what, swap_path):
    with prepared(Training(), Placement("cpu", "cpu"), swap_path) as (model, optimizer):
        state = capture(model, optimizer)
    model = other.model()
    import offload

    groups = other.param_groups(dict(model.named_parameters()))
    model, optimizer = offload.prepare(model, other.config(Placement("cpu", "cpu"), swap_path), groups)
    with contextlib.closing(optimizer.engine):
        before = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
        with pytest.raises(CheckpointError, match=what):
            restore(model, optimizer, state)
        assert [{**group, "params": None} for group in optimizer.param_groups] == before


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    with prepared(Training(), Placement("cpu", "cpu"), tmp_path_factory.mktemp("swap")) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return capture(model, optimizer, parts={"scheduler": scheduler}).values


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
JUNK = (
    JUNK
    | st.lists(JUNK, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.just("$map"), JUNK, max_size=2)
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_strangers_state_is_refused_in_one_line_or_harmless(good, data):
    values = copy.deepcopy(good)
    place = values
    for _ in range(data.draw(st.integers(0, 4))):
        inner = [
            key
            for key in (place if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], (dict, list)) and place[key]
        ]
        if not inner:
            break
        place = place[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if data.draw(st.booleans()) and isinstance(place, dict):
        del place[key]
    else:
        place[key] = data.draw(JUNK)
    try:
        state = TrainingState.of(values)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        state.part("scheduler")


@pytest.mark.parametrize("values", [None, [], {}, {"version": 2}, {"version": "1"}, "x"])
def test_what_is_no_state_is_refused(values):
    with pytest.raises(CheckpointError):
        TrainingState.of(values)
