"""The step benchmark in its smallest size: it must not rot."""

import json

from benchmarks import step


def test_step_benchmark_runs(swap_path, capsys):
    small = ["--layers=2", "--width=64", "--length=8", "--vocabulary=100", "--rounds=2", "--precision=fp32"]
    assert step.main([*small, f"--swap={swap_path}", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {"plain", "cpu", "nvme-optimizer", "nvme"}
    assert len({row["loss_last"] for row in rows.values() if row["name"] in ("cpu", "nvme-optimizer")}) == 1
    assert abs(rows["plain"]["loss_last"] - rows["cpu"]["loss_last"]) < 1e-4
