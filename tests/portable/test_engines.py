"""Checkpoints beside commits: the values of one store go into another, and DeepSpeed's calls say the same."""

import contextlib
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from leftovers import assert_same, committed_run, saved, values_of
from models import Placement, Training, steps

import offload
from offload.errors import CheckpointError, ConfigError

NVME = Placement("nvme", "nvme", chunk=2048)


@contextlib.contextmanager
def going(training, placement, swap, generations=2, seed=7):
    config = training.config(placement, swap)
    config["durability"]["generations"] = generations
    model, optimizer = offload.prepare(replace(training, seed=seed).model(), config)
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


def remove(swap):
    for directory in swap.iterdir():
        shutil.rmtree(directory)


RULES = {
    "sgd": {"type": "SGD", "params": {"lr": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.5}},
    "adam": {"type": "Adam", "params": {"lr": 1e-3}},
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_on_from_a_checkpoint_and_a_commit(rule, swap_path, tmp_path):
    training = Training("bf16", "fp32" if rule in ("sgd", "adagrad") else "bf16", steps=4)
    batches, other = training.batches(), tmp_path / "other"
    other.mkdir()

    def begin(placement, swap, generations, seed=0, **changes):
        config = {**training.config(placement, swap), "optimizer": RULES[rule], **changes}
        config["durability"]["generations"] = generations
        model, optimizer = offload.prepare(replace(training, seed=seed).model(), config)
        return contextlib.closing(optimizer.engine), model, optimizer

    engine, model, optimizer = begin(NVME, swap_path, 2)
    with engine:
        steps(model, optimizer, batches[:2])
        sources = [saved(optimizer, tmp_path / "out"), optimizer.engine.save_checkpoint()]
        steps(model, optimizer, batches[2:])
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    for source in sources:
        engine, model, optimizer = begin(Placement("cpu", "nvme"), other, 1, seed=4)
        with engine:
            optimizer.engine.load_checkpoint(source)
            steps(model, optimizer, batches[2:])
            assert_same(dict(model.state_dict()), expected)
    wrong = RULES["lion" if rule == "adam" else "adam"]
    engine, model, optimizer = begin(Placement("cpu", "cpu"), other, 1, optimizer=wrong)
    with (
        engine,
        pytest.raises(CheckpointError, match=f"its optimizer state is that of {rule}, and"),
    ):
        optimizer.engine.load_checkpoint(sources[0])
    remove(swap_path)


@pytest.mark.parametrize("kept_as", ["fp32", "int8"])
@pytest.mark.parametrize("generations", [1, 2])
def test_k09_a_commit_is_copied_where_it_does_not_fit(kept_as, generations, swap_path, tmp_path):
    """Other chunks, tiers and formats: what is now decides where everything is, and not what was saved."""
    training = Training("bf16", kept_as, steps=3, tied=True, frozen="blocks.0")
    other = tmp_path / "other"
    other.mkdir()
    with committed_run(replace(training, state_format="fp32"), swap_path) as run:
        run.engine.close()
        with going(training, Placement("cpu", "nvme", chunk=2048), other, generations) as (model, optimizer):
            path, client = optimizer.engine.load_checkpoint(run.path)
            assert (path, client) == (str(run.path), {"epoch": 2})
            found = values_of(model, optimizer)
            exact = {
                key for key in run.values if kept_as == "fp32" or key[0] == "step" or "blocks.0" in key[1]
            }
            assert_same({key: found[key] for key in exact}, {key: run.values[key] for key in exact})
            for key in run.values.keys() - exact:
                if key[0] == "master":
                    torch.testing.assert_close(found[key], run.values[key], rtol=2**-16, atol=0)
            assert optimizer.engine.plan.placement.state_format == kept_as
            assert optimizer.engine.global_steps == 3
            losses = steps(model, optimizer, training.batches()[:1])
            with pytest.raises(CheckpointError, match=r"its commit is called None, not 'x'"):
                optimizer.engine.load_checkpoint(run.path, "x")
        with (
            going(replace(training, tied=False), NVME, other) as (_, optimizer),
            pytest.raises(CheckpointError, match=r"lacks head\.weight|is not of this model|head\.weight"),
        ):
            optimizer.engine.load_checkpoint(run.path)
        if kept_as == "fp32":
            assert losses == steps_in_memory(training, run)
    remove(other)


def steps_in_memory(training, run):
    model = training.model()
    model, optimizer = offload.prepare(model, training.config(Placement(), "/nowhere"))
    with contextlib.closing(optimizer.engine):
        return steps(model, optimizer, [*training.batches(), training.batches()[0]])[-1:]


@pytest.mark.parametrize("placement", [NVME, Placement("cpu", "nvme"), Placement("cpu", "cpu")], ids=str)
def test_what_was_loaded_is_committed_as_a_whole(placement, swap_path, tmp_path):
    """Also what lies in memory, and so was not written to the store by loading it."""
    training = Training("bf16", steps=2)
    with going(training, placement, swap_path, seed=0) as (model, optimizer):
        steps(model, optimizer, training.batches())
        expected = values_of(model, optimizer)
        folder = saved(optimizer, tmp_path / "out")
    remove(swap_path)
    with going(training, placement, swap_path) as (model, optimizer):
        steps(model, optimizer, training.batches()[:1])
        optimizer.engine.save_checkpoint()
        optimizer.engine.load_checkpoint(folder)
        optimizer.engine.save_checkpoint()
    config = training.config(placement, swap_path)
    config["durability"]["generations"] = 2
    model, optimizer = offload.prepare(replace(training, seed=3).model(), config, resume=True)
    with contextlib.closing(optimizer.engine):
        assert_same(values_of(model, optimizer), expected)
        assert optimizer.engine.global_steps == 2
    remove(swap_path)


def test_deepspeeds_calls(swap_path, tmp_path, caplog):
    """Saved with a schedule and in the midst of a window; loaded elsewhere, the next steps are those of one run."""
    training = Training("bf16", accumulation=2, steps=4)
    batches = training.batches()
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}}}

    def begin(placement, seed=0):
        config = {**training.config(placement, swap_path), **more}
        return offload.initialize(model=replace(training, seed=seed).model(), config=config)[0]

    def train(engine, first, last):
        for batch in batches[first:last]:
            engine.backward(engine(batch))
            engine.step()

    engine = begin(Placement("cpu", "nvme"))
    train(engine, 0, 5)
    assert engine.save_checkpoint(tmp_path / "out", client_state={"epoch": 1}, save_latest=False) is True
    assert not (tmp_path / "out" / "latest").exists() and (tmp_path / "out" / "global_step2").is_dir()
    with caplog.at_level(logging.WARNING):
        assert engine.load_checkpoint(tmp_path / "out") == (None, {})
    assert "nothing was saved there" in caplog.text
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(str(tmp_path / "out"), tag, {"epoch": 1}, keep_last=2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"latest", "b", "c"}
    train(engine, 5, 8)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    counts = engine.global_steps, engine.micro_steps, engine.get_lr()
    engine.close()
    engine = begin(NVME, seed=5)
    for arguments, message in (
        ({"custom_load_fn": print}, "custom_load_fn is not called"),
        ({"load_lr_scheduler_states": False}, "set the schedule afterwards"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.load_checkpoint(tmp_path / "out", **arguments)
    path, client = engine.load_checkpoint(str(tmp_path / "out"))
    assert (path, client) == (str(tmp_path / "out" / "c"), {"epoch": 1})
    train(engine, 5, 8)
    assert (engine.global_steps, engine.micro_steps, engine.get_lr()) == counts
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    engine.close()
    engine = begin(Placement("cpu", "cpu"), seed=6)
    before = values_of(engine.module, engine.optimizer)
    engine.load_checkpoint(tmp_path / "out", "b", load_optimizer_states=False, load_lr_scheduler_states=False)
    after = values_of(engine.module, engine.optimizer)
    assert engine.global_steps == 0
    assert all(
        torch.equal(after[key], before[key]) for key in after if key[0] in ("exp_avg", "exp_avg_sq", "step")
    )
    assert not torch.equal(after["weight", "head.weight"], before["weight", "head.weight"])
    engine.close()
