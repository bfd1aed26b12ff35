"""How many generations are kept where nobody says so: two where there is room, and why in one line."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

from offload.config import OffloadConfig
from offload.durability import choose_generations
from offload.inventory import ParamInfo, build_inventory
from offload.metrics import Mount
from offload.placement import placement_of, swap_paths_of
from offload.plan import MemoryPlan

INVENTORY = build_inventory(
    [ParamInfo(f"blocks.{index}.weight", (1000, 100), 2, True) for index in range(4)]
    + [ParamInfo("blocks.0.table", (50_000,), 2, False)],
    weight_itemsize=2,
)
GIB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    """Sets the free space of every file system."""

    def set_free(size, blocks=1 << 30):
        status = SimpleNamespace(f_blocks=blocks, f_bavail=size // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: status)

    set_free(100 * GIB)
    monkeypatch.setattr("offload.durability.mount_of", lambda path: Mount("/", "ext4", "/dev/x"))
    return set_free


def config(swap, param="nvme", state="nvme", **more):
    path = {"nvme_path": str(swap)}
    return OffloadConfig.from_dict(
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": param, **path},
                "offload_optimizer": {"device": state, **path},
            },
            "memory": {"host_bytes": GIB},
            **more,
        }
    )


def choose(settings):
    placement, why = choose_generations(settings, placement_of(settings), INVENTORY)
    return placement.generations, why


def need(settings, generations):
    placement = dataclasses.replace(placement_of(settings), generations=generations)
    return MemoryPlan.build(placement, INVENTORY).bytes_total("nvme")


def test_two_where_there_is_room(tmp_path, free):
    count, why = choose(config(tmp_path))
    assert count == 2 and "2 chosen, they take" in why and "100 GiB free; after a crash" in why
    least = need(config(tmp_path), 2)
    free(int(least / 0.9) + 8192)
    assert choose(config(tmp_path))[0] == 2
    free(int(least / 0.9) - 8192)
    count, why = choose(config(tmp_path))
    assert count == 1 and "are free; a crash loses the run" in why


def test_the_budget_counts(tmp_path, free):
    one, two = (need(config(tmp_path), count) for count in (1, 2))
    assert choose(config(tmp_path, memory={"host_bytes": GIB, "nvme_bytes": two}))[0] == 2
    count, why = choose(config(tmp_path, memory={"host_bytes": GIB, "nvme_bytes": two - 1}))
    assert count == 1 and "memory.nvme_bytes does not hold two" in why
    assert choose(config(tmp_path, memory={"host_bytes": GIB, "nvme_bytes": one}))[0] == 1


def test_one_where_two_would_keep_nothing(tmp_path, free, monkeypatch):
    assert choose(config(tmp_path, state="cpu")) == (
        1,
        "durability.generations: 1 chosen, optimizer state is not at home on nvme; a crash loses the run",
    )
    monkeypatch.setattr("offload.durability.mount_of", lambda path: Mount("/", "tmpfs", "tmpfs"))
    count, why = choose(config(tmp_path))
    assert count == 1 and f"{tmp_path} is memory" in why


def test_paths_that_are_not_there_yet_and_file_systems_that_do_not_say(tmp_path, free):
    assert choose(config(tmp_path / "swap"))[0] == 2
    assert choose(config(tmp_path / "mnt" / "swap"))[0] == 2
    free(0, blocks=0)
    assert choose(config(tmp_path))[0] == 2


def test_what_is_written_is_done(tmp_path, free):
    free(0)
    for count in (1, 2):
        assert choose(config(tmp_path, durability={"generations": count})) == (count, "")
    assert choose(config(tmp_path, "cpu", "cpu")) == (1, "")


@pytest.mark.parametrize(
    ("param", "state"), [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")]
)
def test_the_plan_counts_both_places_of_everything(tmp_path, param, state):
    """2 and 10 bytes for each element that is trained, twice, and what is frozen once; memory comes on top."""
    settings = config(tmp_path, param, state, durability={"generations": 2})
    plan = MemoryPlan.build(placement_of(settings), INVENTORY)
    elements, whole = INVENTORY.elements, INVENTORY.weight_bytes
    state_bytes = plan.state_bytes(INVENTORY.units)
    assert plan.bytes_total("nvme") == whole + 2 * elements + 2 * state_bytes
    assert "second generation" in plan.report()
    assert ("as committed" in plan.report()) == ("cpu" in (param, state))
    paths = swap_paths_of(settings)
    assert paths is not None and paths.names == (str(tmp_path),)
