"""Set-up: gives every plane the home that the plan has chosen, and brings initial values there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from .errors import OffloadError, TransferError
from .ledger import Ledger
from .links import Ticket
from .partition import Partition, StoredParam
from .pipeline import HostStates, NvmeStates, StateHome
from .plan import Chunk, MemoryPlan
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

    A parameter's own memory is given back as soon as its value has been taken. Where something fails, the
    parameters get back what the planes hold.

    Args:
        scratch: for each unit, bytes that nobody needs yet: its gradient memory. Zeroed again afterwards.

    Raises:
        OffloadError: it failed, and so did giving the values back.
    """
    way = _WayHome(plan, weights, states, store, scratch)
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


class _WayHome:
    """The way of parameters to their homes, and back where it breaks off."""

    def __init__(
        self,
        plan: MemoryPlan,
        weights: ResidentWeights | StreamedWeights,
        states: StateHome,
        store: SwapStore | None,
        scratch: Sequence[torch.Tensor],
    ) -> None:
        self._plan, self._weights, self._states, self._store = plan, weights, states, store
        self._scratch = scratch
        self._has_residual = plan.placement.state_planes[0].name == "residual"
        self._before: dict[StoredParam, torch.Tensor | torch.dtype] = {}
        """What a parameter was that has been taken: its marker where it was absent, else the type it had."""
        self._tickets: list[Ticket] = []
        self._under_way: int | None = None  # the unit whose values are in its planes, and not all at home

    def take(self, unit: int, params: Sequence[StoredParam], source: Source) -> None:
        """Brings values into the unit's planes, and gives the parameters' own memory back."""
        plane, residual = self._planes(unit)
        self._under_way = unit
        plane.zero_()
        if residual is not None:
            residual.zero_()
        for stored in params:
            own, value = stored.param.data, source(stored)
            stored.write(plane, residual, value)
            self._before[stored] = own.dtype if value.data_ptr() == own.data_ptr() else own
            stored.param.data = stored.absent

    def send(self, unit: int) -> None:
        """Sends the planes home and waits for them."""
        plane, residual = self._planes(unit)
        if isinstance(self._weights, StreamedWeights):
            self._tickets.append(_needed(self._store).write_weight(unit, plane, 0, plane.numel()))
        for chunk, part in self._parts(unit, residual):
            if isinstance(self._states, HostStates):
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
            plane, residual = self._planes(unit)
            if unit != self._under_way:
                self._fetch(unit, plane, residual)
            for stored in partition.units[unit]:
                before = self._before.get(stored)
                if isinstance(before, torch.Tensor):
                    stored.param.data = before
                elif before is not None:
                    stored.param.data = stored.read(plane, residual).to(before)

    def _fetch(self, unit: int, plane: torch.Tensor, residual: torch.Tensor | None) -> None:
        if isinstance(self._weights, StreamedWeights):
            _needed(self._store).read_weight(unit, plane).wait()
        for chunk, part in self._parts(unit, residual):
            part.copy_(self._states.read(chunk)[: part.numel()])

    def _planes(self, unit: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The unit's weight plane as bytes, and its residual plane where there is one."""
        layout = self._plan.inventory.units[unit]
        if isinstance(self._weights, StreamedWeights):
            plane = self._weights.scratch()[: layout.weight_bytes]
        else:
            plane = self._weights.plane(unit)
        if not self._has_residual:
            return plane, None
        return plane, self._scratch[unit][: layout.elements * 2].view(torch.int16)

    def _parts(self, unit: int, residual: torch.Tensor | None) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Of each chunk, its bytes of the residual plane."""
        if residual is not None:
            for chunk in self._plan.chunks_of[unit]:
                yield chunk, residual[chunk.begin : chunk.end].view(torch.uint8)


def _needed(store: SwapStore | None) -> SwapStore:
    if store is None:
        raise AssertionError("planes homed on nvme and no swap store")
    return store
