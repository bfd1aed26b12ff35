"""One training step of a 217 M GPT: the engine beside plain PyTorch and DeepSpeed ZeRO-3, in turns.

    python -m benchmarks.step --swap DIR --peer-python path/to/python/that/has/deepspeed

Every contestant is a process of its own that makes one step per line on its standard input, so they take
turns, round after round, on one machine and one disk; all are compared by their medians, and the first round
is not counted. Same model, batch, optimizer and clipping for all:

- plain: everything in memory; in bf16 over fp32 master weights with torch's fused AdamW;
- cpu, nvme-optimizer, nvme: the engine with parameters and optimizer in host memory, the optimizer on NVMe,
  and everything on NVMe with the update in backward (which cannot clip);
- deepspeed-cpu, deepspeed-nvme: ZeRO-3 on its CPU accelerator, optimizer in memory or on NVMe, pipelined.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

READY, REPLY = "ready ", "seconds "
OURS = ("cpu", "nvme-optimizer", "nvme")
PEERS = ("deepspeed-cpu", "deepspeed-nvme")
ROOT = Path(__file__).resolve().parents[1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks are checkpointed, as for a model that is large for its machine."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> scalar
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def make_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(
        vocabulary=options.vocabulary, width=options.width, layers=options.layers, length=options.length
    )


# ---- contestants: each returns a function that makes one step and gives its loss ----


def plain(options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    model = make_model(options)
    masters = list(model.parameters())
    if options.precision == "bf16":
        masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        if options.precision == "bf16":
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if options.precision == "bf16":
            with torch.no_grad():
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.copy_(master)
        return loss.detach()

    return step


def ours(options: argparse.Namespace, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    import offload

    backward = name == "nvme"
    path = {"nvme_path": str(options.swap)}
    config = {
        "bf16": {"enabled": options.precision == "bf16"},
        "gradient_clipping": 0.0 if backward else 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme" if name == "nvme" else "cpu", **path},
            "offload_optimizer": {
                "device": "cpu" if name == "cpu" else "nvme",
                "update": "backward" if backward else "step",
                **path,
            },
        },
    }
    model, optimizer = offload.prepare(make_model(options), config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(options: argparse.Namespace, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(29000 + os.getpid() % 1000)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as peer

    nvme = name == "deepspeed-nvme"
    place = {"device": "nvme" if nvme else "cpu", "nvme_path": str(options.swap), "pin_memory": False}
    if nvme:
        place |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 8}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": options.precision == "bf16"},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 10**8,
            "overlap_comm": False,
            "offload_optimizer": place,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
    }
    if not nvme:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
    peer.init_distributed("gloo")
    model = make_model(options)
    engine, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def serve(options: argparse.Namespace, name: str) -> None:
    """One step per line of standard input; answers with its seconds, loss and the process's peak memory."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print; the answers are ours alone
    make = {"plain": plain}.get(name) or (lambda o: ours(o, name) if name in OURS else deepspeed(o, name))
    step = make(options)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, options.vocabulary, (1, options.length), generator=generator)
    answer.write(f"{READY}\n")
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step(ids)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer.write(
            f"{REPLY}{json.dumps({'seconds': seconds, 'loss': loss.item(), 'rss_peak_bytes': peak})}\n"
        )


class Contestant:
    """A serving process and what it has answered."""

    def __init__(self, name: str, python: str, arguments: Sequence[str]) -> None:
        self.name = name
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.step", "--serve", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.answers: list[dict[str, float]] = []
        self._read(READY)

    def step(self) -> None:
        if self.process.stdin is None:
            raise AssertionError("no pipe")
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.answers.append(json.loads(self._read(REPLY)))

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()

    def row(self) -> dict[str, Any]:
        counted = self.answers[1:] or self.answers
        seconds = [answer["seconds"] for answer in counted]
        return {
            "name": self.name,
            "seconds_median": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "loss_last": self.answers[-1]["loss"],
            "rss_peak_bytes": self.answers[-1]["rss_peak_bytes"],
        }

    def _read(self, prefix: str) -> str:
        if self.process.stdout is None:
            raise AssertionError("no pipe")
        for line in self.process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        raise RuntimeError(
            f"{self.name} ended with status {self.process.wait()}; run it with --serve to see why"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swap", default="/tmp/offload-swap", help="directory for swap files")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--rounds", type=int, default=6, help="steps of each contestant, the first not counted"
    )
    parser.add_argument(
        "--contestants", default=",".join(["plain", *OURS]), help="names, separated by commas"
    )
    parser.add_argument("--peer-python", help="interpreter with deepspeed: adds the deepspeed contestants")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds and prints the table; see the top of the file."""
    options = parse(arguments)
    if options.serve:
        serve(options, options.serve)
        return 0
    Path(options.swap).mkdir(parents=True, exist_ok=True)
    passed = [f"--swap={options.swap}", f"--precision={options.precision}", f"--layers={options.layers}"]
    passed += [f"--width={options.width}", f"--length={options.length}", f"--vocabulary={options.vocabulary}"]
    names = options.contestants.split(",") + ([*PEERS] if options.peer_python else [])
    contestants: list[Contestant] = []
    try:
        for name in names:
            python = options.peer_python if name in PEERS else sys.executable
            contestants.append(Contestant(name, python, passed))
        for _ in range(options.rounds):
            for contestant in contestants:
                contestant.step()
    finally:
        for contestant in contestants:
            contestant.close()
    rows = [contestant.row() for contestant in contestants]
    if options.json:
        print(json.dumps({"options": vars(options), "rows": rows}, indent=1))
        return 0
    print(f"{'':16} {'median':>8} {'min':>8} {'max':>8} {'peak RSS':>10} {'loss':>9}  x {rows[0]['name']}")
    for row in rows:
        print(
            f"{row['name']:16} {row['seconds_median']:7.2f}s"
            f" {row['seconds_min']:7.2f}s {row['seconds_max']:7.2f}s"
            f" {row['rss_peak_bytes'] / 1e9:8.2f}GB {row['loss_last']:9.4f}"
            f"  {rows[0]['seconds_median'] / row['seconds_median']:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
