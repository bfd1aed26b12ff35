"""Case I16: several swap paths under one model. One slower than it should be, one full, one failing, one gone."""

import contextlib
import errno
import functools
import logging
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import aio
from offload.errors import OffloadError, StoreError, TransferError

MiB = 1 << 20


class Wide(nn.Module):
    """Large enough to be cut over paths: 2 MiB of bf16 weights and 10 MiB of state in each block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def prepared(paths):
    place = {"device": "nvme", "nvme_path": paths} if paths else {"device": "cpu"}
    settings = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    return offload.prepare(Wide(), settings)


def trained(paths, *, steps=3):
    """Weights and masters after some steps, and the size of the file on each path."""
    model, optimizer = prepared(paths)
    with contextlib.closing(optimizer.engine):
        sizes = [next(Path(p["path"]).glob("*/planes.swap")).stat().st_size for p in paths or ()]
        for step in range(steps):
            model(torch.full((1, 1024), 0.1 * step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        planes = {
            name: plane
            for index, state in optimizer.state_dict()["state"].items()
            for name, plane in ((f"{index}.{plane}", value) for plane, value in state.items())
        }
        return {**model.state_dict(), **planes}, sizes


@functools.cache
def in_memory():
    return trained(None)[0]


def assert_same(values):
    for name, value in in_memory().items():
        assert torch.equal(value, values[name]), name


@pytest.fixture
def two(tmp_path):
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    yield paths
    assert not any(any(path.iterdir()) for path in paths if path.is_dir()), "swap files were left behind"


@pytest.fixture
def faulty_path(monkeypatch):
    """Faults for the swap files of one path only."""

    def use(slow, **faults):
        def queue(path, **settings):
            mine = Path(path).is_relative_to(slow)
            return aio.Queue(path, **settings, faults=faults if mine else None)

        monkeypatch.setattr("offload.store.drives.Queue", queue)

    return use


def entries(paths, *weights):
    return [
        {"path": str(path), **({"weight": weight} if weight else {})}
        for path, weight in zip(paths, weights, strict=True)
    ]


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (None, None)])
def test_i16_two_paths_give_the_same_bits(two, weights):
    values, sizes = trained(entries(two, *weights))
    assert_same(values)
    if weights[0] is not None:
        assert sizes[0] / sum(sizes) == pytest.approx(weights[0] / sum(weights), abs=0.05)


def test_i16_a_slow_path_gets_a_share_that_it_can_carry(two, faulty_path, caplog):
    """Measured at the start: 4 times slower, so a fifth of the bytes, and nothing to complain of."""
    faulty_path(two[1], bytes_per_second=40 * MiB)
    with caplog.at_level(logging.WARNING, logger="offload.store"):
        values, sizes = trained(entries(two, None, None), steps=3)
    assert_same(values)
    assert sizes[1] < 0.25 * sum(sizes)
    assert "was busy for" not in caplog.text


def test_i16_a_path_slower_than_its_weight_is_told_of_while_the_run_goes_on(two, faulty_path, caplog):
    """Equal weights, the second 4 times slower or worse: same bits, and one line that says which and what to do."""
    faulty_path(two[1], bytes_per_second=25 * MiB)
    model, optimizer = prepared(entries(two, 1, 1))
    with contextlib.closing(optimizer.engine), caplog.at_level(logging.WARNING, logger="offload.store"):
        for step in range(3):
            model(torch.full((1, 1024), 0.1 * step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [r.getMessage() for r in caplog.records if "was busy for" in r.getMessage()]
        for name, value in model.state_dict().items():
            assert torch.equal(value, in_memory()[name]), name
    (text,) = told
    assert text.startswith(f"{two[1]} was busy for") and "give the first a smaller weight" in text


@pytest.fixture
def small(two):
    """The second path is a file system of 6 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(two[1])]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield two
    subprocess.run(["umount", str(two[1])], check=True)


def test_i16_a_full_path_gets_what_fits(small, caplog):
    with caplog.at_level(logging.WARNING, logger="offload.store"):
        values, sizes = trained(entries(small, 1, 1))
    assert_same(values)
    assert 4 * MiB < sizes[1] < 6 * MiB < sizes[0]
    (text,) = [r.getMessage() for r in caplog.records if "too little free space" in r.getMessage()]
    assert text.startswith(f"{small[1]} has 6.00 MiB free")


def test_i16_a_full_path_without_a_weight_gets_what_fits(small):
    """There is no room to measure it."""
    values, sizes = trained(entries(small, None, None))
    assert_same(values)
    assert sizes[1] < 6 * MiB < sizes[0]


def test_i16_both_full_is_refused_before_step_1(small, tmp_path):
    paths = [small[1], small[1] / "below"]
    paths[1].mkdir()
    with pytest.raises(
        StoreError, match=r"the swap files need .* MiB and free are .* MiB on .*second, "
    ) as caught:
        trained(entries(paths, 1, 1))
    assert caught.value.errno == errno.ENOSPC
    paths[1].rmdir()


@pytest.mark.parametrize("fail_at", [3, 12, 30])
def test_i16_an_error_names_its_drive(two, faulty_path, fail_at):
    faulty_path(two[1], fail_at=fail_at, fail_errno=errno.EIO)
    with pytest.raises(OffloadError) as caught:
        trained(entries(two, 1, 1))
    error = caught.value if isinstance(caught.value, TransferError) else caught.value.__cause__
    assert error.errno == errno.EIO and Path(error.filename).is_relative_to(two[1])


def test_i16_a_path_that_is_not_there_is_refused_and_the_other_left_clean(two):
    two[1].rmdir()
    two[1].write_text("a file")
    with pytest.raises(StoreError, match="is not a directory") as caught:
        trained(entries(two, 1, 1))
    assert caught.value.filename == str(two[1])
    two[1].unlink()
