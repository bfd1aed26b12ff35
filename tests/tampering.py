"""JSON that a stranger may have written: a good one, changed in a few places."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything in it is: keys from the outside in."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*at, key))


def values(numbers: Sequence[int], texts: Sequence[str]) -> st.SearchStrategy[Any]:
    """Anything that JSON can say, ``numbers`` and ``texts`` often."""
    whole = st.one_of(
        st.integers(-2, 5), st.integers(),
        st.sampled_from([*numbers, 2**31, 2**32, 2**53, 2**56, 2**62, 2**63, 2**64, 10**400, 1 << 5000]),
    )  # fmt: skip
    return st.one_of(
        whole, st.none(), st.booleans(), st.floats(), st.text(max_size=9), st.sampled_from(texts),
        st.just("\ud800"),
        st.lists(whole, max_size=4), st.lists(st.lists(whole, min_size=3, max_size=3), max_size=3), st.just({}),
    )  # fmt: skip


@st.composite
def tampered(
    draw: st.DrawFn,
    good: Any,
    places: Sequence[tuple[Any, ...]],
    others: st.SearchStrategy[Any],
    steps: Sequence[int],
) -> Any:
    """``good``, changed in up to three places: replaced by one of ``others``, moved by a step, dropped, or doubled."""
    body = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from(places))
        where = body
        try:
            for key in outer:
                where = where[key]
            before = where[last]
        except (LookupError, TypeError):
            continue
        if isinstance(where, str):
            continue
        what = draw(st.sampled_from(["replace", "number", "drop", "twice"]))
        if what == "replace":
            where[last] = copy.deepcopy(draw(others))
        elif what == "number" and type(before) is int:
            where[last] = before + draw(st.sampled_from(steps))
        elif what == "drop":
            del where[last]
        elif isinstance(where, list):
            where.insert(last, copy.deepcopy(before))
    return body


def with_value(good: Any, value: Any, *at: Any) -> Any:
    """``good`` with another value in one place."""
    body = copy.deepcopy(good)
    where = body
    for key in at[:-1]:
        where = where[key]
    where[at[-1]] = value
    return body
