"""``offload bench adam``: every contestant in one run, JSON that stays as it is, refusals before memory is taken."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner, Result

from offload import metrics
from offload.cli import adam_contestants, bench_adam
from offload.cli.main import app
from offload.optim import kernels

FORMATS = ("bf16", "bf16, fp32 grad", "bf16, bf16 state", "bf16, int8 state", "fp32", "fp32, bf16 state")
SMALL = ["--millions", "0.02", "--rounds", "1", "--threads", "1", "--isa", "scalar"]


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", "adam", *SMALL, *options])


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)


@pytest.fixture
def with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AdamW in its place: what it would compute."""
    module = ModuleType("deepspeed.ops.adam")
    module.DeepSpeedCPUAdam = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ModuleType("deepspeed.ops"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", module)


@pytest.mark.usefixtures("with_deepspeed")
def test_json_has_every_contestant_once():
    report = json.loads(run("--json").stdout)
    assert (report["version"], report["parameters"], report["rounds"]) == (1, 20_000, 1)
    names = [row["name"] for row in report["results"]]
    ours = [f"offload {name} scalar 1 thread" for name in (*FORMATS, "norm bf16", "whole step bf16")]
    assert names == [*ours, adam_contestants.TORCH, "copy", *adam_contestants.DEEPSPEED]
    for row in report["results"]:
        whole = "whole step" in row["name"]
        assert row["base"] == "DeepSpeedCPUAdam " + ("whole step" if whole else "fp32")
        assert row["median_seconds"] >= row["best_seconds"] > 0
        assert row["gparam_per_s"] == pytest.approx(20_000 / row["median_seconds"] / 1e9)
        assert row["gb_per_s"] == pytest.approx(row["gparam_per_s"] * row["bytes_per_parameter"])
    by_name = dict(zip(names, report["results"], strict=True))
    assert by_name["copy"]["of_copy_bandwidth"] == 1 == by_name["DeepSpeedCPUAdam fp32"]["ratio"]


def test_bytes_are_those_of_the_planes():
    contestants = adam_contestants.ours(128_000, isas=["scalar"], threads=[1])
    sizes = {
        contestant.name.removesuffix(" scalar 1 thread"): contestant.bytes_per_parameter
        for contestant in contestants
    }
    moments = {"fp32": 16, "bf16": 8, "int8": 4 + 2 * 8 / kernels.STATE_BLOCK}
    assert sizes == {
        "offload bf16": 4 + 4 + moments["fp32"] + 2,
        "offload bf16, fp32 grad": 4 + 4 + moments["fp32"] + 4,
        "offload bf16, bf16 state": 4 + 4 + moments["bf16"] + 2,
        "offload bf16, int8 state": 4 + 2 + moments["int8"] + 2,
        "offload fp32": 8 + moments["fp32"] + 4,
        "offload fp32, bf16 state": 8 + moments["bf16"] + 4,
        "offload norm bf16": 2,
        "offload whole step bf16": 2 + 4 + 4 + moments["fp32"] + 2,
    }


@pytest.mark.usefixtures("without_deepspeed")
def test_the_table_says_what_it_lacks():
    result = run()
    assert result.exit_code == 0, result.output
    assert "deepspeed is not installed here" in result.output
    lines = result.output.splitlines()
    assert sum(line.startswith("  offload ") for line in lines) == len(FORMATS) + 2
    assert lines[-1].endswith(f"to {adam_contestants.TORCH}")


def test_refusals(monkeypatch: pytest.MonkeyPatch):
    unknown = run("--isa", "mmx")
    assert unknown.exit_code == 2 and "--isa mmx: this machine has" in unknown.output
    threads = run("--threads", "0")
    assert threads.exit_code == 2 and "--threads must be in 1.." in threads.output
    monkeypatch.setattr(
        metrics, "memory_available_bytes", lambda: 10_000_000 * bench_adam.BYTES_PER_PARAMETER
    )
    large = run("--millions", "20")
    assert large.exit_code == 2 and "use --millions 10" in large.output
