"""What a copy of a block is worth, and who may use it. Pure: no tensor, no tier, no clock.

Note [Life of a block]
A block is a unit's weight plane, and a copy of it lies in a slot of host memory::

    ABSENT -> LOADING -> CLEAN -> DIRTY -> CLEAN -> ABSENT
                 |
                 +-> ABSENT    (a failed read)

Its home copy is in the swap store. DIRTY lasts from the first change until everything changed has been
written. A lease is the right to use the bytes: while one is open the copy
stays where it is. A lease is cheap, counted and idempotent to close.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    __slots__ = ("block", "leases", "slot", "state")

    def __init__(self, block: int) -> None:
        self.block = block
        self.state = BlockState.ABSENT
        self.slot: int | None = None
        self.leases = 0

    def advance(self, new: BlockState) -> None:
        """Takes the one step that is legal; anything else is our mistake and stops the program."""
        if new not in _NEXT[self.state]:
            raise AssertionError(f"block {self.block}: {self.state.name} -> {new.name}")
        if new is BlockState.ABSENT and self.leases:
            raise AssertionError(f"block {self.block}: dropped under {self.leases} leases")
        self.state = new

    @property
    def readable(self) -> bool:
        """Whether its bytes may be computed with."""
        return self.state in (BlockState.CLEAN, BlockState.DIRTY)


class Lease:
    """The right to use one block's bytes; the copy stays until the lease is closed."""

    __slots__ = ("_copy",)

    def __init__(self, copy: Copy) -> None:
        self._copy: Copy | None = None
        if not copy.readable:
            raise AssertionError(f"lease of block {copy.block} while {copy.state.name}")
        copy.leases += 1
        self._copy = copy

    @property
    def block(self) -> int | None:
        """The leased block; None once closed."""
        return None if self._copy is None else self._copy.block

    def close(self) -> None:
        """Gives the right back. Idempotent: hooks and error paths may both call it."""
        if self._copy is not None:
            self._copy.leases -= 1
            self._copy = None

    def __del__(self) -> None:
        self.close()  # one that an exception has lost between two hands

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Residency:
    """Which block has a copy in which slot. The only place that binds blocks to slots.

    With as many slots as blocks each block has its own, and slots may be of the sizes of their blocks.
    """

    def __init__(self, block_count: int, slot_count: int) -> None:
        self.copies = tuple(Copy(block) for block in range(block_count))
        self._free = list(range(slot_count))[::-1]
        self._slot_count = slot_count

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def present(self) -> set[int]:
        """Blocks that hold a slot, those still loading included."""
        return {copy.block for copy in self.copies if copy.slot is not None}

    def block_in(self, slot: int) -> int | None:
        """The block that a slot holds."""
        return next((copy.block for copy in self.copies if copy.slot == slot), None)

    def droppable(self) -> Iterable[Copy]:
        """Copies that may be dropped now: clean and unused."""
        return (copy for copy in self.copies if copy.state is BlockState.CLEAN and not copy.leases)

    def begin(self, block: int) -> Copy:
        """Gives the block a free slot to load into."""
        copy = self.copies[block]
        copy.advance(BlockState.LOADING)
        copy.slot = block if self._slot_count == len(self.copies) else self._free[-1]
        self._free.remove(copy.slot)
        return copy

    def finish(self, block: int) -> None:
        """The load has ended well."""
        self.copies[block].advance(BlockState.CLEAN)

    def drop(self, block: int) -> None:
        """Takes the slot back: of a clean copy, or of one whose load has failed."""
        copy = self.copies[block]
        copy.advance(BlockState.ABSENT)
        if copy.slot is None:
            raise AssertionError(f"block {block}: no slot to give back")
        self._free.append(copy.slot)
        copy.slot = None

    def verify(self) -> None:
        """Re-checks the sums: every slot is free or holds exactly one block."""
        held = [copy.slot for copy in self.copies if copy.slot is not None]
        if sorted([*held, *self._free]) != list(range(self._slot_count)):
            raise AssertionError(
                f"slots held {sorted(held)}, free {sorted(self._free)} of {self._slot_count}"
            )
        for copy in self.copies:
            if (copy.slot is None) != (copy.state is BlockState.ABSENT):
                raise AssertionError(f"block {copy.block}: {copy.state.name} with slot {copy.slot}")
