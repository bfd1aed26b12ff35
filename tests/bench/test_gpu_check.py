"""The GPU check on the test accelerator, in its smallest size: it must be ready the day there is a GPU."""

import json

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.common import Finding, NotRunError


@pytest.fixture
def out(tmp_path):
    return tmp_path / "check.json"


def test_every_section_runs_to_its_end_without_a_gpu(out, capfd):
    arguments = ["--device", "test", "--smoke", "--out", str(out)]
    assert gpu_check.main(arguments) == 0, capfd.readouterr().out
    report = json.loads(out.read_text())
    assert [section["name"] for section in report["sections"]] == [s.name for s in gpu_check.SECTIONS]
    assert {section["status"] for section in report["sections"]} == {"ok"}
    parity = next(section for section in report["sections"] if section["name"] == "parity")
    assert len(parity["findings"]) == 1 + 2 * 3 * 3
    table = out.with_suffix(".md").read_text()
    assert "| parity | bf16 step: parameters nvme, state nvme | same bits; bytes as planned | ok |" in table
    assert "| 1.3b | smoke: fsdp2 | not run: no CUDA device |  |" in table


def test_a_section_that_fails_is_said_and_the_rest_goes_on(out, monkeypatch, capfd):
    def breaks(_run):
        yield Finding("first", "well", ok=True)
        raise OSError("no such bus")

    def stops(_run):
        yield Finding("second", "wrong", ok=False)
        raise NotRunError("no time")

    def works(run):
        yield Finding("third", f"{run.left():.0f}", ok=True)

    sections = [gpu_check.Section(function.__name__, function, 9) for function in (breaks, stops, works)]
    sections.append(gpu_check.Section("needs", works, 9, needs_cuda=True))
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.main(["--device", "test", "--out", str(out)]) == 1
    statuses = {section["name"]: section["status"] for section in json.loads(out.read_text())["sections"]}
    assert statuses == {
        "breaks": "failed",
        "stops": "failed",
        "works": "ok",
        "needs": "not run: no CUDA device",
    }
    assert "OSError: no such bus" in out.with_suffix(".md").read_text()
    assert gpu_check.main(["--device", "test", "--out", str(out), "--seconds", "1"]) == 0
    assert "not run: 1 s are left of 1" in out.with_suffix(".md").read_text()
    assert gpu_check.main(["--only", "nothing", "--device", "test"]) == 2
    assert "there is no section nothing" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_section_on_a_gpu(out):
    assert gpu_check.main(["--smoke", "--out", str(out)]) == 0
