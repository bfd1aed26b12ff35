"""Which extent of an item is read, and to which one it is written. Pure.

Note [Generations]
An item is what is written as one: the state of a chunk, a chunk's part of its unit's weight plane, or what is frozen
of a weight plane. An item has two extents. Reads go to the one that was written last. Writes go to the one that the
last commit does not name: the first write after a commit goes to the other extent, and so has to be of the whole
item; later ones stay there. So whatever is written after a commit, all that the commit names is as it was.
An item that is not written between two commits is named again where it lies. What is frozen has one extent, as it is
not written again; where somebody does so all the same, it gets its second one then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Generations:
    """The extents of all items. See Note [Generations]."""

    def __init__(self, extents: Sequence[int]) -> None:
        """
        Args:
            extents: how many each item has, 1 or 2.
        """
        self._extents = [*extents]
        self._current: list[int | None] = [None] * len(self._extents)
        self._committed: list[int | None] = [None] * len(self._extents)

    def current(self, item: int) -> int | None:
        """The extent that was written last; None where the item was never written."""
        return self._current[item]

    def moves(self, item: int) -> bool:
        """Whether the next write goes to the other extent, and so has to be of the whole item."""
        return self._current[item] is not None and self._current[item] == self._committed[item]

    def lacks_extent(self, item: int) -> bool:
        """Whether the next write needs an extent that is not there yet: :meth:`add_extent`."""
        return self.moves(item) and self._extents[item] == 1

    def add_extent(self, item: int) -> None:
        """The item has a second extent from now on."""
        if self._extents[item] != 1:
            raise AssertionError(f"item {item} has {self._extents[item]} extents")
        self._extents[item] = 2

    def write(self, item: int) -> int:
        """The extent to which a write goes that begins now; reads go there from now on."""
        current = self._current[item]
        if current is None:
            current = 0
        elif self.moves(item):
            if self._extents[item] == 1:
                raise AssertionError(f"item {item} has no extent for another generation")
            current = 1 - current
        self._current[item] = current
        return current

    def changed(self) -> Iterator[int]:
        """Items written since the last commit."""
        for item, (current, committed) in enumerate(zip(self._current, self._committed, strict=True)):
            if current != committed:
                yield item

    def commit(self) -> None:
        """What was written last is what counts, whatever happens from now on."""
        self._committed = [*self._current]

    def restore(self, committed: Sequence[int | None]) -> None:
        """Goes back to the extents that a commit names."""
        for item, extent in enumerate(committed):
            if extent is not None and not 0 <= extent < self._extents[item]:
                raise AssertionError(
                    f"item {item} has {self._extents[item]} extents and none is number {extent}"
                )
        self._current, self._committed = [*committed], [*committed]
