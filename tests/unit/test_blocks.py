"""The rules of copies, leases and slots, stated as tables: what is not in them stops the program."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.blocks import BlockState, Copy, Lease, Residency

ABSENT, LOADING, CLEAN, DIRTY = BlockState

PATHS = {ABSENT: (), LOADING: (LOADING,), CLEAN: (LOADING, CLEAN), DIRTY: (LOADING, CLEAN, DIRTY)}
"""How a new copy comes into each state."""

LEGAL = {
    (ABSENT, LOADING),
    (LOADING, CLEAN),
    (LOADING, ABSENT),  # the read failed
    (CLEAN, DIRTY),
    (CLEAN, ABSENT),
    (DIRTY, CLEAN),  # everything changed has been written
}


def copy_in(state: BlockState) -> Copy:
    copy = Copy(7)
    for step in PATHS[state]:
        copy.advance(step)
    return copy


@pytest.mark.parametrize(("old", "new"), list(product(BlockState, BlockState)))
def test_only_the_listed_transitions_are_legal(old: BlockState, new: BlockState) -> None:
    copy = copy_in(old)
    if (old, new) in LEGAL:
        copy.advance(new)
        assert copy.state is new
    else:
        with pytest.raises(AssertionError, match=f"block 7: {old.name} -> {new.name}"):
            copy.advance(new)
        assert copy.state is old


@pytest.mark.parametrize("state", BlockState)
def test_only_bytes_that_are_there_can_be_leased(state: BlockState) -> None:
    copy = copy_in(state)
    assert copy.readable == (state in (CLEAN, DIRTY))
    if copy.readable:
        lease = Lease(copy)
        assert lease.block == 7 and copy.leases == 1
        del lease  # one that an exception has lost
        assert copy.leases == 0
    else:
        with pytest.raises(AssertionError, match=f"lease of block 7 while {state.name}"):
            Lease(copy)
        assert copy.leases == 0


def test_leases_are_counted_and_each_is_given_back_once() -> None:
    copy = copy_in(CLEAN)
    first, second = Lease(copy), Lease(copy)
    assert copy.leases == 2
    first.close()
    first.close()
    assert copy.leases == 1 and first.block is None and second.block == 7
    with pytest.raises(ZeroDivisionError), second:
        raise ZeroDivisionError
    assert copy.leases == 0


def test_a_leased_copy_may_change_and_may_not_be_dropped() -> None:
    copy = copy_in(CLEAN)
    lease = Lease(copy)
    with pytest.raises(AssertionError, match="block 7: dropped under 1 leases"):
        copy.advance(ABSENT)
    assert copy.state is CLEAN
    copy.advance(DIRTY)
    copy.advance(CLEAN)
    lease.close()
    copy.advance(ABSENT)


def test_a_failed_read_gives_its_slot_back() -> None:
    residency = Residency(block_count=2, slot_count=1)
    slot = residency.begin(0).slot
    residency.drop(0)
    assert residency.free_slots == 1 and residency.present == set() and residency.block_in(0) is None
    assert residency.begin(1).slot == slot
    residency.verify()


@pytest.mark.parametrize("slot", [1, 2])
def test_verify_finds_a_slot_that_is_held_twice_or_not_there(slot: int) -> None:
    residency = Residency(block_count=3, slot_count=2)
    residency.begin(0)
    residency.begin(1)
    residency.verify()
    residency.copies[0]._slot = slot
    assert residency.copies[1].slot == 1
    with pytest.raises(AssertionError, match="slots held"):
        residency.verify()


def test_a_lost_lease_is_none() -> None:
    residency = Residency(block_count=1, slot_count=1)
    copy = residency.begin(0)
    residency.finish(0)
    leases = [Lease(copy), Lease(copy)]
    assert copy.leases == 2 and not list(residency.droppable())
    leases.pop()
    assert copy.leases == 1
    leases.clear()
    assert list(residency.droppable()) == [copy]
    residency.drop(0)


BLOCKS, SLOTS = 5, 3


class Slots(RuleBasedStateMachine):
    """Residency against a dictionary of what must be where, under any order of calls."""

    @initialize()
    def start(self) -> None:
        self.residency = Residency(BLOCKS, SLOTS)
        self.slots: dict[int, int] = {}  # block -> slot
        self.states = dict.fromkeys(range(BLOCKS), ABSENT)
        self.leases: list[Lease] = []

    def leased(self, block: int) -> int:
        return sum(lease.block == block for lease in self.leases)

    def blocks_in(self, *states: BlockState) -> list[int]:
        return [block for block, state in self.states.items() if state in states]

    @precondition(lambda self: len(self.slots) < SLOTS)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.blocks_in(ABSENT)))
        slot = self.residency.begin(block).slot
        assert slot is not None and slot not in self.slots.values()
        self.slots[block], self.states[block] = slot, LOADING

    @precondition(lambda self: self.blocks_in(LOADING))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.blocks_in(LOADING)))
        self.residency.finish(block)
        self.states[block] = CLEAN

    @precondition(lambda self: self.blocks_in(CLEAN, DIRTY))
    @rule(data=st.data())
    def change_or_store(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.blocks_in(CLEAN, DIRTY)))
        new = DIRTY if self.states[block] is CLEAN else CLEAN
        self.residency.copies[block].advance(new)
        self.states[block] = new

    @precondition(lambda self: self.blocks_in(CLEAN, DIRTY))
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.blocks_in(CLEAN, DIRTY)))
        self.leases.append(Lease(self.residency.copies[block]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.close()

    @rule(block=st.integers(0, BLOCKS - 1))
    def drop(self, block: int) -> None:
        if self.states[block] in (LOADING, CLEAN) and not self.leased(block):
            self.residency.drop(block)
            del self.slots[block]
            self.states[block] = ABSENT
        else:
            with pytest.raises(AssertionError):
                self.residency.drop(block)

    @invariant()
    def is_as_expected(self) -> None:
        residency = self.residency
        residency.verify()
        assert residency.free_slots == SLOTS - len(self.slots)
        assert residency.present == set(self.slots)
        assert {slot: residency.block_in(slot) for slot in range(SLOTS)} == {
            **dict.fromkeys(range(SLOTS)),
            **{slot: block for block, slot in self.slots.items()},
        }
        assert [copy.state for copy in residency.copies] == list(self.states.values())
        assert [copy.leases for copy in residency.copies] == [self.leased(block) for block in range(BLOCKS)]
        droppable = {block for block in self.blocks_in(CLEAN) if not self.leased(block)}
        assert {copy.block for copy in residency.droppable()} == droppable


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
