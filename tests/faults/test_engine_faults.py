"""The engine on a disk that is slow, short, shuffled or gone. (One that fails: test_nth_failure.)"""

import contextlib
import errno
import functools
import random
import sys
from pathlib import Path

import pytest
import torch
from models import Placement, Training, train_offloaded
from torch import nn

import offload
from offload.errors import OffloadError, TransferError

sys.path.append(str(Path(__file__).parents[1] / "sim"))
from virtual import VirtualQueue

pytestmark = pytest.mark.timeout(60)


PLACEMENTS = [
    Placement(param, state, update, chunk=2048)
    for param, state in (("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"))
    for update in ("step", "backward")
]
LOOP = Training(precision="bf16", steps=3)


@functools.cache
def without_faults():
    return train_offloaded(LOOP, Placement(), "/unused")


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """torch starts its own threads at the first backward: they are not ours to count."""
    without_faults()


@pytest.mark.parametrize("seed", range(30))
def test_the_same_bits_on_a_bad_disk(seed, swap_path, faulty, nothing_left_behind):
    """Short transfers, EINTR, EAGAIN, completions in any order, now and then one that is very late."""
    rng = random.Random(seed)
    faulty(
        seed=seed,
        short_one_in=rng.choice([0, 2, 5]),
        eintr_one_in=rng.choice([0, 3, 9]),
        eagain_one_in=rng.choice([0, 4, 11]),
        reorder=rng.randint(0, 1),
        delay_at=rng.randint(1, 200),
        delay_ms=rng.choice([0, 20]),
    )
    train_offloaded(LOOP, PLACEMENTS[seed % len(PLACEMENTS)], swap_path).assert_same_bits(without_faults())


@pytest.mark.parametrize("seed", range(12))
def test_the_same_bits_on_a_disk_without_a_clock(seed, swap_path, monkeypatch):
    """The whole engine over tests/sim's disk, which also finds transfers that overlap."""
    monkeypatch.setattr("offload.store.drives.Queue", functools.partial(VirtualQueue, seed=seed))
    train_offloaded(LOOP, PLACEMENTS[seed % len(PLACEMENTS)], swap_path).assert_same_bits(without_faults())


class Tiny(nn.Module):
    """Three equal blocks; `backwards` uses them against their order of registration."""

    def __init__(self, blocks=3, backwards=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(blocks))
        self.backwards = backwards

    def forward(self, x):
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def config(swap_path, update="step", precision="bf16", **block):
    return {
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2048,
            "offload_param": {"device": "nvme", "nvme_path": str(swap_path)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(swap_path), "update": update},
        },
        **block,
    }


def train(model, optimizer, steps, dtype=torch.bfloat16):
    for step in range(steps):
        model(torch.full((2, 48), 0.1 * (step + 1), dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_slow_disk_and_a_fast_model(update, blocks, backwards, swap_path, faulty):
    """Every transfer takes longer than a step computes: the next update waits for the last one's write."""
    outcomes = []
    for faults, path in ({"delay_ms": 4}, swap_path), (None, swap_path):
        if faults:
            faulty(**faults)
        else:
            faulty(seed=0)
        model, optimizer = offload.prepare(Tiny(blocks, backwards), config(path, update))
        with contextlib.closing(optimizer.engine) as engine:
            train(model, optimizer, 4)
            ledger = engine.report()
            if not backwards:
                assert +ledger.moved == ledger.predicted
            outcomes.append(model.state_dict())
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name])


def test_a_failed_write_of_a_gathered_parameter_stops_the_engine(swap_path, monkeypatch):
    """The plane on disk is then neither old nor new: nothing may go on as if it were."""
    fails = []
    monkeypatch.setattr(
        "offload.store.drives.Queue",
        functools.partial(VirtualQueue, fail=lambda number: bool(fails) and number == fails[0]),
    )
    model, optimizer = offload.prepare(Tiny(), config(swap_path, precision="fp32"))
    engine = optimizer.engine
    with contextlib.closing(engine):
        queue = engine._store._drives[0].queue
        with pytest.raises(TransferError), offload.gather(model.blocks[0].weight, modify=True):
            with torch.no_grad():
                model.blocks[0].weight.zero_()
            fails.append(len(queue.submitted))
        with pytest.raises(OffloadError, match="the engine stopped"):
            model(torch.ones(2, 48))


def test_a_prepare_that_fails_leaves_nothing(swap_path, monkeypatch, nothing_left_behind):
    """Bad groups, a plan that does not fit, no space: before anything has changed."""
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stranger = nn.Parameter(torch.ones(3))
    with pytest.raises(OffloadError, match="not in the model"):
        offload.prepare(model, config(swap_path), [{"params": [stranger]}])
    with pytest.raises(OffloadError, match="host memory needs at least"):
        offload.prepare(model, config(swap_path, memory={"host_bytes": 1000}))
    with pytest.raises(OffloadError, match="nvme_path"):
        offload.prepare(model, config(swap_path / "a" / "b"))
    monkeypatch.setattr("offload.store.drives.Queue.preallocate", lambda self, size: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offload.prepare(model, config(swap_path))
    monkeypatch.undo()
    assert list(swap_path.iterdir()) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1, torch.float32)  # still an ordinary model


def mixed():
    """Of every type, trained and frozen, laid out in channels_last, of no element."""
    model = Tiny()
    model.blocks[1].bfloat16()
    model.blocks[2].half()
    model.frozen = nn.Linear(8, 8).bfloat16().requires_grad_(False)
    model.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.empty = nn.Parameter(torch.ones(0, 3))
    return model


def as_it_was(model, reference):
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.dtype is expected.dtype and param.stride() == expected.stride(), name
        assert torch.equal(param, expected), name
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


HOMES = [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("param", "state"), HOMES)
def test_a_prepare_that_breaks_off_gives_the_values_back(
    param, state, update, precision, swap_path, monkeypatch, nothing_left_behind
):
    """At every parameter in turn: the model is the one that was given."""
    settings = config(swap_path, update, precision)
    settings["zero_optimization"]["offload_param"]["device"] = param
    settings["zero_optimization"]["offload_optimizer"]["device"] = state
    model, reference = mixed(), mixed()
    real, left = offload.construct.initial_value, []

    def broken(param):
        if not left:
            raise RuntimeError("the checkpoint ends here")
        return left.pop()(param)

    monkeypatch.setattr("offload.construct.initial_value", broken)
    for at in range(len(list(model.parameters()))):
        left[:] = [real] * at
        with pytest.raises(RuntimeError, match="ends here"):
            offload.prepare(model, settings)
        assert list(swap_path.iterdir()) == []
        as_it_was(model, reference)
    monkeypatch.undo()
    model, optimizer = offload.prepare(model, settings)
    for stored in optimizer.engine.partition.trainable:
        expected = reference.get_parameter(stored.name)
        assert torch.equal(offload.read_master(optimizer.engine, stored), expected.float())
    optimizer.engine.close()


def test_a_prepare_whose_disk_fails(swap_path, faulty, nothing_left_behind):
    """One failed write or read: the values come back. Later reads fail too: it says that they are lost."""
    for n in range(1, 100):
        faulty(fail_at=n, fail_errno=errno.EIO)
        model, reference = mixed(), mixed()
        try:
            _, optimizer = offload.prepare(model, config(swap_path))
        except TransferError as error:
            assert "planes.swap" in str(error)
            as_it_was(model, reference)
        else:
            optimizer.engine.close()
            break
    assert 10 < n < 99


def test_a_prepare_whose_disk_is_gone(swap_path, monkeypatch):
    gone = functools.partial(VirtualQueue, fail=lambda number: number >= 5)
    monkeypatch.setattr("offload.store.drives.Queue", gone)
    model = Tiny()
    with pytest.raises(OffloadError, match=r"cannot be read back .*: build the model anew"):
        offload.prepare(model, config(swap_path))
    assert any(bool(param.isnan().all()) for param in model.parameters()), "lost, and never plausible"
    assert list(swap_path.iterdir()) == []


def test_a_prepare_that_breaks_off_while_a_model_is_streamed_in(swap_path, monkeypatch):
    """What was built inside `offload.init` is still in its own file: preparing again works."""
    settings = {**config(swap_path), "memory": {"host_bytes": "40KiB"}}
    with offload.init(settings):
        model = Tiny()
    del settings["memory"]
    real, calls = offload.construct.initial_value, []

    def broken(param):
        calls.append(param)
        return real(param) if len(calls) < 4 else 1 / 0

    monkeypatch.setattr("offload.construct.initial_value", broken)
    with pytest.raises(ZeroDivisionError):
        offload.prepare(model, settings)
    monkeypatch.undo()
    model, optimizer = offload.prepare(model, settings)
    with contextlib.closing(optimizer.engine):
        expected = Tiny()
        for stored in optimizer.engine.partition.trainable:
            master = offload.read_master(optimizer.engine, stored)
            assert torch.equal(master, expected.get_parameter(stored.name))
