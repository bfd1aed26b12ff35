"""What the state formats learn: a decoder on real text, with each format and with torch's AdamW over fp32 masters.

    python -m benchmarks.learning --kept learning.json --results --picture benchmarks/results/learning.png

Every training of a seed starts from the same weights and sees the same batches: only the optimizer differs. The last
tenth of the text is not trained on; its loss is taken every two hundred steps. A training that has ended is kept in
the file `--kept`, so the benchmark goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.matmul import WideLinears, bf16_is_native
from offload.models.decoder import Decoder
from offload.models.presets import BYTE_VOCAB_SIZE, DecoderConfig, num_parameters

from . import harness

RESULTS = harness.ROOT / "benchmarks/results/learning.md"
MARK = "<!-- what follows is written by the benchmark -->\n"

TORCH = "torch AdamW, fp32 masters"
FORMATS = ("fp32", "bf16", "int8")

WARMUP_SHARE = 0.1
LR_END = 0.1
"""Part of the learning rate that the cosine ends at."""
VALIDATION_SEQUENCES = 128

REMARK = "Losses at the end, on text that was not trained on."

Curve = list[tuple[int, float]]
"""Steps made, and the loss on text that was not trained on."""


class TorchMasters:
    """The reference: torch's fused AdamW over fp32 masters, of which the bf16 weights are copies."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._weights = [*model.parameters()]
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._adam = torch.optim.AdamW(self._masters, fused=True, **settings)
        self.param_groups = self._adam.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._adam.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)


def make_optimizer(contestant: str, model: nn.Module, **settings: Any) -> Any:
    if contestant == TORCH:
        return TorchMasters(model, **settings)
    return offload.CPUAdam(model.parameters(), state_format=contestant, **settings)  # type: ignore[arg-type]


class Text:
    """Bytes of source files, cut into what is trained on and what is not."""

    def __init__(self, folder: str, seq: int) -> None:
        files = sorted(Path(folder).rglob("*.py"))[:600]
        data = b"".join(path.read_bytes() for path in files)
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.cut, self.seq = len(data) * 9 // 10, seq

    def batch(self, starts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.tokens[start : start + self.seq] for start in starts.tolist()]).long()

    def training(self, seed: int, batch: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.batch(torch.randint(self.cut - self.seq, (batch,), generator=generator))

    def validation(self, batch: int) -> Iterator[torch.Tensor]:
        """The same sequences for every training."""
        starts = torch.linspace(self.cut, len(self.tokens) - self.seq, VALIDATION_SEQUENCES).long()
        for part in starts.split(batch):
            yield self.batch(part)


def lr_at(step: int, steps: int, lr: float) -> float:
    """Linear up, then a cosine down."""
    warmup = max(1, int(steps * WARMUP_SHARE))
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (LR_END + (1 - LR_END) * (1 + math.cos(math.pi * done)) / 2)


def train(
    contestant: str, seed: int, text: Text, options: argparse.Namespace, tell: Callable[[str], None]
) -> Curve:
    """One training from its first weights to its last loss."""
    torch.manual_seed(seed)
    model = Decoder(shape_of(options), checkpointing=False).to(torch.bfloat16)
    if not bf16_is_native():
        WideLinears(model)
    optimizer = make_optimizer(contestant, model, lr=options.lr, betas=(0.9, 0.999), weight_decay=0.1)
    curve: Curve = []
    begun = time.monotonic()
    for step, ids in zip(range(options.steps), text.training(seed, options.batch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, options.steps, options.lr)
        model(ids, labels=ids).backward()
        optimizer.step()
        model.zero_grad()
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            curve.append((step + 1, validate(model, text, options.batch)))
            left = (time.monotonic() - begun) / (step + 1) * (options.steps - step - 1)
            tell(f"seed {seed}, {contestant}: step {step + 1}, loss {curve[-1][1]:.4f}, {left:.0f} s left")
    return curve


@torch.no_grad()
def validate(model: nn.Module, text: Text, batch: int) -> float:
    losses = [model(ids, labels=ids).item() * len(ids) for ids in text.validation(batch)]
    return math.fsum(losses) / VALIDATION_SEQUENCES


def shape_of(options: argparse.Namespace) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=BYTE_VOCAB_SIZE, hidden_size=options.width, intermediate_size=options.width * 8 // 3 // 32 * 32,
        num_layers=options.layers, num_heads=options.width // 32, num_kv_heads=options.width // 32,
        max_seq_len=options.seq,
    )  # fmt: skip


# ---- report ----


def rows_of(kept: dict[str, Curve], contestants: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Of each contestant its last losses, and how far their mean is from torch's."""
    rows: list[dict[str, Any]] = []
    for contestant in contestants:
        losses = [kept[f"{contestant}/{seed}"][-1][1] for seed in range(seeds)]
        reference = rows[0]["loss"] if rows else statistics.mean(losses)
        mean = statistics.mean(losses)
        rows.append({"name": contestant, "losses": losses, "loss": mean, "difference": mean / reference - 1})
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    seeds = range(len(rows[0]["losses"]))
    columns = ["optimizer state", *(f"seed {seed}" for seed in seeds), "mean", "against torch"]
    lines = []
    for row in rows:
        losses = [f"{loss:.4f}" for loss in (*row["losses"], row["loss"])]
        lines.append([row["name"], *losses, f"{row['difference']:+.2%}"])
    return harness.table(columns, lines)


def draw(kept: dict[str, Curve], contestants: Sequence[str], seeds: int, path: str, title: str) -> None:
    """The curves, and their distance from torch's. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, apart) = pyplot.subplots(1, 2, figsize=(13, 4.4), constrained_layout=True)
    for index, contestant in enumerate(contestants):
        every = [kept[f"{contestant}/{seed}"] for seed in range(seeds)]
        steps = [step for step, _ in every[0]]
        mean = [
            statistics.mean(losses) for losses in zip(*([y for _, y in one] for one in every), strict=True)
        ]
        if index == 0:
            reference = mean
        curves.plot(
            steps, mean, label=contestant, linewidth=3 if index == 0 else 1.2, alpha=0.5 if index == 0 else 1
        )
        apart.plot(steps, [100 * (a / b - 1) for a, b in zip(mean, reference, strict=True)], label=contestant)
    curves.set_ylabel(f"loss on text not trained on, mean of {seeds} seeds")
    apart.set_ylabel("difference from torch, %")
    for axes in (curves, apart):
        axes.set_xlabel("steps")
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument(
        "--data", default=sysconfig.get_paths()["stdlib"], help="a folder with Python sources"
    )
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=200, help="steps between two looks at the other text")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--seq", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--kept", help="file with the trainings that have ended")
    parser.add_argument("--results", action="store_true", help=f"write the table into {RESULTS.name}")
    parser.add_argument("--picture", help="file to draw the curves into (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains what is not kept yet, prints the table; see the top of the file."""
    options = parse(arguments)
    kept: dict[str, Curve] = {}
    if options.kept and Path(options.kept).exists():
        kept = json.loads(Path(options.kept).read_text())
    text, contestants = Text(options.data, options.seq), (TORCH, *options.formats)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for seed in range(options.seeds):
        for contestant in contestants:
            if f"{contestant}/{seed}" not in kept:
                kept[f"{contestant}/{seed}"] = train(contestant, seed, text, options, tell)
                if options.kept:
                    Path(options.kept).write_text(json.dumps(kept))
    rows = rows_of(kept, contestants, options.seeds)
    millions = num_parameters(shape_of(options)) / 1e6
    tokens = options.steps * options.batch * options.seq / 1e6
    title = (
        f"a decoder of {millions:.1f} million bf16 parameters, {options.steps} steps,"
        f" {tokens:.2f} million bytes of Python"
    )
    if options.json:
        print(json.dumps({"host": harness.host(), "rows": rows, "curves": kept}))
    else:
        print(as_table(rows))
    if options.results:
        said = RESULTS.read_text().partition(MARK)[0] if RESULTS.exists() else "# Learning\n\n"
        command = (
            f"python -m benchmarks.learning --seeds {options.seeds} --steps {options.steps} --lr {options.lr}"
            f" --layers {options.layers} --width {options.width} --seq {options.seq} --batch {options.batch}"
        )
        RESULTS.write_text(
            f"{said}{MARK}{harness.header(command, harness.host(), REMARK)}\n{title}.\n\n{as_table(rows)}\n"
        )
    if options.picture:
        draw(kept, contestants, options.seeds, options.picture, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
