"""What runs beside what: one training step on the simulated accelerator, as a time line.

    python -m benchmarks.overlap --swap DIR --picture benchmarks/results/overlap.png

A decoder of which everything is at home on NVMe. Simulated are the seconds of compute, which touches so many bytes
per second, and of copies over PCIe; the disk and the update on the host take no time here. So the picture shows
what the order of events allows, not how fast a machine is: that weights come while others are computed with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import offload
from offload.accel.simulated import COMPUTE, Span
from offload.models.decoder import Decoder
from offload.models.presets import DecoderConfig

from .harness import make_parser

H2D, D2H = "h2d", "d2h"
STEPS = 3
"""The last is shown: by then the order of use is known, and every step is like it."""


@dataclass(frozen=True)
class Step:
    """The time line of one step."""

    compute: list[Span]
    """What was computed between two uses of other units' weights, by unit."""
    lifts: list[Span]
    """Weights on their way to the device, by unit."""
    gradients: list[Span]
    """Gradients on their way to the host."""
    begin: float
    end: float

    @property
    def compute_share(self) -> float:
        """Of the step, in which compute runs."""
        return length(self.compute) / (self.end - self.begin)

    @property
    def beside_share(self) -> float:
        """Of the time of compute, in which copies run beside it."""
        return overlap(self.compute, self.lifts + self.gradients) / length(self.compute)

    @property
    def hidden_share(self) -> float:
        """Of the time of copies of weights, in which compute runs beside them."""
        return overlap(self.compute, self.lifts) / length(self.lifts)

    def late(self) -> list[tuple[Span, Span]]:
        """Uses that had to wait for their weights: what was lifted, and what was computed before."""
        found = []
        for before, after in zip(self.compute, self.compute[1:], strict=False):
            lift = next((lift for lift in reversed(self.lifts) if lift.end <= after.begin), None)
            if lift is not None and lift.name == after.name and lift.end > before.end:
                found.append((lift, before))
        return found


def length(spans: Sequence[Span]) -> float:
    """Seconds in which any of the spans is."""
    return overlap(spans, spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which a span of both is."""
    marks = sorted(
        (time, change, which)
        for which, spans in enumerate((first, second))
        for span in spans
        for time, change in ((span.begin, 1), (span.end, -1))
    )
    total, since, open_ = 0.0, 0.0, [0, 0]
    for time, change, which in marks:
        if all(open_):
            total += time - since
        open_[which] += change
        since = time
    return total


def merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Neighbours of one name as one."""
    current: Span | None = None
    for span in spans:
        if current is not None and current.name == span.name and span.begin - current.end < 1e-12:
            current = Span(span.actor, span.name, current.begin, span.end)
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def trace(options: argparse.Namespace) -> Step:
    """Trains a few steps and gives the time line of the last."""
    path = {"nvme_path": str(options.swap)}
    config = {
        "bf16": {"enabled": True},
        "accelerator": f"simulated:{options.seed}",
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", **path},
            "offload_optimizer": {"device": "nvme", "update": options.update, **path},
        },
    }
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=3 * options.width, num_layers=options.layers,
        num_heads=4, num_kv_heads=4, max_seq_len=options.length,
    )  # fmt: skip
    model, optimizer = offload.prepare(Decoder(shape), config)
    with closing(optimizer.engine) as engine:
        accelerator: Any = engine.accelerator
        _name_by_unit(engine, accelerator)
        rates = {COMPUTE: options.compute, H2D: options.pcie, D2H: options.pcie}
        accelerator.seconds_of = lambda actor, size: size / (rates[actor] * 1e9)
        ids = torch.randint(
            0, 256, (options.batch, options.length), generator=torch.Generator().manual_seed(1)
        )
        begin, first = 0.0, 0
        for _ in range(STEPS):
            begin, first = accelerator.compute.time, len(accelerator.spans)
            model(ids, labels=ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        spans = accelerator.spans[first:]
    by_actor = {actor: [span for span in spans if span.actor == actor] for actor in rates}
    compute = [*merged([span for span in by_actor[COMPUTE] if span.end > span.begin])]
    return Step(compute, by_actor[H2D], by_actor[D2H], begin, compute[-1].end)


def _name_by_unit(engine: Any, accelerator: Any) -> None:
    """Calls compute and copies by the number of the unit whose weights they are about."""
    lifts = engine.weights.mover._lifts
    start, show = lifts.start, lifts.show

    def named_start(slot: int, unit: int, **settings: Any) -> None:
        accelerator.copy_label = str(unit)
        start(slot, unit, **settings)

    def named_show(slot: int, unit: int, **settings: Any) -> None:
        show(slot, unit, **settings)
        accelerator.label = str(unit)

    lifts.start, lifts.show = named_start, named_show


def draw(step: Step, path: str, title: str) -> None:
    """The time line as a picture. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    units = sorted({int(span.name) for span in step.compute})
    colours = pyplot.get_cmap("turbo")
    rows = {
        "weights to\nthe device": step.lifts,
        "compute": step.compute,
        "gradients to\nthe host": step.gradients,
    }
    figure, axes = pyplot.subplots(figsize=(15, 3.6), constrained_layout=True)
    scale = 1e6
    for row, spans in enumerate(rows.values()):
        for span in spans:
            unit = int(span.name)
            colour = colours(0.08 + 0.84 * unit / max(units[-1], 1)) if row < 2 else "0.55"
            begin, width = (span.begin - step.begin) * scale, (span.end - span.begin) * scale
            axes.barh(row, width, left=begin, height=0.72, color=colour, edgecolor="white", linewidth=0.4)
            if row < 2 and width > 0.012 * (step.end - step.begin) * scale:
                axes.text(
                    begin + width / 2, row, span.name, ha="center", va="center", fontsize=9, color="white"
                )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, (step.end - step.begin) * scale)
    axes.set_xlabel("simulated microseconds of one step; the numbers are units: 0 is the embedding")
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary(step: Step) -> dict[str, Any]:
    return {
        "compute_share_of_step": round(step.compute_share, 4),
        "copies_beside_compute": round(step.beside_share, 4),
        "weight_copies_hidden": round(step.hidden_share, 4),
        "late": [f"{lift.name} after {before.name}" for lift, before in step.late()],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--swap", default="/tmp/offload-swap", help="directory for swap files")
    parser.add_argument("--update", choices=["step", "backward"], default="backward")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pcie", type=float, default=25.0, help="simulated GB/s of copies, each way")
    parser.add_argument("--compute", type=float, default=400.0, help="simulated GB/s that compute touches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="file to write the time line to (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps, prints the shares and draws the picture; see the top of the file."""
    options = parse(arguments)
    Path(options.swap).mkdir(parents=True, exist_ok=True)
    step = trace(options)
    numbers = summary(step)
    if options.json:
        print(json.dumps(numbers))
    else:
        for name, value in numbers.items():
            print(f"{name.replace('_', ' '):24} {value if isinstance(value, list) else f'{value:.1%}'}")
    if options.picture:
        title = (
            f"everything on NVMe, update in {options.update}; PCIe {options.pcie:g} GB/s:"
            f" compute runs {step.compute_share:.0%} of the step, and copies beside {step.beside_share:.0%} of compute"
        )
        draw(step, options.picture, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
