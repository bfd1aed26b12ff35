"""What has to be there again: step 58, tiers that change, written values; and who may not go on from what."""

import contextlib
import dataclasses
import logging
import time

import pytest
import torch
from interrupted import GIB, after, remove, running, settings, start
from models import WIDTH, Placement, Training
from torch import nn

import offload
from offload.errors import CheckpointError, ConfigError, OffloadError, StoreError, TransferError
from offload.store.commits import find_commits
from offload.store.scan import scan

NVME = Placement("nvme", "nvme", "step")
RESIDENT = Placement("cpu", "nvme", "step")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def test_step_58_with_a_schedule_new_betas_and_a_window_that_is_half_full(precision, swap_path):
    """Case K08: the next five updates are those of a run without a break, bit by bit."""
    training = Training(precision=precision, steps=64, accumulation=2, groups=True)

    def until_the_break(run):
        run.train(2 * 30)
        run.optimizer.param_groups[0]["betas"] = (0.7, 0.97)
        run.optimizer.param_groups[1]["weight_decay"] = 0.25
        run.train(2 * 28 + 1)

    with running(training, Placement("cpu", "cpu"), swap_path) as run:
        until_the_break(run)
        run.outcome.losses.clear()
        run.outcome.norms.clear()
        run.train(1 + 2 * 5)
        expected = run.state()
    with running(training, RESIDENT, swap_path) as run:
        until_the_break(run)
        run.engine.save_checkpoint()
        groups = [{**group, "params": None} for group in run.optimizer.param_groups]
    with running(training, NVME, swap_path, resume=True) as run:
        assert run.engine.global_steps == 58 and run.scheduler.last_epoch == 58
        assert [{**group, "params": None} for group in run.optimizer.param_groups] == groups
        assert {stored.step for stored in run.engine.partition.trainable} == {58}
        run.train(1 + 2 * 5)
        run.state().assert_same_bits(expected)
    remove(swap_path)


def test_planes_change_tiers_and_budgets_between_the_processes(swap_path):
    """Case K01. Chunks stay as they were cut, whatever the configuration says by now."""
    training = Training(precision="bf16", steps=10)
    places = [
        (Placement("nvme", "nvme", "step", chunk=2048), {}),
        (Placement("cpu", "nvme", "backward", chunk=8192), {}),
        (Placement("nvme", "cpu", "step", chunk=8192), {"memory": {"host_bytes": GIB}}),
        (
            Placement("nvme", "nvme", "backward", chunk=8192, verify="always"),
            {"memory": {"host_bytes": "8MiB"}},
        ),
        (Placement("cpu", "cpu", "step", chunk=8192), {}),
    ]
    for index, (placement, changes) in enumerate(places):
        changes = {**changes, "durability": {"verify": placement.verify, "generations": 2}}
        with running(training, placement, swap_path, resume=index > 0, changes=changes) as run:
            assert run.engine.plan.chunk_elements == 2048
            run.train(2)
            run.state().assert_same_bits(after(training, 2 * index, 2 * index + 2))
            run.engine.save_checkpoint()
    remove(swap_path)


def test_a_commit_writes_no_plane_that_is_on_nvme(swap_path):
    with running(Training(precision="bf16", steps=4), NVME, swap_path) as run:
        run.train(2)
        run.engine.settle()
        before = run.engine.ledger.moved.copy()
        directory = run.engine.save_checkpoint()
        run.engine.save_checkpoint()
        assert run.engine.ledger.moved == before
        files = [file for file in directory.iterdir() if file.name != "planes.swap"]
        assert sum(file.stat().st_size for file in files) < 1 << 20
        run.train(2)
        ledger = run.engine.report()
        assert +ledger.moved == ledger.predicted
    remove(swap_path)


def test_what_is_in_memory_is_written_once_for_each_commit_that_finds_it_changed(swap_path):
    training = Training(precision="bf16", steps=4, frozen="blocks.0 blocks.1")
    with running(training, Placement("cpu", "cpu"), swap_path) as run:
        plan = run.engine.plan
        trained = plan.inventory.elements * plan.inventory.weight_itemsize
        state = sum(map(plan.chunk_bytes, plan.chunks))
        written = []
        for micro_batches in (1, 1, 0):
            run.train(micro_batches)
            before = run.engine.ledger.moved["nvme_write", "commit"]
            run.engine.save_checkpoint()
            written.append(run.engine.ledger.moved["nvme_write", "commit"] - before)
        assert written == [plan.inventory.weight_bytes + state, trained + state, trained]
        with torch.no_grad():  # frozen, and an ordinary tensor
            run.model.blocks[0].norm1.weight.fill_(3.0)
        run.engine.save_checkpoint()
    with running(training, NVME, swap_path, resume=True) as run:
        assert bool((run.model.state_dict()["blocks.0.norm1.weight"] == 3.0).all())
    remove(swap_path)


def test_writes_of_a_commit_keep_the_pace_that_is_set(swap_path):
    changes = {"durability": {"generations": 2, "write_bytes_per_second": "20MiB"}}
    with running(Training(steps=1), Placement("cpu", "cpu"), swap_path, changes=changes) as run:
        begin = time.monotonic()
        run.engine.save_checkpoint()
        seconds = time.monotonic() - begin
        assert seconds >= run.engine.ledger.moved["nvme_write", "commit"] / (20 << 20) * 0.9
    remove(swap_path)


@pytest.mark.parametrize("placement", [NVME, RESIDENT, Placement("cpu", "cpu")], ids=str)
def test_values_written_by_the_user_stick_in_weight_master_and_commit(placement, swap_path):
    """N28's kind: inside gather, and by load_state_dict; the next step starts from them, here and after a restart."""
    training = Training(precision="bf16", steps=3)

    def write(run):
        with offload.gather(run.model.blocks[1].norm1.weight, modify=True), torch.no_grad():
            run.model.blocks[1].norm1.weight.mul_(0.37)
        head = torch.randn(run.model.head.weight.shape, generator=torch.Generator().manual_seed(3))
        run.model.load_state_dict({"head.weight": head}, strict=False)

    def masters(run):
        stored = run.engine.partition.of_param
        return {
            name: offload.read_master(run.engine, stored[param])
            for name, param in run.model.named_parameters()
        }

    with running(training, Placement("cpu", "cpu"), swap_path) as run:
        run.train(1)
        write(run)
        run.train(1)
        expected = run.state()
    with running(training, placement, swap_path) as run:
        run.train(1)
        run.engine.save_checkpoint()
    with running(training, placement, swap_path, resume=True) as run:
        write(run)
        run.engine.save_checkpoint()
        written = run.model.state_dict(), masters(run)
    with running(training, placement, swap_path, resume=True) as run:
        for before, now in zip(written, (run.model.state_dict(), masters(run)), strict=True):
            for name, value in now.items():
                assert torch.equal(value, before[name]), name
        run.train(1)
        run.state().assert_same_state(expected)
    remove(swap_path)


# -- a live engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placement", [NVME, RESIDENT, Placement("nvme", "cpu"), Placement("nvme", "nvme", "backward")], ids=str
)
def test_a_live_engine_goes_back_to_its_last_commit(placement, swap_path):
    training = Training(precision="bf16", steps=6)
    with running(training, placement, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint(tag="two", client_state={"at": 2})
        run.train(2)
        if placement.update == "step":
            run.model(training.batches()[0]).backward()  # a gradient that nobody wants
        path, client = run.engine.load_checkpoint(tag="two")
        assert path == str(run.engine.commits_to) and client == {"at": 2}
        run.outcome.losses.clear()
        run.outcome.norms.clear()
        run.train(2)
        run.state().assert_same_bits(after(training, 2, 4))
    remove(swap_path)


@pytest.mark.parametrize("placement", [NVME, RESIDENT, Placement("cpu", "cpu")], ids=str)
def test_a_live_engine_takes_over_what_another_run_has_committed(placement, swap_path):
    training = Training(precision="bf16", steps=6)
    with running(training, NVME, swap_path) as run:
        run.train(2)
        run.engine.save_checkpoint(client_state={"at": 2})
        directory = run.engine.commits_to
    with running(training, placement, swap_path) as run:
        run.train(1)
        run.outcome.losses.clear()
        run.outcome.norms.clear()
        assert run.engine.load_checkpoint(swap_path) == (str(directory), {"at": 2})
        assert run.engine.commits_to == directory and list(swap_path.iterdir()) == [directory]
        run.train(2)
        run.state().assert_same_bits(after(training, 2, 4))
        run.engine.save_checkpoint()
    remove(swap_path)


def test_deepspeeds_shape(swap_path):
    """An unfinished window, the schedule and the counts are those of the run that was broken off."""
    training = Training(precision="bf16", accumulation=3, steps=4)
    batches = training.batches()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}}

    def begin(placement):
        config = settings(training, placement, swap_path, scheduler=scheduler)
        return offload.initialize(model=training.model(), config=config)[0]

    def train(engine, first, last):
        for batch in batches[first:last]:
            engine.backward(engine(batch))
            engine.step()

    whole = begin(RESIDENT)
    train(whole, 0, 12)
    expected = whole.state_dict()
    counts = whole.global_steps, whole.micro_steps, whole.global_samples, whole.get_lr()
    whole.close()
    engine = begin(NVME)
    train(engine, 0, 7)
    assert engine.save_checkpoint(str(swap_path), client_state={"epoch": 1}) is True
    train(engine, 7, 9)
    engine.close()
    engine = begin(NVME)
    _, client = engine.load_checkpoint(str(swap_path))
    assert (
        client == {"epoch": 1} and engine.micro_steps == 7 and not engine.is_gradient_accumulation_boundary()
    )
    train(engine, 7, 12)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.get_lr()) == counts
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    engine.close()
    remove(swap_path)


def test_another_schedule_counts_from_where_the_old_one_was(swap_path):
    """The step after the restart trains at the rate that was due; then the new schedule says."""
    training = Training(precision="bf16", steps=6)

    def begin(warmup, *, resume):
        params = {"warmup_num_steps": warmup, "warmup_max_lr": 1e-2, "warmup_type": "linear"}
        config = settings(training, NVME, swap_path, scheduler={"type": "WarmupLR", "params": params})
        return offload.initialize(model=training.model(), config=config, resume=resume)[0]

    def rates(engine, batches):
        found = []
        for batch in batches:
            found += engine.get_lr()
            engine.backward(engine(batch))
            engine.step()
        return found

    batches = training.batches()
    engine = begin(10, resume=False)
    old = rates(engine, batches)
    engine.close()
    engine = begin(20, resume=False)
    new = rates(engine, batches)
    engine.close()
    engine = begin(10, resume=False)
    rates(engine, batches[:3])
    engine.save_checkpoint()
    engine.close()
    engine = begin(20, resume=True)
    assert rates(engine, batches[3:]) == [old[3], *new[4:]]
    engine.close()
    remove(swap_path)


def test_deepspeeds_shape_where_there_is_nothing_to_load(swap_path, caplog):
    engine = offload.initialize(model=Training().model(), config=settings(Training(), NVME, swap_path))[0]
    with caplog.at_level(logging.WARNING):
        assert engine.load_checkpoint(str(swap_path)) == (None, {})
    assert "there is no commit to go on from" in caplog.text
    engine.close()


class Counted(nn.Module):
    """With a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x)).square().mean()


def test_buffers_are_those_of_the_commit(swap_path):
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, WIDTH, generator=generator) for _ in range(4)]

    def run(resume, first, last, saves, **more):
        torch.manual_seed(0)
        config = settings(Training(), NVME, swap_path)
        model, optimizer = offload.prepare(Counted(), config, resume=resume, **more)
        with contextlib.closing(optimizer.engine):
            for batch in batches[first:last]:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if saves:
                    optimizer.engine.save_checkpoint()
            files = len(list(optimizer.engine.commits_to.glob("tensors-*")))
            return {name: value.clone() for name, value in model.state_dict().items()}, files

    expected, _ = run(False, 0, 4, saves=False)
    _, files = run(False, 0, 3, saves=True)
    assert files == 2, "those of the last two commits"
    found, _ = run(True, 3, 4, saves=False)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    run(True, 3, 4, saves=True)
    found, _ = run(True, 3, 4, saves=True, previous=True)  # whose tensors the commit after it has kept
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    (directory,) = swap_path.iterdir()
    assert not any(item.damage for item in scan(directory))
    named = {file.name: file for file in directory.glob("tensors-*")}
    file = named[find_commits(directory).newest.training["tensors"]["file"]]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (damage,) = [item.damage for item in scan(directory) if item.damage]
    assert "buffer.norm." in str(damage) and file.name in str(damage)
    with pytest.raises(TransferError, match=r"buffer\.norm\..*nothing of it was used"):
        run(True, 3, 4, saves=False)
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="broken header"):
        list(scan(directory))
    with pytest.raises(CheckpointError, match=r"commit 4: .*broken header"):
        run(True, 3, 4, saves=False)
    remove(swap_path)


# -- refusals -----------------------------------------------------------------------------------------------


def test_swap_directories_outlive_a_run_that_has_committed_and_no_other(swap_path, caplog):
    training = Training()
    with running(training, NVME, swap_path):
        pass
    assert list(swap_path.iterdir()) == []
    with running(training, NVME, swap_path) as run:
        directory = run.engine.save_checkpoint()
    assert list(swap_path.iterdir()) == [directory]
    with caplog.at_level(logging.WARNING), running(training, NVME, swap_path):
        pass
    assert list(swap_path.iterdir()) == [directory] and f"{directory} holds the last commit" in caplog.text
    remove(swap_path)


def test_half_a_step_is_never_saved(swap_path):
    training = Training(steps=2)
    batch = training.batches()[0]
    with running(training, Placement("nvme", "nvme", "backward"), swap_path) as run:
        run.model(batch).backward()
        with pytest.raises(OffloadError, match=r"call optimizer.step\(\) first"):
            run.engine.save_checkpoint()
        run.optimizer.step()
        run.model(batch).register_hook(lambda grad: run.engine.save_checkpoint()) if False else None
        with (
            offload.gather(run.model.head.weight, modify=True),
            pytest.raises(OffloadError, match="inside gather"),
        ):
            run.engine.save_checkpoint()
        assert run.engine.commit_serial == 0


def test_what_cannot_be_committed_says_what_to_set(swap_path):
    one = {"durability": {"generations": 1}}
    refusal = pytest.raises(ConfigError, match=r"keep one generation.*durability.generations = 2")
    with running(Training(), NVME, swap_path, changes=one) as run, refusal:
        run.engine.save_checkpoint()
    _, optimizer = offload.prepare(Training().model(), Training().config(Placement(), swap_path))
    with contextlib.closing(optimizer.engine), pytest.raises(ConfigError, match="nothing is on nvme"):
        optimizer.engine.save_checkpoint()
    config = {"durability": {"generations": 2}}
    with pytest.raises(ConfigError, match=r"durability.generations: 2 needs swap files.*nvme_path"):
        offload.prepare(Training().model(), config)
    with pytest.raises(ConfigError, match="nothing can be gone on from: there is no swap path"):
        offload.prepare(Training().model(), {}, resume=True)


OTHERS = [
    (Training(precision="bf16"), "weights are float32 there and bfloat16 here"),
    (Training(state_format="bf16"), "optimizer state is exp_avg float32.* there and exp_avg bfloat16"),
    (Training(frozen="blocks.0.up"), r"blocks.0.up.weight \[256, 64\] float32 there, .*, frozen here"),
    (Training(tied=True), "49 parameters there and 48 here, where head.weight is on one side only"),
    (Training(adamw=False), "it was trained with AdamW, and this optimizer is Adam"),
]


@pytest.mark.parametrize(("other", "what"), OTHERS, ids=lambda value: str(value)[:30])
def test_another_model_is_refused_and_keeps_its_values(other, what, swap_path):
    with running(Training(), NVME, swap_path) as run:
        run.train(1)
        directory = run.engine.save_checkpoint()
    model = other.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=what):
        offload.prepare(model, settings(other, NVME, swap_path), resume=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with running(Training(), NVME, swap_path, resume=directory) as run:
        assert run.engine.global_steps == 1
    remove(swap_path)


def test_the_newest_commit_of_this_model_is_found_among_others(swap_path):
    ours, other = Training(), Training(precision="bf16")
    for training, steps in ((ours, 1), (ours, 2), (other, 3)):
        with running(training, NVME, swap_path) as run:
            run.train(steps)
            run.engine.save_checkpoint()
    with running(ours, NVME, swap_path, resume=True) as run:
        assert run.engine.global_steps == 2
        with running(ours, NVME, swap_path, resume=True) as second:  # the newest is in use
            assert second.engine.global_steps == 1
            with pytest.raises(StoreError, match="still going on"):
                start(ours, NVME, swap_path, resume=run.engine.commits_to)
            other = dataclasses.replace(ours, state_format="bf16")
            with pytest.raises(
                CheckpointError, match=r"of another model or plan: weights are|still going on"
            ):
                start(other, NVME, swap_path, resume=True)
    remove(swap_path)


def damage(file, extent):
    with file.open("r+b") as opened:
        opened.seek(extent.offset + 5)
        byte = opened.read(1)
        opened.seek(extent.offset + 5)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["weights", "states"])
def test_a_damaged_chunk_is_named_and_the_commit_before_offered_where_it_is_whole(kind, swap_path):
    """What is damaged of weights is found before a step has written anything; of state, when it is too late."""
    training = Training(precision="bf16", steps=4)
    with running(training, NVME, swap_path) as run:
        run.train(1)
        run.engine.save_checkpoint()
        run.train(1)
        directory = run.engine.save_checkpoint()
        store = run.engine._store
        owner = 3 if kind == "weights" else run.engine.plan.chunks_of[3][0].index
        item = store._items.weights[3][0] if kind == "weights" else store._items.states[owner]
        stripes = store._layout.generations[store._generations.current(item.index)].of(kind, owner)
        (extent,) = stripes.extents
        names = [stored.name for stored in run.engine.partition.trained[3]]
    damage(directory / "planes.swap", extent)
    with running(training, NVME, swap_path, resume=True) as run:
        with pytest.raises(TransferError) as error:
            run.train(1)
        text = str(error.value)
        assert names[0] in text and f"offset {extent.offset}" in text and str(directory) in text
        whole = "has it intact: go on from that with previous=True (--previous)"
        partly = "has it intact, but not all else: this run has written over it"
        assert f"the commit before, number 1 of step 1, {whole if kind == 'weights' else partly}" in text
        with pytest.raises(OffloadError, match="the engine stopped in step"):
            run.engine.save_checkpoint()
    with running(training, NVME, swap_path, resume=True, previous=True) as run:
        assert run.engine.global_steps == 1
        if kind == "weights":
            run.train(2)
            run.state().assert_same_bits(after(training, 1, 3))
        else:
            with pytest.raises(TransferError, match="nothing of it was used"):
                run.train(2)
    remove(swap_path)
