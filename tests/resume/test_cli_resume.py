"""``offload finetune``: commits, ends in any way, and goes on with the losses of a run without a break."""

import json
import os
import shutil
import signal

import pytest

from offload.cli.commits import RunRecord, check_record
from offload.errors import ConfigError

RUN = """
import os, signal, sys
from pathlib import Path
from offload.cli import commits, training
from offload.cli.main import app

stop_after, number = {stop_after}, {number}
after = commits.Commits.after
def and_then_end(self, step):
    after(self, step)
    if step == stop_after:
        os.kill(os.getpid(), number)
commits.Commits.after = and_then_end
app(["finetune", "run.json", "--model", "preset:10m", "--data", "data.txt", "--seq", "32", *{arguments}])
"""


@pytest.fixture
def folder(tmp_path):
    swap = {"nvme_path": str(tmp_path / "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", **swap},
            "offload_optimizer": {"device": "nvme", **swap},
        },
        "memory": {"host_bytes": "200MiB"},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    (tmp_path / "data.txt").write_text("".join(f"{n} green bottles on the wall\n" for n in range(400)))
    return tmp_path


@pytest.fixture
def finetune(folder, run_forked):
    def run(*arguments, stop_after=0, number=signal.SIGKILL):
        return run_forked(RUN.format(stop_after=stop_after, number=int(number), arguments=arguments), folder)

    return run


def losses(folder, out):
    return json.loads((folder / out / "report.json").read_text())["losses"]


def test_a_run_goes_on_with_the_losses_of_one_without_a_break(folder, finetune):
    """After kill -9, after SIGTERM, then to its end, where the model is exported and nothing else is kept."""
    every = ("--save-every", "2", "--seed", "3")
    result = finetune("--steps", "8", "--out", "whole", *every, "--save-every", "0")
    assert result.returncode == 0, result.stderr
    assert not (folder / "swap").exists()
    whole = losses(folder, "whole")

    result = finetune("--steps", "8", "--out", "out", *every, stop_after=3)
    assert result.returncode == -signal.SIGKILL, result.stderr
    for refused, what in (((), "go on with --resume"), (("--resume", "--restart"), "give one of them")):
        result = finetune("--steps", "8", "--out", "out", *every, *refused)
        assert result.returncode == 2 and what in result.stderr

    result = finetune("--steps", "8", "--out", "out", *every, "--resume", stop_after=5, number=signal.SIGTERM)
    assert result.returncode == -signal.SIGTERM, result.stderr
    assert "stopped by SIGTERM after 5 of 8 steps" in result.stdout
    assert "keeps the state after step 4: the same command goes on from there with --resume" in result.stdout
    assert losses(folder, "out") == whole[2:5]

    result = finetune("--steps", "8", "--out", "out", *every, "--resume", "--export", "model")
    assert result.returncode == 0, result.stderr
    assert "going on after step 4" in result.stdout and "differs" not in result.stdout
    assert losses(folder, "out") == whole[4:]
    assert not list((folder / "swap").glob("*")) and (folder / "model" / "model.safetensors").exists()
    result = finetune("--steps", "8", "--out", "out", *every, "--resume")
    assert result.returncode == 2 and "holds no run that was committed" in result.stderr


def test_a_run_that_is_over_can_be_made_longer_or_given_up(folder, finetune):
    assert finetune("--steps", "2", "--out", "out").returncode == 0
    (first,) = (folder / "swap").iterdir()
    result = finetune("--steps", "3", "--out", "out", "--resume", "--previous")
    assert result.returncode == 2 and "there is no commit before number 1" in result.stderr
    result = finetune("--steps", "3", "--out", "out", "--resume")
    assert result.returncode == 0 and "going on after step 2" in result.stdout
    assert len(losses(folder, "out")) == 1 and list((folder / "swap").iterdir()) == [first]
    result = finetune("--steps", "1", "--out", "out", "--restart")
    assert result.returncode == 0, result.stderr
    (second,) = (folder / "swap").iterdir()
    assert second != first
    (folder / "data.txt").write_text("other data\n" * 500)
    result = finetune("--steps", "2", "--out", "out", "--resume")
    assert result.returncode == 2 and "the data cannot resume: num_tokens was" in result.stderr
    shutil.rmtree(second)


def test_records_that_are_damaged_or_lead_nowhere(tmp_path):
    assert check_record(tmp_path, resumes=False, restarts=False) is None
    RunRecord(tmp_path).write(tmp_path / "gone")
    assert check_record(tmp_path, resumes=False, restarts=False) is None
    with pytest.raises(ConfigError, match="holds no run that was committed"):
        check_record(tmp_path, resumes=True, restarts=False)
    for text in ("", "[]", "{}", '{"swap_directory": 3}', "\udcff"):
        (tmp_path / "committed.json").write_bytes(os.fsencode(text))
        with pytest.raises(ConfigError, match="cannot be read"):
            check_record(tmp_path, resumes=True, restarts=False)
