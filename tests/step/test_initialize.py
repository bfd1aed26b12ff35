"""DeepSpeed's loop. Oracle: the same loop in plain PyTorch, micro-batches divided and counted by hand."""

import argparse
import functools
import json
import warnings
from pathlib import Path

import pytest
import torch
from leaks import assert_as
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, IterableDataset

import offload
from offload import ConfigError, OffloadError

STEPS = 20
HOMES = ("none", "cpu", "nvme")


class Net(nn.Module):
    """Three kinds of parameters for three groups, a tied weight, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in "ab"
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + self.scale * block(hidden)
        return self.head(self.norm(hidden))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def groups_of(model):
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "lr": 1e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 2e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": [model.embed.weight], "lr": 5e-3, "weight_decay": 0.01},
    ]


def batches(count, rows=2):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 11, (rows, 6), generator=generator) for _ in range(count)]


def loss_of(model, tokens, factor=1.0):
    logits = model(tokens)
    return factor * nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def config_of(accumulation=1, clip=None, param="none", state="none", path=None, **more):
    offloads = {
        block: {"device": device, **({"nvme_path": str(path)} if device == "nvme" else {})}
        for block, device in (("offload_param", param), ("offload_optimizer", state))
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **offloads},
        **more,
    }
    if clip is not None:
        config["gradient_clipping"] = clip
    return config


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Small models are faster on one thread, and plain sums then have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def begin():
    """`offload.initialize` whose engines are closed at the end of the test."""
    engines = []

    def initialize(**arguments):
        made = offload.initialize(**{"model": net(), "config": config_of(), **arguments})
        engines.append(made[0])
        return made

    yield initialize
    for engine in engines:
        engine.close()


def train(engine, data, factor=lambda step: 1.0):
    """DeepSpeed's loop, to the letter."""
    losses = []
    for step, tokens in enumerate(data):
        loss = loss_of(engine, tokens, factor(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plain(model, optimizer, data, accumulation=1, clip=None, scheduler=None, factor=lambda step: 1.0):
    losses, norms = [], []
    for step, tokens in enumerate(data):
        loss = loss_of(model, tokens, factor(step))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip).item()
            )
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses, norms


def assert_same_weights(engine, model, **tolerance):
    torch.testing.assert_close(dict(engine.state_dict()), dict(model.state_dict()), **tolerance)


# -- the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_loop_equals_plain_loop(begin, accumulation, clip):
    """Three groups, a schedule; the norm reported is the one before clipping (N02, N11, N21)."""
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_num_steps": 6}}
    data = batches(STEPS * accumulation)
    model = net()
    engine, optimizer, _, scheduler = begin(
        model=model,
        model_parameters=groups_of(model),
        config=config_of(accumulation, clip, scheduler=schedule),
    )
    norms = []
    losses = []
    for tokens in data:
        losses += train(engine, [tokens])
        if engine.was_step_applied():
            norms.append(engine.get_global_grad_norm())

    plain = net()
    reference = torch.optim.AdamW(groups_of(plain))
    peaks = [group["lr"] for group in reference.param_groups]
    expected, expected_norms = [], []
    for step in range(STEPS):
        for group, peak, own in zip(reference.param_groups, peaks, optimizer.param_groups, strict=True):
            # the formula of the warm-up: counts -1, 0, 1, ... (see test_schedulers.py)
            rise = torch.tensor(max(1.0, step)).log().item() / torch.tensor(6.0).log().item()
            group["lr"] = 1e-4 + (peak - 1e-4) * min(1.0, rise)
            assert own["betas"] == group["betas"]
        part = data[step * accumulation : (step + 1) * accumulation]
        part_losses, part_norms = train_plain(plain, reference, part, accumulation, clip)
        expected += part_losses
        expected_norms += part_norms
    assert losses == pytest.approx(expected, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert clip is None or min(norms) > clip
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)
    assert engine.global_steps == STEPS
    assert engine.get_lr() == pytest.approx(peaks) == scheduler.get_last_lr()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loop_is_bit_identical_wherever_things_are(tmp_path, precision):
    """Losses, norms, and weights, for every placement of parameters and optimizer state."""
    seen = {}
    for param in HOMES:
        for state in HOMES:
            path = tmp_path / f"{param}-{state}"
            path.mkdir()
            model = net()
            engine, *_ = offload.initialize(
                model=model,
                model_parameters=groups_of(model),
                config=config_of(
                    4,
                    0.5,
                    param,
                    state,
                    path,
                    bf16={"enabled": precision == "bf16"},
                    scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}},
                ),
            )
            losses = train(engine, batches(3 * 4))
            seen[param, state] = losses, engine.get_global_grad_norm(), engine.state_dict()
            engine.close()
            assert list(path.iterdir()) == []
    losses, norm, weights = seen["none", "none"]
    assert losses[-1] != losses[0]
    for placement, (other_losses, other_norm, other_weights) in seen.items():
        assert other_losses == losses and other_norm == norm, placement
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights), placement


# -- micro-batches ----------------------------------------------------------------------------------------


def test_every_micro_batch_counts(begin):
    """N02: the k-th loss is scaled by 10^k, so one that is lost shows in the norm."""
    data = batches(4)
    engine, *_ = begin(config=config_of(4))
    train(engine, data, factor=lambda step: 10.0**step)
    plain = net()
    _, norms = train_plain(
        plain,
        torch.optim.AdamW(plain.parameters(), weight_decay=0.0),
        data,
        4,
        factor=lambda step: 10.0**step,
    )
    assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize("state", HOMES)
def test_unfinished_window_stays_pending(begin, tmp_path, state):
    """N03: neither applied nor lost: micro-batch 6 completes what micro-batch 5 began."""
    data = batches(6)
    engine, *_ = begin(config=config_of(2, state=state, path=tmp_path))
    applied = []
    for tokens in data[:5]:
        train(engine, [tokens])
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True, False]
    plain = net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    train_plain(plain, reference, data[:5], 2)
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 5, 8)
    train(engine, data[5:])
    assert engine.was_step_applied()
    loss_of(plain, data[5]).div(2).backward()  # the plain gradients of micro-batch 5 are still there
    reference.step()
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)


def test_n05_both_rhythms_train_the_same(begin):
    """N05: a loop that calls step() each time, and one that counts itself and calls it every 4th time."""
    data = batches(8)
    each, *_ = begin(config=config_of(4))
    boundaries = []
    for tokens in data:
        before = each.is_gradient_accumulation_boundary()
        each.backward(loss_of(each, tokens))
        assert each.is_gradient_accumulation_boundary() == before
        boundaries.append(before)
        each.step()
        assert each.was_step_applied() == before
    assert boundaries == 2 * [False, False, False, True]

    fourth, *_ = begin(config=config_of(4))
    for number, tokens in enumerate(data, 1):
        fourth.backward(loss_of(fourth, tokens))
        if number % 4 == 0:
            assert fourth.is_gradient_accumulation_boundary()
            fourth.step()
            assert fourth.was_step_applied()
    weights = each.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in fourth.state_dict().items())
    assert each.micro_steps == fourth.micro_steps == 8
    assert each.global_steps == fourth.global_steps == 2


def test_loss_is_divided_once(begin):
    engine, *_ = begin(config=config_of(4))
    tokens = batches(1)[0]
    loss = loss_of(engine, tokens)
    returned = engine.backward(loss)
    assert returned.item() == loss.item() / 4
    once = engine.module.norm.weight.grad.clone()
    loss_of(engine.module, tokens).div(4).backward()
    torch.testing.assert_close(engine.module.norm.weight.grad, 2 * once)
    engine.zero_grad(discard=True)
    loss = loss_of(engine, tokens) / 4
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
    torch.testing.assert_close(engine.module.norm.weight.grad, once)


def test_n04_gradients_add_up_without_a_window(begin):
    """N01, N04: accumulation 1, backward of four parts, one step; with and without no_sync."""
    data = batches(1, rows=8)[0]
    plain = net()
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0), [data])
    engine, *_ = begin()
    for number, part in enumerate(data.chunk(4)):
        if number < 3:
            with engine.no_sync():
                engine.backward(loss_of(engine, part) / 4)
        else:
            engine.backward(loss_of(engine, part) / 4)
    engine.step()
    assert engine.global_steps == 1
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)


def test_script_may_take_over_the_counting(begin):
    """Windows of 3 and 5 micro-batches under accumulation 4; losses are still divided by 4."""
    data = batches(8)
    engine, *_ = begin(config=config_of(4))
    plain = net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for number, tokens in enumerate(data, 1):
        engine.set_gradient_accumulation_boundary(number in (3, 8))
        train(engine, [tokens])
        loss_of(plain, tokens).div(4).backward()
        assert engine.was_step_applied() == (number in (3, 8))
        if number in (3, 8):
            reference.step()
            reference.zero_grad()
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)
    assert (engine.global_steps, engine.global_samples) == (2, 16)


def test_other_rhythms_are_refused(begin):
    engine, *_ = begin(config=config_of(4))
    tokens = batches(1)[0]

    def backward():
        engine.backward(loss_of(engine, tokens))

    with pytest.raises(OffloadError, match=r"step\(\) without backward"):
        engine.step()
    backward()
    engine.step()
    with pytest.raises(OffloadError, match=r"step\(\) without backward.* 1 of 4"):
        engine.step()
    backward()
    backward()
    with pytest.raises(OffloadError, match=r"step\(\) after 2 backward\(\) in a window of .* 4"):
        engine.step()
    backward()
    with pytest.raises(OffloadError, match="4 micro-batches wait for step"):
        backward()
    with pytest.raises(OffloadError, match=r"zero_grad\(\) would lose 4 of 4"):
        engine.zero_grad()
    assert engine.global_steps == 0
    engine.zero_grad(discard=True)
    loss = loss_of(engine, tokens)
    engine.backward(loss, retain_graph=True)
    with pytest.raises(OffloadError, match="add the losses up"):
        engine.backward(loss)
    with engine.no_sync():
        with pytest.raises(OffloadError, match="inside no_sync"):
            engine.step()
        with pytest.raises(OffloadError, match=r"no_sync\(\) inside"), engine.no_sync():
            pass
    with pytest.raises(OffloadError, match="scalar"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(OffloadError, match="scalar"):
        engine.backward(1.0)
    engine.step()  # all of that has left the window as it was
    for _ in range(3):
        train(engine, [tokens])
    assert engine.was_step_applied()


# -- refused steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", HOMES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_step_with_a_gradient_that_is_not_finite_is_refused(begin, tmp_path, accumulation, state):
    """N12: weights, moments, step counts and the schedule are those of a run without these batches."""
    data = batches(7 * accumulation)
    bad = {2 * accumulation: float("inf"), 5 * accumulation - 1: float("nan")}  # in windows 3 and 5
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_num_steps": 5}}
    settings = config_of(accumulation, 0.5, state=state, path=tmp_path, scheduler=schedule)
    engine, optimizer, _, scheduler = begin(config=settings)
    applied = []
    for number, tokens in enumerate(data):
        rate = engine.get_lr()
        train(engine, [tokens], factor=lambda _step, number=number: bad.get(number, 1.0))
        if (number + 1) % accumulation == 0:
            applied.append(engine.was_step_applied())
            if not applied[-1]:
                assert engine.get_lr() == rate
                assert all(param.grad is None for param in engine.module.parameters())
                assert not torch.isfinite(torch.tensor(engine.get_global_grad_norm()))
    assert applied == [True, True, False, True, False, True, True]
    assert (engine.global_steps, engine.skipped_steps) == (7, 2)
    assert scheduler.last_epoch == 5

    good = [tokens for number, tokens in enumerate(data) if number // accumulation not in (2, 4)]
    clean, *_ = begin(config=config_of(accumulation, 0.5, scheduler=schedule))
    train(clean, good)
    weights = clean.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    assert {stored.step for stored in optimizer.engine.partition.trainable} == {5}


def test_step_without_gradients_changes_nothing(begin):
    engine, _, _, scheduler = begin(config=config_of(scheduler={"type": "WarmupLR"}))
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, scheduler.last_epoch) == (0, 0, 0)
    assert engine.get_global_grad_norm() in (None, 0.0)


# -- what the script brings -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["adamw", "adam", "class", "partial", "function", "tensor"])
def test_client_optimizer_trains_as_torch(begin, form):
    """G09, N21: every accepted form, with three groups; the configuration's own block does not count."""
    kind = torch.optim.Adam if form == "adam" else torch.optim.AdamW
    model, plain = net(), net()
    arguments = {}
    if form in ("adamw", "adam"):
        given = kind(groups_of(model), lr=7e-3, eps=1e-6)
    elif form == "tensor":
        given = kind(groups_of(model), lr=torch.tensor(7e-3), eps=1e-6)
    elif form == "class":
        given, arguments = torch.optim.AdamW, {"model_parameters": groups_of(model)}
    elif form == "partial":
        given = functools.partial(kind, eps=1e-6)
        arguments = {"model_parameters": (group for group in groups_of(model))}
    else:

        def given(params):
            assert [p.shape for p in params] == [p.shape for p in model.parameters()]
            return kind(groups_of(model), eps=1e-6)

    engine, optimizer, *_ = begin(model=model, optimizer=given, **arguments)
    reference = kind(groups_of(plain), eps=1e-8 if form == "class" else 1e-6)
    data = batches(10)
    train(engine, data)
    train_plain(plain, reference, data)
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.01]


@pytest.mark.usefixtures("the_cpu_computes")
@pytest.mark.parametrize(
    ("kind", "numbers", "of_a_group"),
    [
        (torch.optim.SGD, {"lr": 0.1}, {"lr": 0.2}),
        (torch.optim.SGD, {"lr": 0.1}, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}, {"lr_decay": 0.1}),
    ],
    ids=["sgd", "momentum-of-a-group", "nesterov", "adagrad"],
)
def test_other_rules_are_taken_over_with_their_numbers(begin, kind, numbers, of_a_group):
    model, plain = net(), net()
    first, *rest = (list(each.parameters()) for each in (model, plain))
    (other,) = rest
    groups = ([{"params": of[:3], **of_a_group}, {"params": of[3:]}] for of in (first, other))
    engine, optimizer, *_ = begin(model=model, optimizer=kind(next(groups), **numbers))
    reference = kind(next(groups), **numbers)
    data = batches(10)
    train(engine, data)
    train_plain(plain, reference, data)
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {key: ours[key] for key in numbers | of_a_group} == {
            key: theirs[key] for key in numbers | of_a_group
        }


def test_client_optimizer_is_out_of_work(begin):
    model = net()
    given = torch.optim.AdamW(model.parameters())
    engine, *_ = begin(model=model, optimizer=given)
    with pytest.raises(OffloadError, match=r"handed to offload\.initialize"):
        given.step()
    engine.close()
    given.step()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda p: torch.optim.NAdam(p),
            "a NAdam cannot be taken over; accepted are torch.optim.AdamW, Adam, Ada",
        ),
        (lambda p: torch.optim.SGD(p, maximize=True), "group 0: maximize is not built"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "group 0: amsgrad is not built"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "group 0: maximize is not built"),
        (lambda p: type("Mine", (torch.optim.AdamW,), {})(p), "a Mine cannot be taken over"),
        (lambda p: torch.optim.Rprop, "what the callable made, a Rprop, cannot be taken over"),
        (lambda p: lambda params: None, "what the callable made, a NoneType,"),
        (lambda p: "AdamW", "a str cannot be taken over"),
    ],
)
def test_other_client_optimizers_are_refused(make, match):
    model = net()
    with pytest.raises(ConfigError, match=match):
        offload.initialize(model=model, optimizer=make(model.parameters()), config=config_of())
    assert_is_untouched(model)


def test_client_optimizer_that_has_stepped_is_refused():
    model = net()
    given = torch.optim.AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()
    given.step()
    given.zero_grad()
    with pytest.raises(ConfigError, match="has taken steps already"):
        offload.initialize(model=model, optimizer=given, config=config_of())


def test_groups_that_train_nothing_are_left_out(begin):
    """S10."""
    model = net()
    model.norm.requires_grad_(False)
    groups = [
        {"params": []},
        {"params": list(model.norm.parameters())},
        {"params": [p for p in model.parameters() if p.requires_grad]},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = torch.optim.AdamW(groups)
    engine, optimizer, *_ = begin(model=model, optimizer=given)
    train(engine, batches(2))
    assert len(optimizer.param_groups) == 1
    scheduler = LambdaLR(given, lambda step: 1.0)
    with pytest.raises(ConfigError, match="group 0 of its optimizer has nothing to train"):
        offload.initialize(model=net(), optimizer=given, lr_scheduler=scheduler, config=config_of())


def _schedulers(optimizer, form):
    return {
        "lambda": lambda: LambdaLR(
            optimizer, [lambda step: 1 / (1 + step), lambda step: 1.0, lambda step: 0.5]
        ),
        "one cycle": lambda: OneCycleLR(optimizer, max_lr=[0.01, 0.02, 0.03], total_steps=12),
        "sequence": lambda: SequentialLR(
            optimizer,
            [LinearLR(optimizer, 0.1, total_iters=3), LambdaLR(optimizer, lambda step: 0.9**step)],
            milestones=[3],
        ),
        "chain": lambda: ChainedScheduler(
            [LinearLR(optimizer, 0.1, total_iters=3), LambdaLR(optimizer, lambda step: 0.9**step)]
        ),
    }[form]()


@pytest.mark.parametrize("bound", [True, False], ids=["bound to the client's", "made from ours"])
@pytest.mark.parametrize("form", ["lambda", "one cycle", "sequence", "chain"])
def test_client_scheduler_drives_our_optimizer(begin, form, bound):
    """Learning rates, betas and weights are those of torch under the same scheduler. No warning is given."""
    model, plain = net(), net()
    given = torch.optim.AdamW(groups_of(model))
    reference = torch.optim.AdamW(groups_of(plain))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        theirs = _schedulers(given, form) if bound else functools.partial(_schedulers, form=form)
        engine, optimizer, _, scheduler = begin(
            model=model, optimizer=given, lr_scheduler=theirs, config=config_of(2)
        )
        expected = _schedulers(reference, form)
        assert scheduler is engine.lr_scheduler
        assert scheduler is theirs or not bound
        assert engine.get_lr() == [group["lr"] for group in reference.param_groups]
        data = batches(20)
        for step in range(0, 20, 2):
            train(engine, data[step : step + 2])
            train_plain(plain, reference, data[step : step + 2], 2, scheduler=expected)
            for ours, others in zip(optimizer.param_groups, reference.param_groups, strict=True):
                assert ours["lr"] == others["lr"]
                assert ours["betas"] == others["betas"]
    assert_same_weights(engine, plain, rtol=1e-5, atol=1e-7)


def test_scheduler_arguments_pass_through(begin):
    """ReduceLROnPlateau needs the loss."""
    make = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    engine, *_ = begin(lr_scheduler=make)
    tokens = batches(1)[0]
    for metric in (1.0, 2.0):
        engine.backward(loss_of(engine, tokens))
        engine.step(lr_kwargs={"metrics": metric})
    assert engine.get_lr() == [5e-4]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda own, other: LambdaLR(other, lambda step: 1.0), "LambdaLR is not bound to the optimizer"),
        (lambda own, other: "cosine", "a str is none"),
    ],
)
def test_other_client_schedulers_are_refused(make, match):
    model = net()
    own, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=match):
        offload.initialize(model=model, optimizer=own, lr_scheduler=make(own, other), config=config_of())
    assert_is_untouched(model)


def test_scheduler_that_cannot_be_made_closes_the_engine(tmp_path):
    before = opened()
    with pytest.raises(ConfigError, match=r"returned a int, which has no step\(\)"):
        offload.initialize(
            model=net(),
            lr_scheduler=lambda optimizer: 3,
            config=config_of(param="nvme", state="nvme", path=tmp_path),
        )
    assert_as(before, opened)
    assert list(tmp_path.iterdir()) == []


# -- configuration and data -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["config", "config_params", "args", "twice"])
def test_configuration_may_come_from_anywhere(begin, tmp_path, way):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config_of(4)))
    args = argparse.Namespace(deepspeed_config=str(file), local_rank=0)
    arguments = {
        "config": {"config": file},
        "config_params": {"config": None, "config_params": config_of(4)},
        "args": {"config": None, "args": args},
        "twice": {"config": config_of(4), "args": args},
    }[way]
    engine, *_ = begin(**arguments)
    assert engine.gradient_accumulation_steps() == 4
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert engine.train_batch_size() == 8


def assert_is_untouched(model):
    fresh = net().state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"config": None}, "no configuration: give it as one of config, config_params, args"),
        ({"config_params": config_of(2)}, "config and config_params are different configurations"),
        ({"mpu": object()}, "mpu: model parallelism is not supported"),
        ({"model": None}, "model: a torch.nn.Module is needed, got NoneType"),
        ({"config": config_of(4, train_batch_size=10)}, "train_batch_size: 10 "),
        ({"config": config_of(fp16={"enabled": True})}, "fp16.enabled: fp16 training is not built yet"),
        ({"config": config_of(scheduler={"type": "WarmupDecayLR"})}, "total_num_steps: .*write it"),
        ({"training_data": []}, "training_data: the dataset is empty"),
        ({"training_data": 3}, "training_data: a int is no dataset"),
        ({"training_data": DataLoader([1])}, "training_data: a DataLoader is no dataset"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_touched(arguments, match):
    model = net()
    with pytest.raises(ConfigError, match=match):
        offload.initialize(**{"model": model, "config": config_of(), **arguments})
    assert_is_untouched(model)


def test_backward_updates_and_accumulation_exclude_each_other():
    config = config_of(2)
    config["zero_optimization"]["offload_optimizer"]["update"] = "backward"
    with pytest.raises(ConfigError, match=r"offload_optimizer\.update"):
        offload.initialize(model=net(), config=config)


def test_update_in_backward_trains_the_same(begin):
    config = config_of()
    config["zero_optimization"]["offload_optimizer"]["update"] = "backward"
    inside, *_ = begin(config=config)
    after, *_ = begin()
    data = batches(6)
    assert train(inside, data) == train(after, data)
    assert inside.global_steps == 6 and inside.was_step_applied()


def test_training_data_becomes_a_loader(begin):
    data = [(torch.tensor([k, k]), k) for k in range(7)]
    orders = []
    for number in range(2):
        _, _, loader, _ = begin(training_data=data)
        torch.manual_seed(number)  # the order is none of the global generator's business
        epochs = [[int(k) for _, labels in loader for k in labels] for _ in range(2)]
        assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        orders.append(epochs)
    assert orders[0] == orders[1]
    assert [len(labels) for _, labels in loader] == [2, 2, 2, 1]
    _, _, loader, _ = begin(training_data=data, config=config_of(dataloader_drop_last=True), collate_fn=len)
    assert list(loader) == [2, 2, 2]


def test_iterable_data_keeps_its_order(begin):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    _, _, loader, _ = begin(training_data=Stream())
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


# -- the engine as an object ------------------------------------------------------------------------------


def test_module_shows_through(begin):
    engine, optimizer, *_ = begin()
    assert engine.module is not engine and engine.optimizer is optimizer
    assert engine.device == torch.device("cpu")
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in net().named_parameters()]
    assert engine.eval() is engine and not engine.module.training
    assert engine.train().module.training
    assert engine.plan is optimizer.engine.plan
    with pytest.raises(AttributeError, match="TrainingEngine has no 'sav_checkpoint'"):
        _ = engine.sav_checkpoint


def test_what_is_not_built_says_so(begin):
    engine, *_ = begin()
    assert not hasattr(engine, "compile")
    with pytest.raises(OffloadError, match=r"engine\.compile\(\) is not built yet; call torch.compile"):
        engine.compile()


def test_evaluation_does_not_disturb_the_window(begin):
    data = batches(8)
    engine, *_ = begin(config=config_of(4))
    other, *_ = begin(config=config_of(4))
    for tokens in data:
        train(engine, [tokens])
        engine.eval()
        with torch.no_grad():
            loss_of(engine, tokens)
        engine.train()
    for tokens in data:
        train(other, [tokens])
        if other.was_step_applied():
            other.zero_grad(set_to_none=True)  # between windows it is as in torch
    weights = other.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())


def test_weights_go_out_and_come_in(begin, tmp_path):
    first, *_ = begin(config=config_of(param="nvme", state="nvme", path=tmp_path))
    train(first, batches(3))
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second, *_ = begin(model=net(seed=9))
    second.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_same_weights(second, first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict({})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_files_hold_the_weights(begin, tmp_path, precision):
    swap = tmp_path / "swap"
    swap.mkdir()
    settings = config_of(param="nvme", state="nvme", path=swap, bf16={"enabled": precision == "bf16"})
    model = net()
    model.embed.requires_grad_(False)
    engine, *_ = begin(model=model, config=settings)
    train(engine, batches(2))
    weights = engine.state_dict()

    assert engine.save_16bit_model(tmp_path / "out") is True
    assert engine.save_16bit_model(tmp_path / "out") is True  # replaces it
    assert engine.save_16bit_model(tmp_path / "out", "model.safetensors")
    assert engine.save_16bit_model(tmp_path / "out", "trained.bin", exclude_frozen_parameters=True)
    assert names(tmp_path / "out") == ["model.safetensors", "pytorch_model.bin", "trained.bin"]
    pickled = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert pickled.keys() == weights.keys()
    assert all(torch.equal(pickled[name], weights[name]) for name in weights)
    assert net().to(weights["norm.bias"].dtype).load_state_dict(pickled)
    streamed = load_file(tmp_path / "out" / "model.safetensors")
    assert streamed.keys() == weights.keys() - {"head.weight"}  # a tied weight is there once
    assert all(torch.equal(streamed[name], weights[name]) for name in streamed)
    trained = torch.load(tmp_path / "out" / "trained.bin")
    assert trained.keys() == weights.keys() - {"embed.weight", "head.weight"}

    engine.export(tmp_path / "exported", dtype=torch.float32)
    assert names(tmp_path / "exported") == ["model.safetensors"]
    masters = load_file(tmp_path / "exported" / "model.safetensors")
    for name, master in masters.items():
        assert master.dtype is torch.float32
        torch.testing.assert_close(master, weights[name].float(), rtol=2**-8, atol=0)
    if precision == "bf16":  # the exact master, not the rounded weight
        assert any(not torch.equal(masters[name], weights[name].float()) for name in masters)
    with pytest.raises(ConfigError, match="is not empty"):
        engine.export(tmp_path / "exported")
    with pytest.raises(ConfigError, match="floating-point"):
        engine.export(tmp_path / "other", dtype=torch.int8)


def test_failed_save_leaves_the_old_file(begin, tmp_path, monkeypatch):
    engine, *_ = begin()
    engine.save_16bit_model(tmp_path)
    old = (tmp_path / "pytorch_model.bin").read_bytes()
    monkeypatch.setattr(torch, "save", lambda state, path: Path(path).write_bytes(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.save_16bit_model(tmp_path)
    monkeypatch.setattr("offload.metrics.memory_available_bytes", lambda: 10)
    with pytest.raises(OffloadError, match=r"ends in \.safetensors"):
        engine.save_16bit_model(tmp_path)
    assert (tmp_path / "pytorch_model.bin").read_bytes() == old
    assert names(tmp_path) == ["pytorch_model.bin"]


def test_export_of_a_transformers_model_opens_there(begin, tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    engine, *_ = begin(model=transformers.LlamaForCausalLM(settings))
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits
    for dtype in (None, torch.bfloat16):
        engine.export(tmp_path / f"{dtype}", dtype=dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{dtype}").eval()
        assert model.dtype == (dtype or torch.float32)
        with torch.no_grad():
            found = model(input_ids=tokens).logits.float()
        torch.testing.assert_close(found, logits, rtol=0, atol=0.02 if dtype else 0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def opened():
    """Threads and descriptors of this process."""
    descriptors = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    return len(list(Path("/proc/self/task").iterdir())), sorted(descriptors)


def test_close_gives_everything_back(tmp_path):
    settings = config_of(2, param="nvme", state="nvme", path=tmp_path)
    for number in range(2):
        before = opened()
        engine, *_ = offload.initialize(model=net(), config=settings)
        train(engine, batches(3))
        engine.close() if number else engine.destroy()
        engine.close()
        if number:  # the first run starts the kernel's own threads, which stay
            assert_as(before, opened)
        assert list(tmp_path.iterdir()) == []
    tokens = batches(1)[0]
    for call in (
        lambda: engine(tokens),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.state_dict,
        lambda: engine.export(tmp_path / "out"),
        lambda: engine.save_16bit_model(tmp_path),
    ):
        with pytest.raises(OffloadError, match="engine is closed"):
            call()
    assert engine.report().steps == 1


def test_nothing_is_printed(begin, capfd):
    engine, *_ = begin(config=config_of(steps_per_print=1))
    train(engine, batches(2))
    engine.close()
    assert capfd.readouterr() == ("", "")
