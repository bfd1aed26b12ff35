"""The benchmarks in their smallest sizes: they must not rot, and what they compare must compute the same."""

import json
import sys

import pytest
import torch

from benchmarks import adam, durability, harness, hooks, io, learning, step, tune
from offload.cli.loads import LOADS
from offload.cli.search import candidates


def test_step(swap_path, capsys):
    small = ["--layers=2", "--width=64", "--length=8", "--vocabulary=100", "--rounds=2", "--precision=fp32"]
    names = ["plain", "nvme-optimizer", "nvme"]
    assert step.main([*small, f"--swap={swap_path}", "--json", f"--contestants={','.join(names)}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["rows"]] == names and "torch" in report["host"]
    losses = [row["loss_last"] for row in report["rows"]]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)
    assert step.as_table(report["rows"]).count("\n") == 1 + len(names)


def test_hooks(swap_path, capsys):
    gpt = "--precision=fp32 --layers=1 --width=64 --length=8 --vocabulary=100"
    small = ["--units=3", "--rounds=2", "--gpt-rounds=1", f"--gpt={gpt}", f"--swap={swap_path}", "--json"]
    threads = torch.get_num_threads()
    assert hooks.main(small) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(capsys.readouterr().out)
    plain, *placements = report["rows"]
    assert [row["name"] for row in placements] == list(hooks.HOMES)
    for row in placements:
        assert row["more_seconds"] == row["cpu_seconds"] - plain["cpu_seconds"] and row["cpu_seconds"] > 0
        assert row["share_of_gpt_step"] == row["more_seconds"] / report["gpt_step_seconds"]
    assert hooks.as_table(report["rows"], 3).count("\n") == 1 + 4


@pytest.mark.parametrize("output", [["--json"], ["--results"]], ids=["json", "table"])
def test_io(output, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.md"
    results.write_text(f"Said by hand.\n{io.MARK}old table")
    monkeypatch.setattr(io, "RESULTS", results)
    drive = tmp_path / "drive"
    drive.mkdir()
    small = [f"--path={drive}", "--mib=4", "--chunks", "1", "--rounds=1"]
    if output == ["--json"]:
        small.append(f"--peer-python={sys.executable}")
        monkeypatch.setattr(io.shutil, "which", lambda _: None)
    else:
        small.append("--loads=mixed")
    assert io.main([*small, *output]) == 0
    assert list(drive.iterdir()) == []
    out, err = capsys.readouterr()
    if output == ["--json"]:
        assert "no peer: ended with status 1" in err
        report = json.loads(out)
        assert [cell["load"] for cell in report["cells"]] == list(io.LOADS)
        for cell in report["cells"]:
            names = [row["name"] for row in cell["rows"]]
            assert "offload threads 8 threads x 1 MiB" in names and len(set(names)) == len(names)
            assert all(row["gb_per_s_max"] >= row["gb_per_s"] > 0 for row in cell["rows"])
        assert results.read_text().endswith("old table")
    else:
        text = results.read_text()
        assert text.startswith("Said by hand.") and "old table" not in text
        assert text.count("| offload threads 8 threads x 1 MiB |") == 1


def test_io_cells_move_every_byte_once():
    for load in io.LOADS:
        moved = list(io.Cell(load, chunk=4, size=64).transfers())
        assert sorted(offset for _, offset in moved) == list(range(0, 64, 4))
    reads = [offset for operation, offset in moved if operation == "read"]
    assert reads == list(range(0, 32, 4))


@pytest.mark.parametrize("output", [["--json"], []], ids=["json", "table"])
def test_adam(output, capsys):
    small = ["--millions=0.02", "--rounds=1", "--threads=2", "--isas=scalar", *output]
    peer = ["--peer-python", sys.executable] if output else []
    assert adam.main([*small, *peer]) == 0
    out, err = capsys.readouterr()
    expected = {"offload bf16 scalar 2 threads", "offload fp32 scalar 2 threads", "copy"}
    if output:
        report = json.loads(out)
        assert expected <= {row["name"] for row in report["rows"]}
        assert all(row["median_seconds"] > 0 and row["gparam_per_s"] > 0 for row in report["rows"])
        assert "no peer: ended with status 1" in err
    else:
        title, _, *table = out.splitlines()
        assert "torch 2" in title and "cores" in title
        cells = [line.strip("| ").split(" | ") for line in table]
        assert len({len(row) for row in cells}) == 1 and expected <= {row[0] for row in cells}


def test_contestants_take_turns_and_the_first_round_does_not_count():
    turns = []

    def contestant(name, seconds):
        remaining = iter(seconds)
        return harness.Contestant(name, lambda: turns.append(name) or {"seconds": next(remaining)})

    first, second = contestant("first", [9.0, 3.0, 1.0, 2.0]), contestant("second", [0.0, 5.0, 4.0, 4.0])
    harness.take_turns([first, second], rounds=3)
    assert turns == ["first", "second"] * 4
    assert (first.median, second.median) == (2.0, 4.0)


def test_tune(tmp_path, capsys):
    small = ["--seconds=1", "--max-write-gib=0.03", "--mib=1", "--file-mib=16", "--rounds=4", "--cells=1"]
    assert tune.main([*small, "--backends=threads", f"--swap={tmp_path}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["load"], row["what"]) for row in report["rows"]] == [
        (load, what) for load in LOADS for what in ("tune", "the defaults", "best of the sweep")
    ]
    assert report["sweep_cells"] == 3 * len(candidates(["threads"])) and list(tmp_path.iterdir()) == []
    page = tune.as_text(report, "command")
    assert report["chosen"] in page and page.count("\n") > len(report["rows"])


def test_the_best_cell_is_not_judged_by_the_rounds_that_picked_it():
    cells = tune.Cells()
    steady, lucky = candidates(["threads"])[:2]
    cells.rates[steady, "read"] = [10.0] * 6
    cells.rates[lucky, "read"] = [5.0, 30.0] * 3  # the best of the odd rounds, the worst of the even ones
    share = tune.share_of_best(cells, "read", steady)
    assert share == pytest.approx((10 / 10 + 10 / 5) / 2)
    assert cells.best("read", 1) == [lucky]


def test_learning(tmp_path, monkeypatch, capsys):
    """Three steps of every contestant; those that are kept are not trained again."""
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "learning.md")
    kept = tmp_path / "kept.json"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("for i in range(3):\n    print(i)\n" * 200)
    small = [f"--data={tmp_path / 'text'}", "--seeds=1", "--steps=3", "--every=2", "--width=64", "--layers=1"]
    small += ["--seq=32", "--batch=2", f"--kept={kept}"]
    assert learning.main([*small, "--results"]) == 0
    curves = json.loads(kept.read_text())
    assert [*curves] == [f"{name}/0" for name in (learning.TORCH, *learning.FORMATS)]
    assert all([step for step, _ in curve] == [2, 3] for curve in curves.values())
    last = [curve[-1][1] for curve in curves.values()]
    assert last == pytest.approx([last[0]] * 4, rel=1e-3) and last[0] < curves["fp32/0"][0][1]
    assert (tmp_path / "learning.md").read_text().count("| int8 |") == 1
    monkeypatch.setattr(learning, "train", None)
    capsys.readouterr()
    assert learning.main([*small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["difference"] == 0
    assert learning.main([*small, "--formats", "int8", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == [learning.TORCH, "int8"]


def test_learning_rate_goes_up_and_down():
    rates = [learning.lr_at(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=2e-3)


def test_durability(tmp_path, capsys):
    small = ["--model=preset:10m", "--steps=1", "--seq=16", "--host-bytes=1GiB", f"--swap={tmp_path}"]
    assert durability.main([*small, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["train"], report["go_on"]
    assert first["loss"] == second["loss"] and list(tmp_path.iterdir()) == []
    assert max(save["bytes"] for save in (*first["flushing"], *first["nothing_to_flush"])) <= 1 << 20
    assert dict(durability.rows(first, second)).keys() >= {"a step, seconds", "prepare(resume=True), seconds"}
    assert durability.main([*small, "--background", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["background"]
    assert found["bytes"] > 100_000_000 and min(found["written"]) > 0 and list(tmp_path.iterdir()) == []
    assert dict(durability.background_rows(found)).keys() >= {
        "a step, seconds",
        "seconds until that is written",
    }
    assert durability.main([*small, "--commits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["commits"]
    assert found["bytes"] > 80_000_000 and list(tmp_path.iterdir()) == []
    assert dict(durability.commit_rows(found)).keys() >= {"a step, seconds", "bytes of a commit"}
