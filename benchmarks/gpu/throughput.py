"""Seconds per step, tokens per second and peaks of a decoder: ours beside plain PyTorch and FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..harness import ROOT
from .common import Finding, NotRunError, Run

Task = dict[str, Any]

PLANNED_SHARE = 1.1
"""Of the plan, that a peak may be: caches of torch and CUDA's libraries are not in it."""
DEVICE_SLACK_BYTES = 256 << 20
HOST_SLACK_BYTES = 4 << 30
"""What CUDA's libraries take of host memory when they first run, and pages of code."""


def _ours(param: str, state: str, update: str) -> Task:
    return {"contestant": "ours", "param": param, "state": state, "update": update}


MIDDLE: list[Task] = [
    _ours("cpu", "cpu", "step"),
    {"contestant": "fsdp2"},
    {"contestant": "plain"},
    _ours("none", "cpu", "step"),
    _ours("nvme", "nvme", "backward"),
    _ours("none", "none", "step"),
]
LARGE: list[Task] = [
    _ours("cpu", "cpu", "backward"),
    {"contestant": "fsdp2-bf16"},  # its fp32 state is 16 bytes per parameter: 128 GB
    _ours("none", "cpu", "backward"),
]
"""Everything on nvme would be 96 GB of swap files."""


def middle(run: Run) -> Iterator[Finding]:
    """1.3 billion parameters: all that we compare fit."""
    sizes = {"model": "1.3b", "batch": 8, "seq": 1024, "steps": 3}
    yield from _contestants(run, sizes, MIDDLE, seconds=18)


def large(run: Run) -> Iterator[Finding]:
    """8 billion: 80 GB of optimizer state in the smallest format there is."""
    sizes = {"model": "8b", "batch": 8, "seq": 1024, "steps": 2}
    yield from _contestants(run, sizes, LARGE, seconds=45)


def _contestants(run: Run, sizes: Task, tasks: list[Task], *, seconds: float) -> Iterator[Finding]:
    """One process after the other; what there is no time for is said."""
    if run.smoke:
        sizes = {"model": "smoke", "batch": 1, "seq": 16, "steps": 1}
    for task in tasks:
        name = f"{sizes['model']}: {_name(task)}"
        if not run.is_cuda and task["contestant"].startswith("fsdp2"):
            yield Finding(name, "not run: no CUDA device")
            continue
        try:
            if not run.smoke:
                run.need(seconds, name)
            yield _finding(name, _measure(run, {**task, **sizes}), run)
        except NotRunError as reason:
            yield Finding(name, f"not run: {reason}")
        except Exception as error:
            yield Finding(name, f"{type(error).__name__}: {error}", ok=False)


def _measure(run: Run, task: Task) -> dict[str, Any]:
    from . import contestant

    task = {**task, "device": run.device, "swap": str(run.swap)}
    if run.smoke and not run.is_cuda:
        return contestant.measure(task)
    command = [sys.executable, "-m", "benchmarks.gpu.contestant", json.dumps(task)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(run.left(), 1))
    except subprocess.TimeoutExpired:
        raise NotRunError("broken off: the time is up") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _finding(name: str, answer: dict[str, Any], run: Run) -> Finding:
    run.say(f"{name}: prepared in {answer['prepare_seconds']:.1f} s")
    text = f"{answer['step_seconds']:.3f} s, {answer['tokens_per_second']:,.0f} tokens/s"
    ok: bool | None = None
    for tier, slack in (("device", DEVICE_SLACK_BYTES), ("host", HOST_SLACK_BYTES)):
        peak, planned = answer[f"{tier}_peak_bytes"], answer.get(f"plan_{tier}_bytes")
        if peak is None:
            continue
        text += f"; {tier} {peak / 1e9:.2f} GB" + (
            "" if planned is None else f" of {planned / 1e9:.2f} planned"
        )
        if planned is not None:
            ok = ok is not False and peak <= planned * PLANNED_SHARE + slack
    if "bytes_as_planned" in answer:
        text += "; bytes as planned" if answer["bytes_as_planned"] else "; bytes differ from the plan"
        ok = ok is not False and answer["bytes_as_planned"]
    return Finding(name, text, ok, answer)


def _name(task: Task) -> str:
    if task["contestant"] != "ours":
        return str(task["contestant"])
    return f"parameters {task['param']}, state {task['state']}, {task['update']}"
