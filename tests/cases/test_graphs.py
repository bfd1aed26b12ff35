"""What makes other graphs than a plain forward: checkpoints, compilers, functional transforms, several losses.

Oracle: the same loop over a plain model with torch.optim.AdamW.
"""

from __future__ import annotations

import pytest
import torch
from loops import ALL, STEP, adamw, close, compare, rows, same_step, seeded
from test_unusual_modules import Chain
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import offload
from offload import OffloadError


def products_are_saved(_ctx, op, *_args, **_kwargs):
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(products_are_saved)


def around(**settings):
    """A checkpoint around one layer, with dropout in it."""

    def block(layer, x):
        return checkpoint(lambda x: F.dropout(torch.tanh(layer(x)), 0.3), x, **settings)

    return block


def nested(inner, outer):
    def block(layer, x):
        return checkpoint(lambda x: around(use_reentrant=inner)(layer, x) * 2, x, use_reentrant=outer)

    return block


def by_attribute(reentrant):
    """The weight of another module, read inside the checkpoint."""

    def block(layer, x):
        return checkpoint(
            lambda x: torch.tanh(F.linear(x, layer.weight, layer.bias)), x, use_reentrant=reentrant
        )

    return block


CHECKPOINTS = {
    "reentrant": around(use_reentrant=True),
    "non-reentrant": around(use_reentrant=False),
    "not determined": around(use_reentrant=False, determinism_check="none"),
    "nested": nested(False, False),
    "nested reentrant": nested(True, True),
    "reentrant in non-reentrant": nested(True, False),
    "by attribute": by_attribute(False),
    "by attribute, reentrant": by_attribute(True),
    "random numbers not kept": lambda layer, x: checkpoint(
        lambda x: torch.tanh(layer(x)), x, use_reentrant=False, preserve_rng_state=False
    ),
    "selective": lambda layer, x: checkpoint(
        lambda x: torch.tanh(layer(x)), x, use_reentrant=False, context_fn=selective
    ),
}


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_s11_checkpoints_of_every_kind(kind, home, prepare):
    class Checkpointed(Chain):
        def block(self, layer, x):
            return CHECKPOINTS[kind](layer, x)

    compare(prepare, home, Checkpointed, same_step(lambda m: m(rows(4).requires_grad_()), 3))


@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("reentrant", [False, True])
def test_s11_a_checkpoint_around_more_than_fits(reentrant, home, prepare):
    """All weights are used again in one go: none keeps its slot until it has its gradient."""

    class Sequential(Chain):
        def forward(self, x):
            layers = [lambda x, layer=layer: self.block(layer, x) for layer in self.layers]
            return checkpoint_sequential(layers, 1, x, use_reentrant=reentrant).square().mean()

    whole = same_step(lambda m: checkpoint(m, rows(4).requires_grad_(), use_reentrant=reentrant), 3)
    compare(prepare, home, Chain, whole)
    compare(prepare, home, Sequential, same_step(lambda m: m(rows(4).requires_grad_()), 3))


@pytest.fixture
def dynamo():
    compiler = pytest.importorskip("torch._dynamo")
    compiler.reset()
    yield
    compiler.reset()


def compiled_layers(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


COMPILED = {
    "layers": compiled_layers,
    "model": lambda model: torch.compile(model, backend="eager"),
    "in place": compiled_in_place,
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch looks at that of an activation between two graphs
@pytest.mark.parametrize("home", ALL)
@pytest.mark.parametrize("what", COMPILED)
def test_s02_compiled(what, home, prepare, dynamo, the_cpu_computes):
    plain, (model, optimizer) = seeded(Chain), prepare(seeded(Chain), home)
    expected = same_step(lambda m: m(rows(4)), 3)(plain, adamw(plain.parameters()))
    close(same_step(lambda m: m(rows(4)), 3)(COMPILED[what](model), optimizer), expected)
    close(dict(model.state_dict()), dict(plain.state_dict()))


def test_s02_compiled_into_one_graph_is_refused(prepare, dynamo, the_cpu_computes):
    model, _ = prepare(seeded(Chain), "nvme")
    with pytest.raises(Exception, match="offload moves weights here; compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(rows(4))


def derivatives(model):
    x = rows(4)
    params = dict(model.named_parameters())
    return [
        grad(lambda own: functional_call(model, own, (x,)))(params),
        grad(model)(x),
        jvp(model, (x,), (torch.ones_like(x),)),
        vmap(model)(x),
        functional_call(model, {name: torch.ones(p.shape) for name, p in params.items()}, (x,)),
    ]


@pytest.mark.parametrize("home", STEP)
def test_s05_functional_transforms(home, prepare):
    """Of a module as it is, and inside gather of one whose weights are on nvme."""
    model, _ = prepare(seeded(Chain), home)
    expected = torch.utils._pytree.tree_map(torch.Tensor.detach, derivatives(seeded(Chain)))
    with offload.gather(model):
        got = torch.utils._pytree.tree_map(torch.Tensor.detach, derivatives(model))
    close(got, expected)


def test_s05_a_transform_of_absent_parameters_is_refused(prepare):
    model, _ = prepare(seeded(Chain), "nvme")
    with pytest.raises(OffloadError, match=r"inside `with offload\.gather"):
        derivatives(model)


@pytest.mark.parametrize("home", STEP)
def test_s05_a_gradient_penalty(home, prepare):
    """A backward through a backward, inside gather."""

    def loss_of(model):
        x = rows(4).requires_grad_()
        loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    def loop(model, optimizer):
        with offload.gather(model):
            loss_of(model).backward()
        optimizer.step()
        return [p.detach().clone() for p in model.state_dict().values()]

    plain, (model, optimizer) = seeded(Chain), prepare(seeded(Chain), home)
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))


class TwoHeads(Chain):
    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x.square().mean(), x.abs().mean()


@pytest.mark.parametrize("home", ALL)
def test_n01_two_losses_on_one_graph(home, prepare):
    def loop(model, optimizer):
        first, second = model(rows(4))
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return [first.item(), second.item()]

    plain, (model, optimizer) = seeded(TwoHeads), prepare(seeded(TwoHeads), home)
    if home == "nvme-backward":
        with pytest.raises(OffloadError, match=r"set offload_optimizer\.update to 'step'"):
            loop(model, optimizer)
        return
    close(loop(model, optimizer), loop(plain, adamw(plain.parameters())))
    close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("home", ALL)
def test_s05_a_model_that_is_exported_is_refused(home, prepare):
    model, _ = prepare(seeded(Chain), home)
    with pytest.raises(OffloadError, match="a prepared model cannot be exported"):
        torch.export.export(model, (rows(4),))


class Generator(TwoHeads):
    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x


@pytest.mark.parametrize("homes", [("nvme", "none"), ("none", "nvme"), ("nvme", "nvme")])
def test_s14_two_engines_that_train_against_each_other(homes, prepare):
    """A GAN: the loss of one goes through the other, whose gradients are thrown away."""

    def run(engines):
        (maker, maker_steps), (judge, judge_steps) = engines
        seen = []
        for step in range(3):
            made = maker(rows(4, seed=step))
            loss = judge(rows(4, seed=50 + step)).mean() - judge(made.detach()).mean()
            loss.backward()
            judge_steps.step()
            judge_steps.zero_grad()
            fooled = judge(made).mean()
            fooled.backward()
            maker_steps.step()
            maker_steps.zero_grad()
            judge_steps.zero_grad()
            seen += [loss.item(), fooled.item()]
        return seen, dict(maker.state_dict()), dict(judge.state_dict())

    def models():
        return seeded(Generator), seeded(lambda: (torch.randn(3), Generator())[1])

    expected = run([(model, adamw(model.parameters())) for model in models()])
    close(run([prepare(model, home) for model, home in zip(models(), homes, strict=True)]), expected)
