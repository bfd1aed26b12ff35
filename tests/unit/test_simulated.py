"""The simulated accelerator itself: every kind of ordering fault is reported, right sequences are not."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.accel import native_watchers
from offload.accel.simulated import QUESTIONS_MAX, OrderingError, SimulatedAccelerator
from offload.aio import Queue
from offload.bytesize import MiB
from offload.errors import PlanError
from offload.ledger import Ledger
from offload.links import DeviceLinks, NvmeLinks
from offload.optim import kernels
from offload.tiers.device import DeviceTier
from offload.tiers.host import HostTier

SEEDS = range(20)
SIZE = 64


@pytest.fixture
def opened():
    """Opens accelerators; closes them at the end, whatever is still queued."""
    accelerators = []

    def make(seed=0, *, lazy=False, **settings):
        accelerator = SimulatedAccelerator(seed, **settings)
        if lazy:
            accelerator.eagerness = 0.0  # copies run when somebody waits, not before
        accelerators.append(accelerator)
        return accelerator

    yield make
    for accelerator in accelerators:
        with contextlib.suppress(OrderingError):
            accelerator.close()
    assert torch._C._len_torch_dispatch_stack() == 0 and not native_watchers


def floats(value, size=SIZE):
    return torch.full((size,), value)


def on_device(accelerator, size=SIZE):
    return accelerator.allocate(size * 4).view(torch.float32)


def pinned(accelerator, value, size=SIZE):
    host = floats(value, size)
    accelerator.register(host.view(torch.uint8))
    return host


@pytest.mark.parametrize("seed", SEEDS)
def test_right_sequences_pass_and_compute_right(seed, opened):
    """There, doubled, and back, three times over the same memory, with every event that is needed."""
    accelerator = opened(seed)
    h2d, d2h = accelerator.stream("h2d"), accelerator.stream("d2h")
    device, there, back = on_device(accelerator), pinned(accelerator, 1.0), pinned(accelerator, 0.0)
    idle = accelerator.compute.record()
    for turn in range(3):
        there.fill_(turn + 1.0)
        h2d.wait(idle)
        accelerator.copy(device, there, h2d)
        lifted = h2d.record()
        accelerator.compute.wait(lifted)
        device.mul_(2)
        d2h.wait(accelerator.compute.record())
        accelerator.copy(back, device, d2h)
        arrived = d2h.record()
        questions = 0
        while not arrived.done():
            questions += 1
        assert questions <= QUESTIONS_MAX
        assert torch.equal(back, floats(2 * (turn + 1.0)))
        lifted.wait()  # the host may write its source again
        accelerator.compute.wait(arrived)  # compute may write what was copied
        idle = accelerator.compute.record()


def test_compute_that_does_not_wait_for_a_copy(opened):
    accelerator = opened()
    h2d, device = accelerator.stream("h2d"), on_device(accelerator)
    source = floats(1.0)
    h2d.wait(accelerator.compute.record())
    accelerator.copy(device, source, h2d)
    with pytest.raises(
        OrderingError, match=r"compute reads bytes 0 to 256 of device memory, which h2d writes"
    ):
        device.sum()
    with pytest.raises(OrderingError, match=r"compute writes .* which h2d writes"):
        device.zero_()
    accelerator.compute.wait(h2d.record())
    assert device.sum() == SIZE


def test_a_copy_over_what_compute_may_still_read(opened):
    accelerator = opened()
    h2d, device = accelerator.stream("h2d"), on_device(accelerator)
    old, source = accelerator.compute.record(), floats(1.0)
    device[:10].isnan()  # compute reads these
    h2d.wait(old)  # recorded too early
    with pytest.raises(
        OrderingError, match=r"h2d writes bytes 0 to 256 of device memory, which compute reads"
    ):
        accelerator.copy(device, source, h2d)
    accelerator.copy(device[10:], source[10:], h2d)  # these it does not read


def test_autograd_is_watched_too(opened):
    """The read is in backward, where only C++ runs."""
    accelerator = opened()
    h2d, device = accelerator.stream("h2d"), on_device(accelerator)
    device.fill_(2.0)
    x = floats(1.0).requires_grad_()
    loss = (x * device).sum()
    h2d.wait(accelerator.compute.record())
    with _disable_current_modes():
        device = device.detach()
    accelerator.copy(device, floats(3.0), h2d)
    with pytest.raises(OrderingError, match=r"compute reads .* which h2d writes"):
        loss.backward()


@pytest.mark.parametrize("how", ["torch", "kernel", "write", "overwrite"])
def test_the_host_that_touches_the_target_of_a_copy_before_its_event(how, opened, tmp_path):
    accelerator = opened()
    d2h, device, back = (
        accelerator.stream("d2h"),
        on_device(accelerator, 1024),
        pinned(accelerator, 0.0, 1024),
    )
    device.fill_(1.0)
    d2h.wait(accelerator.compute.record())
    accelerator.copy(back, device, d2h)
    arrived = d2h.record()

    def touch(queue):
        if how == "torch":
            back.sum()
        elif how == "overwrite":
            back.zero_()
        elif how == "kernel":
            kernels.sum_of_squares(back)
        else:
            NvmeLinks(queue, Ledger()).write(back.view(torch.uint8), 0, [("weight", 4096)]).wait()

    with Queue(tmp_path / "swap") as queue:
        queue.preallocate(4096)
        with pytest.raises(
            OrderingError, match=r"host (reads|writes) .* registered host memory, which d2h writes"
        ):
            touch(queue)
        arrived.wait()
        touch(queue)


@pytest.mark.parametrize("how", ["torch", "kernel", "read"])
def test_the_host_that_changes_the_source_of_a_copy_before_its_event(how, opened, tmp_path):
    accelerator = opened()
    h2d, device, source = (
        accelerator.stream("h2d"),
        on_device(accelerator, 1024),
        pinned(accelerator, 1.0, 1024),
    )
    h2d.wait(accelerator.compute.record())
    accelerator.copy(device, source, h2d)
    arrived = h2d.record()

    def change(queue):
        if how == "torch":
            source.mul_(2)
        elif how == "kernel":
            halves = source.view(torch.bfloat16), torch.zeros(2048, dtype=torch.int16)
            kernels.split_master(torch.zeros(2048), *halves)
        else:
            NvmeLinks(queue, Ledger()).read(source.view(torch.uint8), 0, [("weight", 4096)]).wait()

    with Queue(tmp_path / "swap") as queue:
        queue.preallocate(4096)
        with pytest.raises(OrderingError, match=r"host writes .* registered host memory, which h2d reads"):
            change(queue)
        source.sum()  # reading beside a copy that reads is right
        arrived.wait()
        change(queue)


def test_compute_that_changes_the_source_of_a_copy_to_the_host(opened):
    accelerator = opened()
    d2h, device, back = accelerator.stream("d2h"), on_device(accelerator), pinned(accelerator, 0.0)
    device.fill_(1.0)
    d2h.wait(accelerator.compute.record())
    accelerator.copy(back, device, d2h)
    device.sum()
    with pytest.raises(OrderingError, match=r"compute writes .* device memory, which d2h reads"):
        device.zero_()


def test_a_copy_to_the_host_of_what_compute_has_not_made(opened):
    accelerator = opened()
    d2h, device, back = accelerator.stream("d2h"), on_device(accelerator), pinned(accelerator, 0.0)
    device.fill_(1.0)
    with pytest.raises(OrderingError, match=r"d2h reads .* device memory, which compute writes"):
        accelerator.copy(back, device, d2h)


@pytest.mark.parametrize("end", ["source", "destination"])
def test_an_end_of_a_copy_that_is_given_up_before_it_runs(end, opened):
    accelerator = opened(lazy=True)
    stream, source, destination = accelerator.stream("h2d"), floats(1.0), floats(0.0)
    accelerator.copy(destination, source, stream)
    if end == "source":
        del source
    else:
        del destination
    with pytest.raises(OrderingError, match=f"the {end} of a copy was given up"):
        stream.record().wait()


def test_a_source_in_ordinary_memory_that_changes_before_the_copy_runs(opened):
    accelerator = opened(lazy=True)
    stream, source, device = accelerator.stream("h2d"), floats(1.0), on_device(accelerator)
    accelerator.copy(device, source, stream)
    source.add_(1)
    with pytest.raises(OrderingError, match="source of a copy was changed"):
        stream.record().wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison(dtype, opened):
    """Memory is NaN until the first write has arrived, and again once it is forgotten."""
    accelerator = opened(lazy=True)
    memory = accelerator.allocate(SIZE)
    values = memory.view(dtype)
    assert values.isnan().all()
    stream, source = accelerator.stream("h2d"), torch.ones_like(values)
    stream.wait(accelerator.compute.record())
    accelerator.copy(values, source, stream)
    with _disable_current_modes():  # one that nobody stops sees what is there
        assert values.isnan().all()
    accelerator.compute.wait(stream.record())
    assert torch.equal(values, source)
    accelerator.forget(memory)
    assert values.isnan().all()


def answers(seed):
    """How often each of 50 events says "not yet", and how many copies have run early."""
    accelerator = SimulatedAccelerator(seed)
    stream, source = accelerator.stream("h2d"), floats(1.0, 1)
    target = torch.zeros(50)
    with contextlib.closing(accelerator):
        seen = []
        for turn in range(50):
            accelerator.copy(target[turn : turn + 1], source, stream)
            with _disable_current_modes():
                seen.append(int(target.sum()))
        for _ in range(50):
            event, count = stream.record(), 0
            while not event.done():
                count += 1
            seen.append(count)
    return seen


def test_a_seed_is_one_order_of_things():
    runs = [answers(seed) for seed in range(10)]
    assert runs == [answers(seed) for seed in range(10)]
    assert len({tuple(run) for run in runs}) == 10
    assert any(run[49] == 0 for run in runs) and any(
        run[49] > 10 for run in runs
    )  # as late as can be, and not


def test_two_at_once(opened):
    """Each has its own memory, streams and faults; one that closes leaves the other watching."""
    first, second = opened(1), opened(2)
    copies = []
    for accelerator in (first, second):
        stream, device, source = accelerator.stream("h2d"), on_device(accelerator), floats(1.0)
        stream.wait(accelerator.compute.record())
        accelerator.copy(device, source, stream)
        copies.append((accelerator, device, stream.record(), source))
    accelerator, device, event, _ = copies[0]
    accelerator.compute.wait(event)
    assert device.sum() == SIZE
    first.close()
    accelerator, device, event, _ = copies[1]
    with pytest.raises(OrderingError):
        device.sum()
    accelerator.compute.wait(event)
    assert device.sum() == SIZE


def test_close_runs_what_is_queued_and_watches_no_more(opened):
    accelerator = opened(lazy=True)
    stream, device, source = accelerator.stream("h2d"), on_device(accelerator), floats(1.0)
    accelerator.copy(device, source, stream)
    accelerator.close()
    accelerator.close()
    assert torch.equal(device, source)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_memory_is_limited(opened):
    accelerator = opened(memory_bytes=1000)
    tier = DeviceTier(accelerator)
    tier.allocate("weights", [600])
    assert accelerator.memory() == (400, 1000) and accelerator.peak_bytes() == 600
    with pytest.raises(PlanError, match="simulated: 500 bytes wanted for gradients, 400 are free"):
        tier.allocate("gradients", [500])
    tier.allocate("gradients", [400])
    assert accelerator.memory() == (0, 1000)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staging_bytes", [MiB, 4096, 0], ids=["large", "small", "none"])
def test_memory_that_cannot_be_pinned_goes_through_staging(staging_bytes, seed, opened, caplog, monkeypatch):
    """Pieces of whatever could be pinned; where nothing can be, the driver's own buffer."""
    monkeypatch.setattr(DeviceLinks, "STAGING_BYTES", (4 * MiB, 4096) if staging_bytes == 4096 else (MiB,))
    accelerator = opened(seed)
    accelerator.register_bytes_max = staging_bytes
    host, ledger = HostTier(accelerator), Ledger()
    links = DeviceLinks(accelerator, host, ledger)
    there, back = (
        host.allocate("weights", [10_000, 3 * MiB], pinned=True)[0],
        torch.zeros(10_000, dtype=torch.uint8),
    )
    assert not host.is_pinned(there) and "cannot be pinned" in caplog.text
    there.random_(256)
    device = accelerator.allocate(10_000)
    for _ in range(3):
        idle = accelerator.compute.record()
        arrival = links.to_device(device, there, [("weight", 10_000)], idle=idle)
        accelerator.compute.wait(arrival)
        ticket = links.to_host(back, device, "weight")
        assert ticket.done()
        assert torch.equal(back, there)
        arrival.wait()
        there.add_(1)
    assert ledger.moved == {("h2d", "weight"): 30_000, ("d2h", "weight"): 30_000}
    host.close()
    assert accelerator.registered_bytes == 0
