"""Several swap paths: where pieces lie, what each path gets, and what comes back."""

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from offload.bytesize import PAGE_BYTES
from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.errors import StoreError
from offload.inventory import ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.placement import Placement, SwapPaths
from offload.plan import MemoryPlan
from offload.store.drives import fit_shares, shares_of
from offload.store.layout import PIECE_BYTES_MIN, StoreLayout
from offload.store.swap import SwapStore

MiB = 1 << 20


def plan_of(sizes):
    params = [ParamInfo(f"blocks.{i}.weight", (size,), 2, True) for i, size in enumerate(sizes)]
    placement = Placement(
        precision="bf16", param_home="nvme", state_home="nvme", update="step", grad_itemsize=2, micro_batches=1,
        host_bytes=1 << 40,
    )  # fmt: skip
    return MemoryPlan.build(placement, build_inventory(params, weight_itemsize=2))


@pytest.mark.parametrize("seed", range(20))
def test_extents_tile_every_file_in_proportion(seed):
    rng = random.Random(seed)
    plan = plan_of([rng.randint(1, 4 * MiB) for _ in range(rng.randint(1, 30))])
    weights = [rng.uniform(0.2, 4) for _ in range(rng.randint(1, 5))]
    shares = [weight / sum(weights) for weight in weights]
    layout = StoreLayout(plan, shares, shares)
    everything = [*layout.weights, *layout.states]
    for path, size in enumerate(layout.sizes):
        extents = sorted((e for s in everything for e in s.extents if e.path == path), key=lambda e: e.offset)
        end = 0
        for extent in extents:
            assert extent.offset == end and extent.size % PAGE_BYTES == 0 and extent.size > 0
            end += extent.size
        assert end == size
    assert sum(layout.sizes) == plan.bytes_total("nvme")
    for stripes, wanted in (
        (layout.weights, plan.inventory.weight_bytes),
        (layout.states, plan.inventory.elements * 10),
    ):
        for path, share in enumerate(shares):
            given = sum(e.size for s in stripes for e in s.extents if e.path == path)
            largest = max(s.size for s in stripes)
            assert abs(given - share * wanted) <= max(largest, PIECE_BYTES_MIN)
    for stripes in everything:
        assert len({e.path for e in stripes.extents}) == len(stripes.extents)


@pytest.mark.parametrize("seed", range(20))
def test_a_part_is_its_bytes(seed):
    rng = random.Random(seed)
    layout = StoreLayout(plan_of([3 * MiB]), [0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    (stripes,) = layout.weights
    begin, end = sorted(rng.randint(0, stripes.size) for _ in range(2))
    at = begin
    for first, last, extent in stripes.part(begin, end):
        assert first == at and extent.size == last - first > 0
        whole = next(e for e in stripes.extents if e.path == extent.path)
        assert whole.offset <= extent.offset and extent.offset + extent.size <= whole.offset + whole.size
        at = last
    assert at == end or begin == end
    with pytest.raises(AssertionError):
        list(stripes.part(0, stripes.size + 1))


def paths_under(tmp_path, *weights):
    paths = []
    for index, weight in enumerate(weights):
        (tmp_path / f"drive{index}").mkdir()
        paths.append(SwapPath(str(tmp_path / f"drive{index}"), weight))
    names = frozenset(path.path for path in paths)
    return SwapPaths(tuple(paths), names, names)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 2, 5, 1), (None, None)])
@pytest.mark.usefixtures("every_drive")
def test_planes_come_back_from_several_paths(tmp_path, weights, nothing_left_behind):
    plan, ledger = plan_of([2 * MiB, 5000, 1 * MiB]), Ledger()
    paths = paths_under(tmp_path, *weights)
    store = SwapStore.open(paths, plan, Aio(), ledger)
    ledger.start_steps()
    generator = torch.Generator().manual_seed(0)

    def noise(size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    planes = [noise(unit.weight_bytes) for unit in plan.inventory.units]
    states = {chunk: noise(plan.chunk_bytes(chunk)) for chunk in plan.chunks}
    tickets = [store.write_weight(unit, plane, 0, plane.numel()) for unit, plane in enumerate(planes)]
    tickets += [store.write_state(chunk, state) for chunk, state in states.items()]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    part = noise(3 * PAGE_BYTES)
    planes[0][PAGE_BYTES : 4 * PAGE_BYTES] = part
    store.write_weight(0, planes[0], PAGE_BYTES, 4 * PAGE_BYTES).wait()
    for unit, plane in reversed(list(enumerate(planes))):
        slot = torch.zeros(plane.numel(), dtype=torch.uint8)
        store.read_weight(unit, slot).wait()
        assert torch.equal(slot, plane)
    for chunk, state in states.items():
        buffer = torch.zeros_like(state)
        store.read_state(chunk, buffer).wait()
        assert torch.equal(buffer, state)
    whole = sum(map(len, planes)) + sum(map(len, states.values()))
    assert sum(ledger.moved.values()) == 2 * whole + 3 * PAGE_BYTES
    store.update_seconds()
    assert ledger.seconds["nvme_read"] > 0
    store.close()
    assert not any(any(drive.iterdir()) for drive in tmp_path.iterdir())


@pytest.mark.usefixtures("every_drive")
def test_weights_and_states_on_paths_of_their_own(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = SwapPath(str(tmp_path / "a"), 1), SwapPath(str(tmp_path / "b"), 1)
    paths = SwapPaths((a, b), frozenset({a.path}), frozenset({b.path}))
    plan = plan_of([1 * MiB])
    store = SwapStore.open(paths, plan, Aio(), Ledger())
    sizes = [next((tmp_path / name).rglob("planes.swap")).stat().st_size for name in "ab"]
    assert sizes == [plan.inventory.weight_bytes, plan.inventory.elements * 10]
    store.close()


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.usefixtures("every_drive")
def test_one_bad_path_leaves_nothing_on_any(tmp_path, broken, nothing_left_behind):
    paths = paths_under(tmp_path, 1, 1, 1)
    bad = tmp_path / f"drive{broken}"
    bad.rmdir()
    bad.write_text("a file")
    with pytest.raises(StoreError, match=f"drive{broken}"):
        SwapStore.open(paths, plan_of([1 * MiB]), Aio(), Ledger())
    assert not any(any(drive.iterdir()) for drive in tmp_path.iterdir() if drive.is_dir())


# -- shares -----------------------------------------------------------------------------------------------


def drive(root, free):
    return SimpleNamespace(directory=SimpleNamespace(root=root, free_bytes=lambda: free))


class Root:
    """A directory on a file system of its own."""

    def __init__(self, device):
        self.device = device

    def stat(self):
        return SimpleNamespace(st_dev=self.device)

    def __str__(self):
        return f"/mnt/{self.device}"


def test_weights_are_shares():
    assert shares_of([SwapPath("/a", 3.0), SwapPath("/b", 1.0)], []) == [0.75, 0.25]
    assert shares_of([SwapPath("/a", None)], []) == [1.0]


def test_measured_bandwidths_are_shares(monkeypatch):
    monkeypatch.setattr("offload.store.drives.measure", lambda drives: [3e9, 1e9])
    assert shares_of([SwapPath("/a"), SwapPath("/b")], [None, None]) == [0.75, 0.25]
    assert shares_of([SwapPath("/a", 1.0), SwapPath("/b")], [None, None]) == pytest.approx([2 / 3, 1 / 3])


def test_a_full_path_gets_what_fits(caplog):
    with caplog.at_level(logging.WARNING):
        shares = fit_shares([0.5, 0.5], 1000, [drive(Root(1), 100), drive(Root(2), 10_000)])
    assert shares == [0.098, 0.902] and "too little free space" in caplog.text
    three = fit_shares(
        [0.4, 0.4, 0.2], 1000, [drive(Root(1), 100), drive(Root(2), 500), drive(Root(3), 10**6)]
    )
    assert three == pytest.approx([0.098, 0.49, 0.412])


def test_paths_on_one_file_system_share_its_space():
    fits = [drive(Root(1), 1100), drive(Root(1), 1100)]
    assert fit_shares([0.5, 0.5], 1000, fits) == [0.5, 0.5]
    with pytest.raises(StoreError, match=r"need 1\.95 KiB"):
        fit_shares([0.5, 0.5], 2000, fits)


def test_all_full_is_refused_with_the_sums():
    with pytest.raises(StoreError, match=r"100 B on /mnt/1, 200 B on /mnt/2"):
        fit_shares([0.5, 0.5], 1000, [drive(Root(1), 100), drive(Root(2), 200)])
