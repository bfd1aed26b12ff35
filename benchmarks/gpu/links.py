"""PCIe both ways: our links beside plain pinned copies of torch, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from .common import Finding, Run

RATIO_MIN = 0.95
"""Of plain pinned copies: what is allowed to be lost."""


def bandwidth(run: Run) -> Iterator[Finding]:
    from offload.accel import open_accelerator
    from offload.ledger import Ledger
    from offload.links import DeviceLinks
    from offload.tiers.host import HostTier

    size = (4 if run.smoke else 512) << 20
    accelerator = open_accelerator(run.accelerator)
    tier = HostTier(accelerator)
    links = DeviceLinks(accelerator, tier, Ledger())
    (host,) = tier.allocate("weights", [size], pinned=True)
    device = accelerator.allocate(size)
    plain = torch.ones(size, dtype=torch.uint8, pin_memory=run.is_cuda)
    host.fill_(1)

    def to_device() -> None:
        links.to_device(device, host, [("weight", size)], idle=accelerator.compute.record()).wait()

    def to_host() -> None:
        links.to_host(host, device, "weight").wait()

    def plain_to_device() -> None:
        accelerator.copy(device, plain, accelerator.compute)
        accelerator.compute.record().wait()

    def plain_to_host() -> None:
        accelerator.copy(plain, device, accelerator.compute)
        accelerator.compute.record().wait()

    try:
        if run.is_cuda:
            plain_to_device = _torch_copy(device, plain)
            plain_to_host = _torch_copy(plain, device)
        for name, ours, theirs in (("h2d", to_device, plain_to_device), ("d2h", to_host, plain_to_host)):
            mine, others = _in_turns(ours, theirs, 3 if run.smoke else 15)
            ratio = others / mine
            yield Finding(
                f"{name}, {size >> 20} MiB",
                f"{size / mine / 1e9:.2f} GB/s, plain pinned {size / others / 1e9:.2f} GB/s, ratio {ratio:.3f}",
                ratio >= RATIO_MIN if run.is_cuda else None,
                {
                    "gb_per_second": size / mine / 1e9,
                    "plain_gb_per_second": size / others / 1e9,
                    "ratio": ratio,
                },
            )
    finally:
        accelerator.close()
        tier.close()


def _torch_copy(destination: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _in_turns(first: Callable[[], None], second: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median seconds of each, after one round that is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for which, call in enumerate((first, second)):
            begin = time.perf_counter()
            call()
            if round_:
                seconds[which].append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
