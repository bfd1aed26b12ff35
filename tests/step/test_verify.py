"""`durability.verify: always`: the same bits, and a byte that changes on disk stops the run before it counts."""

import contextlib
import dataclasses
import errno
import random

import pytest
import torch
from models import Placement, Training, train_offloaded

import offload
from offload.errors import OffloadError, TransferError

PLACEMENTS = [
    Placement(param, state, update, chunk, verify="always")
    for param, state in (("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"))
    for update, chunk in (("step", 2048), ("backward", 100_000))
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("formats", [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "int8")], ids="-".join)
def test_the_same_bits(formats, placement, swap_path):
    """Trained and frozen parameters beside each other, a tied weight, evaluation between steps."""
    training = Training(*formats, tied=True, frozen="blocks.0 blocks.2.norm", evaluate=True)
    checked = train_offloaded(training, placement, swap_path)
    checked.assert_same_bits(
        train_offloaded(training, dataclasses.replace(placement, verify="off"), swap_path)
    )


def test_values_written_between_steps(swap_path):
    """`gather`, `load_state_dict` and the optimizer's state write parts of planes."""
    outcomes = []
    for verify in ("always", "off"):
        placement = Placement("nvme", "nvme", chunk=2048, verify=verify)
        model, optimizer = offload.prepare(
            Training().model(), Training(precision="bf16").config(placement, swap_path)
        )
        with contextlib.closing(optimizer.engine):
            for batch in Training(precision="bf16").batches():
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                with offload.gather(model.blocks[1].norm1.weight, modify=True), torch.no_grad():
                    model.blocks[1].norm1.weight.mul_(0.5)
                optimizer.load_state_dict(optimizer.state_dict())
                model.load_state_dict(model.state_dict())
            outcomes.append(model.state_dict())
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name]), name


def one_generation(training, placement, swap_path):
    """All that is in the file counts."""
    return {
        **training.config(placement, swap_path),
        "durability": {"verify": placement.verify, "generations": 1},
    }


def flip(file, at, bit):
    with open(file, "r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_byte_that_changes_on_disk_stops_the_run(update, seed, swap_path):
    """Anywhere in the file, between two steps: the step after it, at the latest, finds it and does not count."""
    training, rng = Training(precision="bf16", steps=3), random.Random(seed)
    placement = Placement("nvme", "nvme", update, chunk=2048, verify="always")
    model, optimizer = offload.prepare(training.model(), one_generation(training, placement, swap_path))
    engine = optimizer.engine
    with contextlib.closing(engine):
        before, *after = training.batches()
        model(before).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()
        (file,) = swap_path.glob("*/planes.swap")
        # A unit that is still in its slot is not read again, so its weights on disk would not be missed.
        states = next(iter(engine._store._layout.states)).extents[0].offset
        at = rng.randrange(states, file.stat().st_size)
        flip(file, at, rng.randrange(8))
        with pytest.raises(
            TransferError, match=r"of chunk \d+ of unit .*: crc32c 0x.* was written"
        ) as caught:
            for batch in after:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert caught.value.errno == errno.EBADMSG and caught.value.filename == str(file)
        assert caught.value.offset <= at < caught.value.offset + caught.value.size
        assert engine.ledger.steps == 1
        for use in (optimizer.step, model.state_dict, optimizer.state_dict):
            with pytest.raises(OffloadError, match=r"the engine stopped in step 2: .*crc32c"):
                use()


def test_weights_that_change_on_disk_are_found_where_they_are_read(swap_path):
    """Every unit of an evaluation, in turn."""
    training = Training(precision="bf16")
    placement = Placement("nvme", "nvme", chunk=2048, verify="always")
    for unit in range(3):
        model, optimizer = offload.prepare(training.model(), one_generation(training, placement, swap_path))
        with contextlib.closing(optimizer.engine) as engine:
            (extent,) = engine._store._layout.weights[unit].extents
            (file,) = swap_path.glob("*/planes.swap")
            flip(file, extent.offset + 70, 3)
            name = engine.plan.inventory.units[unit].name
            said = rf"weight of unit {name} \({name}\S*.*\): crc32c"
            with pytest.raises(TransferError, match=said), torch.no_grad():
                model.state_dict()
