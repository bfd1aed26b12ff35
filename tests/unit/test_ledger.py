"""The account of a run: sums of what was counted, and the same as JSON."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.ledger import Ledger

LINKS, PLANES = ("nvme_read", "nvme_write"), ("weight", "residual", "exp_avg")
counts = st.lists(st.tuples(st.sampled_from(LINKS), st.sampled_from(PLANES), st.integers(0, 1 << 40)))


@given(counts)
def test_a_link_has_moved_the_sum_of_its_planes(calls: list[tuple[str, str, int]]) -> None:
    ledger = Ledger()
    for link, plane, size in calls:
        ledger.count(link, plane, size)
    for link in LINKS:
        assert ledger.link_bytes()[link] == sum(size for name, _, size in calls if name == link)
    assert ledger.moved.total() == sum(size for _, _, size in calls)
    for key, size in ledger.moved.items():
        assert size == sum(n for link, plane, n in calls if (link, plane) == key)


@given(counts, counts)
def test_what_came_before_the_steps_is_set_aside(
    before: list[tuple[str, str, int]], after: list[tuple[str, str, int]]
) -> None:
    ledger, sums = Ledger(), (Counter[tuple[str, str]](), Counter[tuple[str, str]]())
    for calls, total in zip((before, after), sums, strict=True):
        for link, plane, size in calls:
            ledger.count(link, plane, size)
            total[link, plane] += size
        if calls is before:
            ledger.seconds["nvme_write"] += 2.0
            ledger.stalls["write"] += 1.0
            ledger.start_steps()
    assert (ledger.setup, ledger.moved) == sums
    assert not ledger.seconds and not ledger.stalls


def test_a_stall_counts_the_time_inside_by_cause_even_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 2.0, 2.25, 4.0, 4.0])
    monkeypatch.setattr("offload.ledger.time.perf_counter", lambda: next(clock))
    ledger = Ledger()
    with ledger.stall("weights"):
        pass
    with pytest.raises(OSError, match="lost"), ledger.stall("weights"):
        raise OSError("lost")
    with ledger.stall("state"):
        pass
    assert ledger.stalls == {"weights": 0.75, "state": 0.0}


def test_as_json_the_keys_are_joined_and_rates_are_bytes_by_busy_seconds() -> None:
    ledger = Ledger(steps=3, skipped_steps=1, step_seconds=1.5)
    ledger.count("nvme_write", "weight", 100)
    ledger.start_steps()
    ledger.count("nvme_read", "weight", 3 * 10**9)
    ledger.count("nvme_read", "exp_avg", 10**9)
    ledger.count("nvme_write", "weight", 5)
    ledger.seconds["nvme_read"] = 2.0
    ledger.stalls["write"] = 0.25
    ledger.predicted["nvme_read", "weight"] = 7
    assert json.loads(json.dumps(ledger.to_dict())) == {
        "steps": 3,
        "skipped_steps": 1,
        "seconds": 1.5,
        "links": {
            "nvme_read": {"bytes": 4 * 10**9, "seconds": 2.0, "gb_per_second": 2.0},
            "nvme_write": {"bytes": 5, "seconds": 0.0, "gb_per_second": None},
        },
        "planes": {"nvme_read.exp_avg": 10**9, "nvme_read.weight": 3 * 10**9, "nvme_write.weight": 5},
        "predicted": {"nvme_read.weight": 7},
        "setup": {"nvme_write.weight": 100},
        "stalls": {"write": 0.25},
    }


def test_two_ledgers_share_nothing() -> None:
    first, second = Ledger(), Ledger()
    first.count("nvme_read", "weight", 1)
    first.seconds["nvme_read"] += 1
    first.stalls["write"] += 1
    assert second == Ledger()
