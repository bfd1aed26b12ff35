"""Cases of the I/O and memory kind, on the whole engine. (I05, I11, I16 and M13 over saves are beside this file; I02,
I07, I08, I15, M05, S14 in tests/faults, M08 in tests/memory, I12 and what concerns single transfers in tests/io.)"""

import contextlib
import errno
import functools
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import aio, metrics
from offload.errors import ConfigError, OffloadError, TransferError

ODD_SIZES = (1, 511, 4097, 14_412, 51_300)


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (self.weight.float() * x).square().mean()


class Odd(nn.Module):
    """Parameters of sizes that are a multiple of nothing; each layer a block."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.items = nn.ModuleList(Scale(torch.randn(size, generator=generator)) for size in ODD_SIZES)

    def forward(self, x):
        return sum(item(x) for item in self.items)


def config(path, *, device="nvme", precision="bf16", **block):
    place = {"device": device, "nvme_path": str(path)} if device == "nvme" else {"device": device}
    return {
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 4096, "offload_param": place, "offload_optimizer": place,
        },
        **block,
    }  # fmt: skip


def trained(path, *, steps=3, **settings):
    model, optimizer = offload.prepare(Odd(), config(path, **settings))
    with contextlib.closing(optimizer.engine) as engine:
        for step in range(steps):
            model(torch.tensor(0.5 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.settle()
        return {f"{i}": offload.read_master(engine, s) for i, s in enumerate(engine.partition.trainable)}


def assert_same(first, second):
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("block_size", [131072, 262144, 1048576])
@pytest.mark.parametrize(
    ("queue_depth", "thread_count", "backend"), [(4, 1, "threads"), (8, 4, "threads"), (32, 1, "auto")]
)
def test_i01_sizes_of_odd_numbers(swap_path, precision, block_size, queue_depth, thread_count, backend):
    settings = {
        "block_size": block_size, "queue_depth": queue_depth, "thread_count": thread_count,
        "backend": backend,
    }  # fmt: skip
    in_memory = trained(None, device="cpu", precision=precision)
    assert_same(trained(swap_path, precision=precision, aio=settings), in_memory)


def test_every_setting_of_aio_reaches_the_queue(swap_path, monkeypatch):
    asked = []

    def queue(*arguments, **settings):
        asked.append(settings)
        return aio.Queue(*arguments, **settings)

    monkeypatch.setattr("offload.store.drives.Queue", queue)
    settings = {
        "backend": "io_uring", "block_size": 65536, "queue_depth": 5, "thread_count": 3, "direct_io": "off",
        "sqpoll": True,
    }  # fmt: skip
    assert_same(trained(swap_path, aio=settings), trained(None, device="cpu"))
    names = {"block_size": "request_bytes", "thread_count": "threads"}
    wanted = {names.get(name, name): value for name, value in settings.items()}
    (got,) = asked
    assert got == {**wanted, "create": True}


def test_i03_a_file_that_became_short_is_an_error_and_no_step(swap_path):
    """Somebody cuts the swap file: the read says where the file ends, and the step does not count."""
    model, optimizer = offload.prepare(Odd(), config(swap_path, precision="fp32"))
    with contextlib.closing(optimizer.engine) as engine:
        model(torch.tensor(1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()
        (file,) = swap_path.glob("*/planes.swap")
        os.truncate(file, 4096)
        with pytest.raises(TransferError, match="the file ends at 4096 bytes") as caught:
            for _ in range(2):
                model(torch.tensor(1.0)).backward()
                optimizer.step()
        assert caught.value.errno == errno.ENODATA
        assert engine.ledger.steps == 1
        with pytest.raises(OffloadError, match="the engine stopped in step 2"):
            optimizer.step()


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("place", [{"device": "nvme"}, {"device": "nvme", "nvme_path": None}])
def test_i09_no_path(block, place):
    settings = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, block: place}}
    with pytest.raises(ConfigError, match=rf"{block}.*nvme_path"):
        offload.prepare(Odd(), settings)


def test_i09_relative_path_is_resolved_and_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="offload"):
        trained("swap here", steps=1)
    assert f"swap goes to {tmp_path}/swap here, on " in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ramfs(tmp_path):
    """A file system without direct I/O."""
    folder = tmp_path / "ramfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_i10_without_direct_io(ramfs, caplog):
    """Same bits, one warning with the errno; where fallback is forbidden an error, and nothing left."""
    with caplog.at_level(logging.WARNING):
        assert_same(trained(ramfs), trained(None, device="cpu"))
    refusals = [r.getMessage() for r in caplog.records if "direct I/O is refused" in r.getMessage()]
    assert len(refusals) == 1 and "EINVAL" in refusals[0]
    assert "still takes RAM" in caplog.text
    with pytest.raises(TransferError, match="direct_io='auto' goes through the page cache"):
        trained(ramfs, aio={"direct_io": "required"})
    assert list(ramfs.iterdir()) == []


def test_i10_direct_io_refused_at_the_first_transfer(swap_path, monkeypatch):
    monkeypatch.setattr(
        "offload.store.drives.Queue", functools.partial(aio.Queue, faults={"refuse_direct": 1})
    )
    assert_same(trained(swap_path), trained(None, device="cpu"))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOMEM, errno.ENOSYS])
def test_i13_io_uring_refused(swap_path, monkeypatch, caplog, code):
    """The engine goes on with the next backend and says why, once, whatever the number of files."""
    real = aio.refusals._aio.Queue

    def refusing(*, backend, **settings):
        if backend == "io_uring":
            raise aio.refusals._aio.BackendError(code, "io_uring_setup")
        return real(backend=backend, **settings)

    monkeypatch.setattr(aio.refusals._aio, "Queue", refusing)
    monkeypatch.setattr(aio.refusals, "_logged", set())
    with caplog.at_level(logging.WARNING):
        first, second = trained(swap_path), trained(swap_path)
    assert_same(first, second)
    (text,) = [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]
    assert "io_uring" in text and errno.errorcode[code] in text and "using libaio" in text


def test_m04_memory_does_not_grow_with_steps(swap_path):
    """Twenty steps on: buffers are those of the plan, and what has been written is let go."""
    model, optimizer = offload.prepare(Odd(), config(swap_path))
    with contextlib.closing(optimizer.engine) as engine:
        seen = []
        for step in range(24):
            model(torch.tensor(0.1 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(metrics.rss_bytes())
        assert sum(engine._tiers.host.allocated.values()) == engine.plan.bytes_total("host")
        assert seen[-1] - seen[3] < 4 << 20


def test_m13_descriptors_stay_the_same(tmp_path):
    """2,000 writes and waits, 500 that fail: no descriptor more; a removed file's space comes back."""
    path = tmp_path / "swap"

    def descriptors():
        return {fd.name: fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}

    faults = {"fail_at": 2001, "fail_count": 500, "fail_errno": errno.EIO}
    before = descriptors()
    with aio.Queue(path, faults=faults) as queue:
        opened = descriptors()
        for turn in range(2000):
            queue.write(b"x" * 512, turn * 512).wait()
        for turn in range(500):
            with pytest.raises(TransferError):
                queue.write(b"x" * 512, turn * 512).wait()
        assert len(descriptors()) == len(opened)
        path.unlink()
    assert len(descriptors()) == len(before)
    assert not any(str(tmp_path) in str(target) for target in descriptors().values())
