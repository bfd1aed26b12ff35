"""``offload finetune`` from end to end, against plain PyTorch, arithmetic and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lion import Lion

from offload import api
from offload.cli import building
from offload.cli.report import Account, build_report, table
from offload.cli.sources import PresetSource, inventory_of
from offload.config import OffloadConfig
from offload.integrations.schedulers import build_scheduler
from offload.ledger import Ledger
from offload.models.decoder import Decoder
from offload.models.presets import DecoderConfig, num_parameters, parameter_shapes, preset
from offload.models.text import ByteTokenizer, TextDataset
from offload.placement import placement_of
from offload.plan import MemoryPlan

ROOT = Path(__file__).parents[2]
LR = 1e-3
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""One thread: on a machine that is busy with other tests, threads wait for each other's slices of time."""


def run_config(swap: Path, *, bf16: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(swap)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(swap), "update": "backward"},
        },
        "memory": {"host_bytes": "200MiB"},
        "steps_per_print": 1,
        **changes,
    }


def run_python(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


def prepare_folder(folder: Path, config: dict[str, Any]) -> None:
    (folder / "run.json").write_text(json.dumps(config))
    text = "".join(f"{n} green bottles hanging on the wall\n" for n in range(400))
    (folder / "data.txt").write_text(text)


@pytest.fixture
def one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run of preset:10m in fp32, everything on nvme, three steps: its folder, report and output."""
    folder = tmp_path_factory.mktemp("run")
    prepare_folder(folder, run_config(folder / "swap"))
    output = run_python(
        folder,
        *("-m", "offload", "finetune", "run.json", "--model", "preset:10m", "--data", "data.txt"),
        *("--steps", "3", "--seq", "32", "--seed", "5"),
    )
    return folder, json.loads((folder / "runs" / "run" / "report.json").read_text()), output


@pytest.mark.usefixtures("one_thread")
def test_losses_equal_plain_pytorch(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, report, _ = finished
    torch.manual_seed(5)
    model = Decoder(preset("10m"))
    data = TextDataset(folder / "data.txt", ByteTokenizer(), seq=32, cache_dir=folder / "plain", seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for expected in report["losses"]:
        loss = model(**data.next_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert expected == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_lion_from_the_configuration_alone(tmp_path: Path) -> None:
    """Losses of plain PyTorch with the paper's program; one moment to a parameter less than Adam."""
    config = run_config(tmp_path / "swap")
    numbers = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
    config["optimizer"] = {"type": "Lion", "params": numbers}
    prepare_folder(tmp_path, config)
    run_python(
        tmp_path,
        *("-m", "offload", "finetune", "run.json", "--model", "preset:10m", "--data", "data.txt"),
        *("--steps", "3", "--seq", "32", "--seed", "5"),
    )
    report = json.loads((tmp_path / "runs" / "run" / "report.json").read_text())
    torch.manual_seed(5)
    model = Decoder(preset("10m"))
    data = TextDataset(tmp_path / "data.txt", ByteTokenizer(), seq=32, cache_dir=tmp_path / "plain", seed=5)
    optimizer = Lion(model.parameters(), **numbers)
    for expected in report["losses"]:
        loss = model(**data.next_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert expected == pytest.approx(loss.item(), rel=1e-5)
    assert report["rule"] == "lion"
    assert report["state_bytes"] == 12 * report["parameters"]
    assert {"nvme_write.exp_avg", "nvme_write.weight"} == {n for n in report["planes"] if "nvme_write" in n}


def test_report_is_arithmetic(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, report, _ = finished
    parameters = num_parameters(preset("10m"))
    assert report["parameters"] == report["trainable_parameters"] == parameters
    assert report["state_bytes"] == 16 * parameters
    assert report["steps"] == report["steps_asked"] == len(report["losses"]) == 3
    assert report["skipped_steps"] == 0 and report["interrupted"] is False
    assert report["tokens"] == 3 * 32
    assert report["tokens_per_second"] == pytest.approx(96 / report["seconds"], rel=0.01)
    assert report["loss_first"] == report["loss_last"] == pytest.approx(sum(report["losses"]) / 3)
    assert (report["loss_first_step"], report["loss_last_step"]) == (report["losses"][0], report["losses"][2])
    assert report["host_budget_bytes"] == 200 << 20 >= report["host_bytes"]
    assert report["rss_start_bytes"] < report["rss_peak_bytes"]
    assert report["config"]["memory"]["host_bytes"] == 200 << 20
    assert len(report["config_digest"]) == 12 and report["versions"]["torch"] == torch.__version__


def test_bytes_are_those_predicted_and_those_of_a_formula(
    finished: tuple[Path, dict[str, Any], str],
) -> None:
    """fp32 has no residual: two moments of 4 bytes, read in all steps but the first, and a weight of 4."""
    _, report, _ = finished
    assert report["planes"] == report["predicted"]
    # Units: embedding; 12 layers; last norm with output layer. Each is padded to 2048 elements.
    hidden, ffn, vocab = 256, 704, 264
    units = [vocab * hidden, *[4 * hidden**2 + 3 * hidden * ffn + 2 * hidden] * 12, hidden + vocab * hidden]
    elements = sum(-(-unit // 2048) * 2048 for unit in units)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert report["planes"][f"nvme_read.{moment}"] == 2 * 4 * elements
        assert report["planes"][f"nvme_write.{moment}"] == 3 * 4 * elements
    assert report["planes"]["nvme_write.weight"] == 3 * 4 * elements
    assert report["setup"] == {"nvme_write.weight": 4 * elements}
    for link in ("nvme_read", "nvme_write"):
        of_planes = sum(size for name, size in report["planes"].items() if name.startswith(link))
        assert report["links"][link]["bytes"] == of_planes


def test_kernel_counts_the_same_bytes(finished: tuple[Path, dict[str, Any], str]) -> None:
    """Where I/O is direct, /proc/self/io sees what the ledger sees, but for what was in flight at the end."""
    _, report, _ = finished
    if not report["storage_written_bytes"]:
        pytest.skip("the temporary folder is in memory")
    written = report["links"]["nvme_write"]["bytes"]
    assert report["storage_written_bytes"] == pytest.approx(written, rel=0.1)


def test_memory_stays_in_the_plan(finished: tuple[Path, dict[str, Any], str]) -> None:
    """By the operating system's count, against the plan and an interpreter that has imported torch."""
    folder, report, _ = finished
    script = "import torch; print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
    interpreter = int(run_python(folder, "-c", script)) * 1024
    assert report["rss_peak_bytes"] <= 1.1 * report["host_bytes"] + interpreter


def test_output_tells_configuration_plan_progress_and_result(
    finished: tuple[Path, dict[str, Any], str],
) -> None:
    _, report, output = finished
    lines = output.splitlines()
    order = [
        f"configuration run.json ({report['config_digest']})",
        '  zero_optimization.offload_param.device = "nvme"',
        "tokenising data.txt",
        "plan of preset:10m",
        "moving the model",
        "training 3 steps",
        "step 1/3  loss ",
        "step 3/3  loss ",
        "3 steps in ",
        "  peak memory",
        "report: runs/run/report.json",
    ]
    found = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert found == sorted(found)
    step = next(line for line in lines if line.startswith("step 3/3"))
    for part in ("tokens/s", "nvme_read", "nvme_write", "GB/s", "rss", "left 0:00"):
        assert part in step
    assert "differs" not in output


def test_nothing_is_left_but_the_out_directory_and_the_last_commit(
    finished: tuple[Path, dict[str, Any], str],
) -> None:
    folder, _, output = finished
    (committed,) = (folder / "swap").iterdir()
    left = {p.relative_to(folder).parts[0] for p in folder.rglob("*")} - {"plain"}
    assert left == {"run.json", "data.txt", "runs", "swap"}
    out = folder / "runs" / "run"
    assert {path.name for path in out.iterdir()} == {"cache", "report.json", "committed.json"}
    assert json.loads((out / "committed.json").read_text()) == {"swap_directory": str(committed)}
    assert output.splitlines()[-1].startswith(f"{committed} keeps the state after step 3: ")


EXPORTING = """
import json, torch
from pathlib import Path
from offload.cli import finetune, training

ids = torch.arange(24).reshape(1, 24)
expected, original = [], training._export
def spy(job, model, optimizer):
    model.eval()
    with torch.no_grad():
        output = model(ids)
    expected.append(output if isinstance(output, torch.Tensor) else output.logits)
    original(job, model, optimizer)
training._export = spy
arguments = {arguments}
for name in ("config_path", "data", "out", "export", "tokenizer"):
    arguments[name] = arguments[name] and Path(arguments[name])
finetune.run(finetune.Request(**arguments))

from offload.cli import memory
memory._load_compiler()
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(arguments["export"]).eval()
with torch.no_grad():
    logits = model(ids).logits
print(json.dumps({{
    "dtype": str(model.dtype), "difference": (logits - expected[0]).abs().max().item(),
    "size": logits.abs().max().item(), "same": torch.equal(logits, expected[0]),
    "eos": model.config.eos_token_id}}))
"""


@pytest.fixture
def run_exporting(tmp_path: Path, run_forked: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Trains in a process of its own, exports, and opens the export with transformers in the same process."""
    given = {
        "config_path": "run.json",
        "model": "preset:10m",
        "data": "data.txt",
        "steps": 2,
        "seq": 16,
        "out": None,
        "export": "exported",
        "field": "text",
        "tokenizer": None,
        "seed": 0,
        "quiet": True,
    }

    def run(**changes: Any) -> dict[str, Any]:
        result = run_forked(EXPORTING.format(arguments=given | changes), tmp_path)
        assert result.returncode == 0, (result.stdout, result.stderr)
        return dict(json.loads(result.stdout.splitlines()[-1]))

    return run


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_export_opens_in_transformers(tmp_path: Path, bf16: bool, run_exporting: Callable[..., Any]) -> None:
    prepare_folder(tmp_path, run_config(tmp_path / "swap", bf16=bf16))
    found = run_exporting()
    assert found["dtype"] == ("torch.bfloat16" if bf16 else "torch.float32")
    assert found["eos"] == ByteTokenizer.eos_id
    # The same numbers by other operations: 3 digits of bf16, 7 of fp32.
    assert found["difference"] <= (0.05 if bf16 else 1e-4) * found["size"] and found["size"] > 0.1


@pytest.mark.usefixtures("one_thread")
def test_a_saved_model_is_trained_as_plain_transformers_trains_it(
    tmp_path: Path, run_exporting: Callable[..., Any]
) -> None:
    """A tied GPT-2 with its own tokenizer, accumulated micro-batches, a schedule, and the export of it."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    prepare_folder(tmp_path, {})
    warm_up = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_num_steps": 4}}
    changes = {"memory": {"host_bytes": "300MiB"}, "scheduler": warm_up}
    config = run_config(
        tmp_path / "swap", **changes, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2
    )
    config["zero_optimization"]["offload_optimizer"]["update"] = "step"
    (tmp_path / "run.json").write_text(json.dumps(config))

    torch.manual_seed(3)
    shape = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 64}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **drops))
    model.save_pretrained(tmp_path / "saved")
    vocabulary = {chr(n): n for n in range(32, 127)} | {"<|endoftext|>": 0, "<unk>": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "saved" / "tokenizer.json"))

    found = run_exporting(model="saved", out="out", seq=24, steps=3)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    state = {name for name in report["planes"] if name != "nvme_read.weight"}  # tied: its unit is used twice
    assert {name: report["planes"][name] for name in state} == {
        name: report["predicted"][name] for name in state
    }
    assert found["dtype"] == "torch.float32" and found["difference"] <= 1e-5 * found["size"]
    assert (tmp_path / "exported" / "tokenizer.json").is_file()

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.train()

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.inner(**batch).loss
            return loss

    from offload.models import text

    wanted = text.load_tokenizer(tmp_path / "saved")
    data = text.TextDataset(
        tmp_path / "data.txt", wanted, seq=24, micro_batch=2, cache_dir=tmp_path / "plain"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    loop = Loss()
    scheduler = build_scheduler(OffloadConfig.from_dict(config), optimizer, total_steps=3)
    assert scheduler is not None
    for expected in report["losses"]:
        losses = []
        for _ in range(2):
            loss = loop(**data.next_batch())
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert expected == pytest.approx(sum(losses) / 2, rel=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_are_the_constructors_bit_for_bit(tied: bool) -> None:
    """Through `prepare`, in the order in which it asks; and no more than one value is alive at once."""
    shape = DecoderConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=64,
        tie_embeddings=tied,
    )
    model, read = building.build(PresetSource("small", shape), seed=11)
    assert all(param.is_meta for param in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    told: list[tuple[int, int]] = []
    building.fill_later(model, read, lambda done, total: told.append((done, total)))
    model, optimizer = api.prepare(model, {"zero_optimization": {"stage": 0}})
    try:
        torch.manual_seed(11)
        for (name, mine), theirs in zip(model.named_parameters(), Decoder(shape).parameters(), strict=True):
            assert torch.equal(mine, theirs), name
        assert told[-1] == (num_parameters(shape), num_parameters(shape))
        assert len(told) == len(parameter_shapes(shape))
    finally:
        optimizer.engine.close()


def test_report_marks_what_was_not_planned() -> None:
    """A byte too many, memory above the plan and a loss that JSON cannot hold are told, not hidden."""
    source = PresetSource("preset:10m", preset("10m"))
    config = OffloadConfig.from_dict(run_config(Path("/swap")))
    plan = MemoryPlan.build(placement_of(config), inventory_of(config, source, source.shapes(), 32))
    ledger = Ledger(steps=2, predicted=plan.bytes_moved(2))
    ledger.moved = plan.bytes_moved(2)
    account = Account(steps=2, tokens_per_step=32, rss_start_bytes=0, losses=[3.0, 1.0], seconds=4.0)
    report = build_report(account, plan, ledger, {})
    assert report["tokens_per_second"] == 16
    lines = "\n".join(table({**report, "rss_peak_bytes": report["rss_allowed_bytes"]}))
    assert "differs" not in lines and "ABOVE" not in lines
    ledger.moved["nvme_read", "weight"] += 1
    report = build_report(account, plan, ledger, {})
    lines = "\n".join(table({**report, "rss_peak_bytes": report["rss_allowed_bytes"] + 1}))
    assert "differs by +1 bytes" in lines and "ABOVE" in lines
