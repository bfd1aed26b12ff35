"""What benchmarks share: contestants that take turns, processes that answer, tables with their host.

Contestants make one step each, round after round, so that a busy neighbour or a change of clock meets all of
them; medians over the rounds are compared, and the best shows what a quiet machine would give.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]

Answer = dict[str, float]
"""What one step tells: its ``seconds``, and whatever else the benchmark reports."""


@dataclass
class Contestant:
    """One of those compared."""

    name: str
    step: Callable[[], Answer]
    details: dict[str, Any] = field(default_factory=dict)
    """What the report needs to know of it."""
    answers: list[Answer] = field(default_factory=list)
    """Those that count."""

    @property
    def seconds(self) -> list[float]:
        return [answer["seconds"] for answer in self.answers]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_turns(contestants: Sequence[Contestant], rounds: int) -> None:
    """One step of each, round after round, after one round that is not counted."""
    for round_ in range(rounds + 1):
        for contestant in contestants:
            answer = contestant.step()
            if round_:
                contestant.answers.append(answer)


def timed(step: Callable[[], object]) -> Callable[[], Answer]:
    """The step of a contestant in this process."""

    def run() -> Answer:
        begin = time.perf_counter()
        step()
        return {"seconds": time.perf_counter() - begin}

    return run


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring, as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# ---- processes ----


def serve(make: Callable[[], Callable[[str], Answer]]) -> None:
    """In a process of its own: one step per line of standard input, which says of what; answers with JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print; the answers are ours alone
    step = make()
    answers.write("{}\n")  # ready
    for line in sys.stdin:
        answers.write(json.dumps(step(line.strip())) + "\n")


class Server:
    """A process that serves steps, in any interpreter. Several may start at once."""

    def __init__(self, module: str, arguments: Sequence[str], *, python: str = sys.executable) -> None:
        interpreter = Path(python).absolute()
        self._command = [str(interpreter), "-m", module, *arguments]
        tools = str(interpreter.parent)  # its compiler driver lies there
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([tools, os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def wait_ready(self) -> None:
        """Waits until it can make steps.

        Raises:
            RuntimeError: it has ended instead.
        """
        self._read()

    def step(self, what: str = "") -> Answer:
        """One step; ``what`` says of what, where the process serves several."""
        if self._process.stdin is None:
            raise AssertionError("no pipe")
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading will tell
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Answer:
        if self._process.stdout is None:
            raise AssertionError("no pipe")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"ended with status {status}; to see why, run {' '.join(self._command)}")
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process: it has nothing more to read."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


# ---- report ----


def host(disk: str | Path | None = None) -> dict[str, Any]:
    """The machine that was measured, and with ``disk`` the file system that a directory lies on."""
    described = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
    }
    if disk is not None:
        described["disk"] = _disk(Path(disk).resolve())
    return {**described, "date": time.strftime("%Y-%m-%d")}


TURNS = "Contestants take turns, after a round that is not counted."


def header(command: str, described: dict[str, Any], remark: str = TURNS) -> str:
    """The lines above a table of results: what was run, and where."""
    words = {"cores": "{} cores", "memory_gb": "{} GB", "torch": "torch {}"}
    parts = [words.get(key, "{}").format(value) for key, value in described.items()]
    return f"`{command}`: {', '.join(parts)}. {remark}\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is a name, the others are numbers."""
    lines = [columns, [":--", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _disk(path: Path) -> str:
    """File system and device of a path, by the longest mount point above it, and the model of the device."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if path.is_relative_to(mount[1])]
    device, _, kind = max(above, key=lambda mount: len(mount[1]))
    model = Path("/sys/class/block") / Path(device).name / "device/model"
    return f"{kind} on {device}" + (f" ({model.read_text().strip()})" if model.is_file() else "")
