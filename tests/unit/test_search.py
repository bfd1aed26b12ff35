"""The search of `offload tune` on drives that are formulas: no disk, no clock, the best settings known."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from offload.bytesize import KiB, MiB
from offload.cli.loads import LOADS
from offload.cli.search import ROUNDS, OutOfBudget, Progress, Search, candidates
from offload.machine import IoSettings

DEFAULT = IoSettings("io_uring", 1 * MiB, 32, 1)
BACKENDS = ["io_uring", "libaio", "threads"]


class Drive:
    """GB/s by a formula: a cost for each request, a depth that fills it, a penalty for what is too much."""

    def __init__(self, seed: int, noise: float) -> None:
        rng = random.Random(seed)
        self.rng, self.noise = random.Random(seed + 1), noise
        self.cost = {backend: rng.uniform(0.5, 3) * 1e-5 for backend in BACKENDS}
        self.top = {"read": rng.uniform(1, 7), "write": rng.uniform(1, 5), "mixed": rng.uniform(1, 5)}
        self.needed = 2 ** rng.uniform(21, 25)
        self.calls: list[tuple[IoSettings, str]] = []

    def true_rate(self, one: IoSettings, load: str) -> float:
        filled = min(one.block_size * one.queue_depth / self.needed, 1.0)
        seconds = (
            one.block_size / (self.top[load] * filled * 1e9) + self.cost[one.backend] / one.queue_depth**0.5
        )
        crowd = 1 + max(math.log2(one.block_size * one.queue_depth / self.needed), 0) * 0.01
        return one.block_size / seconds / 1e9 / crowd

    def measure(self, one: IoSettings, load: str) -> float:
        self.calls.append((one, load))
        return self.true_rate(one, load) * math.exp(self.rng.gauss(0, self.noise))

    def true_share(self, one: IoSettings) -> float:
        """By the rule of the search, over all settings there are."""
        return min(
            self.true_rate(one, load) / max(self.true_rate(any_, load) for any_ in candidates(BACKENDS))
            for load in LOADS
        )


@pytest.mark.parametrize("seed", range(30))
def test_finds_the_best_of_a_formula(seed: int) -> None:
    drive = Drive(seed, noise=0.0)
    search = Search(candidates(BACKENDS), DEFAULT, drive.measure, seed=seed)
    best = search.run()
    assert search.complete
    assert drive.true_share(best) >= 0.98 * max(map(drive.true_share, candidates(BACKENDS)))


def test_noise_costs_little() -> None:
    shares = []
    for seed in range(40):
        drive = Drive(seed, noise=0.05)
        best = Search(candidates(BACKENDS), DEFAULT, drive.measure, seed=seed).run()
        shares.append(drive.true_share(best) / max(map(drive.true_share, candidates(BACKENDS))))
    assert sorted(shares)[2] >= 0.95 and sum(shares) / len(shares) >= 0.98


def test_later_rounds_have_fewer_settings_and_more_trials_of_each() -> None:
    drive = Drive(3, noise=0.02)
    settings = candidates(BACKENDS)
    search = Search(settings, DEFAULT, drive.measure)
    best = search.run()
    assert len(drive.calls) <= sum(r.trials(len(settings)) + len(r.loads) * r.times for r in ROUNDS)
    assert len(drive.calls) < 1.2 * len(settings) * len(LOADS)
    assert {one for one, _ in drive.calls} == set(settings)
    assert len(search.rates[best, "mixed"]) == 1 + sum(r.times for r in ROUNDS[1:])
    assert len(search.rates[DEFAULT, "read"]) == sum(r.times for r in ROUNDS[1:]), "the defaults stay in"
    assert best in search.finalists and len(search.finalists) <= 3


def test_every_setting_has_its_turn_before_one_has_its_second() -> None:
    drive, rounds = Drive(1, noise=0.02), [Progress(0, 0, 0, 0.0, None, 0.0)]
    Search(candidates(BACKENDS), DEFAULT, drive.measure, show=rounds.append).run()
    size, times = rounds[-1].settings * len(LOADS), ROUNDS[-1].times
    last = drive.calls[-size * times :]
    turns = [last[begin : begin + size] for begin in range(0, len(last), size)]
    field = {one for one, _ in last}
    assert len(field) == rounds[-1].settings and len(turns) == times
    assert all(set(turn) == set(itertools.product(field, LOADS)) for turn in turns)
    assert len(set(map(tuple, turns))) == times, "each in another order"


def test_the_defaults_are_kept_where_nothing_is_better() -> None:
    assert Search(candidates(BACKENDS), DEFAULT, lambda one, load: 1.0).run() == DEFAULT
    slower = {DEFAULT: 0.995}
    assert Search(candidates(BACKENDS), DEFAULT, lambda one, load: slower.get(one, 1.0)).run() == DEFAULT
    slower = {DEFAULT: 0.9}
    search = Search(candidates(BACKENDS), DEFAULT, lambda one, load: slower.get(one, 1.0))
    best = search.run()
    assert best != DEFAULT and search.share(best) == 1.0 and search.share(DEFAULT) == 0.9


@pytest.mark.parametrize("trials", [0, 1, 5, 60, 100, 150])
def test_a_budget_that_ends_gives_the_best_that_is_known(trials: int) -> None:
    drive = Drive(5, noise=0.0)

    def measure(one: IoSettings, load: str) -> float:
        if len(drive.calls) == trials:
            raise OutOfBudget
        return drive.measure(one, load)

    search = Search(candidates(BACKENDS), DEFAULT, measure)
    best = search.run()
    assert not search.complete and len(drive.calls) == trials
    if not trials:
        assert best == DEFAULT
        return
    known = {one for one, _ in drive.calls}
    assert best in known
    if trials < 60:
        assert drive.true_rate(best, "mixed") >= 0.99 * max(drive.true_rate(one, "mixed") for one in known)


def test_a_slow_drive_gets_fewer_settings_and_all_rounds() -> None:
    """A trial of half a second: 25 s are 50 trials, and each round gets its part of them."""
    drive, now, rounds = Drive(7, noise=0.0), 0.0, set()

    def measure(one: IoSettings, load: str) -> float:
        nonlocal now
        now += 0.5
        return drive.measure(one, load)

    def show(progress: Progress) -> None:
        rounds.add((progress.round, progress.settings))
        assert 0 <= progress.share <= 1

    search = Search(candidates(BACKENDS), DEFAULT, measure, seconds_left=lambda: 25 - now, show=show)
    search.expect(0.5)
    search.run()
    assert search.complete and now <= 28
    assert {number for number, _ in rounds} == {1, 2, 3, 4}
    assert max(settings for _, settings in rounds) < 40


def test_candidates_keep_enough_and_not_too_much_in_flight() -> None:
    settings = candidates(BACKENDS)
    assert len(set(settings)) == len(settings) and DEFAULT in settings
    assert all(2 * MiB <= one.block_size * one.queue_depth <= 64 * MiB for one in settings)
    assert all(one.thread_count == (one.queue_depth if one.backend == "threads" else 1) for one in settings)
    assert {one.block_size for one in settings} >= {256 * KiB, 8 * MiB}


def test_spread_tells_of_a_busy_drive() -> None:
    quiet = Search(candidates(BACKENDS), DEFAULT, Drive(2, noise=0.01).measure)
    busy = Search(candidates(BACKENDS), DEFAULT, Drive(2, noise=0.8).measure)
    quiet.run(), busy.run()
    assert quiet.spread() < 1.2 and busy.spread() > 2
