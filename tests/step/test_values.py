"""Values in and out of a live engine: state dicts, gather, init, export. Oracle: the values themselves."""

import contextlib
import copy

import pytest
import torch
from models import Placement, Training, half_up, prepared, steps, train_offloaded
from torch import nn

import offload
from offload.errors import CheckpointError, OffloadError

PLACEMENTS = [Placement("none", "none"), Placement("nvme", "nvme"), Placement("nvme", "cpu", "backward")]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_is_full_and_true(precision, placement, swap_path):
    training = Training(precision=precision, tied=True, frozen="blocks.0")
    original = {name: value.clone() for name, value in training.model().state_dict().items()}
    with prepared(training, placement, swap_path) as (model, _):
        state = model.state_dict()
        assert state.keys() == original.keys()
        for name, value in state.items():
            if precision == "bf16":
                frozen = name.startswith("blocks.0")
                expected = original[name].bfloat16() if frozen else half_up(original[name])
            else:
                expected = original[name]
            assert torch.equal(value, expected), name
        inner = model.blocks[1].state_dict()
        assert all(torch.equal(value, state[f"blocks.1.{name}"]) for name, value in inner.items())


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_load_state_dict_goes_to_where_it_is(placement, swap_path):
    training = Training(precision="bf16", tied=True)
    other = Training(precision="bf16", tied=True, seed=5).model().to(torch.bfloat16).state_dict()
    with prepared(training, placement, swap_path) as (model, optimizer):
        model.load_state_dict(other)
        for name, value in model.state_dict().items():
            assert torch.equal(value, other[name]), name
        masters = Training(seed=6, tied=True).model().state_dict()
        model.load_state_dict(masters)  # wider than bf16: taken over exactly
        for stored in optimizer.engine.partition.trainable:
            master = offload.read_master(optimizer.engine, stored)
            assert torch.equal(master, masters[stored.name]), stored.name
        with pytest.raises(OffloadError, match="assign"):
            model.load_state_dict(other, assign=True)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**other, "norm.weight": torch.ones(3)})


@pytest.mark.parametrize("second", PLACEMENTS, ids=str)
@pytest.mark.parametrize("first", PLACEMENTS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_from_state_dicts(precision, first, second, swap_path):
    """Three steps, state dicts into a fresh model on another placement, three steps: six steps without a break."""
    training = Training(precision=precision, steps=6)
    batches = training.batches()
    unbroken = train_offloaded(training, Placement(), swap_path)
    with prepared(training, first, swap_path) as (model, optimizer):
        losses = steps(model, optimizer, batches[:3])
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        weights, state = model.state_dict(), optimizer.state_dict()
    fresh = Training(precision=precision, seed=99).model()
    with prepared(training, second, swap_path, fresh) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        losses += steps(model, optimizer, batches[3:])
        for stored, values in offload.optimizer_state(optimizer.engine):
            expected = unbroken.moments[stored.name]
            assert torch.equal(torch.stack([values["exp_avg"], values["exp_avg_sq"]]), expected)
            assert torch.equal(offload.read_master(optimizer.engine, stored), unbroken.masters[stored.name])
    assert losses == unbroken.losses


def test_torch_adam_state_is_understood(swap_path):
    """A torch AdamW after three steps, continued by the engine, against the same AdamW continued by torch."""
    training = Training(steps=6)
    batches = training.batches()
    plain = training.model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    steps(plain, reference, batches[:3])
    weights, state = {k: v.clone() for k, v in plain.state_dict().items()}, reference.state_dict()
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        torch.testing.assert_close(
            steps(model, optimizer, batches[3:]), steps(plain, reference, batches[3:]), rtol=1e-5, atol=0
        )


def test_state_of_another_model_is_refused_whole(swap_path):
    training = Training()
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        before = optimizer.state_dict()
        wrong = optimizer.state_dict()
        wrong["state"][3]["exp_avg"] = torch.zeros(5)
        wrong["param_groups"][0]["lr"] = 7.0
        with pytest.raises(CheckpointError, match="exp_avg of shape"):
            optimizer.load_state_dict(wrong)
        wrong["param_groups"][0]["params"] = [0]
        with pytest.raises(CheckpointError, match="groups of"):
            optimizer.load_state_dict(wrong)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(
            torch.equal(after["state"][i][key], before["state"][i][key])
            for i in before["state"]
            for key in before["state"][i]
        )


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gather(placement, swap_path):
    training = Training(precision="bf16")
    with prepared(training, placement, swap_path) as (model, optimizer):
        engine = optimizer.engine
        masters = {s.name: offload.read_master(engine, s) for s in engine.partition.trainable}
        with offload.gather(model):
            assert all(torch.equal(p, half_up(masters[n])) for n, p in model.named_parameters())
            model.norm.weight.data.fill_(3.0)  # not kept: modify is False
        weight = model.blocks[2].up.weight
        with offload.gather([weight], modify=True):
            weight.data[0] = 0.5
        for stored in engine.partition.trainable:
            expected = masters[stored.name].clone()
            if stored.name == "blocks.2.up.weight":
                expected[0] = 0.5
            assert torch.equal(offload.read_master(engine, stored), expected), stored.name
        steps(model, optimizer, training.batches()[:2])


def test_gather_leaves_strangers_alone():
    param = nn.Parameter(torch.ones(3))
    with offload.gather(param, modify=True):
        param.data.mul_(2)
    assert torch.equal(param, torch.full((3,), 2.0))


def test_reading_an_absent_parameter_gives_its_value(swap_path):
    training = Training(precision="bf16")
    plain = training.model()
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        params = dict(model.named_parameters())
        param = params["blocks.1.up.weight"]
        assert optimizer.engine.partition.of_param[param].is_absent
        assert param.shape == (256, 64) and param.numel() == 256 * 64 and param.dtype is torch.bfloat16
        with pytest.raises(
            OffloadError, match=r"blocks.1.up.weight would be written to by mul_\(\).*offload\.gather"
        ):
            param.mul_(2.0)
        assert optimizer.engine.partition.of_param[param].is_absent, "shapes and refusals move nothing"
        assert all((p == half_up(q)).all() for p, q in zip(params.values(), plain.parameters(), strict=True))
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_init_builds_the_same_model(precision, swap_path):
    """Built inside offload.init with hardly any memory, a model starts from the same bits as outside."""
    training = Training(precision=precision)
    config = training.config(Placement("nvme", "nvme"), swap_path)
    config["memory"] = {"host_bytes": "600KiB"}  # a quarter of it may be alive: less than one block
    outside = {name: value.clone() for name, value in training.model().state_dict().items()}
    with offload.init(config):
        model = training.model()
        for param in model.parameters():  # as a constructor's last loop over everything would
            param.data.add_(0.0)
    del config["memory"]
    model, optimizer = offload.prepare(model, config)
    with contextlib.closing(optimizer.engine):
        for stored in optimizer.engine.partition.trainable:
            assert torch.equal(offload.read_master(optimizer.engine, stored), outside[stored.name])
        steps(model, optimizer, training.batches()[:1])


def test_init_that_fails_leaves_nothing(swap_path):
    config = Training().config(Placement("nvme", "nvme"), swap_path)
    with pytest.raises(ZeroDivisionError), offload.init(config):
        nn.Linear(10, 10)
        raise ZeroDivisionError


def test_two_engines_do_not_mix(swap_path):
    """Two models of the same shapes, same path, in turns: each as if it were alone."""
    first, second = Training(seed=1), Training(seed=2)
    alone = [train_offloaded(t, Placement("nvme", "nvme"), swap_path) for t in (first, second)]
    placement = Placement("nvme", "nvme")
    losses = [[], []]
    with (
        prepared(first, placement, swap_path) as (model1, optimizer1),
        prepared(second, placement, swap_path) as (model2, optimizer2),
    ):
        for batch1, batch2 in zip(first.batches(), second.batches(), strict=True):
            losses[0] += steps(model1, optimizer1, [batch1])
            losses[1] += steps(model2, optimizer2, [batch2])
    assert losses == [outcome.losses for outcome in alone]


def test_closed_engine_says_so(swap_path):
    with prepared(Training(), Placement("nvme", "nvme"), swap_path) as (_model, optimizer):
        pass
    optimizer.engine.close()
    with pytest.raises(OffloadError, match="closed"):
        optimizer.step()


class Assorted(nn.Module):
    """Parameters of many shapes, a tied and a frozen one, and one that is true although it is not the engine's."""

    def __init__(self):
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(1))
        self.matrix, self.empty = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.tied = self.matrix

    def forward(self):
        return self.scalar * self.one.sum() + self.matrix.sum() + self.tied.sum() + self.empty.sum()


def test_a_state_dict_after_close_is_refused_where_weights_were_on_nvme(swap_path):
    """Never NaN that looks like a checkpoint, whatever the shape; the engine closed twice, the model kept."""
    with prepared(Training(), Placement("nvme", "nvme"), swap_path, Assorted()) as (model, optimizer):
        before = model.state_dict()
    optimizer.engine.close()
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"scalar, one, matrix, frozen, tied: .* before close\(\)"):
            model.state_dict()
    for name in ("scalar", "one", "matrix", "frozen"):
        setattr(model, name, nn.Parameter(before[name], requires_grad=name != "frozen"))
    model.tied = model.matrix
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with prepared(Training(), Placement("nvme", "nvme"), swap_path, model) as (model, _):
        assert torch.equal(model.state_dict()["matrix"], before["matrix"])


def test_a_state_dict_after_close_is_whole_where_weights_were_in_memory(swap_path):
    with prepared(Training(), Placement("cpu", "nvme"), swap_path, Assorted()) as (model, _):
        before = model.state_dict()
    assert not any(module._state_dict_hooks for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("chunk", [2048, 1 << 20])
def test_the_optimizer_state_reads_each_chunk_once(precision, chunk, swap_path):
    """Many parameters in a chunk, or many chunks in a parameter."""
    training = Training(precision=precision)
    with prepared(training, Placement("nvme", "nvme", chunk=chunk), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        optimizer.engine.settle()
        moved = optimizer.engine.ledger.moved
        before = moved["nvme_read", "exp_avg"]
        state = copy.deepcopy(optimizer.state_dict())
        whole = sum(unit.elements for unit in optimizer.engine.plan.inventory.units) * 4
        assert moved["nvme_read", "exp_avg"] - before == whole
        before = moved["nvme_read", "exp_avg"]
        optimizer.load_state_dict(state)
        if chunk > 2048:  # else a parameter's moments and its residual each pass through all its chunks
            assert moved["nvme_read", "exp_avg"] - before == whole


UPDATES = [Placement(), Placement("nvme", "nvme"), Placement("nvme", "nvme", "backward")]


@pytest.mark.parametrize("placement", UPDATES, ids=str)
def test_the_optimizer_state_is_that_of_its_moment_whenever_it_is_looked_at(placement, swap_path):
    training = Training(precision="bf16")
    batches = training.batches()
    with prepared(training, placement, swap_path) as (model, optimizer):
        steps(model, optimizer, batches[:1])
        expected, late = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict()
        steps(model, optimizer, batches[1:2])
        assert not torch.equal(optimizer.state_dict()["state"][3]["exp_avg"], late["state"][3]["exp_avg"])
        assert_same_states(late, expected)
        late = optimizer.state_dict()
        optimizer.load_state_dict(expected)
        before = optimizer.state_dict()
        optimizer.load_state_dict(late)
        assert_same_states(before, expected)
        with offload.gather(model.norm.weight, modify=True):
            model.norm.weight.data.fill_(3.0)
        assert not (late["state"][index_of(optimizer, model.norm.weight)]["master"] == 3.0).any()
        expected, at_the_end = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict()
    assert_same_states(at_the_end, expected)


def test_optimizer_state_that_comes_back_unread_moves_no_byte(swap_path):
    """What accelerate does with every optimizer that it wraps."""
    training = Training(precision="bf16")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        before = copy.deepcopy(optimizer.state_dict())
        moved = optimizer.engine.report().moved.copy()
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 7.0
        optimizer.load_state_dict(state)
        assert optimizer.engine.report().moved == moved
        assert optimizer.param_groups[0]["lr"] == 7.0
        assert_same_states(optimizer.state_dict(), before)


def test_pickled_optimizer_state_is_plain_and_refused_without_memory(swap_path, tmp_path, monkeypatch):
    training = Training(precision="bf16")
    with prepared(training, Placement("nvme", "nvme"), swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        assert_same_states(torch.load(tmp_path / "state.pt", weights_only=True), optimizer.state_dict())
        monkeypatch.setattr("offload.metrics.memory_available_bytes", lambda: 1 << 20)
        with pytest.raises(OffloadError, match=r"needs 2\.\d+ MiB of memory at once, 1.00 MiB"):
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")


def index_of(optimizer, param):
    return [id(p) for group in optimizer.param_groups for p in group["params"]].index(id(param))


def assert_same_states(ours, other):
    assert ours["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert ours["state"][index].keys() == state.keys()
        assert all(torch.equal(ours["state"][index][name], value) for name, value in state.items())
