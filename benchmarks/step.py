"""One training step of a 217 M GPT: the engine beside plain PyTorch and DeepSpeed ZeRO-3, in turns.

    python -m benchmarks.step --swap DIR --peer-python path/to/python/that/has/deepspeed

Every contestant is a process of its own, on one machine and one disk. Same model, batch, optimizer and clipping
for all:

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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .harness import Answer, Contestant, Server, header, host, make_parser, serve, table, take_turns

OURS = ("cpu", "nvme-optimizer", "nvme")
PEERS = ("deepspeed-cpu", "deepspeed-nvme")
SIZES = ("precision", "layers", "width", "length", "vocabulary")


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


def make_step(options: argparse.Namespace, name: str) -> Callable[[str], Answer]:
    """In the contestant's process: one step, its seconds and loss, and the process's peak memory."""
    if name == "plain":
        step = plain(options)
    else:
        step = ours(options, name) if name in OURS else deepspeed(options, name)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, options.vocabulary, (1, options.length), generator=generator)

    def answer(_what: str) -> Answer:
        begin = time.perf_counter()
        loss = step(ids)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "loss": loss.item(), "rss_peak_bytes": peak}

    return answer


def row(contestant: Contestant) -> dict[str, Any]:
    last = contestant.answers[-1]
    return {
        "name": contestant.name,
        "seconds_median": contestant.median,
        "seconds_min": min(contestant.seconds),
        "seconds_max": max(contestant.seconds),
        "loss_last": last["loss"],
        "rss_peak_bytes": last["rss_peak_bytes"],
    }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["contestant", "median s", "min", "max", "peak RSS", "loss", f"x {rows[0]['name']}"]
    cells = (
        [
            row["name"],
            *(f"{row[key]:.2f}" for key in ("seconds_median", "seconds_min", "seconds_max")),
            f"{row['rss_peak_bytes'] / 1e9:.2f} GB",
            f"{row['loss_last']:.4f}",
            f"{rows[0]['seconds_median'] / row['seconds_median']:.2f}",
        ]
        for row in rows
    )
    return table(columns, cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--swap", default="/tmp/offload-swap", help="directory for swap files")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--rounds", type=int, default=6, help="steps of each contestant, the first not counted"
    )
    parser.add_argument(
        "--contestants",
        help="names, separated by commas; all that can run, if not given (all six need 30 GB of memory)",
    )
    parser.add_argument("--peer-python", help="interpreter with deepspeed, for the deepspeed contestants")
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
        serve(lambda: make_step(options, options.serve))
        return 0
    Path(options.swap).mkdir(parents=True, exist_ok=True)
    sizes = [f"--{name}={getattr(options, name)}" for name in SIZES]
    everybody = ["plain", *OURS, *(PEERS if options.peer_python else ())]
    names = options.contestants.split(",") if options.contestants else everybody
    with ExitStack() as stack:
        servers = []
        for name in names:
            python = options.peer_python if name in PEERS else sys.executable
            arguments = [f"--serve={name}", f"--swap={options.swap}", *sizes]
            servers.append(stack.enter_context(closing(Server("benchmarks.step", arguments, python=python))))
        for server in servers:
            server.wait_ready()
        contestants = [Contestant(name, server.step) for name, server in zip(names, servers, strict=True)]
        take_turns(contestants, max(1, options.rounds - 1))
    rows = [row(contestant) for contestant in contestants]
    described = host(options.swap)
    if options.json:
        print(json.dumps({"host": described, "options": vars(options), "rows": rows}, indent=1))
    else:
        print(header(f"python -m benchmarks.step {' '.join(sizes)}", described))
        print(as_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
