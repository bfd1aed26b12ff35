"""G03: the three batch sizes, in all eight combinations, on one rank and on two."""

from __future__ import annotations

import itertools

import pytest

from offload.config import OffloadConfig
from offload.errors import ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# which of (train, micro, accumulation) is given -> the result with 24, 3 and 4 on two ranks
WANTED = {
    (False, False, False): (2, 1, 1),
    (True, False, False): (24, 12, 1),
    (False, True, False): (6, 3, 1),
    (False, False, True): (8, 1, 4),
    (True, True, False): (24, 3, 4),
    (True, False, True): (24, 3, 4),
    (False, True, True): (24, 3, 4),
    (True, True, True): (24, 3, 4),
}


@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("absent", ["missing", "auto", None])
def test_g03_all_combinations(given: tuple[bool, bool, bool], absent: str | None):
    values = dict(zip(KEYS, (24, 3, 4), strict=True))
    data = {key: values[key] if is_given else absent for key, is_given in zip(KEYS, given, strict=True)}
    data = {key: value for key, value in data.items() if value != "missing"}
    assert OffloadConfig.from_dict(data).resolve_batch(world_size=2) == WANTED[given]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("accumulation", [None, 1, 4, 100])
@pytest.mark.parametrize("train", [None, 1, 24, 96])
def test_g03_the_identity_holds_or_it_is_refused(
    world_size: int, micro: int | None, accumulation: int | None, train: int | None
):
    data = dict(zip(KEYS, (train, micro, accumulation), strict=True))
    fits = train is None or train % ((micro or 1) * (accumulation or 1) * world_size) == 0
    if micro and accumulation and train:
        fits = train == micro * accumulation * world_size
    try:
        sizes = OffloadConfig.from_dict(data).resolve_batch(world_size)
    except ConfigError as error:
        assert not fits
        assert str(train) in str(error) and "\n" not in str(error)
    else:
        assert fits
        assert sizes.train == sizes.micro * sizes.accumulation * world_size and min(sizes) >= 1
        for wanted, found in zip(data.values(), sizes, strict=True):
            assert wanted in (None, found)


def test_g03_the_error_has_the_three_numbers_and_the_way_out():
    config = OffloadConfig.from_dict(dict(zip(KEYS, (32, 4, 1), strict=True)))
    with pytest.raises(ConfigError) as caught:
        config.resolve_batch(world_size=1)
    assert str(caught.value) == (
        "train_batch_size: 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 "
        "x 1 rank = 4; run on 8 ranks, or leave one of the three out"
    )
    assert config.resolve_batch(world_size=8) == (32, 4, 1)


def test_g03_what_fits_no_number_of_ranks_is_refused_when_read():
    with pytest.raises(ConfigError, match="33 does not divide by train_micro_batch_size_per_gpu 4"):
        OffloadConfig.from_dict({"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4})


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, -1, True, "two", 1.5, [2], float("inf")])
def test_g03_bad_values(key: str, value: object):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        OffloadConfig.from_dict({key: value})


def test_no_ranks():
    with pytest.raises(ConfigError, match="world_size: 0 is below 1"):
        OffloadConfig.from_dict({}).resolve_batch(world_size=0)


def test_accumulation_that_only_follows_is_checked_against_the_update():
    config = OffloadConfig.from_dict(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"offload_optimizer": {"device": "cpu", "update": "backward"}},
        }
    )
    assert config.resolve_batch(world_size=8) == (8, 1, 1)
    with pytest.raises(ConfigError, match="2 micro-batches are added up"):
        config.resolve_batch(world_size=4)
