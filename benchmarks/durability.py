"""What saving and going on cost: commits of the swap store after each step, and the next process's first step.

    python -m benchmarks.durability --swap DIR --model preset:1b --results

One process trains with everything on NVMe and two generations, and commits after every step: once as it is, which
brings the step's writes to stable storage, and once more at once, when nothing is left to bring there: what a commit
itself costs. Then it makes one step more, of which nobody will hear. Another process goes on from the last commit,
and has to have the same loss in that step. Bytes are those that the kernel counts for the process while it saves.

With ``--background`` one process saves checkpoints to another directory instead, in turns: while training waits, and
in the background while it makes steps; between them it makes steps without. With ``--commits`` it commits, in turns in
the same two ways, a run whose state is at home in memory: a commit writes all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import offload
from offload import construct
from offload.bytesize import format_bytes
from offload.cli.building import build
from offload.cli.sources import PresetSource
from offload.models.presets import preset

from . import harness

RESULTS = harness.ROOT / "benchmarks/results/durability.md"
MARK = "<!-- what follows is written by the benchmark -->\n"
MARK_BACKGROUND = "<!-- what follows is written by the benchmark with --background -->\n"
MARK_COMMITS = "<!-- what follows is written by the benchmark with --commits -->\n"
STEPS_BETWEEN = 2
"""Without a saving, in each round of ``--background``."""


def written_bytes() -> int:
    """What this process has sent to drives, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


class Training:
    """A preset in training, with everything on NVMe, or with its state in memory."""

    def __init__(self, options: argparse.Namespace, *, resume: bool = False, state: str = "nvme") -> None:
        self._options = options
        update = "backward" if state == "nvme" else "step"
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": options.swap},
                "offload_optimizer": {"device": state, "nvme_path": options.swap, "update": update},
            },
            "durability": {"generations": 2},
            "memory": {"host_bytes": options.host_bytes},
        }
        name = options.model.removeprefix("preset:")
        model, read = build(PresetSource(name, preset(name)), seed=0)
        construct.fill_later(model, read)
        self._vocabulary = preset(name).vocab_size
        begin = time.perf_counter()
        self.model, self.optimizer = offload.prepare(model, config, resume=resume)
        self.prepare_seconds = time.perf_counter() - begin
        self.engine = self.optimizer.engine

    def step(self) -> tuple[float, float]:
        """Loss and seconds of the next step."""
        draw = torch.Generator().manual_seed(self.engine.global_steps)
        tokens = torch.randint(self._vocabulary, (1, self._options.seq), generator=draw)
        begin = time.perf_counter()
        loss = self.model(tokens, labels=tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), time.perf_counter() - begin

    def save(self) -> dict[str, float]:
        """Commits; gives its seconds and bytes."""
        self.engine.settle()  # what the step has still to write is the step's
        before, begin = written_bytes(), time.perf_counter()
        self.engine.save_checkpoint()
        return {"seconds": time.perf_counter() - begin, "bytes": written_bytes() - before}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The process that commits after every step."""
    training = Training(options)
    steps, flushing, nothing_to_flush = [], [], []
    for _ in range(options.steps):
        steps.append(training.step()[1])
        flushing.append(training.save())
        nothing_to_flush.append(training.save())
    loss, _ = training.step()
    state_bytes = sum(line.total for line in training.engine.plan.lines if line.tier == "nvme") // 2
    training.engine.close()
    return {
        "loss": loss,
        "steps": steps,
        "flushing": flushing,
        "nothing_to_flush": nothing_to_flush,
        "state_bytes": state_bytes,
    }


def go_on(options: argparse.Namespace) -> dict[str, Any]:
    """The process that goes on from the last commit."""
    training = Training(options, resume=True)
    loss, seconds = training.step()
    second, steady = training.step()
    training.engine.close()
    return {
        "loss": loss,
        "prepare_seconds": training.prepare_seconds,
        "first_step": seconds,
        "step": steady,
        "second_loss": second,
    }


def compare_savings(options: argparse.Namespace) -> dict[str, Any]:
    """The process that saves in both ways, round after round."""
    training, folder = Training(options), Path(options.swap).with_name("benchmark-saved")
    engine = training.engine
    steps, foreground, calls, written, meanwhile = [], [], [], [], []
    training.step()
    for _ in range(options.steps):
        steps += [training.step()[1] for _ in range(STEPS_BETWEEN)]
        engine.settle()
        foreground.append(timed(lambda: engine.save_checkpoint(folder, "foreground")))
        training.step()
        engine.settle()
        begin = time.time()
        calls.append(timed(lambda: engine.save_checkpoint(folder, "background", background=True)))
        while engine.is_saving:
            meanwhile.append(training.step()[1])
        engine.wait_for_checkpoint()
        written.append((folder / "background/checkpoint.json").stat().st_mtime - begin)
    size = sum(file.stat().st_size for file in (folder / "background").iterdir())
    engine.discard()
    shutil.rmtree(folder)
    return {
        "steps": steps,
        "foreground": foreground,
        "calls": calls,
        "written": written,
        "meanwhile": meanwhile,
        "bytes": size,
    }


def compare_commits(options: argparse.Namespace) -> dict[str, Any]:
    """The process that commits in both ways, round after round, with state at home in memory."""
    training = Training(options, state="cpu")
    engine = training.engine
    steps, foreground, calls, meanwhile, sizes = [], [], [], [], []
    training.step()
    for _ in range(options.steps):
        steps.append(training.step()[1])
        before = written_bytes()
        foreground.append(timed(engine.save_checkpoint))
        sizes.append(written_bytes() - before)
        steps.append(training.step()[1])
        calls.append(timed(lambda: engine.save_checkpoint(background=True)))
        meanwhile.append(training.step()[1])  # it ends the commit before its update
    engine.discard()
    return {
        "steps": steps,
        "foreground": foreground,
        "calls": calls,
        "meanwhile": meanwhile,
        "bytes": max(sizes),
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run_phase(options: argparse.Namespace, phase: str) -> dict[str, Any]:
    """One phase in a process of its own.

    Raises:
        RuntimeError: it has failed.
    """
    command = [sys.executable, "-m", "benchmarks.durability", "--phase", phase, "--model", options.model]
    command += ["--swap", options.swap, "--steps", str(options.steps), "--seq", str(options.seq)]
    command += ["--host-bytes", options.host_bytes]
    passive = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # as `offload finetune` does it
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, cwd=harness.ROOT, env=passive
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {ended.returncode}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers, each with its name."""
    step = statistics.median(first["steps"])
    saving = {
        what: statistics.median(save["seconds"] for save in first[what])
        for what in ("flushing", "nothing_to_flush")
    }
    most = max(save["bytes"] for what in saving for save in first[what])
    fixed = saving["nothing_to_flush"]
    return [
        ("state of the run", format_bytes(first["state_bytes"])),
        ("a step, seconds", f"{step:.2f}"),
        ("save_checkpoint after a step, ms", f"{1e3 * saving['flushing']:.1f}"),
        ("of it the commit itself, ms", f"{1e3 * fixed:.1f}"),
        ("the commit itself, of a step", f"{fixed / step:.2%}"),
        ("bytes written by saving, at most", format_bytes(most)),
        ("prepare(resume=True), seconds", f"{second['prepare_seconds']:.2f}"),
        ("first step then, and the next, seconds", f"{second['first_step']:.2f}, {second['step']:.2f}"),
        ("loss of that step, in both processes", f"{first['loss']:.6f}, {second['loss']:.6f}"),
    ]


def background_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of ``--background``, each with its name."""
    names = ("steps", "foreground", "calls", "written", "meanwhile")
    step, foreground, call, written, meanwhile = (statistics.median(found[name]) for name in names)
    count = len(found["meanwhile"])
    # What each way costs the run: the wait, and what the steps that share the time with it take longer.
    cost = call + count / len(found["calls"]) * (meanwhile - step)
    return [
        ("bytes of a checkpoint", format_bytes(found["bytes"])),
        ("a step, seconds", f"{step:.2f}"),
        ("save_checkpoint(DIR), seconds in which training waits", f"{foreground:.2f}"),
        ("save_checkpoint(DIR, background=True), seconds in which training waits", f"{call:.3f}"),
        ("seconds until that is written", f"{written:.2f}"),
        (f"a step begun meanwhile ({count} of them), seconds", f"{meanwhile:.2f} ({meanwhile / step:.2f}x)"),
        ("what the run loses by it, of what it loses by waiting", f"{cost / foreground:.0%}"),
    ]


def commit_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of ``--commits``, each with its name."""
    names = ("steps", "foreground", "calls", "meanwhile")
    step, foreground, call, meanwhile = (statistics.median(found[name]) for name in names)
    return [
        ("bytes of a commit", format_bytes(found["bytes"])),
        ("a step, seconds", f"{step:.2f}"),
        ("save_checkpoint(), seconds in which training waits", f"{foreground:.2f}"),
        ("save_checkpoint(background=True), seconds in which training waits", f"{call:.3f}"),
        ("the step after it, at whose update it ends, seconds", f"{meanwhile:.2f} ({meanwhile / step:.2f}x)"),
        (
            "what the run loses by it, of what it loses by waiting",
            f"{(call + meanwhile - step) / foreground:.0%}",
        ),
    ]


def write_results(mark: str, text: str) -> None:
    """Puts a section of the results file in the place of the one before."""
    before, _, after = (RESULTS.read_text() if RESULTS.exists() else "# Durability\n\n").partition(mark)
    _, other, rest = after.partition("<!-- ")
    RESULTS.write_text(f"{before.rstrip()}\n\n{mark}{text}\n{chr(10) if other else ''}{other}{rest}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument(
        "--swap", required=True, help="a directory on the drive; the benchmark makes one in it"
    )
    parser.add_argument("--model", default="preset:1b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--host-bytes", default="2GiB")
    parser.add_argument("--results", action="store_true", help=f"write the table into {RESULTS.name}")
    parser.add_argument("--json", action="store_true")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--background", action="store_true", help="compare ways to save to another directory")
    ways.add_argument("--commits", action="store_true", help="compare ways to commit state in memory")
    parser.add_argument("--phase", choices=[*PHASES], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, folder: Path) -> int:
    """The process of ``--background`` or ``--commits``, and its table."""
    phase, mark, rows_of = "background", MARK_BACKGROUND, background_rows
    if options.commits:
        phase, mark, rows_of = "commits", MARK_COMMITS, commit_rows
    try:
        found = run_phase(options, phase)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.with_name("benchmark-saved"), ignore_errors=True)
    described = harness.host(folder.parent)
    if options.json:
        print(json.dumps({"host": described, phase: found}, indent=2))
        return 0
    text = harness.table([options.model, ""], rows_of(found))
    print(text)
    if options.results:
        command = f"python -m benchmarks.durability --{phase} --model {options.model} --seq {options.seq}"
        head = harness.header(f"{command} --steps {options.steps}", described, "Medians over the rounds.")
        write_results(mark, f"{head}\n{text}")
    return 0


PHASES = {"train": train, "go_on": go_on, "background": compare_savings, "commits": compare_commits}


def main(arguments: Sequence[str] | None = None) -> int:
    """Both processes, and the table; see the top of the file."""
    options = parse(arguments)
    if options.phase:
        print(json.dumps(PHASES[options.phase](options)))
        return 0
    folder = Path(options.swap) / "benchmark-durability"
    options.swap = str(folder)
    if options.background or options.commits:
        return compare(options, folder)
    try:
        first, second = run_phase(options, "train"), run_phase(options, "go_on")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if first["loss"] != second["loss"]:
        print(f"the losses differ: {first['loss']!r} and {second['loss']!r}", file=sys.stderr)
        return 1
    described = harness.host(Path(options.swap).parent)
    if options.json:
        print(json.dumps({"host": described, "train": first, "go_on": second}, indent=2))
        return 0
    text = harness.table([options.model, ""], rows(first, second))
    print(text)
    if options.results:
        command = f"python -m benchmarks.durability --model {options.model} --steps {options.steps}"
        head = harness.header(command, described, "Medians over the steps.")
        write_results(MARK, f"{head}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
