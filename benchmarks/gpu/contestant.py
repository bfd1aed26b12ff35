"""One contestant of the throughput sections: a decoder, trained by us, by plain PyTorch or by FSDP2.

    python -m benchmarks.gpu.contestant '{"contestant": "ours", "model": "1.3b", ...}'

A process of its own, so that its peaks are its own; the answer is one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .common import Run, config, prepared, provide_psutil

Step = Callable[[], torch.Tensor]


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Prepares, makes a step that does not count and so many that do.

    Args:
        task: ``contestant`` ("ours", "plain", "fsdp2", "fsdp2-bf16"), ``model``, ``batch``, ``seq``, ``steps``,
            ``device``, ``swap``; of ours ``param``, ``state``, ``update``.
    """
    is_cuda = task["device"] == "cuda"
    run = Run(task["device"], task["model"] == "smoke", Path(task["swap"]), time.monotonic() + 600)
    if is_cuda:
        torch.cuda.init()
    rss = _rss_bytes()
    begin = time.perf_counter()
    makers = {"ours": _ours, "plain": _plain, "fsdp2": _fsdp2, "fsdp2-bf16": _fsdp2}
    with makers[task["contestant"]](run, task) as (step, about):
        run.synchronize()
        prepare_seconds = time.perf_counter() - begin
        seconds, loss = [], 0.0
        for number in range(task["steps"] + 1):
            begin = time.perf_counter()
            loss = float(step())
            run.synchronize()
            if number:
                seconds.append(time.perf_counter() - begin)
        told = about()
    return {
        **told,
        "prepare_seconds": prepare_seconds,
        "step_seconds": sorted(seconds)[len(seconds) // 2],
        "tokens_per_second": task["batch"] * task["seq"] / sorted(seconds)[len(seconds) // 2],
        "loss": loss,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else told.get("device_peak_bytes"),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - rss,
    }


def decoder_config(name: str) -> Any:
    from offload.models.presets import DecoderConfig, preset

    shapes = {
        "smoke": {
            "vocab_size": 264,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 4,
        },
        "1.3b": {
            "vocab_size": 32_000,
            "hidden_size": 2_048,
            "intermediate_size": 5_632,
            "num_layers": 24,
            "num_heads": 32,
        },
    }
    if name not in shapes:
        return preset(name)
    heads = shapes[name]["num_heads"]
    return DecoderConfig(**shapes[name], num_kv_heads=heads, max_seq_len=4096)


def _decoder(task: dict[str, Any]) -> nn.Module:
    """Its logits exist at once, so that the output layer is used once in a step."""
    from offload.models.decoder import Decoder

    return Decoder(decoder_config(task["model"]), loss_chunk=task["batch"] * task["seq"])


@contextlib.contextmanager
def _ours(run: Run, task: dict[str, Any]) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    from offload import construct
    from offload.models.presets import activation_bytes

    shape = decoder_config(task["model"])
    with torch.device("meta"):
        model = _decoder(task)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    construct.fill_later(model, lambda name: _value(shapes[name]))
    settings = config(run, task["param"], task["state"], task["update"])
    activations = activation_bytes(shape, task["batch"], task["seq"], loss_chunk=task["batch"] * task["seq"])
    with prepared(model, settings, activation_bytes=activations) as (model, optimizer):
        engine = optimizer.engine

        def about() -> dict[str, Any]:
            report = engine.report()
            return {
                "plan_device_bytes": engine.plan.bytes_total("device"),
                "plan_host_bytes": engine.plan.bytes_total("host"),
                "bytes_as_planned": report.moved == report.predicted,
                "ledger": report.to_dict(),
                "device_peak_bytes": engine.accelerator.peak_bytes(),
            }

        yield _looped(model, optimizer, task, engine.device), about


@contextlib.contextmanager
def _plain(run: Run, task: dict[str, Any]) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    """bf16 weights over fp32 masters, all on the device, with torch's fused AdamW."""
    device = torch.device("cuda" if run.is_cuda else "cpu")
    with torch.device("meta"):
        model = _decoder(task)
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(_value(param.shape))
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)
    ids = _ids(task, device)

    def step() -> torch.Tensor:
        loss = model(ids, labels=ids)
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss.detach()

    yield step, dict


@contextlib.contextmanager
def _fsdp2(run: Run, task: dict[str, Any]) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    """``fully_shard`` with CPUOffloadPolicy on one rank: fp32 parameters computed in bf16, or bf16 throughout."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_pure = task["contestant"] == "fsdp2-bf16"
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policies = {
            "mesh": init_device_mesh("cuda", (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy()
            if is_pure
            else MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        with torch.device("meta"):
            model: Any = _decoder(task)
        if is_pure:
            model = model.to(torch.bfloat16)
        for block in model.model.layers:
            fully_shard(block, **policies)
        fully_shard(model, **policies)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().copy_(_value(param.shape))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        yield _looped(model, optimizer, task, torch.device("cuda")), dict
    finally:
        dist.destroy_process_group()


def _looped(model: nn.Module, optimizer: Any, task: dict[str, Any], device: torch.device) -> Step:
    ids = _ids(task, device)

    def step() -> torch.Tensor:
        loss = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ids(task: dict[str, Any], device: torch.device) -> torch.Tensor:
    vocabulary = decoder_config(task["model"]).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (task["batch"], task["seq"]), generator=generator).to(device)


def _value(shape: torch.Size) -> torch.Tensor:
    """A bf16 tensor of plausible weights, made by repeating a small one: drawing eight billion takes minutes."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    tile = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    return tile.repeat(-(-shape.numel() // tile.numel()))[: shape.numel()].view(shape)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    provide_psutil()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the answer is ours alone
    answers.write(json.dumps(measure(json.loads(sys.argv[1]))))
    answers.close()
