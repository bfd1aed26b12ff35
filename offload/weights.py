"""Where weight planes are during training: all in host memory, or streamed through slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .blocks import BlockState, Lease
from .ledger import Ledger
from .links import DoneTicket, Ticket
from .mover import Mover
from .partition import Partition
from .plan import MemoryPlan
from .schedule import Phase
from .store import SwapStore


class Hold(Protocol):
    """The right to use a unit's weights until closed."""

    def close(self) -> None: ...


class _NoHold:
    def close(self) -> None:
        return None


NO_HOLD = _NoHold()


class ResidentWeights:
    """Every plane stays in host memory, and every parameter is a view of it for good."""

    streamed = False

    def __init__(self, partition: Partition, planes: Sequence[torch.Tensor]) -> None:
        self._partition, self._planes = partition, planes

    def enter(self, phase: Phase, *, training: bool = True) -> None:
        return None

    def use(self, unit: int) -> None:
        return None

    def lease(self, unit: int) -> Hold:
        return NO_HOLD

    def lease_unannounced(self, unit: int) -> Hold:
        return NO_HOLD

    def plane(self, unit: int) -> torch.Tensor:
        return self._planes[unit]

    def refresh(self, unit: int) -> None:
        """Points the unit's parameters at their plane."""
        self._partition.attach(unit, self._planes[unit])

    def unit_at(self, tensor: torch.Tensor) -> int | None:
        return None

    def begin_update(self, unit: int, *, in_backward: bool) -> None:
        return None

    def store(self, unit: int, begin: int, end: int) -> Ticket:
        return DoneTicket()

    def end_update(self, unit: int) -> None:
        return None

    def poll(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def close(self) -> None:
        """The parameters keep their planes: after the engine is closed they are ordinary tensors."""
        return


class StreamedWeights:
    """Planes are at home in the swap store; those in use lie in slots."""

    streamed = True

    def __init__(
        self,
        partition: Partition,
        plan: MemoryPlan,
        slots: list[torch.Tensor],
        store: SwapStore,
        ledger: Ledger,
        reclaim: Callable[[], bool],
    ) -> None:
        self._partition, self._store = partition, store
        self.mover = Mover(
            unit_count=len(partition.units),
            slots=slots,
            read=lambda unit, slot, priority: store.read_weight(unit, slot, priority=priority),
            attach=partition.attach,
            detach=partition.detach,
            is_saved=partition.is_saved,
            reclaim=reclaim,
            scheduler=plan.scheduler(),
            ledger=ledger,
        )
        self._scratch = slots[0]
        self._updating: dict[int, Lease] = {}
        self._slot_released = False

    def scratch(self) -> torch.Tensor:
        """The bytes of a slot, for use before the first fetch."""
        return self._scratch

    def unit_at(self, tensor: torch.Tensor) -> int | None:
        """The unit in whose slot a tensor lies, if it does."""
        return self.mover.unit_at(tensor.untyped_storage().data_ptr())

    def enter(self, phase: Phase, *, training: bool = True) -> None:
        """Tells the scheduler that a phase begins."""
        self.mover.enter(phase, training=training)

    def use(self, unit: int) -> None:
        self.mover.use(unit)

    def lease(self, unit: int) -> Hold:
        return self.mover.lease(unit)

    def lease_unannounced(self, unit: int) -> Hold:
        return self.mover.lease_unannounced(unit)

    def plane(self, unit: int) -> torch.Tensor:
        return self.mover.plane(unit)

    def refresh(self, unit: int) -> None:
        self.mover.refresh(unit)

    def begin_update(self, unit: int, *, in_backward: bool) -> None:
        self._updating[unit] = self.mover.lease_unannounced(unit) if in_backward else self.mover.lease(unit)
        self.mover.residency.copies[unit].advance(BlockState.DIRTY)

    def store(self, unit: int, begin: int, end: int) -> Ticket:
        return self._store.write_weight(unit, self.mover.plane(unit), begin, end)

    def end_update(self, unit: int) -> None:
        self.mover.residency.copies[unit].advance(BlockState.CLEAN)
        self._updating.pop(unit).close()
        self._slot_released = True

    def poll(self) -> None:
        """Makes the fetches for which a slot has become free."""
        if self._slot_released:
            self._slot_released = False
            self.mover.fetch_ahead()

    def settle(self) -> None:
        """Makes all the fetches that the scheduler still wants, and waits for them."""
        self.mover.fetch_ahead()
        self.mover.settle()

    def close(self) -> None:
        """Waits for what is in flight and makes every parameter absent."""
        self.mover.close()
        for unit in range(len(self._partition.units)):
            self._partition.detach(unit)
