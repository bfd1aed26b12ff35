"""Models as users build them: branches, experts, resized and quantised layers, buffers.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import random

import pytest
import torch
from loops import (
    ALL,
    CHECKPOINTING,
    STEP,
    Adapted,
    Branches,
    Experts,
    Unbiased,
    adamw,
    close,
    compare,
    ids,
    mlp_a,
    rows,
    same_step,
    seeded,
    steps,
)
from torch import nn
from torch.nn import functional as F

from offload import ConfigError, OffloadError


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(4))
        self.never = nn.Linear(17, 40)

    def forward(self, x, sometimes):
        for index, layer in enumerate(self.layers):
            if index != 2 or sometimes:
                x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("home", ALL)
def test_s01_parameters_that_are_not_used(home, prepare):
    losses = [lambda m, step=step: m(rows(4), step % 2 == 0) for step in range(6)]
    model, _, _ = compare(prepare, home, Unused, steps(*losses))
    assert torch.equal(model.state_dict()["never.weight"], seeded(Unused).never.weight)


@pytest.mark.parametrize("home", ALL)
def test_s02_the_order_changes_with_the_data(home, prepare):
    """Flags, dropped layers, early exits, reversed order: right for any, and nothing stays held."""
    chance = random.Random(7)
    orders = [list(range(6))] * 2
    orders += [[i for i in range(6) if chance.random() < 0.6] or [0] for _ in range(4)]
    orders += [list(range(n)) for n in (2, 5, 1)] + [list(range(6))[::-1]] + [chance.sample(range(6), 6)]
    losses = [lambda m, order=order: m(rows(4), order) for order in orders]
    _, optimizer, _ = compare(prepare, home, Branches, steps(*losses))
    engine = optimizer.engine
    engine.settle()
    if engine.weights.streamed:
        assert not any(copy_.leases for copy_ in engine.weights.mover.residency.copies)
        present = engine.weights.mover.residency.present
        assert len(present) <= engine.plan.weight_slots < len(engine.partition.units)


@pytest.mark.parametrize("home", STEP)
def test_s03_evaluation_between_and_inside(home, prepare):
    def look(model, length):
        model.eval()
        with torch.no_grad():
            logits = model.logits(ids(99, length))
        model.train()
        return logits

    def train(model, optimizer, seeds, watch):
        for seed in seeds:
            for micro in range(2):
                (model(ids(10 * seed + micro)) / 2).backward()
                if watch:
                    look(model, 5)  # inside the accumulation window
            optimizer.step()
            optimizer.zero_grad()

    def loop(model, optimizer, watch=True):
        seen = []
        train(model, optimizer, (0, 1), watch)
        if watch:
            seen += [look(model, length) for length in (3, 9, 1, 6, 4)]
            text = ids(5, 2)
            for _ in range(20):  # a loop that generates
                with torch.no_grad():
                    text = torch.cat([text, model.logits(text)[:, -1:].argmax(-1)], 1)
            seen.append(text)
            with pytest.raises(IndexError):
                model(torch.full((1, 4), 10**6))  # an exception in the middle of a forward
        train(model, optimizer, (2, 3), watch)
        return seen

    # Logits may be near zero: an ulp of the sum is more of them.
    model, _, _ = compare(prepare, home, Evaluated, loop, seen_atol=1e-6)
    quiet = seeded(Evaluated)
    loop(quiet, adamw(quiet.parameters()), watch=False)
    close(dict(model.state_dict()), dict(quiet.state_dict()))


class Evaluated(Unbiased):
    def logits(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def forward(self, ids):
        if ids.max() > 66:
            self.blocks[0](self.embed(ids.clamp(max=66)))
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("fused", [False, True])
def test_s04_experts_without_tokens(fused, home, prepare):
    used = seeded(Experts, fused).router(rows(3)).argmax(-1).unique()
    assert len(used) <= 3, "five experts or more are idle"
    losses = [lambda m, seed=seed: m(rows(3, seed=seed)) for seed in (3, 3, 4, 5, 3)]
    compare(prepare, home, lambda: Experts(fused), steps(*losses))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("home", ALL)
def test_s09_embeddings_resized_before(home, tied, prepare):
    def build():
        model = small_llama(tied)
        torch.manual_seed(2)
        model.resize_token_embeddings(80, mean_resizing=False)
        return model

    batch = ids(0).clone()
    batch[0, 3] = 79
    model, optimizer, _ = compare(
        prepare, home, build, same_step(lambda m: m(input_ids=batch, labels=batch).loss)
    )
    assert optimizer.engine.plan.inventory.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("home", ALL)
def test_s09_embeddings_resized_after(home, prepare):
    """The engine does not know the new matrix: it must not be left untrained without a word."""
    model, optimizer = prepare(small_llama(True), home)
    batch = ids(0)
    same_step(lambda m: m(input_ids=batch, labels=batch).loss, 2)(model, optimizer)
    with pytest.raises(OffloadError, match=r"embed_tokens.weight.* before offload.prepare"):
        model.resize_token_embeddings(80, mean_resizing=False)
        model(input_ids=batch, labels=batch)


@pytest.mark.parametrize("home", ALL)
def test_s09_a_new_module_after(home, prepare):
    model, optimizer = prepare(seeded(Unbiased), home)
    same_step(lambda m: m(ids(0)), 2)(model, optimizer)
    model.head = nn.Linear(32, 99)
    with pytest.raises(OffloadError, match=r"head.weight has come into the model.* before offload.prepare"):
        model(ids(0))


def small_llama(tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("home", ALL)
def test_s10_empty_groups_and_groups_of_frozen_parameters(home, prepare):
    def groups(model):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": frozen, "lr": 1.0},
            {"params": trained[:2], "lr": 2e-3},
            {"params": [], "lr": 5.0},
            {"params": trained[2:], "lr": 3e-3},
        ]

    plain, model = seeded(Adapted), seeded(Adapted)
    expected = same_step(lambda m: m(rows(6, 24)))(plain, adamw([groups(plain)[1], groups(plain)[3]]))
    model, optimizer = prepare(model, home, groups(model))
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 3e-3]
    close(same_step(lambda m: m(rows(6, 24)))(model, optimizer), expected)
    close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("home", ALL)
def test_s10_nothing_to_train_is_said(home, prepare):
    for groups in (None, [], [{"params": []}]):
        model = seeded(mlp_a).requires_grad_(False)
        with pytest.raises(ConfigError, match="no trainable parameter"):
            prepare(model, home, groups)
        assert torch.equal(model(rows(3)), seeded(mlp_a)(rows(3))), "the model is as it was"


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_s11_checkpointing_with_frozen_weights_and_dropout(checkpointing, home, prepare):
    def loss_of(model):
        return model(rows(6, 24).requires_grad_())

    compare(prepare, home, lambda: Adapted(checkpointing, dropout=0.3), same_step(loss_of))


class _Dequantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        return x @ ((codes.to(x.dtype) - 128) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx, grad):
        codes, scale = ctx.saved_tensors
        return grad @ ((codes.to(grad.dtype) - 128) * scale.to(grad.dtype)), None, None


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(QuantisedLayer(24) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class QuantisedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        codes = torch.randint(0, 256, (width, width), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.codes.quant_state = {"scale": torch.tensor(0.01), "blocksize": 64}
        self.bypass = nn.Linear(width, width)

    def forward(self, x):
        quantised = _Dequantised.apply(x, self.codes, self.codes.quant_state["scale"])
        return torch.tanh(quantised) + self.bypass(x)


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_s12_quantised_frozen_weights(precision, home, prepare):
    original = seeded(Quantised)
    if precision == "fp32":
        model, optimizer, _ = compare(prepare, home, Quantised, same_step(lambda m: m(rows(6, 24))))
    else:
        model, optimizer = prepare(seeded(Quantised), home, precision="bf16")
        loss = same_step(lambda m: m(rows(6, 24).bfloat16()).float())(model, optimizer)
        assert loss[0] == pytest.approx(original(rows(6, 24)).item(), rel=2e-2), "not wrong by a factor"
    state = model.state_dict()
    for index, layer in enumerate(original.layers):
        codes = model.layers[index].codes
        assert codes.dtype is torch.uint8 and not codes.requires_grad
        assert codes.quant_state["blocksize"] == 64
        assert codes.quant_state["scale"] == layer.codes.quant_state["scale"]
        assert torch.equal(state[f"layers.{index}.codes"], layer.codes)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 17, bias=False), nn.BatchNorm1d(17), nn.ReLU()) for _ in range(3)
        )
        self.register_buffer("cache", torch.linspace(0, 1, 17), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.cache
        return x.square().mean()


@pytest.mark.parametrize("home", ALL)
def test_s15_buffers_stay_and_are_updated(home, prepare):
    losses = [lambda m, seed=seed: m(rows(8, seed=seed)) for seed in range(4)]
    model, _, plain = compare(prepare, home, Buffers, steps(*losses))
    norm = model.layers[1][1]
    assert norm.num_batches_tracked.item() == 4
    close(norm.running_var, plain.layers[1][1].running_var)
    assert torch.equal(model.cache, plain.cache)
    model.eval(), plain.eval()
    with torch.no_grad():
        close(model(rows(2)), plain(rows(2)))
