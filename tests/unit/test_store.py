"""The swap directory and the store: who owns it, what is refused, what is left, what comes back."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import offload
from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.errors import OffloadError, StoreError
from offload.inventory import ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.placement import Placement, SwapPaths
from offload.plan import MemoryPlan
from offload.store.directory import SwapDirectory
from offload.store.layout import StoreLayout
from offload.store.swap import SwapStore

ROOT = str(Path(offload.__file__).parents[1])
MiB = 1 << 20
FORKS_WITH_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def one(swap_path):
    """A single path for everything."""
    path = str(swap_path)
    return SwapPaths((SwapPath(path),), frozenset({path}), frozenset({path}))


OWNER = """
import sys
from offload.store.directory import SwapDirectory
directory = SwapDirectory(sys.argv[1])
print(directory.path, flush=True)
sys.stdin.read()  # until our parent lets go
directory.close()
"""


@pytest.fixture
def owner(swap_path):
    """A process that owns a directory in the swap path."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(swap_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    process.path = Path(process.stdout.readline().strip())
    yield process
    process.communicate()


# -- paths ------------------------------------------------------------------------------------------------


def test_directory_comes_and_goes(swap_path):
    directory = SwapDirectory(swap_path, rank=3)
    assert directory.path.parent == swap_path and directory.path.name.endswith(f"-{os.getpid()}-rank3")
    assert json.loads((directory.path / "owner.json").read_text())["pid"] == os.getpid()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert swap_path.is_dir()


def test_a_path_is_made_where_its_parent_exists_and_removed_again(tmp_path):
    directory = SwapDirectory(tmp_path / "made")
    assert directory.path.is_dir()
    directory.close()
    assert not (tmp_path / "made").exists()


def test_relative_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for given, root in (("here", tmp_path / "here"), ("~/there", tmp_path / "home" / "there")):
        directory = SwapDirectory(given)
        assert directory.root == root and directory.path.is_dir()
        directory.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home"]


def spoil(tmp_path, kind):
    path = tmp_path / "path"
    if kind == "missing":
        return tmp_path / "a" / "b" / "c"
    if kind == "file":
        path.write_text("x")
    if kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    if kind == "under a file":
        path.write_text("x")
        return path / "swap"
    if kind == "device":
        return Path("/dev/null")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"nvme_path does not exist and neither does .*/a/b; make it, or mount the drive"),
        ("file", "nvme_path is not a directory"),
        ("dangling link", "nvme_path is not a directory"),
        ("under a file", "nvme_path"),
        ("device", "nvme_path is not a directory"),
    ],
)
def test_unusable_path_is_refused_by_name(tmp_path, kind, message):
    path = spoil(tmp_path, kind)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=message) as caught:
        SwapDirectory(path)
    assert caught.value.filename == str(path) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


UNPRIVILEGED = """
import os
from offload.store.directory import SwapDirectory
from offload.errors import StoreError
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    SwapDirectory({path!r})
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("mode", [0o555, 0o666])
def test_unwritable_path(tmp_path, mode, run_forked):
    """As an ordinary user: root may write anywhere, so the test gives its rights up first."""
    path = tmp_path / "swap"
    path.mkdir()
    path.chmod(mode)
    for parent in path.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            if os.getuid() != 0 or not str(parent).startswith("/tmp/pytest"):
                break
            parent.chmod(0o755)
    result = run_forked(UNPRIVILEGED.format(path=str(path)))
    path.chmod(0o755)
    assert "nvme_path" in result.stdout and str(path) in result.stdout, result.stderr
    assert list(path.iterdir()) == []


# -- owners -----------------------------------------------------------------------------------------------


def test_two_owners_in_one_process(swap_path):
    first, second = SwapDirectory(swap_path), SwapDirectory(swap_path)
    assert first.path != second.path and first.path.is_dir()
    first.close()
    assert second.path.is_dir()
    second.close()


def test_a_live_owner_is_left_alone(swap_path, owner):
    directory = SwapDirectory(swap_path)
    assert owner.path.is_dir() and directory.path.is_dir()
    directory.close()
    assert owner.path.is_dir()


def test_the_directory_of_a_killed_owner_is_removed_with_a_warning(swap_path, owner, caplog):
    (owner.path / "planes.swap").write_bytes(bytes(5000))
    owner.kill()
    owner.wait()
    assert owner.path.is_dir()
    with caplog.at_level(logging.WARNING):
        directory = SwapDirectory(swap_path)
    assert not owner.path.exists()
    assert str(owner.path) in caplog.text and f'"pid": {owner.pid}' in caplog.text
    directory.close()


def test_what_is_not_ours_is_left_alone(swap_path):
    strangers = [swap_path / "offload-notes-rank0", swap_path / "offload-1-2-rank0"]
    strangers[0].write_text("a file")
    strangers[1].mkdir()
    link = swap_path / "offload-3-4-rank0"
    link.mkdir()
    (link / "owner.json").symlink_to(strangers[0])
    SwapDirectory(swap_path).close()
    assert strangers[0].read_text() == "a file" and strangers[1].is_dir() and link.is_dir()
    (link / "owner.json").unlink()
    link.rmdir()
    strangers[1].rmdir()
    strangers[0].unlink()


def test_half_made_directories_go_when_they_are_old(swap_path):
    young, old = swap_path / ".offload-1-2-rank0", swap_path / ".offload-3-4-rank0"
    for path in (young, old):
        path.mkdir()
        (path / "owner.json").write_text("{}")
    os.utime(old, (time.time() - 1000,) * 2)
    SwapDirectory(swap_path).close()
    assert young.is_dir() and not old.exists()
    (young / "owner.json").unlink()
    young.rmdir()


@FORKS_WITH_THREADS
def test_a_forked_child_does_not_remove(swap_path):
    directory = SwapDirectory(swap_path)
    child = os.fork()
    if child == 0:
        directory.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.path.is_dir()
    directory.close()


ORPHAN = """
import os, time
from offload.store.directory import SwapDirectory
directory = SwapDirectory({path!r})
child = os.fork()
if child == 0:
    os.close(0); os.close(1); os.close(2)
    time.sleep(30)
    os._exit(0)
print(child, directory.path, flush=True)
os._exit(1)
"""


def test_a_forked_child_does_not_hold_the_lock(swap_path, run_forked):
    """A worker that outlives its parent does not make the parent's directory look owned."""
    child, path = run_forked(ORPHAN.format(path=str(swap_path))).stdout.split()
    try:
        assert Path(path).is_dir()
        directory = SwapDirectory(swap_path)
        assert not Path(path).exists()
        directory.close()
    finally:
        os.kill(int(child), signal.SIGKILL)


RACERS = """
import os, sys, time
from offload.store.directory import SwapDirectory
start, racers = time.monotonic() + 0.1, []
for _ in range(2):
    racers.append(os.fork())
    if racers[-1] == 0:
        time.sleep(max(0.0, start - time.monotonic()))
        for _ in range(60):
            directory = SwapDirectory({path!r})
            assert (directory.path / "owner.json").is_file(), "taken away"
            directory.close()
        os._exit(0)
sys.exit(any([os.waitpid(racer, 0)[1] for racer in racers]))
"""


def test_starters_do_not_take_each_other_for_stale(swap_path, run_forked):
    result = run_forked(RACERS.format(path=str(swap_path)))
    assert result.returncode == 0 and "removing" not in result.stderr, result.stderr


# -- space ------------------------------------------------------------------------------------------------


def test_too_little_space_is_refused_with_numbers(swap_path):
    directory = SwapDirectory(swap_path)
    with pytest.raises(
        StoreError, match=r"needs 1.00 EiB|needs 1048576.* TiB and .* are free on /"
    ) as caught:
        directory.check_space(1 << 60)
    assert caught.value.errno == 28
    directory.close()


FORMATS = pytest.mark.parametrize(
    "formats", [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8")], ids="-".join
)
"""Precision of training and format of state."""


def plan_of(formats=("bf16", "fp32"), sizes=(5000, 100, 40_000), chunk=8192):
    precision, state_format = formats
    itemsize = 2 if precision == "bf16" else 4
    params = [ParamInfo(f"blocks.{i}.w.weight", (size,), itemsize, True) for i, size in enumerate(sizes)]
    placement = Placement(
        precision=precision, state_format=state_format, param_home="nvme", state_home="nvme", update="step",
        grad_itemsize=4, micro_batches=1, host_bytes=1 << 40, chunk_elements_max=chunk,
    )  # fmt: skip
    return MemoryPlan.build(placement, build_inventory(params, weight_itemsize=itemsize))


@pytest.mark.parametrize("setting", ["space", "backend", "direct"])
def test_a_store_that_cannot_open_leaves_nothing(swap_path, setting, monkeypatch, nothing_left_behind):
    settings = Aio()
    if setting == "space":
        monkeypatch.setattr(MemoryPlan, "bytes_total", lambda self, tier: 1 << 60)
    elif setting == "backend":
        object.__setattr__(settings, "backend", "no such backend")
    else:
        monkeypatch.setattr("offload.store.drives.Queue.preallocate", lambda self, size: 1 / 0)
    with pytest.raises((OffloadError, ZeroDivisionError)):
        SwapStore.open(one(swap_path), plan_of(), settings, Ledger())


@pytest.mark.usefixtures("every_drive")
def test_the_file_has_its_space_from_the_start(swap_path):
    plan = plan_of(sizes=(1 << 20,))
    store = SwapStore.open(one(swap_path), plan, Aio(), Ledger())
    status = (store.path / "planes.swap").stat()
    assert status.st_size == plan.bytes_total("nvme")
    assert status.st_blocks * 512 >= status.st_size
    store.close()
    store.close()


@FORMATS
def test_extents_tile_the_file(formats):
    plan = plan_of(formats)
    layout = StoreLayout(plan)
    extents = [extent for stripes in (*layout.weights, *layout.states) for extent in stripes.extents]
    assert_tiled(extents, 0, plan.bytes_total("nvme"))
    assert layout.sizes == [plan.bytes_total("nvme")]


def assert_tiled(extents, path, size):
    """The extents on a path follow each other from 0 to its size."""
    on_path = sorted((extent for extent in extents if extent.path == path), key=lambda extent: extent.offset)
    assert on_path[0].offset == 0 and on_path[-1].offset + on_path[-1].size == size
    assert all(a.offset + a.size == b.offset for a, b in itertools.pairwise(on_path))


@FORMATS
@pytest.mark.usefixtures("every_drive")
def test_planes_come_back_as_written(swap_path, formats):
    """Weights and states, written in one order and read in another; the ledger counts."""
    plan, ledger = plan_of(formats), Ledger()
    store = SwapStore.open(one(swap_path), plan, Aio(), ledger)
    generator = torch.Generator().manual_seed(0)

    def noise(size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    weights = [noise(unit.weight_bytes) for unit in plan.inventory.units]
    states = {chunk: noise(plan.chunk_bytes(chunk)) for chunk in plan.chunks}
    tickets = [store.write_weight(u, plane, 0, plane.numel()) for u, plane in enumerate(weights)]
    tickets += [store.write_state(chunk, state) for chunk, state in states.items()]
    for ticket in tickets:
        ticket.wait()
    part = noise(4096)
    weights[2][8192:12288] = part
    store.write_weight(2, weights[2], 8192, 12288).wait()
    for unit in reversed(range(len(weights))):
        slot = torch.zeros(plan.bytes_total("nvme"), dtype=torch.uint8)
        store.read_weight(unit, slot).wait()
        assert torch.equal(slot[: weights[unit].numel()], weights[unit])
        assert not slot[weights[unit].numel() :].any()
    for chunk in reversed(plan.chunks):
        buffer = torch.zeros_like(states[chunk])
        store.read_state(chunk, buffer).wait()
        assert torch.equal(buffer, states[chunk])
    total = plan.bytes_total("nvme")
    assert ledger.link_bytes() == {"nvme_write": total + 4096, "nvme_read": total}
    store.close()


@FORMATS
@pytest.mark.usefixtures("every_drive")
def test_moments_never_written_are_zeros_and_cost_nothing(swap_path, formats):
    plan, ledger = plan_of(formats), Ledger()
    store = SwapStore.open(one(swap_path), plan, Aio(), ledger)
    for chunk in plan.chunks:
        residual = torch.full((chunk.elements * plan.placement.residual_itemsize,), 7, dtype=torch.uint8)
        if residual.numel():
            store.write_residual(chunk, residual).wait()
        ledger.moved.clear()
        buffer = torch.full((plan.chunk_bytes(chunk),), 0xA5, dtype=torch.uint8)
        store.read_state(chunk, buffer).wait()
        if residual.numel():
            assert torch.equal(buffer[: residual.numel()], residual)
            assert not buffer[residual.numel() :].any()
            assert ledger.moved == {("nvme_read", "residual"): residual.numel()}
        else:
            assert not buffer.any() and not ledger.moved
    store.close()
