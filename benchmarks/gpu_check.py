"""Proves the accelerator path on one GPU in under six minutes, and says how fast it is.

    python -m benchmarks.gpu_check --out gpu_check.json            # needs a CUDA device
    python -m benchmarks.gpu_check --device test --smoke           # anywhere: the test accelerator, smallest sizes

It needs torch, numpy and pybind11, and no network. Every section stands alone: one that fails is reported and the
rest goes on; the status at the end is 1 then. Results are written after each section, so a hang loses one.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one order of additions; read when CUDA starts

import torch

from .gpu.common import Finding, NotRunError, Run, provide_psutil
from .harness import ROOT, header, host, make_parser, table

HANG_SECONDS = 60
"""How long after its time a section counts as hanging: the process then ends with every thread's stack."""


@dataclass
class Section:
    """One part of the check."""

    name: str
    run: Callable[[Run], Iterator[Finding]]
    seconds: float
    """What it may take at most."""
    needs_cuda: bool = False


@dataclass
class Outcome:
    name: str
    status: str = "ok"
    """"ok", "failed", or "not run: " and the reason."""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


# ---- sections that need nothing of ours ----


def build(run: Run) -> Iterator[Finding]:
    """Builds the extensions where they are missing or older than their sources."""
    sources = [ROOT / "setup.py", *(ROOT / "aio_csrc").rglob("*.cpp"), *(ROOT / "aio_csrc").rglob("*.h")]
    newest = max(path.stat().st_mtime for path in sources)
    built = {path.name.partition(".")[0]: path for path in (ROOT / "offload").glob("*.so")}
    is_old = any(path.stat().st_mtime < newest for path in built.values()) and not run.smoke
    seconds = 0.0
    if is_old or not {"_aio", "_adam"} <= built.keys():
        begin = time.perf_counter()
        command = [sys.executable, "setup.py", "build_ext", "--inplace", "--parallel", "2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(run.left(), 1))
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"build failed: {done.stderr.strip()[-2000:]}")
    for name in ("_aio", "_adam"):
        importlib.import_module(f"offload.{name}")
    yield Finding("extensions", f"built in {seconds:.0f} s" if seconds else "were there", ok=True)


def environment(run: Run) -> Iterator[Finding]:
    """What is measured on."""
    for key, value in host(run.swap).items():
        yield Finding(key, str(value))
    yield Finding("torch's CUDA", str(torch.version.cuda))
    if run.is_cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        yield Finding("device", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    fields = (
        "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm,power.limit"
    )
    if run.is_cuda and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20)
        for name, value in zip(fields.split(","), asked.stdout.splitlines()[0].split(", "), strict=False):
            yield Finding(name, value)


def _later(module: str, function: str) -> Callable[[Run], Iterator[Finding]]:
    """A section of `benchmarks.gpu`, imported when it runs: what it needs has been built then."""

    def run(given: Run) -> Iterator[Finding]:
        yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(given)

    return run


SECTIONS = [
    Section("build", build, 150),
    Section("environment", environment, 20),
    Section("kernels", _later("correctness", "kernels"), 60),
    Section("links", _later("links", "bandwidth"), 20),
    Section("parity", _later("correctness", "parity"), 70),
    Section("cases", _later("cases", "structure"), 20),
    Section("lifetimes", _later("cases", "lifetimes"), 30),
    Section("pinned bytes", _later("cases", "pinned_bytes"), 15),
    Section("1.3b", _later("throughput", "middle"), 110),
    Section("8b", _later("throughput", "large"), 130),
    Section("overlap", _later("correctness", "overlap"), 70),
]
"""In the order of what a short time is best spent on."""


# ---- running and reporting ----


def run_section(section: Section, options: argparse.Namespace, swap: Path, deadline: float) -> Outcome:
    """Runs one section; whatever it raises is its outcome."""
    outcome, begin = Outcome(section.name), time.monotonic()
    left = deadline - begin
    if section.needs_cuda and options.device != "cuda":
        outcome.status = "not run: no CUDA device"
        return outcome
    if left < 5:
        outcome.status = f"not run: {max(left, 0):.0f} s are left of {options.seconds:g}"
        return outcome
    run = Run(options.device, options.smoke, swap, begin + min(section.seconds, left))
    faulthandler.dump_traceback_later(run.left() + HANG_SECONDS, exit=True, file=sys.__stderr__)
    print(f"[{options.seconds - left:5.0f} s] {section.name}", flush=True)
    try:
        for finding in section.run(run):
            outcome.findings.append(finding)
            mark = {None: " ", True: "+", False: "!"}[finding.ok]
            print(f"  {mark} {finding.check}: {finding.measured}", flush=True)
            if run.left() < 0:
                raise NotRunError(f"the rest: {section.seconds:g} s are up")
        if any(finding.ok is False for finding in outcome.findings):
            outcome.status = "failed"
    except NotRunError as reason:
        failed = any(finding.ok is False for finding in outcome.findings)
        outcome.status = "failed" if failed else f"not run: {reason}"
    except Exception as error:
        outcome.status = "failed"
        text = f"{type(error).__name__}: {error}"
        outcome.findings.append(Finding("broken off", text, ok=False))
        print(f"  ! {text}", flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
    outcome.seconds = time.monotonic() - begin
    return outcome


def as_table(outcomes: Sequence[Outcome]) -> str:
    """One row for each finding, and one for each section that has none."""
    rows = []
    for outcome in outcomes:
        if outcome.status != "ok" or not outcome.findings:
            rows.append([outcome.name, "", outcome.status, ""])
        for finding in outcome.findings:
            verdict = {None: "", True: "ok", False: "FAILED"}[finding.ok]
            rows.append([outcome.name, finding.check, finding.measured.replace("|", "/"), verdict])
    return table(["section", "check", "measured", "verdict"], rows)


def as_json(outcomes: Sequence[Outcome], options: argparse.Namespace, described: dict[str, Any]) -> str:
    return json.dumps(
        {"host": described, "options": vars(options), "sections": [asdict(outcome) for outcome in outcomes]},
        indent=1,
        default=str,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "test"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes: to see that the script runs")
    parser.add_argument("--seconds", type=float, default=330, help="what all sections may take together")
    parser.add_argument("--swap", help="directory for swap files, on a disk; runs/ where it is left out")
    parser.add_argument(
        "--out", default="gpu_check.json", help="where results go, as JSON and as a table (.md)"
    )
    parser.add_argument("--only", help="names of sections, separated by commas")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections; 1 where one has failed."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device is found here; --device test --smoke runs the script without one", file=sys.stderr
        )
        return 2
    names = options.only.split(",") if options.only else [section.name for section in SECTIONS]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        print(f"--only: there is no section {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    provide_psutil()
    swap = Path(options.swap or ROOT / "runs")  # not the system's: that may be memory
    swap.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory(dir=swap) as directory, _deterministic():
        described = host(directory)
        for section in SECTIONS:
            if section.name in names:
                outcomes.append(run_section(section, options, Path(directory), deadline))
                Path(options.out).write_text(as_json(outcomes, options, described))
    text = f"{header('python -m benchmarks.gpu_check', described)}\n{as_table(outcomes)}\n"
    Path(options.out).with_suffix(".md").write_text(text)
    print(f"\n{text}\n{options.out} has all of it")
    return int(any(outcome.status == "failed" for outcome in outcomes))


class _deterministic(warnings.catch_warnings):  # noqa: N801  # a context
    """Operations with one order of additions, where torch has them."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        return entered

    def __exit__(self, *error: Any) -> None:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        super().__exit__(*error)


if __name__ == "__main__":
    sys.exit(main())
