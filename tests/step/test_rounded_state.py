"""State in bf16 and int8: the same bits on every placement, and the bytes of the plan.

Oracles: the loop with everything in host memory, one chunk and one thread; and plain PyTorch's gradients with the
kernel called parameter by parameter, each with planes of its own, so that nothing of the engine is in it.
"""

import contextlib
import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import Outcome, Placement, Training, prepared, steps, train_offloaded
from torch import nn

import offload
from offload import accel, kernels
from offload.access import ChunkAccess
from offload.matmul import WideLinears, bf16_is_native
from offload.optim import Adam, Segment

pytestmark = pytest.mark.usefixtures("the_cpu_computes")

FORMATS = [("bf16", "bf16"), ("bf16", "int8"), ("fp32", "bf16")]
"""Precision of training, format of state."""
LOOPS = {"-".join(formats): Training(*formats, steps=20) for formats in FORMATS}
ODD = Training("bf16", "int8", tied=True, frozen="blocks.0 blocks.2.norm1", groups=True, accumulation=2)
"""Parameters that end inside a block of 128, and begin behind others that are not trained."""
CUTS = [
    (Placement(param, state, update, chunk), threads)
    for param, state in itertools.product(("cpu", "nvme"), repeat=2)
    for update in ("step", "backward")
    for chunk, threads in ((2048, 2), (8192, 1), (8192, 2), (10**9, 3))
]
CASES = [
    (loop, *cut)
    for loop in LOOPS
    for index, cut in enumerate(CUTS)
    if loop == "bf16-int8" or index % 4 in (0, 3)
]
"""bf16 state is rounded element by element: two ways of cutting show as much as four."""


@cache
def in_memory(training):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "default_threads", lambda: 1)
        return train_offloaded(training, Placement(chunk=10**9), "/unused")


@pytest.mark.parametrize(("loop", "placement", "threads"), CASES, ids=str)
def test_same_bits_on_every_placement(loop, placement, threads, swap_path, monkeypatch):
    """And the ledger is the plan's, to the byte: see ``train_offloaded``."""
    expected = in_memory(LOOPS[loop])
    monkeypatch.setattr(kernels, "default_threads", lambda: threads)
    train_offloaded(LOOPS[loop], placement, swap_path).assert_same_bits(expected)


@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_same_bits_with_everything_else_on(state, swap_path):
    placement = Placement("nvme", state, "step", chunk=2048)
    train_offloaded(ODD, placement, swap_path).assert_same_bits(in_memory(ODD))


@pytest.mark.parametrize(("param", "state"), [("none", "cpu"), ("cpu", "nvme"), ("nvme", "cpu")])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_same_bits_where_an_accelerator_computes(param, state, update, swap_path, monkeypatch):
    """State that is not exact stays with the host; weights and gradients cross."""
    training = replace(LOOPS["bf16-int8"], steps=3)
    expected = in_memory(training)
    monkeypatch.setenv(accel.ENVIRONMENT, "simulated:5")
    train_offloaded(training, Placement(param, state, update), swap_path).assert_same_bits(expected)


def train_by_parameter(training):
    """Plain PyTorch, and for each parameter one call of the kernel over its own planes."""
    model, outcome = training.model(), Outcome()
    optimizer = Adam(weight_format=training.precision, state_format=training.state_format)
    planes, element = {}, 0
    for name, param in model.named_parameters():
        numel = param.numel()
        planes[name] = {"weight": torch.empty(numel, dtype=optimizer.weight_dtype)}
        for spec in optimizer.state_specs(numel):
            planes[name][spec.name] = torch.empty(spec.numel, dtype=spec.dtype)
        optimizer.init_state(planes[name], param.detach().flatten())
    if training.precision == "bf16":
        model.to(torch.bfloat16)
        if not bf16_is_native():
            WideLinears(model)
    for step, batch in enumerate(training.batches(), start=1):
        element = 0
        for name, param in model.named_parameters():
            param.data.copy_(planes[name]["weight"].view_as(param))
        loss = model(batch)
        loss.backward()
        outcome.losses.append(loss.item())
        for name, param in model.named_parameters():
            numel = param.numel()
            segment = Segment(0, numel, step, 1e-3, 0.9, 0.999, 1e-8, 0.01, element=element)
            own = planes[name]
            kernels.adam_segments(
                own["weight"], own.get("residual"), own["exp_avg"], own["exp_avg_sq"], param.grad.flatten(),
                [segment], seed=0, threads=1, scale=own.get("scale"),
            )  # fmt: skip
            element += numel
            param.grad = None
    return outcome, planes


@pytest.mark.parametrize("loop", LOOPS)
def test_equal_to_the_kernel_parameter_by_parameter(loop, swap_path):
    training = LOOPS[loop]
    by_parameter, planes = train_by_parameter(training)
    with prepared(training, Placement("nvme", "nvme", "backward"), swap_path) as (model, optimizer):
        assert steps(model, optimizer, training.batches()) == by_parameter.losses
        access = ChunkAccess(optimizer.engine)
        weights = model.state_dict()
        for stored in optimizer.engine.partition.trainable:
            own = planes[stored.name]
            assert torch.equal(weights[stored.name].flatten(), own["weight"]), stored.name
            values = access.read(stored, *(name for name in own if name != "weight"))
            for name in own.keys() - {"weight", "exp_avg", "exp_avg_sq"}:
                assert torch.equal(values[name], own[name]), (stored.name, name)
            moments = torch.empty(2, own["weight"].numel())
            kernels.decode_moments(own["exp_avg"], own["exp_avg_sq"], own.get("scale"), *moments)
            assert torch.equal(torch.stack([values["exp_avg"], values["exp_avg_sq"]]), moments), stored.name


def test_the_seed_is_of_the_noise(swap_path):
    """Another seed rounds otherwise, and nothing else is random."""
    training = Training("bf16", "int8")
    outcomes = []
    for seed in (0, 0, 1):
        config = {**training.config(Placement("cpu", "cpu"), swap_path), "seed": seed}
        model, optimizer = offload.prepare(training.model(), config)
        with contextlib.closing(optimizer.engine):
            outcomes.append(steps(model, optimizer, training.batches()))
    assert outcomes[0] == outcomes[1] != outcomes[2]


# -- bytes ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Blocks of 512 x 512, whose planes are whole pages: 8-bit state of 3 bytes and 8/128 for each element."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


@pytest.mark.parametrize(("param", "limit"), [("nvme", 12.5), ("cpu", 6.3)])
def test_bytes_per_parameter_and_step(param, limit, swap_path):
    """State each way 1 residual + 1 + 1 moments + 8/128 scales: 6.125. Weights 2 read in forward, 2 in backward,
    2 written: 6. What the slots still hold is not read again."""
    training = Training("bf16", "int8")
    config = training.config(Placement(param, "nvme", "backward", chunk=1 << 20), swap_path)
    model, optimizer = offload.prepare(Wide(), config)
    engine, batch = optimizer.engine, torch.ones(2, 512, dtype=torch.bfloat16)
    with contextlib.closing(engine):
        moved = []
        for _ in range(4):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(engine.report().moved.copy())
        assert moved[-1] == engine.plan.bytes_moved(4)
        per_parameter = (moved[3] - moved[2]).total() / engine.plan.inventory.parameters
    state = 2 * (3 + 8 / 128)
    assert per_parameter == state if param == "cpu" else state + 2 < per_parameter <= state + 6
    assert per_parameter <= limit


# -- what training makes of it ----------------------------------------------------------------------------


@cache
def losses_of_200_steps(state_format):
    training = Training("bf16", state_format, steps=8)
    with prepared(training, Placement("cpu", "cpu", "backward"), "/unused") as (model, optimizer):
        return steps(model, optimizer, training.batches() * 25)


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
def test_learns_as_well_as_exact_state(state_format):
    """200 steps on eight batches. Sanity: what rounded state costs shows on something larger."""
    exact, rounded = losses_of_200_steps("fp32"), losses_of_200_steps(state_format)
    first, last = exact[0], sum(exact[-8:]) / 8
    assert last < 0.4 * first
    assert abs(sum(rounded[-8:]) / 8 - last) < 0.02 * first
