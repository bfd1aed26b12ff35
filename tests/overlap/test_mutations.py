"""Each rule of ordering and ownership, taken away alone, is missed by somebody: a training that is right with it.

A scenario is a short training on the simulated accelerator; its oracle is the same one on the CPU. A mutation takes
one rule out of the code. It is caught where the accelerator reports an access that no event orders, or where the
numbers, the bytes moved, or the finiteness of a gradient are not those of the CPU.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import Outcome, Placement, Training, train_offloaded
from torch import nn
from torch.nn import functional as F

import offload
from offload import accel, gradients, landing, lift, links, mover
from offload.accel.simulated import SimulatedAccelerator, SimulatedStream
from offload.errors import OffloadError

SEEDS = range(2)


# -- scenarios --------------------------------------------------------------------------------------------


def training(param, state, update="step", **settings):
    """The loop of the step tests."""

    def run(swap_path):
        return train_offloaded(
            Training(**{"steps": 3, **settings}), Placement(param, state, update), swap_path
        )

    return run


def custom(loss_of, param="nvme", state="nvme", update="step", build=None):
    """A loop of its own: ``loss_of(model, optimizer, batch)`` gives the loss to differentiate before the step."""

    def run(swap_path):
        trained = Training(steps=3)
        model, optimizer = offload.prepare(
            trained.model() if build is None else build(),
            trained.config(Placement(param, state, update), swap_path),
        )
        outcome = Outcome()
        with contextlib.closing(optimizer.engine) as opened:
            for batch in trained.batches():
                loss = loss_of(model, optimizer, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                outcome.losses.append(loss.item())
            if build is not None:
                assert +opened.report().moved == opened.report().predicted
            for stored in opened.partition.trainable:
                outcome.masters[stored.name] = offload.read_master(opened, stored)
        return outcome

    return run


def thrown_away(model, optimizer, batch):
    """Sums that the user throws away while their last ones are on their way, and a new gradient right behind."""
    for factor in (3, 7):
        (factor * model(batch)).backward()
    optimizer.zero_grad()
    model.positions.weight.square().sum().backward()
    return model(batch)


def kept_view(model, _optimizer, batch):
    """A view of a weight, not of the parameter, that lives through the forward of all other units."""
    kept = model.blocks[0].up.weight.data[:5]
    return model(batch) + kept.square().sum()


def saved_parameter(model, _optimizer, batch):
    """A penalty whose graph has saved the parameter itself, because nobody may pack it."""
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        penalty = model.blocks[-1].up.weight.norm()
    return model(batch) + penalty


def watched_view(model, _optimizer, batch):
    """A view that is read after the step that has changed the weight."""
    if not hasattr(model, "watched"):
        model.watched = model.blocks[1].up.weight.detach()[:5]
    model.watched.isnan()
    return model(batch)


def written_after_evaluation(model, _optimizer, batch):
    """The user writes a weight that compute has been given a moment ago."""
    with torch.no_grad():
        model(batch)
    with offload.gather([model.head.weight], modify=True):
        model.head.weight.data.mul_(0.5)
    return model(batch)


class Branched(nn.Module):
    """A block whose frozen weight is used by an other part of the graph than its trained one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.ParameterDict({"frozen": torch.randn(64, 64) / 8, "trained": torch.randn(64, 64) / 8})
            for _ in range(2)
        )
        for block in self.blocks:
            block["frozen"].requires_grad_(False)
        self.between = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = F.linear(x, block["frozen"])
        x = self.between(x)
        return sum(F.linear(x, block["trained"]).square().mean() for block in self.blocks)


def branched(model, _optimizer, batch):
    return model((batch.float().flatten()[:32] / 128 - 1).outer(torch.linspace(-1, 1, 64)))


ADAPTERS = "blocks.0.norm1 blocks.0.qkv blocks.1.norm1 blocks.1.qkv blocks.1.up blocks.2.norm1 blocks.2.qkv"

SCENARIOS = {
    "nvme": training("nvme", "nvme"),
    "nvme-backward": training("nvme", "nvme", "backward"),
    "host": training("cpu", "cpu"),
    "sums": training("none", "cpu", precision="bf16", accumulation=2, clip_loop=0.5, steps=2),
    "update-on-device": training("nvme", "none"),
    "adapters": training("none", "nvme", "backward", frozen=ADAPTERS),
    "adapters-again": training("none", "nvme", "backward", frozen=ADAPTERS, checkpointing="reentrant"),
    "branched": custom(branched, "none", "nvme", "backward", Branched),
    "thrown-away": custom(thrown_away, "cpu", "cpu"),
    "kept-view": custom(kept_view),
    "saved-parameter": custom(saved_parameter),
    "watched-view": custom(watched_view, "none", "cpu"),
    "written": custom(written_after_evaluation, "cpu", "cpu"),
    "written-under-an-update-on-device": custom(written_after_evaluation, "cpu", "none"),
}
UNPINNED = {"unpinned": training("nvme", "cpu")}


_on_cpu = {}


def on_cpu(name, swap_path):
    """The oracle, once for each scenario."""
    if name not in _on_cpu:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(accel.ENVIRONMENT, "cpu")
            _on_cpu[name] = (SCENARIOS | UNPINNED)[name](swap_path)
    return _on_cpu[name]


def on_accelerator(name, seed, swap_path):
    """Runs a scenario and compares it with the CPU."""
    expected = on_cpu(name, swap_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(accel.ENVIRONMENT, f"simulated:{seed}")
        if name in UNPINNED:
            patch.setattr(SimulatedAccelerator, "register", refuse_large)
        (SCENARIOS | UNPINNED)[name](swap_path).assert_same_bits(expected)


_register = SimulatedAccelerator.register


def refuse_large(self, slab):
    self.register_bytes_max = 10_000
    _register(self, slab)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*SCENARIOS, *UNPINNED])
def test_right_with_every_rule(name, seed, swap_path):
    on_accelerator(name, seed, swap_path)


# -- mutations --------------------------------------------------------------------------------------------


def stream_waits_for_nothing(name):
    wait = SimulatedStream.wait

    def mutated(self, event):
        if self.name != name:
            wait(self, event)

    return SimulatedStream, "wait", mutated


def nothing(*_args, **_kwargs):
    return None


def done_at_once(self, event, source):
    self._event, self._source = event, None


def give_up_the_source(self, event, source):
    self._event, self._source = event, source[:0].clone()


def spoil_without_idle(self, slot, size=None):
    self._stale[slot] = self.halves[slot].numel() if size is None else max(size, self._stale[slot])
    self._accelerator.forget(self.halves[slot][: self._stale[slot]])


def change_at_once(self, slot, unit):
    self._changing.add(unit)


def change_without_hold(self, slot, unit):
    self.settle(slot)


def staging_that_is_not_waited_for(self, device, host):
    if self._staging is None:
        self._staging = self._make_staging()
    for begin in range(0, host.numel(), self._staging.numel()):
        piece = host[begin : begin + self._staging.numel()]
        staging = self._staging[: piece.numel()]
        staging.copy_(piece)
        self._accelerator.copy(device[begin : begin + piece.numel()], staging, self._h2d)


def never_waiting_for_ordinary_memory(self, host, device, plane):
    self._ledger.count("d2h", plane, device.nbytes)
    self._d2h.wait(self._accelerator.compute.record())
    self._accelerator.copy(host, device, self._d2h)
    return links.CopyTicket(self._d2h.record(), device) if self._host.is_pinned(host) else links.DoneTicket()


def second_at_once(self, first, start_second):
    self._now, self._start_second = start_second(), start_second
    self._is_second = True


def staging_free_at_once(self):
    return self._staging[0]


def fetch_without_settling(self, stored, view, device):
    shown = _show_offloaded(self, stored, view, device)
    shown.fetch = lambda: view.to(device, copy=True)
    return shown


def land_over_an_older_one(self, stored, plane, grad, *, add):
    if add or grad.dtype != plane.dtype:
        _land(self, stored, plane, grad, add=add)
    else:
        to = plane[stored.placed.begin : stored.placed.end]
        flat = landing._in_plane_order(stored, grad)
        self._send(landing._Crossing(stored, flat, to), flat)


def take_what_is_there(self):
    return [self.present(unit) for unit in range(len(self.planes))]


def start_whoever_reads(self, slot, unit, *, is_read=False):
    _start(self, slot, unit)


def spoil_all(self, unit, size=None):
    _spoil(self, unit)


_spoil = mover.Mover.spoil
_land = landing.CrossingLanding.land
_show_offloaded = gradients.WaitingGradients._show_offloaded
_start = lift.Lifts.start

MUTATIONS = {
    # 1: a copy to the device waits until compute has read what it overwrites
    "a lift does not wait until its slot is idle": ("nvme", stream_waits_for_nothing("h2d")),
    "idle is not noted when a half becomes stale": ("nvme", (lift.Lifts, "spoil", spoil_without_idle)),
    # 2: compute waits for what is copied to it
    "compute does not wait for a lift": ("nvme", stream_waits_for_nothing("compute")),
    # 3: a copy to the host waits until compute has made its source
    "a gradient leaves before it is made": ("nvme", stream_waits_for_nothing("d2h")),
    # 4: host memory and sources stay until the host has seen the event
    "the source of a copy is given up at once": ("nvme", (links.CopyTicket, "__init__", give_up_the_source)),
    "a copy to the host is not waited for": ("nvme-backward", (links.CopyTicket, "__init__", done_at_once)),
    "a slot is read into while it is being lifted": ("nvme", (lift.Lifts, "settle", nothing)),
    "weights change while they are being lifted": ("written", (lift.Lifts, "begin_change", change_at_once)),
    "the step takes gradients before they arrive": (
        "nvme", (gradients.WaitingGradients, "all_present", take_what_is_there),
    ),
    "a unit is updated before its gradients arrive": (
        "nvme-backward", (landing.CrossingLanding, "arrived", lambda self, unit: links.DoneTicket()),
    ),
    "the staging of lifts is reused at once": (
        "unpinned", (links.DeviceLinks, "_through_staging", staging_that_is_not_waited_for),
    ),
    "copies to ordinary memory are not waited for": (
        "unpinned", (links.DeviceLinks, "to_host", never_waiting_for_ordinary_memory),
    ),
    "the staging of gradients is reused at once": (
        "sums", (landing.CrossingLanding, "_free_staging", staging_free_at_once),
    ),
    "a gradient is shown before it has arrived": (
        "sums", (gradients.WaitingGradients, "_show_offloaded", fetch_without_settling),
    ),
    "a gradient lands over an older one on its way": (
        "thrown-away", (landing.CrossingLanding, "land", land_over_an_older_one),
    ),
    "weights are stored before they are in host memory": (
        "update-on-device", (links.ThenTicket, "__init__", second_at_once),
    ),
    # ownership
    "autograd adds to a gradient that is elsewhere": (
        "sums", (gradients.WaitingGradients, "before_accumulation", nothing),
    ),
    "a fetched unit is not lifted": ("nvme", (lift.Lifts, "spoil", nothing)),
    "an updated unit is not lifted": ("host", (mover.Mover, "spoil", nothing)),
    "a slot is reused while a view looks at it": (
        "kept-view", (mover.Slot, "is_looked_at", property(lambda self: False)),
    ),
    "a unit may not be lifted for good once it changes": ("host", (lift.Lifts, "end_change", nothing)),
    "half an update is lifted": ("branched", (lift.Lifts, "begin_change", change_without_hold)),
    "frozen weights become stale with the others": (
        "adapters-again", (mover.Mover, "spoil", spoil_all),
    ),
    "a view is lifted over while compute reads it": ("watched-view", (lift.Lifts, "start", start_whoever_reads)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("rule", MUTATIONS)
def test_missed_without_one_rule(rule, swap_path, monkeypatch):
    name, (owner, attribute, mutated) = MUTATIONS[rule]
    on_cpu(name, swap_path)
    monkeypatch.setattr(owner, attribute, mutated)
    for seed in SEEDS:
        try:
            on_accelerator(name, seed, swap_path)
        except AssertionError:  # an OrderingError is one
            return
        except OffloadError as error:
            assert "not finite" in str(error) or "NaN" in str(error)
            return
    pytest.fail(f"nobody misses the rule: {rule}")
