"""Where weight planes are during training: all where compute reads them, or streamed through slots.

Note [Homes of weights]
- *Resident*: compute and the update read one and the same plane, all of them there for good: in host memory
  where the CPU computes, in device memory where weights and optimizer state are at home on the device.
- *Streamed from nvme*: planes come through slots. With an accelerator each slot has a host half and a device half.
- *Streamed from host memory* to an accelerator: host planes are the truth, slots have a device half only; with as
  many slots as units every weight stays on the device and is lifted once after each update.
The update changes the host bytes, and the device half is lifted anew; of a unit whose optimizer state is at home on
the device it changes the device half, and the host bytes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import torch

from .blocks import BlockState, Lease
from .ledger import Ledger
from .lift import Lifts
from .links import DeviceLinks, DoneTicket, ThenTicket, Ticket
from .mover import Mover
from .partition import Partition, StoredParam
from .plan import MemoryPlan
from .schedule import Phase
from .store.swap import SwapStore


class Hold(Protocol):
    """The right to use a unit's weights until closed."""

    def close(self) -> None: ...


class _NoHold:
    def close(self) -> None:
        return None


NO_HOLD = _NoHold()


class ResidentWeights:
    """Every parameter is a view of its plane for good. See Note [Homes of weights]."""

    streamed = False

    def __init__(self, partition: Partition, planes: Sequence[torch.Tensor]) -> None:
        self._partition, self._planes = partition, [*planes]

    def enter(self, phase: Phase, *, training: bool = True, updated: Collection[int] | None = None) -> None:
        return None

    def use(self, unit: int) -> None:
        return None

    def lease(self, unit: int) -> Hold:
        return NO_HOLD

    def lease_unannounced(self, unit: int) -> Hold:
        return NO_HOLD

    def seen(self, unit: int) -> torch.Tensor:
        """The unit's plane, as compute reads it."""
        return self._planes[unit]

    def plane(self, unit: int) -> torch.Tensor:
        """The unit's plane, where the update changes it."""
        return self._planes[unit]

    def host_plane(self, unit: int) -> torch.Tensor:
        """The unit's plane in host memory: the plane itself, or a copy of it. :meth:`put` makes changes true."""
        return self._planes[unit].cpu()

    def put(self, unit: int, plane: torch.Tensor, begin: int, end: int) -> None:
        """Brings the changed bytes [begin, end) of :meth:`host_plane` home."""
        if plane is not self._planes[unit]:
            self._planes[unit][begin:end].copy_(plane[begin:end])

    def buffer(self, unit: int) -> torch.Tensor:
        """Host memory of the size of the unit's plane, for its first value; :meth:`bring` takes it home."""
        plane = self._planes[unit]
        return plane if plane.device.type == "cpu" else torch.empty(plane.numel(), dtype=torch.uint8)

    def bring(self, unit: int, plane: torch.Tensor) -> Ticket:
        """Brings the first value of the unit's plane home."""
        self.put(unit, plane, 0, plane.numel())
        return DoneTicket()

    def bring_back(self, unit: int, plane: torch.Tensor) -> None:
        """Undoes :meth:`bring`."""
        if plane is not self._planes[unit]:
            plane.copy_(self._planes[unit])

    def refresh(self, unit: int) -> None:
        """Points the unit's parameters at their plane."""
        self._partition.attach(unit, self._planes[unit])

    def unit_at(self, tensor: torch.Tensor) -> int | None:
        return None

    def outdate(self, params: Iterable[StoredParam]) -> None:
        """The parameters are about to be updated: autograd is told, as by torch's own optimizers."""
        for stored in params:
            stored.outdate()

    def begin_update(self, unit: int, *, in_backward: bool) -> None:
        return None

    def begin_write(self, unit: int) -> None:
        return None

    def store(self, unit: int, begin: int, end: int) -> Ticket:
        return DoneTicket()

    def end_backward(self) -> None:
        return None

    def updated(self, unit: int) -> None:
        return None

    def end_update(self, unit: int) -> None:
        return None

    def poll(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def close(self) -> None:
        """The parameters keep their planes: after the engine is closed they are ordinary tensors."""
        self._planes.clear()


class HostBytes(Protocol):
    """Where the host bytes of units are that pass through slots."""

    def of(self, unit: int, slot: int) -> torch.Tensor:
        """The weight plane of a unit that is in a slot, or at home here."""

    def fetch(self, unit: int, slot: int, priority: int) -> Ticket:
        """Starts to make :meth:`of` true."""

    def store(self, unit: int, slot: int, begin: int, end: int) -> Ticket:
        """Brings the changed bytes [begin, end) of :meth:`of` home."""

    def buffer(self, unit: int) -> torch.Tensor:
        """Memory for the first value of the unit's plane."""

    def bring(self, unit: int, plane: torch.Tensor) -> Ticket:
        """Brings the first value home."""

    def bring_back(self, unit: int, plane: torch.Tensor) -> None:
        """Undoes :meth:`bring`."""

    is_home: bool
    """Whether every unit's bytes are always there."""


class HostPlanes:
    """All planes in host memory: their home."""

    is_home = True

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self.planes = planes

    def of(self, unit: int, slot: int) -> torch.Tensor:
        return self.planes[unit]

    def fetch(self, unit: int, slot: int, priority: int) -> Ticket:
        return DoneTicket()

    def store(self, unit: int, slot: int, begin: int, end: int) -> Ticket:
        return DoneTicket()

    def buffer(self, unit: int) -> torch.Tensor:
        return self.planes[unit]

    def bring(self, unit: int, plane: torch.Tensor) -> Ticket:
        return DoneTicket()

    def bring_back(self, unit: int, plane: torch.Tensor) -> None:
        return None


class HostSlots:
    """Slots in host memory for planes whose home is the swap store."""

    is_home = False

    def __init__(self, slots: Sequence[torch.Tensor], store: SwapStore, plan: MemoryPlan) -> None:
        self.slots, self.swap = slots, store
        self._sizes = [unit.weight_bytes for unit in plan.inventory.units]

    def of(self, unit: int, slot: int) -> torch.Tensor:
        return self.slots[slot][: self._sizes[unit]]

    def fetch(self, unit: int, slot: int, priority: int) -> Ticket:
        return self.swap.read_weight(unit, self.slots[slot], priority=priority)

    def store(self, unit: int, slot: int, begin: int, end: int) -> Ticket:
        return self.swap.write_weight(unit, self.slots[slot], begin, end)

    def buffer(self, unit: int) -> torch.Tensor:
        return self.of(unit, 0)

    def bring(self, unit: int, plane: torch.Tensor) -> Ticket:
        return self.swap.write_weight(unit, plane, 0, plane.numel())

    def bring_back(self, unit: int, plane: torch.Tensor) -> None:
        self.swap.read_weight(unit, plane).wait()


class StreamedWeights:
    """Planes are at home elsewhere; those in use lie in slots. See Note [Homes of weights]."""

    streamed = True

    def __init__(
        self,
        partition: Partition,
        plan: MemoryPlan,
        host: HostBytes,
        ledger: Ledger,
        reclaim: Callable[[], bool],
        *,
        lifts: Lifts | None = None,
        links: DeviceLinks | None = None,
    ) -> None:
        """
        Args:
            lifts: the device halves of the slots, where compute has memory of its own.
            links: the way back from there, for units that are updated on the device.
        """
        self._partition, self.host, self._lifts = partition, host, lifts
        self._links, self._on_device = links, plan.on_device
        itemsize = plan.inventory.weight_itemsize
        self._trained_bytes = [unit.elements * itemsize for unit in plan.inventory.units]
        slots = [*lifts.halves] if lifts is not None else [*host.slots] if isinstance(host, HostSlots) else []
        self.mover = Mover(
            unit_count=len(partition.units),
            slots=slots,
            read=host.fetch,
            attach=partition.attach,
            detach=partition.detach,
            detach_trained=lambda unit: partition.detach(unit, only_trained=True),
            is_saved=partition.is_saved,
            reclaim=reclaim,
            scheduler=plan.scheduler(),
            ledger=ledger,
            lifts=lifts,
        )
        self._updating: dict[int, Lease | None] = {}
        self._slot_released = False
        self._in_backward = False
        self._changed: set[int] = set()  # units updated in this backward

    def unit_at(self, tensor: torch.Tensor) -> int | None:
        """The unit in whose slot a tensor lies, if it does."""
        storage = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()
        return self.mover.unit_at(storage)

    def enter(self, phase: Phase, *, training: bool = True, updated: Collection[int] | None = None) -> None:
        """Tells the scheduler that a phase begins; of an update, also which units it changes."""
        self.end_backward()
        self._in_backward = phase is Phase.BACKWARD
        self.mover.enter(phase, training=training, updated=updated)

    def use(self, unit: int) -> None:
        self.mover.use(unit)

    def lease(self, unit: int) -> Hold:
        if self._partition.is_gathered(unit):
            return NO_HOLD  # nobody looks at the slot
        return self.mover.lease(unit)

    def lease_unannounced(self, unit: int) -> Hold:
        """Keeps the unit's host bytes; what compute reads is kept as long as it is not updated."""
        return NO_HOLD if self.host.is_home else self.mover.lease_unannounced(unit)

    def seen(self, unit: int) -> torch.Tensor:
        return self.mover.plane(unit)

    def plane(self, unit: int) -> torch.Tensor:
        """The unit's plane, where the update changes it: nothing else reads or writes it now."""
        if unit in self._on_device:
            return self.seen(unit)
        return self.host_plane(unit)

    def host_plane(self, unit: int) -> torch.Tensor:
        """The unit's plane in host memory; the unit is leased, or its home is there."""
        return self.host.of(unit, -1 if self.host.is_home else self.mover.slot_of(unit))

    def put(self, unit: int, plane: torch.Tensor, begin: int, end: int) -> None:
        """Brings the changed bytes [begin, end) of :meth:`host_plane` home."""
        self._store_home(unit, begin, end).wait()
        self.mover.spoil(unit)

    def buffer(self, unit: int) -> torch.Tensor:
        """Host memory for the first value of the unit's plane; :meth:`bring` takes it home."""
        return self.host.buffer(unit)

    def bring(self, unit: int, plane: torch.Tensor) -> Ticket:
        return self.host.bring(unit, plane)

    def bring_back(self, unit: int, plane: torch.Tensor) -> None:
        """Undoes :meth:`bring`."""
        self.host.bring_back(unit, plane)

    def refresh(self, unit: int) -> None:
        self.mover.refresh(unit)

    def outdate(self, params: Iterable[StoredParam]) -> None:
        """As for weights that stay: but only of those that a graph has saved itself. All others are packed, and the
        version of their unit is asked when they are unpacked."""
        for stored in params:
            if stored.is_saved:
                stored.outdate()

    def begin_update(self, unit: int, *, in_backward: bool) -> None:
        """Makes the unit present where the update changes it, until :meth:`end_update`."""
        lease: Lease | None = None
        if unit in self._on_device:
            lease = self.mover.lease(unit)
        elif not self.host.is_home:
            lease = self.mover.lease_unannounced(unit) if in_backward else self.mover.lease_on_host(unit)
        self._updating[unit] = lease
        if lease is not None:
            self.mover.residency.copies[unit].advance(BlockState.DIRTY)
        if unit not in self._on_device:
            self._changed.discard(unit)
            self.mover.begin_change(unit)

    def begin_write(self, unit: int) -> None:
        """Makes the unit's host bytes present, for anybody to change, until :meth:`end_update`."""
        self.begin_update(unit, in_backward=True)
        self.mover.begin_change(unit)

    def store(self, unit: int, begin: int, end: int) -> Ticket:
        """Brings the bytes [begin, end) that the update has changed home."""
        if self._links is None or unit not in self._on_device:
            self.mover.spoil(unit, self._trained_bytes[unit])
            return self._store_home(unit, begin, end)
        host = self.host_plane(unit)[begin:end]
        to_host = self._links.to_host(host, self.seen(unit)[begin:end], "weight")
        return ThenTicket(to_host, lambda: self._store_home(unit, begin, end))

    def updated(self, unit: int) -> None:
        """The update has changed all that it changes: it is lifted once no backward needs the frozen rest."""
        if self._in_backward:
            self._changed.add(unit)
        else:
            self.mover.end_change(unit)

    def end_backward(self) -> None:
        self._in_backward = False
        while self._changed:
            self.mover.end_change(self._changed.pop())

    def end_update(self, unit: int) -> None:
        self.updated(unit)
        lease = self._updating.pop(unit)
        if lease is not None:
            self.mover.residency.copies[unit].advance(BlockState.CLEAN)
            lease.close()
            self._slot_released = True

    def poll(self) -> None:
        """Makes the fetches for which a slot has become free, and the lifts whose bytes have arrived."""
        if self._slot_released:
            self._slot_released = False
            self.mover.fetch_ahead()
        self.mover.lift_ahead()

    def settle(self) -> None:
        """Makes all the fetches that the scheduler still wants, and waits for them."""
        self.mover.fetch_ahead()
        self.mover.settle()

    def close(self) -> None:
        """Waits for what is in flight. Parameters at home in host memory stay readable there, others are absent."""
        self.mover.close()
        for unit in range(len(self._partition.units)):
            if self.host.is_home:
                self._partition.attach(unit, self.host_plane(unit))
            else:
                self._partition.detach(unit)

    def _store_home(self, unit: int, begin: int, end: int) -> Ticket:
        return self.host.store(unit, -1 if self.host.is_home else self.mover.slot_of(unit), begin, end)
