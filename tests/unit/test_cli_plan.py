"""``offload plan`` and what the command says of itself: no torch, arithmetic, exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import offload
from offload.cli import memory
from offload.cli.main import app
from offload.cli.outputs import OutDirectory
from offload.cli.sources import CheckpointSource, PresetSource, inventory_of, open_source
from offload.config import OffloadConfig
from offload.durability import choose_generations
from offload.errors import ConfigError
from offload.models.documents import find_files
from offload.models.presets import num_parameters, preset
from offload.models.pretrained import PretrainedCheckpoint
from offload.placement import placement_of
from offload.plan import MemoryPlan

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "swap_configs"


def plan_lines(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.parametrize("arguments", [["plan"], ["finetune", "--data", str(CONFIGS / "none.json")]])
def test_plan_and_refusals_come_without_torch(arguments: list[str]) -> None:
    """The plan is printed, and a run refused for its budget, before torch is imported."""
    script = (
        "import sys; from offload.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('torch', 'torch' in sys.modules, 'rich.progress' in sys.modules)"
    )
    command, *rest = arguments
    model = "preset:1b" if command == "plan" else "preset:70b"
    result = subprocess.run(
        [sys.executable, "-c", script, command, str(CONFIGS / "nvme_all.json"), "--model", model, *rest],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[-1] == "torch False False", result.stderr
    assert result.returncode == (0 if command == "plan" else 2)


def test_plan_prints_the_plan_and_its_traffic() -> None:
    lines = plan_lines(str(CONFIGS / "nvme_all.json"), "--model", "preset:1b", "--steps", "1000")
    config = OffloadConfig.from_file(CONFIGS / "nvme_all.json")
    source = PresetSource("preset:1b", preset("1b"))
    inventory = inventory_of(config, source, source.shapes(), 256)
    placement, chosen = choose_generations(config, placement_of(config), inventory)
    plan = MemoryPlan.build(placement, inventory)
    assert chosen.split(",")[0] in [line.split(",")[0] for line in lines]
    for line in plan.report().splitlines():
        assert line in lines
    moved = plan.bytes_moved(1000) + plan.bytes_at_start()
    written = sum(size for (link, _), size in moved.items() if link == "nvme_write")
    assert any(line.startswith(f"1000 steps write {written / 1e12:.3f} TB, ") for line in lines)
    (life,) = [re.search(r"takes ([\d,]+) steps", line) for line in lines if "600 TBW" in line]
    assert life is not None
    assert int(life[1].replace(",", "")) == pytest.approx(
        600e12 / (12 * num_parameters(preset("1b"))), rel=0.01
    )
    # Four units of the model are named once, the 22 equal blocks on one line.
    named = [line for line in lines if "M elements, weights" in line]
    assert len(named) == 4 and "22 x model.layers.0 ... model.layers.21" in named[1]


def test_plan_predicts_the_seconds_of_io() -> None:
    fast, slow = (
        plan_lines(str(CONFIGS / "nvme_all.json"), "--model", "preset:1b", "--gb-per-second", rate)
        for rate in ("4", "1")
    )
    seconds = [float(re.search(r"I/O takes ([\d.]+) s", lines[-1])[1]) for lines in (fast, slow)]  # type: ignore[index]
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.01)
    assert seconds[1] == pytest.approx(25.36 * num_parameters(preset("1b")) / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("config", "model", "seq", "resident_max"),
    [("demo.json", "demo", 128, 160 << 20), ("nvme_all.json", "1b", 256, 2 << 30)],
)
def test_the_shown_configurations_keep_their_promise(
    config: str, model: str, seq: int, resident_max: int
) -> None:
    """demo: state at least three times the memory. 1b: with 10 % and an interpreter within 2.5 GiB."""
    settings = OffloadConfig.from_file(CONFIGS / config)
    source = PresetSource(model, preset(model))
    placement = placement_of(settings)
    plan = MemoryPlan.build(placement, inventory_of(settings, source, source.shapes(), seq))
    assert plan.bytes_total("host") <= placement.host_bytes <= resident_max
    assert 16 * num_parameters(preset(model)) >= 3 * placement.host_bytes
    assert 1.1 * plan.bytes_total("host") + (260 << 20) <= (5 << 30) // 2
    assert plan.placement.update == "backward"
    assert plan.placement.param_home == plan.placement.state_home == "nvme"


def test_plan_of_a_saved_model_needs_only_headers(tmp_path: Path) -> None:
    """Shapes come from a file's header: the tensors' bytes are not even there."""
    shapes = {"model.layers.0.w": (64, 32), "model.layers.1.w": (64, 32)}
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        size = 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 300}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    lines = plan_lines(str(CONFIGS / "fp32_nvme.json"), "--model", str(tmp_path))
    assert "0.0 M parameters in 2 units" in lines[1]
    refused = CliRunner().invoke(
        app, ["plan", str(CONFIGS / "fp32_nvme.json"), "--model", str(tmp_path), "--seq", "301"]
    )
    assert refused.exit_code == 2 and "at most 300 tokens" in refused.output


def test_budget_too_small_is_told_with_the_sum() -> None:
    result = CliRunner().invoke(app, ["plan", str(CONFIGS / "demo.json"), "--model", "preset:70b"])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("error: host memory needs at least") and " + " in line
    assert re.search(r'; memory\.host_bytes is 160 MiB; write memory\.host_bytes = "\d+MiB"$', line)


def test_activation_bound_of_a_saved_model_is_above_our_decoders() -> None:
    """The bound for any model must hold for a Llama, whose exact estimate we have."""
    shape = preset("350m")
    config = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
    }
    bound = CheckpointSource("saved", PretrainedCheckpoint(Path(), config, {}, {}))
    exact = PresetSource("350m", shape)
    for seq in (64, 512, 2048):
        assert bound.activation_bytes(2, seq, 2) >= exact.activation_bytes(2, seq, 2)
    unknown = CheckpointSource("saved", PretrainedCheckpoint(Path(), {"vocab_size": 5}, {}, {}))
    assert unknown.activation_bytes(2, 64, 2) == 0


def test_version_and_the_commands_that_there_are() -> None:
    """The whole surface: what is added or lost here is added or lost for users."""
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"offload {offload.__version__}\n"
    command: Any = typer.main.get_command(app)
    commands = {name: sub for name, sub in command.commands.items() if name != "bench"}
    commands |= {f"bench {name}": sub for name, sub in command.commands["bench"].commands.items()}
    surface = {
        name: {option for param in sub.params for option in param.opts} for name, sub in commands.items()
    }
    shared = {"config", "--model", "--steps", "--seq", "--traceback"}
    assert surface == {
        "plan": shared | {"--gb-per-second"},
        "finetune": shared
        | {"--data", "--out", "--export", "--field", "--tokenizer", "--seed", "--quiet"}
        | {"--save-every", "--resume", "--restart", "--previous"},
        "inspect": {"directory", "--params", "--json", "--traceback"},
        "verify": {"directory", "--json", "--quiet", "--traceback"},
        "export": {"directory", "out", "--dtype", "--model", "--quiet", "--traceback"}
        | {"--only-trained", "--exclude-frozen"},
        "tune": {
            "paths",
            "--config",
            "--plot",
            "--max-write",
            "--seconds",
            "--json",
            "--quiet",
            "--traceback",
        },
        "doctor": {"paths", "--json", "--traceback"},
        "bench io": {"path", "--rounds", "--max-write", "--json", "--quiet", "--traceback"},
        "bench adam": {"--millions", "--isa", "--threads", "--rounds", "--json", "--quiet", "--traceback"},
    }
    for name in surface:
        assert runner.invoke(app, [*name.split(), "--help"]).exit_code == 0
    module = subprocess.run(
        [sys.executable, "-m", "offload", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert module.stdout == f"offload {offload.__version__}\n"


def test_traceback_is_shown_where_it_is_wanted() -> None:
    arguments = ["plan", str(CONFIGS / "demo.json"), "--model", "preset:nothing"]
    assert CliRunner().invoke(app, [*arguments, "--traceback"]).exc_info[0] is ConfigError  # type: ignore[index]
    by_environment = CliRunner().invoke(app, arguments, env={"OFFLOAD_TRACEBACK": "1"})
    assert isinstance(by_environment.exception, ConfigError)
    assert isinstance(CliRunner().invoke(app, arguments).exception, SystemExit)


def test_out_directory_is_undone_without_touching_what_others_put_there(tmp_path: Path) -> None:
    out = OutDirectory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    out.make()
    (out.cache / "tokens.npy").touch()
    out.undo()
    assert list(tmp_path.iterdir()) == []
    out.make()
    (tmp_path / "a" / "foreign").touch()
    out.undo()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "foreign"]


def test_report_file_appears_whole_and_holds_only_json(tmp_path: Path) -> None:
    out = OutDirectory(tmp_path)
    out.make()
    path = out.write_report({"losses": [1.0, float("nan")], "deep": {"inf": float("inf")}})
    assert json.loads(path.read_text()) == {"losses": [1.0, None], "deep": {"inf": None}}
    with pytest.raises(TypeError):
        out.write_report({"bad": object()})
    assert json.loads(path.read_text())["losses"] == [1.0, None]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "report.json"]


def test_installed_packages_below_a_data_folder_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "site-packages/b.py", "deep/dist-packages/c.py", "deep/d.py", "__pycache__/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert [file.name for file in find_files(tmp_path)] == ["a.py", "deep/d.py"]
    assert [file.name for file in find_files(tmp_path / "site-packages")] == ["b.py"]


def test_compiler_stays_out_until_it_is_asked_for() -> None:
    """Checkpointing and optimizers work without it; asking for a part of it loads the real one."""
    script = """
import sys, torch
from offload.cli import memory
assert memory.limit_hoarding() in (True, False)
memory.keep_compiler_out()
from torch.utils.checkpoint import checkpoint
p = torch.nn.Parameter(torch.arange(3.0))
optimizer = torch.optim.SGD([p], lr=1.0)
checkpoint(lambda x: (x * x).sum(), p, use_reentrant=False).backward()
optimizer.step(); optimizer.zero_grad()
assert p.tolist() == [0.0, -1.0, -2.0]
assert "torch._dynamo.eval_frame" not in sys.modules and "sympy" not in sys.modules
import torch._dynamo.utils
assert "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_limits_on_malloc_can_be_set_twice() -> None:
    assert memory.limit_hoarding() == memory.limit_hoarding()
    memory.give_back()


def test_code_that_ran_once_is_let_go_and_still_runs() -> None:
    """Pages of libraries leave the count of the operating system, and come back when they are used."""
    script = """
import torch
from offload import metrics
from offload.cli import memory
a = torch.rand(32, 32)
expected, before = a @ a, metrics.rss_file_bytes()
memory.give_back()
after = metrics.rss_file_bytes()
assert after < before - 30 * 2**20, (before, after)
assert torch.equal(a @ a, expected) and torch.nn.Linear(3, 4)(torch.ones(2, 3)).sum().isfinite()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_only_code_without_pages_of_our_own_is_let_go() -> None:
    """Not data, not memory that is no file's, not a library that a debugger has written to."""
    smaps = """\
7f0000000000-7f0000002000 r-xp 00000000 fe:00 11 /usr/lib/liba.so.1
Rss: 8 kB
Anonymous: 0 kB
7f0000002000-7f0000004000 r--p 00002000 fe:00 11 /usr/lib/liba.so.1
Anonymous: 0 kB
7f0000005000-7f0000006000 r-xp 00000000 fe:00 12 /a folder/libb.so (deleted)
Anonymous: 0 kB
7f0000007000-7f0000008000 r-xp 00000000 fe:00 13 /usr/lib/libc.so
Anonymous: 4 kB
7f0000009000-7f000000a000 r-xp 00000000 00:00 0
Anonymous: 0 kB
7f000000b000-7f000000c000 r-xp 00000000 00:00 0 [vdso]
Anonymous: 0 kB
7f000000d000-7f000000e000 r-xs 00000000 fe:00 13 /usr/lib/libc.so
Anonymous: 0 kB
""".splitlines(keepends=True)
    found = [(hex(begin), hex(end)) for begin, end in memory._code_mappings(smaps)]
    assert found == [("0x7f0000000000", "0x7f0000002000"), ("0x7f0000005000", "0x7f0000006000")]


def test_model_that_is_not_there_suggests_the_prefix() -> None:
    with pytest.raises(ConfigError, match="did you mean --model preset:demo"):
        open_source("demo")
