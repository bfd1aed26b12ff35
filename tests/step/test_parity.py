"""The same loop with and without the engine: bit-identical between placements, and with plain PyTorch.

Each loop runs once per placement; the reference of the bit comparison is everything in memory with the update
in `step`, and that one is compared with plain PyTorch and its fused AdamW: losses, masters and moments, bit by bit.
"""

from functools import cache

import pytest
import torch
from fused_adam import FUSED_ADAM_IS_OURS
from models import Placement, Training, train_offloaded, train_plain

PLACEMENTS = [
    Placement(param, state, update)
    for param in ("none", "cpu", "nvme")
    for state in ("none", "cpu", "nvme")
    for update in ("step", "backward")
    if (param, state, update) != ("none", "none", "step")
]
OTHER_CUTS = [
    Placement("nvme", "nvme", "step", chunk=2048),
    Placement("nvme", "nvme", "backward", chunk=10**9),
    Placement("none", "nvme", "step", chunk=50000, backend="threads"),
    Placement("none", "none", "backward", chunk=2048),
]
LOOPS = {
    "plain": Training(),
    "bf16": Training(precision="bf16"),
    "adam-l2": Training(adamw=False),
    "tied": Training(precision="bf16", tied=True),
    "frozen-half": Training(precision="bf16", frozen="blocks.0 blocks.1 tokens"),
    "frozen-ends": Training(frozen="tokens positions head norm blocks.3"),
    "checkpoint": Training(precision="bf16", checkpointing="non-reentrant"),
    "reentrant": Training(precision="bf16", checkpointing="reentrant"),
    "groups": Training(precision="bf16", groups=True, schedule=True),
    "evaluate": Training(precision="bf16", evaluate=True),
}
STEP_LOOPS = {
    "accumulate": Training(precision="bf16", accumulation=4, clip_config=0.5),
    "accumulate-fp32": Training(accumulation=4, evaluate=True),
    "clip-config": Training(clip_config=0.5),
    "clip-loop": Training(precision="bf16", clip_loop=0.5),
    "everything": Training(
        precision="bf16", tied=True, frozen="blocks.0 blocks.1", checkpointing="non-reentrant", accumulation=4,
        clip_loop=0.5, groups=True, schedule=True, evaluate=True,
    ),
    "everything-reentrant": Training(
        tied=True, frozen="blocks.0 blocks.1", checkpointing="reentrant", accumulation=4, clip_config=0.5,
        groups=True, schedule=True,
    ),
}  # fmt: skip


@cache
def in_memory(training):
    return train_offloaded(training, Placement(), "/unused")


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
def test_same_bits_on_every_placement(loop, placement, swap_path):
    training = LOOPS[loop]
    train_offloaded(training, placement, swap_path).assert_same_bits(in_memory(training))


@pytest.mark.parametrize("placement", [p for p in PLACEMENTS if p.update == "step"], ids=str)
@pytest.mark.parametrize("loop", STEP_LOOPS)
def test_same_bits_where_gradients_wait(loop, placement, swap_path):
    training = STEP_LOOPS[loop]
    train_offloaded(training, placement, swap_path).assert_same_bits(in_memory(training))


@pytest.mark.parametrize("placement", OTHER_CUTS, ids=str)
def test_same_bits_whatever_the_chunks_and_backends(placement, swap_path):
    training = LOOPS["bf16"]
    train_offloaded(training, placement, swap_path).assert_same_bits(in_memory(training))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_same_bits_whatever_the_threads_and_the_isa(isa, threads, swap_path, monkeypatch):
    from offload import kernels

    if isa not in kernels.isas():
        pytest.skip(f"this CPU has no {isa}")
    reference = in_memory(LOOPS["bf16"])
    monkeypatch.setenv("OFFLOAD_ISA", isa)
    monkeypatch.setattr(kernels, "default_threads", lambda: threads)
    outcome = train_offloaded(LOOPS["bf16"], Placement("nvme", "nvme"), swap_path)
    outcome.assert_same_bits(reference)


@pytest.mark.parametrize("loop", [*LOOPS, *STEP_LOOPS])
def test_equal_to_plain_pytorch(loop):
    training = (LOOPS | STEP_LOOPS)[loop]
    outcome, plain = in_memory(training), train_plain(training)
    if FUSED_ADAM_IS_OURS:
        assert outcome.losses == plain.losses
        torch.testing.assert_close(outcome.norms, plain.norms, rtol=1e-12, atol=0)
        outcome.assert_same_state(plain)
    else:
        torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(outcome.norms, plain.norms, rtol=1e-4, atol=0)


def test_twenty_steps(swap_path):
    """Long enough for an order learned in the first steps to matter, with everything on."""
    training = Training(precision="bf16", steps=20, accumulation=2, clip_config=1.0, groups=True, tied=True)
    outcome = train_offloaded(training, Placement("nvme", "nvme"), swap_path)
    outcome.assert_same_bits(in_memory(training))
    torch.testing.assert_close(outcome.losses, train_plain(training).losses, rtol=1e-5, atol=0)
