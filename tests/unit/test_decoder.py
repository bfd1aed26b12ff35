"""The preset decoder against transformers' LlamaForCausalLM with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from offload.errors import ConfigError
from offload.models.decoder import Decoder, init_parameter_, to_hf_config
from offload.models.presets import PRESETS, DecoderConfig, activation_bytes, parameter_shapes, preset

CONFIG = DecoderConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=112,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
    rope_theta=5_000.0,
    rms_norm_eps=1e-5,
)
TIED = replace(CONFIG, tie_embeddings=True)
PLAIN_HEADS = replace(CONFIG, num_kv_heads=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and on a busy machine their barriers cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ids(*, batch: int = 2, seq: int = 24, vocab: int = 97, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def pair(config: DecoderConfig) -> tuple[Decoder, LlamaForCausalLM]:
    """Our model and transformers', with the same weights: larger than initial ones, so that errors show."""
    torch.manual_seed(0)
    ours = Decoder(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(3).add_(0.02 * torch.randn_like(parameter))
    theirs = LlamaForCausalLM(LlamaConfig(**to_hf_config(config)))
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and not [name for name in missing if name != "lm_head.weight"]
    return ours, theirs


@pytest.mark.parametrize("config", [CONFIG, TIED, PLAIN_HEADS], ids=["gqa", "tied", "mha"])
def test_names_and_order_are_those_of_llama(config: DecoderConfig) -> None:
    ours, theirs = pair(config)
    expected = [(name, tuple(p.shape)) for name, p in theirs.named_parameters()]
    assert [(name, tuple(p.shape)) for name, p in ours.named_parameters()] == expected
    assert parameter_shapes(config) == expected
    assert set(ours.state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "70b"])
def test_shapes_are_those_of_the_module(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(preset(name))
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == parameter_shapes(preset(name))


@pytest.mark.parametrize("config", [CONFIG, TIED, PLAIN_HEADS], ids=["gqa", "tied", "mha"])
@pytest.mark.parametrize("loss_chunk", [1024, 7])
def test_logits_loss_and_gradients_equal_llama(config: DecoderConfig, loss_chunk: int) -> None:
    ours, theirs = pair(config)
    ours.loss_chunk = loss_chunk
    tokens = ids()
    labels = tokens.clone()
    labels[0, 5:9] = -100
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    loss, loss_theirs = ours(tokens, labels), theirs(tokens, labels=labels).loss
    torch.testing.assert_close(loss, loss_theirs, rtol=1e-5, atol=1e-5)
    loss.backward()
    loss_theirs.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_oracle_can_fail() -> None:
    """A wrong rotary base is far outside the tolerance that the parity test grants."""
    ours, theirs = pair(CONFIG)
    wrong = Decoder(replace(CONFIG, rope_theta=10_000.0))
    wrong.load_state_dict(ours.state_dict())
    assert (wrong(ids()) - theirs(ids()).logits).abs().max() > 1e-3


def test_bf16_is_near_fp32() -> None:
    ours, theirs = pair(CONFIG)
    exact = theirs(ids()).logits
    low = ours.bfloat16()(ids())
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.1 * exact.abs().max()
    loss = ours(ids(), ids())
    assert loss.dtype == torch.float32


def test_checkpointing_changes_nothing() -> None:
    losses, gradients = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = Decoder(CONFIG, checkpointing=checkpointing)
        loss = model(ids(), ids())
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss_chunk", "training", "calls"), [(1024, True, 1), (48, True, 1), (20, True, 6), (20, False, 3)]
)
def test_output_layer_is_used_once_per_piece(loss_chunk: int, training: bool, calls: int) -> None:
    """One piece: once. Three pieces of 20, 20 and 8 of 48 tokens: thrice, and again in the backward."""
    model = Decoder(CONFIG, loss_chunk=loss_chunk).train(training)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    with torch.set_grad_enabled(training):
        loss = model(ids(), ids())
    if training:
        loss.backward()
    assert len(seen) == calls and max(seen) <= loss_chunk


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_seed_reproduces_even_one_parameter_at_a_time(config: DecoderConfig) -> None:
    torch.manual_seed(3)
    first = Decoder(config).state_dict()
    torch.manual_seed(3)
    for name, shape in parameter_shapes(config):
        parameter = torch.empty(shape)
        init_parameter_(config, name, parameter)
        assert torch.equal(parameter, first[name]), name
    torch.manual_seed(4)
    assert not torch.equal(
        Decoder(config).state_dict()["model.embed_tokens.weight"], first["model.embed_tokens.weight"]
    )


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, hidden_size=256, intermediate_size=512))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.02 / 6**0.5 if "o_proj" in name or "down_proj" in name else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(parameter.mean().item()) < 0.05 * std, name
    # Before training the model knows nothing: the loss is near that of a uniform guess.
    assert model(ids(), ids()).item() == pytest.approx(torch.tensor(97.0).log().item(), rel=0.05)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m,
        lambda m: m.bfloat16(),
        lambda m: m.half().float(),
        lambda m: m.to(torch.float64),
        lambda m: m.to_empty(device="cpu"),
    ],
    ids=["plain", "bf16", "half-float", "fp64", "to_empty"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frequencies_stay_float32(move: Callable[[nn.Module], nn.Module], device: str) -> None:
    reference = LlamaForCausalLM(LlamaConfig(**to_hf_config(CONFIG))).model.rotary_emb.inv_freq
    with torch.device(device):
        model = Decoder(CONFIG)
    move(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference)
    assert "model.rotary_emb.inv_freq" not in model.state_dict()


def test_all_labels_ignored_is_zero_not_nan() -> None:
    model = Decoder(CONFIG)
    loss = model(ids(), torch.full_like(ids(), -100))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"65 tokens .* max_seq_len 64"):
        Decoder(CONFIG)(ids(seq=65))
    with pytest.raises(ConfigError, match="loss_chunk"):
        Decoder(CONFIG, loss_chunk=0)


def test_future_tokens_do_not_matter() -> None:
    model, tokens = Decoder(CONFIG).eval(), ids()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    torch.testing.assert_close(model(changed)[:, :12], model(tokens)[:, :12], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(changed)[:, 12], model(tokens)[:, 12])


def allocated_peak(
    config: DecoderConfig, batch: int, seq: int, *, checkpointing: bool, loss_chunk: int
) -> int:
    """Bytes that one training step allocates beside parameters and ``.grad``, at its peak.

    Method: ``.grad`` exists before the step; torch.profiler records every allocation and release of torch's
    CPU allocator inside forward and backward; the peak is the largest running sum. Scratch memory of BLAS is
    not in it.
    """
    torch.manual_seed(0)
    model = Decoder(config, checkpointing=checkpointing, loss_chunk=loss_chunk)
    tokens = ids(batch=batch, seq=seq, vocab=config.vocab_size)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(tokens, tokens).backward()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in memory))


WIDE = replace(
    CONFIG, num_layers=2, hidden_size=256, intermediate_size=704, vocab_size=8_000, max_seq_len=256
)


@pytest.mark.parametrize(
    ("config", "batch", "seq", "loss_chunk"),
    [
        (preset("demo"), 1, 128, 1024),
        (WIDE, 2, 256, 1024),
        (WIDE, 2, 256, 128),
        (replace(WIDE, tie_embeddings=True), 1, 64, 1024),
        (replace(WIDE, tie_embeddings=True), 2, 256, 128),
    ],
    ids=["demo", "vocab", "vocab-pieces", "tied", "tied-pieces"],
)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_activation_estimate_is_above_the_peak_and_within_twice(
    config: DecoderConfig, batch: int, seq: int, loss_chunk: int, checkpointing: bool
) -> None:
    measured = allocated_peak(config, batch, seq, checkpointing=checkpointing, loss_chunk=loss_chunk)
    estimate = activation_bytes(config, batch, seq, checkpointing, dtype_bytes=4, loss_chunk=loss_chunk)
    assert measured <= estimate <= 2 * measured


def test_pieces_bound_the_logits() -> None:
    """1024 tokens x 8000 words: whole, the loss needs several times 32 MB; in pieces of 64, a small part of
    it."""
    whole = allocated_peak(replace(WIDE, num_layers=1), 4, 256, checkpointing=True, loss_chunk=1024)
    pieces = allocated_peak(replace(WIDE, num_layers=1), 4, 256, checkpointing=True, loss_chunk=64)
    assert whole > 2.5 * 1024 * 8000 * 4
    assert pieces < 0.6 * whole
