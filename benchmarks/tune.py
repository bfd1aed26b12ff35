"""What `offload tune` chooses, beside the best of every setting there is.

    python -m benchmarks.tune --swap DIR --picture benchmarks/results/tune.png

First `tune` searches, as the command does. Then every setting is measured once at every load, in a random order, on
the same file: the exhaustive sweep. What came out best there was also the luckiest, so the best few cells of each
load, the defaults and tune's choice then take turns. The best cell is the one with the highest median in the even
rounds, compared in the odd ones, and the other way round: what is picked for its luck is not judged by it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offload import aio
from offload.bytesize import GiB, MiB
from offload.cli import tune as tool
from offload.cli.loads import LOADS, Rig, ScratchFile, settings_text
from offload.cli.progress import PlainDisplay
from offload.cli.search import candidates
from offload.cli.tune_plot import draw_maps
from offload.machine import IoSettings

from . import harness

BEST = "best of the sweep"


class Cells:
    """GB/s of settings at loads, each measured once or more."""

    def __init__(self) -> None:
        self.rates: dict[tuple[IoSettings, str], list[float]] = defaultdict(list)

    def median(self, settings: IoSettings, load: str) -> float | None:
        rates = self.rates.get((settings, load))
        return statistics.median(rates) if rates else None

    def best(self, load: str, count: int) -> list[IoSettings]:
        """The settings with the highest medians at a load."""
        found = {one: self.median(one, at) or 0.0 for one, at in self.rates if at == load}
        return sorted(found, key=lambda one: -found[one])[:count]


def measure(rig: Rig, cells: Cells, one: IoSettings, load: str, size: int) -> None:
    with rig.file.open(one) as queue:
        cells.rates[one, load].append(rig.run(queue, load, size, seconds_max=60).gb_per_second)


def sweep(rig: Rig, settings: Sequence[IoSettings], size: int, seed: int) -> Cells:
    """Every setting at every load, once."""
    cells = Cells()
    todo = [(one, load) for one in settings for load in LOADS]
    random.Random(seed).shuffle(todo)
    for number, (one, load) in enumerate(todo):
        measure(rig, cells, one, load, size)
        if number % 60 == 0:
            print(f"sweep: {number} of {len(todo)}", file=sys.stderr)
    return cells


def compare(
    rig: Rig, swept: Cells, chosen: IoSettings, default: IoSettings, options: argparse.Namespace
) -> dict[str, Cells]:
    """By load: the best cells of the sweep, the choice and the defaults, in turns."""
    compared = {load: Cells() for load in LOADS}
    rng = random.Random(options.seed + 1)
    for round_ in range(options.rounds + 1):
        for load, cells in compared.items():
            field = [*dict.fromkeys([chosen, default, *swept.best(load, options.cells)])]
            warm = cells if round_ else Cells()  # the first round does not count
            for one in rng.sample(field, len(field)):
                measure(rig, warm, one, load, options.mib * MiB)
    return compared


def share_of_best(cells: Cells, load: str, one: IoSettings) -> float:
    """By the rounds in which the best cell was not picked. See the top of the file."""
    shares = []
    for half in (0, 1):
        picked, judged = Cells(), Cells()
        for (settings, _), rates in cells.rates.items():
            picked.rates[settings, load], judged.rates[settings, load] = rates[half::2], rates[1 - half :: 2]
        (best,) = picked.best(load, 1)
        shares.append((judged.median(one, load) or 0.0) / (judged.median(best, load) or 1.0))
    return sum(shares) / len(shares)


def rows_of(load: str, cells: Cells, outcome: tool.Outcome) -> Iterator[dict[str, Any]]:
    """The choice, the defaults and the best of the sweep at one load."""
    (best,) = cells.best(load, 1)
    named = {"tune": outcome.best, "the defaults": outcome.search.default, BEST: best}
    for name, one in named.items():
        rates = cells.rates[one, load]
        yield {
            "load": load,
            "what": name,
            "settings": settings_text(one),
            "gb_per_second": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
            "share": share_of_best(cells, load, one),
        }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Search, sweep, comparison; and the picture of the sweep."""
    path = Path(options.swap)
    display = PlainDisplay(0, to_stderr=True)
    begin = time.monotonic()
    outcome = tool.tune_path(
        path, display, seconds=options.seconds, max_write=int(options.max_write_gib * GiB)
    )
    tune_seconds = time.monotonic() - begin
    settings = candidates(options.backends.split(",") if options.backends else aio.backends())
    with ScratchFile(path, options.file_mib * MiB) as file:
        rig = Rig(file)
        with file.open(outcome.search.default) as queue:
            rig.fill(queue, seconds_max=600)
        begin = time.monotonic()
        swept = sweep(rig, settings, options.mib * MiB, options.seed)
        sweep_seconds = time.monotonic() - begin
        compared = compare(rig, swept, outcome.best, outcome.search.default, options)
    if options.picture:
        title = f"every setting, {harness.host(path)['disk']}"
        draw_maps([(title, swept, settings, outcome.best)], Path(options.picture))
    rows = [row for load, cells in compared.items() for row in rows_of(load, cells, outcome)]
    return {
        "host": harness.host(path),
        "tune_seconds": round(tune_seconds, 1),
        "tune_trials": sum(map(len, outcome.search.rates.values())),
        "tune_written_gib": round(outcome.written_bytes / GiB, 1),
        "sweep_seconds": round(sweep_seconds, 1),
        "sweep_cells": len(settings) * len(LOADS),
        "chosen": settings_text(outcome.best),
        "rounds": options.rounds,
        "rows": rows,
    }


def as_text(report: dict[str, Any], command: str) -> str:
    """The results page."""
    lines = [harness.header(command, report["host"])]
    lines.append(
        f"`tune` took {report['tune_seconds']} s for {report['tune_trials']} measurements and wrote"
        f" {report['tune_written_gib']} GiB; the sweep of {report['sweep_cells']} cells took"
        f" {report['sweep_seconds']} s. It chose {report['chosen']}. Medians of {report['rounds']} rounds, GB/s.\n"
    )
    rows = [
        (f"{row['load']}, {row['what']}", row["settings"], f"{row['gb_per_second']:.2f}", f"{row['min']:.2f}",
         f"{row['max']:.2f}", "" if row["what"] == BEST else f"{100 * row['share']:.1f} %")
        for row in report["rows"]
    ]  # fmt: skip
    lines.append(harness.table(("load", "settings", "median", "min", "max", "of the best"), rows))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--swap", default="/tmp", help="directory on the drive")
    parser.add_argument("--seconds", type=float, default=tool.DEFAULT_SECONDS, help="for tune")
    parser.add_argument("--max-write-gib", type=float, default=16, help="by tune")
    parser.add_argument("--mib", type=int, default=256, help="of one measurement of sweep and comparison")
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--backends", help="of the sweep; default: all that work here")
    parser.add_argument(
        "--cells", type=int, default=4, help="best of the sweep that are compared, for each load"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="file to draw the sweep to (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the results; see the top of the file."""
    options = parse(arguments)
    report = run(options)
    command = " ".join(["python -m benchmarks.tune", *(sys.argv[1:] if arguments is None else arguments)])
    print(json.dumps(report) if options.json else as_text(report, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
