"""Set-up: gives every plane the home that the plan has chosen, and brings initial values there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .accel import Accelerator
from .gradients import Allocate, PassingGradients, WaitingGradients
from .landing import CrossingLanding, Landing, LocalLanding
from .ledger import Ledger
from .lift import Lifts
from .links import DeviceLinks
from .partition import Partition, StoredParam
from .pipeline import NvmeStates, ResidentStates, StateHome
from .plan import GRAD_STAGING_SLOTS, MemoryPlan
from .store import SwapStore
from .tiers.device import DeviceTier
from .tiers.host import HostTier
from .weights import HostPlanes, HostSlots, ResidentWeights, StreamedWeights

Source = Callable[[StoredParam], torch.Tensor]
"""Gives the initial value of a parameter; asked once for each."""


@dataclass
class Tiers:
    """The memories of a run, and the links between them."""

    host: HostTier
    device: DeviceTier | None
    """None where the CPU computes."""
    links: DeviceLinks | None
    accelerator: Accelerator | None

    @classmethod
    def open(cls, accelerator: Accelerator | None, ledger: Ledger) -> Tiers:
        """The host tier, and with an accelerator the device tier and its links."""
        host = HostTier(accelerator)
        if accelerator is None:
            return cls(host, None, None, None)
        return cls(host, DeviceTier(accelerator), DeviceLinks(accelerator, host, ledger), accelerator)

    def allocate_for_update(self, plan: MemoryPlan) -> Allocate:
        """Allocates in the tier where the update runs; pinned where an accelerator copies there."""
        if self.device is not None and plan.placement.updates_on_device:
            return self.device.allocate
        return lambda purpose, sizes: self.host.allocate(purpose, sizes, pinned=True)

    def close(self) -> None:
        """Ends copies and the pinning of host memory. Idempotent."""
        if self.accelerator is not None:
            self.accelerator.close()
        self.host.close()


def make_weights(
    partition: Partition,
    plan: MemoryPlan,
    tiers: Tiers,
    store: SwapStore | None,
    ledger: Ledger,
    reclaim: Callable[[], bool],
) -> ResidentWeights | StreamedWeights:
    """Memory for the weight planes. See `weights`, Note [Homes of weights]."""
    sizes = [unit.weight_bytes for unit in plan.inventory.units]
    home = plan.placement.param_home
    host: HostPlanes | HostSlots
    if home == "nvme":
        slots = tiers.host.allocate("weight slots", [max(sizes)] * plan.weight_slots, pinned=True)
        host = HostSlots(slots, _needed(store), plan)
    elif tiers.device is not None and home == "device" and plan.placement.updates_on_device:
        return ResidentWeights(partition, tiers.device.allocate("weights", sizes))
    else:
        planes = tiers.host.allocate("weights", sizes, pinned=True)
        if tiers.device is None:
            return ResidentWeights(partition, planes)
        host = HostPlanes(planes)
    if tiers.device is None or tiers.links is None or tiers.accelerator is None:
        return StreamedWeights(partition, plan, host, ledger, reclaim)
    halves = tiers.device.allocate("weight slots", plan.device_slot_bytes)
    lifts = Lifts(tiers.accelerator, tiers.links, halves, host.of)
    links = tiers.links if plan.placement.updates_on_device else None
    return StreamedWeights(partition, plan, host, ledger, reclaim, lifts=lifts, links=links)


def make_states(plan: MemoryPlan, tiers: Tiers, store: SwapStore | None) -> StateHome:
    """Memory for the state planes: all of them, or a ring of chunks."""
    sizes = [plan.chunk_bytes(chunk) for chunk in plan.chunks]
    if tiers.device is not None and plan.placement.updates_on_device:
        return ResidentStates([piece.zero_() for piece in tiers.device.allocate("optimizer state", sizes)])
    if plan.placement.state_home != "nvme":
        return ResidentStates(tiers.host.allocate("optimizer state", sizes))
    size = plan.chunk_elements * plan.placement.state_itemsize
    ring = tiers.host.allocate("optimizer state chunks", [size] * plan.chunk_slots)
    return NvmeStates(_needed(store), ring)


def make_gradients(
    partition: Partition,
    plan: MemoryPlan,
    tiers: Tiers,
    ledger: Ledger,
    wait_for_slot: Callable[[list[int]], None],
) -> WaitingGradients | PassingGradients:
    """Memory for gradients where the update runs, and the way there."""
    allocate, itemsize = tiers.allocate_for_update(plan), plan.placement.grad_itemsize
    landing: Landing = LocalLanding()
    device = None
    if tiers.links is not None and tiers.accelerator is not None and not plan.placement.updates_on_device:
        device = tiers.accelerator.device
        sizes = [plan.grad_staging_bytes] * GRAD_STAGING_SLOTS
        landing = CrossingLanding(
            tiers.links, tiers.host.allocate("gradient staging", sizes, pinned=True), ledger
        )
    if plan.placement.update == "step":
        return WaitingGradients(partition, itemsize, allocate, landing, device=device)
    return PassingGradients(partition, itemsize, plan.grad_slots, allocate, landing, wait_for_slot)


def bring_home(
    partition: Partition,
    plan: MemoryPlan,
    weights: ResidentWeights | StreamedWeights,
    states: StateHome,
    gradients: WaitingGradients | PassingGradients,
    store: SwapStore | None,
    source: Source,
) -> None:
    """Splits every parameter into weight and residual and sends both home, unit by unit.

    A parameter's own memory is given back as soon as its value has been taken. Gradient memory in host memory,
    which nobody needs yet, holds the residuals meanwhile.
    """
    has_residual = plan.placement.state_planes[0].name == "residual"
    for unit, layout in enumerate(plan.inventory.units):
        plane = weights.buffer(unit)
        plane.zero_()
        residual = None
        if has_residual:
            scratch = gradients.scratch(unit)
            if scratch.device.type != "cpu" or plan.placement.updates_on_device:
                scratch = torch.empty(layout.elements * 2, dtype=torch.uint8)
            residual = scratch[: layout.elements * 2].view(torch.int16).zero_()
        for stored in partition.units[unit]:
            stored.write(plane, residual, source(stored))
            stored.param.data = stored.absent
        tickets = [weights.bring(unit, plane)]
        if residual is not None:
            for chunk in plan.chunks_of[unit]:
                part = residual[chunk.begin : chunk.end].view(torch.uint8)
                if isinstance(states, ResidentStates):
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
