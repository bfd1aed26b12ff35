"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .bytesize import format_bytes, round_up_bytes

if TYPE_CHECKING:
    from .plan import MemoryPlan

LINKS = ("nvme_read", "nvme_write", "h2d", "d2h")


def table(plan: MemoryPlan) -> str:
    """A line for each purpose, the sums, and what a step moves."""
    inventory, placement = plan.inventory, plan.placement
    trainable = inventory.trainable_parameters
    share = "all" if trainable == inventory.parameters else f"{trainable / 1e6:,.1f} M"
    rows = [
        f"{inventory.parameters / 1e6:,.1f} M parameters in {len(inventory.units)} units,"
        f" {share} trainable; {placement.precision}, optimizer state in {placement.state_format},"
        f" update in {placement.update},"
        f" {len(plan.chunks)} chunks of up to {plan.chunk_elements / 1e6:.2f} M elements"
    ]
    for tier, budget in plan.budgets:
        lines = [line for line in plan.lines if line.tier == tier]
        for line in lines:
            pieces = f"{line.count} x {format_bytes(line.size)}" if line.count != 1 else ""
            rows.append(f"  {tier}  {line.purpose:27} {pieces:>14} {format_bytes(line.total):>10}")
        if lines:
            limit = f" of {format_bytes(budget)}" if budget is not None else ""
            least = plan.smallest.bytes_total(tier)
            if least < plan.bytes_total(tier):
                limit += f'; "{round_up_bytes(least)}" would do, more slowly'
            rows.append(f"  {tier}  {'in all':42} {format_bytes(plan.bytes_total(tier)):>10}{limit}")
    return "\n".join((*rows, *_traffic_rows(plan)))


def _traffic_rows(plan: MemoryPlan) -> Iterator[str]:
    steady = plan.bytes_moved(4) - plan.bytes_moved(3)
    if not steady:
        yield "  no plane is homed away from where it is used: a step moves nothing"
        return
    links = [link for link in LINKS if any(link == key[0] for key in steady)]
    heads = "".join(f" {link:>{max(10, len(link) + 1)}}" for link in links)
    yield f"  {'bytes per step':21}{heads} {'per parameter':>14}"
    for name in (*dict.fromkeys(plane for _, plane in sorted(steady)), "in all"):
        sizes = [
            sum(size for key, size in steady.items() if key[0] == link and name in (key[1], "in all"))
            for link in links
        ]
        cells = "".join(
            f" {format_bytes(size):>{max(10, len(link) + 1)}}"
            for link, size in zip(links, sizes, strict=True)
        )
        yield f"  {name:21}{cells} {sum(sizes) / plan.inventory.trainable_parameters:>12.2f} B"
