"""Set-up: gives every plane the home that the plan has chosen, and brings initial values there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from .accel import Accelerator
from .errors import OffloadError, TransferError
from .gradients import PassingGradients, WaitingGradients
from .landing import CrossingLanding, Landing, LocalLanding
from .ledger import Ledger
from .lift import Lifts
from .links import NEEDED_NOW, DeviceLinks, Ticket
from .partition import Partition, StoredParam
from .pipeline import NvmeStates, ResidentStates, StateHome
from .plan import GRAD_STAGING_SLOTS, Chunk, MemoryPlan
from .squares import SquareSums
from .store.swap import SwapStore
from .tiers.device import DeviceTier
from .tiers.host import HostTier
from .weights import HostPlanes, HostSlots, ResidentWeights, StreamedWeights

RESIDUAL_DTYPES = {0: None, 1: torch.int8, 2: torch.int16}
"""Element type of the residual plane, by bytes per element; None where there is none."""

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

    def allocate_for_update(
        self, plan: MemoryPlan, purpose: str, sizes: Sequence[tuple[int, int]], *, pinned: bool
    ) -> list[torch.Tensor]:
        """Pieces for units, each in the tier where its unit is updated.

        Args:
            sizes: of each piece its unit and its bytes.
            pinned: an accelerator copies to what is in host memory.
        """
        there = [size for unit, size in sizes if unit in plan.on_device]
        here = [size for unit, size in sizes if unit not in plan.on_device]
        on_device = iter(self.device.allocate(purpose, there) if self.device is not None and there else ())
        on_host = iter(self.host.allocate(purpose, here, pinned=pinned) if here else ())
        return [next(on_device if unit in plan.on_device else on_host) for unit, _ in sizes]

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
    placement = plan.placement
    home = placement.param_home
    host: HostPlanes | HostSlots
    if home == "nvme":
        slots = tiers.host.allocate(
            "weight slots", [max(sizes)] * plan.weight_slots, pinned=placement.pin_weights
        )
        host = HostSlots(slots, _needed(store), plan)
    elif tiers.device is not None and plan.weights_stay:
        return ResidentWeights(partition, tiers.device.allocate("weights", sizes))
    else:
        planes = tiers.host.allocate("weights", sizes, pinned=placement.pin_weights)
        if tiers.device is None:
            return ResidentWeights(partition, planes)
        host = HostPlanes(planes)
    if tiers.device is None or tiers.links is None or tiers.accelerator is None:
        return StreamedWeights(partition, plan, host, ledger, reclaim)
    purpose = "weights" if home == "device" else "weight slots"
    halves = tiers.device.allocate(purpose, plan.device_slot_bytes)
    lifts = Lifts(tiers.accelerator, tiers.links, halves, host.of)
    return StreamedWeights(partition, plan, host, ledger, reclaim, lifts=lifts, links=tiers.links)


def make_states(plan: MemoryPlan, tiers: Tiers, store: SwapStore | None) -> StateHome:
    """Memory for the state planes: all of them, or a ring of chunks."""
    if plan.placement.state_home != "nvme":
        sizes = [(chunk.unit, plan.chunk_bytes(chunk)) for chunk in plan.chunks]
        buffers = tiers.allocate_for_update(plan, "optimizer state", sizes, pinned=False)
        for chunk, buffer in zip(plan.chunks, buffers, strict=True):
            if chunk.unit in plan.on_device:
                buffer.zero_()
        return ResidentStates(buffers)
    size = plan.placement.state_bytes(plan.chunk_elements)
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
    itemsize, there = plan.placement.grad_itemsize, plan.on_device
    landing: Landing = LocalLanding()
    device = None
    if tiers.links is not None and tiers.accelerator is not None and not plan.updates_all_on_device:
        device = tiers.accelerator.device
        pieces = [plan.grad_staging_bytes] * GRAD_STAGING_SLOTS
        staging = tiers.host.allocate("gradient staging", pieces, pinned=plan.placement.pin_gradients)
        bytes_max = plan.grad_crossing_bytes
        landing = CrossingLanding(tiers.links, staging, ledger, bytes_max=bytes_max, stay=there)
    sizes = [(unit, layout.elements * itemsize) for unit, layout in enumerate(plan.inventory.units)]
    pinned = plan.placement.pin_gradients
    if plan.placement.update == "step":
        planes = tiers.allocate_for_update(plan, "gradients", sizes, pinned=pinned)
        return WaitingGradients(partition, itemsize, planes, landing, device=device, on_device=there)
    slots: list[list[torch.Tensor]] = []
    for is_there in (False, True):
        members = [(size, unit) for unit, size in sizes if (unit in there) == is_there]
        size, unit = max(members, default=(0, 0))
        count = plan.grad_slots if members else 0
        slots.append(tiers.allocate_for_update(plan, "gradient slots", [(unit, size)] * count, pinned=pinned))
    sums = SquareSums(_allocate_sums(plan, tiers), tiers.links)
    return PassingGradients(partition, itemsize, slots, landing, wait_for_slot, sums=sums, on_device=there)


def _allocate_sums(plan: MemoryPlan, tiers: Tiers) -> dict[int, torch.Tensor]:
    """Host memory for the sums of squares of the gradients that wait on the device."""
    counts = plan.grad_sum_counts
    (memory,) = tiers.host.allocate("gradient sums", [plan.grad_sum_bytes], pinned=True)
    pieces = memory.view(torch.float64)[: sum(counts.values())].split(list(counts.values()))
    return dict(zip(counts, pieces, strict=True))


def bring_home(
    partition: Partition,
    plan: MemoryPlan,
    weights: ResidentWeights | StreamedWeights,
    states: StateHome,
    gradients: WaitingGradients | PassingGradients,
    store: SwapStore | None,
    source: Source | None,
) -> None:
    """Splits every parameter into weight and residual and sends both home, unit by unit.

    A parameter's own memory is given back as soon as its value has been taken. Where something fails, the
    parameters get back what the planes hold.

    Args:
        gradients: their host memory, which nobody needs yet, holds residual planes meanwhile.
        source: None where the store has everything, from a commit.

    Raises:
        OffloadError: it failed, and so did giving the values back.
    """
    if source is None:
        for unit, params in enumerate(partition.units):
            for stored in params:
                stored.take(stored.absent)
            fetch_home(plan, unit, weights, states, _needed(store))
            weights.refresh(unit)
        return
    way = _WayHome(plan, weights, states, gradients, store)
    try:
        for unit, params in enumerate(partition.units):
            way.take(unit, params, source)
            way.send(unit)
            weights.refresh(unit)
    except BaseException as error:
        try:
            way.undo(partition)
        except (OffloadError, MemoryError) as second:
            raise OffloadError(
                f"{error}; and the parameters that had been taken over cannot be read back ({second}): build"
                " the model anew"
            ) from error
        raise


def fetch_home(
    plan: MemoryPlan,
    unit: int,
    weights: ResidentWeights | StreamedWeights,
    states: StateHome,
    store: SwapStore,
) -> None:
    """Reads what of a unit is at home in memory from the store, where a commit has it."""
    if plan.placement.param_home != "nvme":
        plane = weights.buffer(unit)
        store.read_weight(unit, plane, priority=NEEDED_NOW).wait()
        weights.bring(unit, plane).wait()
    if isinstance(states, ResidentStates) and plan.placement.state_planes:
        for chunk in plan.chunks_of[unit]:
            home = states.read(chunk)
            buffer = home if home.device.type == "cpu" else torch.empty(home.numel(), dtype=torch.uint8)
            store.read_state(chunk, buffer, priority=NEEDED_NOW).wait()
            if buffer is not home:
                home.copy_(buffer)


class _WayHome:
    """The way of parameters to their homes, and back where it breaks off."""

    def __init__(
        self,
        plan: MemoryPlan,
        weights: ResidentWeights | StreamedWeights,
        states: StateHome,
        gradients: WaitingGradients | PassingGradients,
        store: SwapStore | None,
    ) -> None:
        self._plan, self._weights, self._states, self._store = plan, weights, states, store
        self._gradients = gradients
        self._residual_dtype = RESIDUAL_DTYPES[plan.placement.residual_itemsize]
        self._before: dict[StoredParam, torch.Tensor | tuple[torch.device, torch.dtype]] = {}
        """What a parameter was that has been taken: its marker where it was absent, else where and of what type."""
        self._tickets: list[Ticket] = []
        self._current: tuple[torch.Tensor, torch.Tensor | None]
        self._under_way: int | None = None  # the unit whose values are in its planes, and not all at home

    def take(self, unit: int, params: Sequence[StoredParam], source: Source) -> None:
        """Brings values into the unit's planes, and gives the parameters' own memory back."""
        self._current = plane, residual = self._planes(unit)
        self._under_way = unit
        plane.zero_()
        if residual is not None:
            residual.zero_()
        for stored in params:
            own, value = stored.param.data, source(stored)
            stored.write(plane, residual, value)
            is_absent = own.device.type == "cpu" and value.data_ptr() != own.data_ptr()
            self._before[stored] = own if is_absent else (own.device, own.dtype)
            stored.take(stored.absent)

    def send(self, unit: int) -> None:
        """Sends the planes home and waits for them."""
        plane, residual = self._current
        self._tickets.append(self._weights.bring(unit, plane))
        for chunk, part in self._parts(unit, residual):
            if isinstance(self._states, ResidentStates):
                self._states.read(chunk)[: part.numel()].copy_(part)
            else:
                self._tickets.append(_needed(self._store).write_residual(chunk, part))
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()
        self._under_way = None
        if residual is not None:
            residual.zero_()

    def undo(self, partition: Partition) -> None:
        """Gives the parameters their values back: of the unit under way from its planes, of others from home."""
        for ticket in self._tickets:
            with suppress(TransferError):
                ticket.wait()
        units = {stored.unit for stored in self._before}
        for unit in sorted(units, key=lambda unit: unit != self._under_way):
            if unit != self._under_way:
                self._current = self._planes(unit)
                self._fetch(unit, *self._current)
            plane, residual = self._current
            for stored in partition.units[unit]:
                before = self._before.get(stored)
                if isinstance(before, torch.Tensor):
                    stored.take(before)
                elif before is not None:
                    stored.take(stored.read(plane, residual).to(*before))

    def _fetch(self, unit: int, plane: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._weights.bring_back(unit, plane)
        for chunk, part in self._parts(unit, residual):
            part.copy_(self._states.read(chunk)[: part.numel()])

    def _planes(self, unit: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Host memory for the unit's weight plane, and for its residual plane where there is one."""
        plane = self._weights.buffer(unit)
        dtype = self._residual_dtype
        if dtype is None:
            return plane, None
        elements = self._plan.inventory.units[unit].elements
        if unit in self._plan.on_device:
            return plane, torch.empty(elements, dtype=dtype)
        return plane, self._gradients.scratch(unit)[: elements * dtype.itemsize].view(dtype)

    def _parts(self, unit: int, residual: torch.Tensor | None) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Of each chunk, its bytes of the residual plane."""
        if residual is not None:
            for chunk in self._plan.chunks_of[unit]:
                yield chunk, residual[chunk.begin : chunk.end].view(torch.uint8)


def _needed(store: SwapStore | None) -> SwapStore:
    if store is None:
        raise AssertionError("planes homed on nvme and no swap store")
    return store
