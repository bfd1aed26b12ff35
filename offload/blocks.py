"""What a copy of a block is worth, and who may use it. Pure: no tensor, no tier, no clock.

Note [Life of a block]
A block is a unit's weight plane, and a copy of it lies in a slot of host memory::

    ABSENT -> LOADING -> CLEAN -> DIRTY -> CLEAN -> ABSENT
                 |
                 +-> ABSENT    (a failed read)

Its home copy is in the swap store. DIRTY lasts from the first change until everything changed has been
written. A lease is the right to use the bytes: while one is open the copy stays where it is. A lease is
cheap, counted and idempotent to close.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from types import TracebackType


class BlockState(Enum):
    """What one copy of a block is worth. See Note [Life of a block]."""

    ABSENT = auto()
    """No bytes here."""
    LOADING = auto()
    """A transfer into this copy is in flight; its bytes are undefined."""
    CLEAN = auto()
    """Equal to the home copy; may be dropped at no cost."""
    DIRTY = auto()
    """Newer than the home copy; must be stored before it is dropped."""


_NEXT: dict[BlockState, frozenset[BlockState]] = {
    BlockState.ABSENT: frozenset({BlockState.LOADING}),
    BlockState.LOADING: frozenset({BlockState.CLEAN, BlockState.ABSENT}),
    BlockState.CLEAN: frozenset({BlockState.DIRTY, BlockState.ABSENT}),
    BlockState.DIRTY: frozenset({BlockState.CLEAN}),
}


class Copy:
    """The copy of one block in host memory, and the slot that holds it while it is there."""

    __slots__ = ("_leases", "_slot", "block", "state")

    def __init__(self, block: int) -> None:
        self.block = block
        self.state = BlockState.ABSENT
        self._slot: int | None = None
        self._leases: set[weakref.ref[Lease]] = set()

    @property
    def slot(self) -> int | None:
        """The slot that holds it; None while it is absent."""
        return None if self.state is BlockState.ABSENT else self._slot

    @property
    def leases(self) -> int:
        """How many open leases there are. One that an exception has lost between two hands is none."""
        if self._leases:
            self._leases = {lease for lease in self._leases if lease() is not None}
        return len(self._leases)

    def advance(self, new: BlockState) -> None:
        """Takes the one step that is legal; anything else is our mistake and stops the program."""
        if new not in _NEXT[self.state]:
            raise AssertionError(f"block {self.block}: {self.state.name} -> {new.name}")
        if new is BlockState.ABSENT and self.leases:
            raise AssertionError(f"block {self.block}: dropped under {self.leases} leases")
        self.state = new

    @property
    def is_droppable(self) -> bool:
        """Whether its slot may be taken at no cost: clean and unused."""
        return self.state is BlockState.CLEAN and not self.leases

    @property
    def readable(self) -> bool:
        """Whether its bytes may be computed with."""
        return self.state in (BlockState.CLEAN, BlockState.DIRTY)


class Lease:
    """The right to use one block's bytes; the copy stays until the lease is closed, or nobody has it any more."""

    __slots__ = ("__weakref__", "_copy", "_self")

    def __init__(self, copy: Copy) -> None:
        if not copy.readable:
            raise AssertionError(f"lease of block {copy.block} while {copy.state.name}")
        self._copy: Copy | None = copy
        self._self = weakref.ref(self)
        copy._leases.add(self._self)

    @property
    def block(self) -> int | None:
        """The leased block; None once closed."""
        return None if self._copy is None else self._copy.block

    def close(self) -> None:
        """Gives the right back. Idempotent: hooks and error paths may both call it."""
        if self._copy is not None:
            self._copy._leases.discard(self._self)
            self._copy = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Residency:
    """Which block has a copy in which slot. The only place that binds blocks to slots.

    With as many slots as blocks each block has its own, and slots may be of the sizes of their blocks.

    Each change takes effect in one assignment, that of the copy's state: Ctrl-C cannot come in its middle.
    """

    def __init__(self, block_count: int, slot_count: int) -> None:
        self.copies = tuple(Copy(block) for block in range(block_count))
        self._last_in: list[Copy | None] = [None] * slot_count
        """The copy that each slot was given to last. Whether it still holds it, the copy itself says."""

    @property
    def free_slots(self) -> int:
        return len(self._last_in) - len(self.present)

    @property
    def present(self) -> set[int]:
        """Blocks that hold a slot, those still loading included."""
        return {copy.block for copy in self._held()}

    def block_in(self, slot: int) -> int | None:
        """The block that a slot holds."""
        copy = self._last_in[slot]
        return None if copy is None or copy.slot != slot else copy.block

    def droppable(self) -> Iterable[Copy]:
        """Copies that may be dropped now: clean and unused."""
        return (copy for copy in self._held() if copy.is_droppable)

    def _held(self) -> Iterator[Copy]:
        """The copies that hold a slot, slot by slot."""
        return (copy for slot, copy in enumerate(self._last_in) if copy is not None and copy.slot == slot)

    def _free_slot(self) -> int:
        return next(slot for slot in range(len(self._last_in)) if self.block_in(slot) is None)

    def begin(self, block: int) -> Copy:
        """Gives the block a free slot to load into."""
        copy = self.copies[block]
        if copy.state is BlockState.ABSENT:
            has_own = len(self._last_in) == len(self.copies)
            slot = block if has_own else self._free_slot()
            copy._slot, self._last_in[slot] = slot, copy
        copy.advance(BlockState.LOADING)
        return copy

    def finish(self, block: int) -> None:
        """The load has ended well."""
        self.copies[block].advance(BlockState.CLEAN)

    def drop(self, block: int) -> None:
        """Takes the slot back: of a clean copy, or of one whose load has failed."""
        self.copies[block].advance(BlockState.ABSENT)

    def verify(self) -> None:
        """Re-checks the sums: no slot holds two blocks."""
        held = sorted(copy.slot for copy in self.copies if copy.slot is not None)
        if held != sorted(copy.slot for copy in self._held() if copy.slot is not None):
            raise AssertionError(f"slots held {held} of {len(self._last_in)}")
