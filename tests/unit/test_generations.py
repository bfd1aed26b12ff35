"""Which extent is written and read: whatever happens after a commit, what it names is as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.store.generations import Generations

ITEMS = 4
ACTIONS = st.lists(st.one_of(st.integers(0, ITEMS - 1), st.just("commit"), st.just("crash")), max_size=60)


class Disk:
    """What the extents of each item hold, and what they should."""

    def __init__(self, extents):
        self.generations, self.extents = Generations(extents), [*extents]
        self.content = {}
        self.now = [None] * ITEMS
        self.committed = [None] * ITEMS
        self.named = [None] * ITEMS
        self.written = 0

    def write(self, item):
        if self.generations.lacks_extent(item):
            self.generations.add_extent(item)
            self.extents[item] = 2
        moves, before = self.generations.moves(item), self.generations.current(item)
        extent = self.generations.write(item)
        assert 0 <= extent < self.extents[item]
        assert moves == (before is not None and extent != before)
        self.written += 1
        self.content[item, extent] = self.now[item] = self.written

    def commit(self):
        self.generations.commit()
        self.committed = [*self.now]
        self.named = [self.generations.current(item) for item in range(ITEMS)]

    def crash(self):
        self.generations = Generations(self.extents)
        self.generations.restore(self.named)
        self.now = [*self.committed]

    def check(self):
        for item in range(ITEMS):
            extent, named = self.generations.current(item), self.named[item]
            assert self.now[item] == (None if extent is None else self.content[item, extent])
            assert self.committed[item] == (None if named is None else self.content[item, named])
        changed = {item for item in range(ITEMS) if self.now[item] != self.committed[item]}
        assert set(self.generations.changed()) == changed


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.lists(st.integers(1, 2), min_size=ITEMS, max_size=ITEMS))
def test_a_commit_stands_whatever_follows(actions, extents):
    disk = Disk(extents)
    for action in actions:
        if action == "commit":
            disk.commit()
        elif action == "crash":
            disk.crash()
        else:
            disk.write(action)
        disk.check()


def test_the_first_write_after_a_commit_goes_to_the_other_extent_and_later_ones_stay():
    generations = Generations([2, 2])
    assert [generations.write(0), generations.write(0)] == [0, 0]
    generations.write(1)
    generations.commit()
    assert generations.moves(0) and [generations.write(0), generations.write(0)] == [1, 1]
    assert list(generations.changed()) == [0]
    generations.commit()
    assert generations.write(0) == 0 and generations.write(1) == 1


def test_without_a_commit_one_extent_is_enough():
    generations = Generations([1])
    for _ in range(3):
        assert not generations.lacks_extent(0) and generations.write(0) == 0


def test_an_extent_that_is_not_there_is_not_written_or_restored():
    generations = Generations([1, 2])
    generations.write(0)
    generations.commit()
    assert generations.lacks_extent(0)
    with pytest.raises(AssertionError, match="no extent"):
        generations.write(0)
    with pytest.raises(AssertionError, match="none is number 1"):
        generations.restore([1, 0])
    generations.add_extent(0)
    assert generations.write(0) == 1
    with pytest.raises(AssertionError, match="has 2 extents"):
        generations.add_extent(0)
