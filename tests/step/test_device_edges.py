"""With the test accelerator: what is pinned and for how long, buffers, and where inputs have to be."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.accel.simulated import SimulatedAccelerator
from offload.tiers.host import HostTier


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        shared = torch.arange(3)
        for layer in (self.first, self.second):
            layer.register_buffer("scale", shared, persistent=False)

    def forward(self, x):  # (N, 40) -> scalar
        return self.second(torch.relu(self.first(x))).square().mean()


def config(**zero):
    return {
        "accelerator": "simulated",
        "memory": {"host_bytes": "100MB", "device_bytes": "200MB"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", **zero},
            "offload_optimizer": {"device": "cpu", **zero},
        },
    }


def train(settings):
    """Losses of three steps, the most bytes that were pinned, and the weights."""
    torch.manual_seed(0)
    model, optimizer = offload.prepare(Net(), settings)
    pinned = optimizer.engine.accelerator.registered_bytes
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 40, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = model.state_dict()
    optimizer.engine.close()
    assert optimizer.engine.accelerator.registered_bytes == 0
    return losses, pinned, weights


def test_pin_memory_false_pins_no_plane_and_changes_nothing():
    losses, pinned, weights = train(config())
    other_losses, other_pinned, other_weights = train(config(pin_memory=False))
    assert pinned > 2 * 40 * 40 * 4 and other_pinned == 0
    assert losses == other_losses
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_prepare_that_fails_halfway_leaves_nothing_pinned(monkeypatch):
    opened = []
    monkeypatch.setattr(
        SimulatedAccelerator,
        "register",
        lambda self, slab, register=SimulatedAccelerator.register: (
            opened.append(self),
            register(self, slab),
        ),
    )
    values = offload.construct.initial_value
    calls = iter(range(100))

    def fail_at_the_third(param):
        if next(calls) == 2:
            raise RuntimeError("the disk is gone")
        return values(param)

    monkeypatch.setattr(offload.construct, "initial_value", fail_at_the_third)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        offload.prepare(Net(), config())
    assert opened and all(accelerator.registered_bytes == 0 for accelerator in opened)


def test_buffers_that_are_shared_stay_shared(monkeypatch):
    model = Net()
    offload.api._move_buffers(model, torch.device("meta"))
    assert model.first.scale.is_meta and model.first.scale is model.second.scale


def test_a_forked_child_does_not_get_pinned_memory():
    """Its copies would part the parent's pages from the device's on older kernels."""
    accelerator = SimulatedAccelerator()
    tier = HostTier(accelerator)
    (pinned,) = tier.allocate("weights", [1 << 20], pinned=True)
    (ordinary,) = tier.allocate("optimizer state", [1 << 20])
    assert "dc" in flags(pinned) and "dc" not in flags(ordinary)
    accelerator.close()
    tier.close()
    assert "dc" not in flags(pinned)


def flags(tensor):
    """VmFlags of the mapping that holds a tensor."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16):
            return re.search(r"VmFlags: (.*)", mapping)[1].split()
    raise AssertionError("no mapping")


def test_what_is_gathered_is_not_streamed_as_well():
    """A loop over tokens inside gather moves nothing, and what it computes is the same."""
    torch.manual_seed(0)
    model, optimizer = offload.prepare(Net(), config())
    ledger, x = optimizer.engine.ledger, torch.ones(2, 40)
    with torch.no_grad():
        expected = model(x)
        assert ledger.link_bytes()["h2d"] > 0
        with offload.gather(model):
            before = ledger.link_bytes()["h2d"]
            assert [model(x).item() for _ in range(3)] == [expected.item()] * 3
            assert ledger.link_bytes()["h2d"] == before
        assert model(x).item() == expected.item()
    optimizer.engine.close()
