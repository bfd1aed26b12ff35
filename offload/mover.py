"""Keeps the weight planes that are needed in slots; decides nothing, waits for little.

Note [Who still looks]
A slot may be reused only when nobody looks at its bytes: no lease is open, no tensor outside the
parameters shares its storage, and no graph has saved a parameter itself (Note [Saved parameters]). The last
two are asked of torch (the use counts of the storage and of the parameters), which covers what no hook can
see: views that a checkpointed block has saved for its backward, an output that is a parameter, a tensor that
user code holds on to, a penalty over weights.

Note [Two halves]
Where compute has memory of its own, a slot has a device half besides its host half, and parameters point at
that. A fetch fills the host half; a lift brings it to the device, for the uses that come next in forward and
backward (never for an update on the host, nor beyond the end of a backward, after which weights change).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from enum import Enum, auto

import torch

from .blocks import BlockState, Copy, Lease, Residency
from .errors import OffloadError, TransferError
from .ledger import Ledger
from .lift import Lifts
from .links import AHEAD, NEEDED_NOW, Ticket, wait_for_end
from .partition import GATHER_LOSS
from .schedule import Phase, PrefetchScheduler

Read = Callable[[int, int, int], Ticket]
"""Starts filling a slot with a unit's weight plane, at a priority: (unit, slot, priority)."""


class Shown(Enum):
    """Which parameters of a unit are views of its slot."""

    NOTHING = auto()
    FROZEN = auto()
    ALL = auto()
    UNKNOWN = auto()
    """Ctrl-C has come while parameters were pointed elsewhere: it is done again before anybody looks."""


class Slot:
    """Memory for one weight plane that compute reads: uint8, with a storage of its own."""

    __slots__ = ("_others", "_own", "_parameters", "_storage", "shown", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage: int = tensor.untyped_storage()._cdata  # its address: holding it would count
        self.shown = Shown.NOTHING
        self._own = self._count()
        self._parameters = self._others = 0

    def repoint(self, point: Callable[[], int], shown: Shown) -> None:
        """Points parameters at the slot, or away from it, while others may be looking or just stop to look.

        Args:
            point: returns how many parameters share the slot's memory now.
            shown: which of the unit's do.
        """
        self._others = self._count_others()
        self.shown = Shown.UNKNOWN
        self._parameters = point()
        self.shown = shown

    @property
    def is_looked_at(self) -> bool:
        """Whether a tensor besides the parameters shares the storage. See Note [Who still looks]."""
        return self._count_others() > 0

    def _count_others(self) -> int:
        return self._others if self.shown is Shown.UNKNOWN else self._count() - self._own - self._parameters

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage)
        return count


class Mover:
    """Units on their way between the swap store and the slots."""

    def __init__(
        self,
        *,
        unit_count: int,
        slots: list[torch.Tensor],
        read: Read,
        attach: Callable[[int, torch.Tensor], int],
        detach: Callable[[int], int],
        detach_trained: Callable[[int], int],
        is_saved: Callable[[int], bool],
        reclaim: Callable[[], bool],
        scheduler: PrefetchScheduler,
        ledger: Ledger,
        lifts: Lifts | None = None,
    ) -> None:
        """
        Args:
            slots: what compute reads: with ``lifts``, their device halves.
            read: starts a read of a unit's plane.
            attach: points a unit's parameters at a slot. It and the next two return how many parameters of the
                unit share a slot's memory then.
            detach: makes a unit's parameters absent.
            detach_trained: makes those absent that are trained.
            is_saved: whether a graph holds parameters of a unit.
            reclaim: asked when every slot is held: gives one hold up, or says that there is none.
            lifts: brings host halves to the device. See Note [Two halves].
        """
        self.residency = Residency(unit_count, len(slots))
        self.slots = [Slot(tensor) for tensor in slots]
        self.scheduler = scheduler
        self._read, self._attach = read, attach
        self._detach, self._detach_trained = detach, detach_trained
        self._is_saved, self._reclaim = is_saved, reclaim
        self._ledger, self._lifts = ledger, lifts
        self._wanted: list[int] = []  # units to lift, in the order of their use
        self._tickets: dict[int, Ticket] = {}
        self._last_used = -1
        self._slot_at = {slot.data_ptr(): index for index, slot in enumerate(slots)}

    def unit_at(self, address: int) -> int | None:
        """The unit in the slot that begins at an address; None where no slot does."""
        slot = self._slot_at.get(address)
        return None if slot is None else self.residency.block_in(slot)

    def use(self, unit: int) -> None:
        """Makes a unit present, waiting for it where that is needed, and fetches ahead."""
        copy = self.residency.copies[unit]
        if unit == self._last_used and copy.readable and self._slot(copy).shown is Shown.ALL:
            return
        self._use(unit)
        if self._lifts is not None:
            self._wanted = [unit, *self.scheduler.next_computed()]
        self._show(unit)
        self.lift_ahead()

    def _use(self, unit: int) -> None:
        copy = self.residency.copies[unit]
        self._last_used = unit
        self.scheduler.use(unit, self.residency.present)
        self.fetch_ahead()
        if copy.state is BlockState.ABSENT:
            self._fetch_now(unit)
        if copy.state is BlockState.LOADING:
            self._finish(unit)

    def enter(self, phase: Phase, *, training: bool, updated: Collection[int] | None = None) -> None:
        """Tells the scheduler that a phase begins, in which the unit used last counts as used anew."""
        self.scheduler.enter(phase, self.residency.present, training=training, updated=updated)
        self._last_used = -1
        self._wanted.clear()

    def lease(self, unit: int) -> Lease:
        """As :meth:`use`, and the unit stays until the lease is closed."""
        self.use(unit)
        return Lease(self.residency.copies[unit])

    def lease_on_host(self, unit: int) -> Lease:
        """As :meth:`lease`, of the host bytes alone, which an update changes: no parameter is pointed at them."""
        self._use(unit)
        return Lease(self.residency.copies[unit])

    def lease_unannounced(self, unit: int) -> Lease:
        """A lease outside the trace: what is kept for an update in backward, or looked at between steps.

        It is good for the host half.
        """
        copy = self.residency.copies[unit]
        if copy.state is BlockState.ABSENT:
            self._fetch_anywhere(unit)
        if copy.state is BlockState.LOADING:
            self._finish(unit)
        return Lease(copy)

    def plane(self, unit: int) -> torch.Tensor:
        """What compute reads of a present unit: its weight plane lies at the front."""
        return self.slots[self.slot_of(unit)].tensor

    def slot_of(self, unit: int) -> int:
        """The slot of a present unit."""
        copy = self.residency.copies[unit]
        if not copy.readable or copy.slot is None:
            raise AssertionError(f"unit {unit} is read while {copy.state.name}")
        return copy.slot

    def is_shown(self, unit: int) -> bool:
        """Whether the unit's parameters point at a slot."""
        copy = self.residency.copies[unit]
        return copy.readable and self._slot(copy).shown is Shown.ALL

    def begin_change(self, unit: int) -> None:
        """Waits until the unit's host bytes may change: what has changed is lifted after :meth:`end_change`."""
        if self._lifts is not None:
            self._lifts.begin_change(self.residency.copies[unit].slot, unit)

    def end_change(self, unit: int) -> None:
        """The unit's host bytes do not change any more. Idempotent."""
        if self._lifts is not None:
            self._lifts.end_change(unit)

    def spoil(self, unit: int, size: int | None = None) -> None:
        """The first ``size`` host bytes of the unit, or all, have changed: its device half is worth less now."""
        copy = self.residency.copies[unit]
        if self._lifts is None or copy.slot is None:
            return
        slot = self._slot(copy)
        if size is None or slot.shown is Shown.UNKNOWN:
            self._hide(unit)
        elif slot.shown is Shown.ALL:  # a backward may still read frozen parameters
            slot.repoint(lambda: self._detach_trained(unit), Shown.FROZEN)
        self._lifts.spoil(copy.slot, size)

    def lift_ahead(self) -> None:
        """Starts the lifts that the trace has asked for, as far as their host halves are there."""
        while self._lifts is not None and self._wanted:
            copy = self.residency.copies[self._wanted[0]]
            ticket = self._tickets.get(copy.block)
            if copy.state is BlockState.LOADING and ticket is not None and ticket.done():
                self._finish(copy.block)
            if not copy.readable or copy.slot is None:
                return
            if not self._slot(copy).is_looked_at:  # else compute may read it until its use
                self._lifts.start(copy.slot, copy.block)
            self._wanted.pop(0)

    def refresh(self, unit: int) -> None:
        """Points the unit's parameters at what is true now: their slot, or nothing."""
        if self.is_shown(unit):
            slot = self.slots[self.slot_of(unit)]
            slot.repoint(lambda: self._attach(unit, slot.tensor), Shown.ALL)
            return
        if self.residency.copies[unit].readable:
            self._hide(unit)
        self._detach(unit)

    def fetch_ahead(self) -> None:
        """Starts the fetches that the scheduler names; those for which no slot is free yet come later."""
        moves = self.scheduler.next_moves(may_evict=self._may_drop, free_slots=self.residency.free_slots)
        for move in moves:
            if move.evict is not None:
                self._drop(move.evict)
            self._fetch(move.unit, AHEAD)

    def settle(self) -> None:
        """Waits for every fetch in flight: what is present is readable."""
        for unit in list(self._tickets):
            self._finish(unit)

    def reload(self) -> None:
        """Reads anew all that is present: what is at home is another state now."""
        self.settle()
        for copy in self.residency.copies:
            if copy.slot is not None:
                self.begin_change(copy.block)
                self._read(copy.block, copy.slot, NEEDED_NOW).wait()
                self.spoil(copy.block)
                self.end_change(copy.block)

    def close(self) -> None:
        """Waits for what is in flight, whatever its outcome, and gives the slots up."""
        for slot in range(len(self.slots)):
            if self._lifts is not None:
                self._lifts.settle(slot)
        wait_for_end(self._tickets.values())
        self._tickets.clear()
        self.slots.clear()
        if self._lifts is not None:
            self._lifts.close()

    # -- steps --------------------------------------------------------------------------------------------

    def _droppable(self) -> set[int]:
        """Units whose slot may be taken."""
        return {copy.block for copy in self.residency.droppable() if self._may_go(copy)}

    def _may_drop(self, unit: int) -> bool:
        copy = self.residency.copies[unit]
        return copy.is_droppable and self._may_go(copy)

    def _may_go(self, copy: Copy) -> bool:
        """Whether nobody looks at a copy's slot or needs its parameters. See Note [Who still looks]."""
        return not self._slot(copy).is_looked_at and not self._is_saved(copy.block)

    def _fetch_now(self, unit: int) -> None:
        """Fetches a unit that is needed at once: as was decided where it was foreseen, else in any slot."""
        while self.scheduler.is_pending(unit) and self._reclaim():
            self.fetch_ahead()
        if self.residency.copies[unit].state is BlockState.ABSENT:
            self._fetch_anywhere(unit)

    def _fetch_anywhere(self, unit: int) -> None:
        self._make_room()
        self._fetch(unit, NEEDED_NOW)
        self.scheduler.deviated(unit, self.residency.present)

    def _fetch(self, unit: int, priority: int) -> None:
        self.residency.begin(unit)
        self._read_into_slot(unit, priority)

    def _read_into_slot(self, unit: int, priority: int) -> None:
        try:
            slot = self.residency.copies[unit].slot
            if slot is None:
                raise AssertionError(f"unit {unit} has no slot")
            if self._lifts is not None:
                self._lifts.settle(slot)
                self._lifts.spoil(slot)
            self._tickets[unit] = self._read(unit, slot, priority)
        except Exception:
            self.residency.drop(unit)
            raise

    def _finish(self, unit: int) -> None:
        if unit not in self._tickets:  # Ctrl-C has come between the slot and the read, or after the read
            self._read_into_slot(unit, NEEDED_NOW)
        ticket = self._tickets[unit]
        try:
            if ticket.done():
                ticket.wait()
            else:
                with self._ledger.stall("weights"):
                    ticket.wait()
        except TransferError:
            del self._tickets[unit]
            self.residency.drop(unit)
            raise
        del self._tickets[unit]  # only now: an interrupted wait leaves all as it is, the bytes on their way
        self.residency.finish(unit)

    def _show(self, unit: int) -> None:
        """Points the unit's parameters at its slot; what compute is asked from now on finds it there."""
        copy = self.residency.copies[unit]
        slot = self._slot(copy)
        if self._lifts is not None and copy.slot is not None:
            self._lifts.show(copy.slot, unit, is_read=slot.is_looked_at)
        if slot.shown is not Shown.ALL:
            slot.repoint(lambda: self._attach(unit, slot.tensor), Shown.ALL)

    def _hide(self, unit: int) -> None:
        """Makes the unit's parameters absent."""
        slot = self._slot(self.residency.copies[unit])
        if slot.shown is not Shown.NOTHING:
            slot.repoint(lambda: self._detach(unit), Shown.NOTHING)

    def _drop(self, unit: int) -> None:
        self._hide(unit)
        self.residency.drop(unit)
        if unit == self._last_used:
            self._last_used = -1

    def _make_room(self) -> None:
        """Frees a slot: the copy needed last goes first; then reads ahead are given up; then holds."""
        collected = False
        while not self.residency.free_slots:
            victim = self.scheduler.victim(self._droppable())
            if victim is not None:
                self._drop(victim)
            elif self._tickets:
                self._finish(next(reversed(self._tickets)))
            elif self._reclaim():
                continue
            elif not collected:
                collected = True
                gc.collect()  # a reference cycle may hold a view, as after an exception
            else:
                held = ", ".join(str(copy.block) for copy in self.residency.copies if copy.slot is not None)
                raise OffloadError(
                    f"all {len(self.slots)} weight slots are in use (units {held}): tensors that are views of"
                    " weights are kept (clone() them), or more weights are used at once than fit, outside the"
                    f" model's forward ({GATHER_LOSS}) or in one module (set offload_param.device to 'cpu')"
                )

    def _slot(self, copy: Copy) -> Slot:
        if copy.slot is None:
            raise AssertionError(f"unit {copy.block} has no slot")
        return self.slots[copy.slot]
