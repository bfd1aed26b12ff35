"""The benchmark runs: small, so that it does not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_small_run_reports_every_contestant() -> None:
    command = [sys.executable, "-m", "benchmarks.adam", "--json", "--millions", "0.02", "--rounds", "1"]
    command += ["--threads", "2", "--isas", "scalar", "--peer-python", sys.executable]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    report = json.loads(output)
    names = {row["name"] for row in report["rows"]}
    assert {"offload bf16 scalar 2 threads", "offload fp32 scalar 2 threads", "copy"} <= names
    assert all(row["median_seconds"] > 0 and row["gparam_per_s"] > 0 for row in report["rows"])
