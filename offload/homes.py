"""Set-up: gives every plane the home that the plan has chosen, and brings initial values there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .ledger import Ledger
from .partition import Partition, StoredParam
from .pipeline import HostStates, NvmeStates, StateHome
from .plan import MemoryPlan
from .store import SwapStore
from .tiers.host import HostTier
from .weights import ResidentWeights, StreamedWeights

Source = Callable[[StoredParam], torch.Tensor]
"""Gives the initial value of a parameter; asked once for each."""


def make_weights(
    partition: Partition,
    plan: MemoryPlan,
    host: HostTier,
    store: SwapStore | None,
    ledger: Ledger,
    reclaim: Callable[[], bool],
) -> ResidentWeights | StreamedWeights:
    """Memory for the weight planes: all of them, or slots to stream them through."""
    units = plan.inventory.units
    if plan.placement.param_home == "host":
        return ResidentWeights(partition, host.allocate("weights", [unit.weight_bytes for unit in units]))
    slot_bytes = max(unit.weight_bytes for unit in units)
    slots = host.allocate("weight slots", [slot_bytes] * plan.weight_slots)
    return StreamedWeights(partition, plan, slots, _needed(store), ledger, reclaim)


def make_states(plan: MemoryPlan, host: HostTier, store: SwapStore | None) -> StateHome:
    """Memory for the state planes: all of them, or a ring of chunks."""
    if plan.placement.state_home == "host":
        return HostStates(
            host.allocate("optimizer state", [plan.chunk_bytes(chunk) for chunk in plan.chunks])
        )
    size = plan.chunk_elements * plan.placement.state_itemsize
    return NvmeStates(_needed(store), host.allocate("optimizer state chunks", [size] * plan.chunk_slots))


def bring_home(
    partition: Partition,
    plan: MemoryPlan,
    weights: ResidentWeights | StreamedWeights,
    states: StateHome,
    store: SwapStore | None,
    scratch: Sequence[torch.Tensor],
    source: Source,
) -> None:
    """Splits every parameter into weight and residual and sends both home, unit by unit.

    A parameter's own memory is given back as soon as its value has been taken.

    Args:
        scratch: for each unit, bytes that nobody needs yet: its gradient memory. Zeroed again afterwards.
    """
    has_residual = plan.placement.state_planes[0].name == "residual"
    for unit, layout in enumerate(plan.inventory.units):
        if isinstance(weights, StreamedWeights):
            plane = weights.scratch()[: layout.weight_bytes]
        else:
            plane = weights.plane(unit)
        plane.zero_()
        residual = None
        if has_residual:
            residual = scratch[unit][: layout.elements * 2].view(torch.int16).zero_()
        for stored in partition.units[unit]:
            stored.write(plane, residual, source(stored))
            stored.param.data = stored.absent
        tickets = []
        if isinstance(weights, StreamedWeights):
            tickets.append(_needed(store).write_weight(unit, plane, 0, layout.weight_bytes))
        if residual is not None:
            for chunk in plan.chunks_of[unit]:
                part = residual[chunk.begin : chunk.end].view(torch.uint8)
                if isinstance(states, HostStates):
                    states.read(chunk)[: part.numel()].copy_(part)
                else:
                    tickets.append(_needed(store).write_residual(chunk, part))
        for ticket in tickets:
            ticket.wait()
        weights.refresh(unit)
        if residual is not None:
            residual.zero_()


def _needed(store: SwapStore | None) -> SwapStore:
    if store is None:
        raise AssertionError("planes homed on nvme and no swap store")
    return store
