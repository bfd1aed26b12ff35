"""A run that was committed goes on bit for bit as one that nobody interrupted, on every placement."""

import pytest
from interrupted import after, remove, running
from models import Placement, Training

PLACEMENTS = [
    Placement("cpu", "nvme", "step", chunk=8192),
    Placement("cpu", "nvme", "backward", chunk=8192),
    Placement("nvme", "nvme", "step", chunk=2048),
    Placement("nvme", "nvme", "backward", chunk=8192),
    Placement("nvme", "cpu", "step", chunk=8192),
    Placement("cpu", "cpu", "step", chunk=8192),
]
FORMATS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "int8"), ("fp32", "bf16")]


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_run_goes_on_bit_for_bit(formats, placement, swap_path):
    """Twice broken off: after a step whose commit is the last thing, and after one that was not committed."""
    precision, state_format = formats
    frozen = "blocks.1 blocks.2.norm" if placement.update == "step" else ""
    training = Training(precision=precision, state_format=state_format, steps=6, groups=True, frozen=frozen)
    with running(training, placement, swap_path) as run:
        run.train(1)
        run.engine.save_checkpoint()
        run.train(1)
        run.engine.save_checkpoint(client_state={"at": 2})
        run.train(2)  # which nobody will hear of
    with running(training, placement, swap_path, resume=True) as run:
        assert run.engine.global_steps == 2 and run.engine.client_state == {"at": 2}
        run.train(2)
        run.state().assert_same_bits(after(training, 2, 4))
        run.engine.save_checkpoint()
    with running(training, placement, swap_path, resume=True) as run:
        run.train(2)
        ledger = run.engine.report()
        assert +ledger.moved == ledger.predicted
        run.state().assert_same_bits(after(training, 4, 6))
    remove(swap_path)


DEVICE_PLACEMENTS = [
    Placement("none", "none", "step", chunk=8192),
    Placement("none", "cpu", "backward", chunk=8192),
    Placement("cpu", "nvme", "step", chunk=8192),
    Placement("nvme", "nvme", "backward", chunk=2048),
]


@pytest.mark.parametrize("placement", DEVICE_PLACEMENTS, ids=str)
def test_a_run_on_an_accelerator_goes_on_bit_for_bit(placement, swap_path):
    """With a device whose memory is its own, and back to the CPU; gradients wait when it is saved."""
    training = Training(precision="bf16", steps=6, accumulation=2 if placement.update == "step" else 1)
    accumulation, waits = training.accumulation, training.accumulation - 1
    on_device = {"accelerator": f"simulated:{len(str(placement))}"}
    with running(training, placement, swap_path, changes=on_device) as run:
        run.train(2 * accumulation + waits)
        run.engine.save_checkpoint()
        run.train(1)
    with running(training, placement, swap_path, resume=True, changes=on_device) as run:
        assert run.engine.global_steps == 2
        run.train(2 * accumulation)
        run.engine.save_checkpoint()
        run.train(accumulation)
        run.engine.load_checkpoint()
        run.outcome.losses.clear()
        run.outcome.norms.clear()
        run.train(accumulation - waits)
        found = run.state()
        expected = after(training, 4 * accumulation + waits, 5 * accumulation)
        found.assert_same_state(expected)
        assert found.losses == expected.losses
    with running(training, Placement("cpu", "nvme"), swap_path, resume=True) as run:
        run.train(2 * accumulation - waits)
        run.state().assert_same_state(after(training, 0, 6 * accumulation))
    remove(swap_path)
