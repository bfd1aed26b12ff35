"""Presets: published parameter counts, and the arithmetic against formulas."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from offload.errors import ConfigError
from offload.models.presets import (
    PRESETS,
    DecoderConfig,
    activation_bytes,
    flops_per_token,
    num_parameters,
    parameter_shapes,
    preset,
)

TINY = DecoderConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    max_seq_len=16,
)

# Parameters as published with the weights, in the order of magnitude that the name promises.
PUBLISHED = {
    "1b": 1_100_048_384,  # TinyLlama-1.1B
    "3b": 3_212_749_824,  # Llama-3.2-3B
    "7b": 6_738_415_616,  # Llama-2-7b
    "8b": 8_030_261_248,  # Meta-Llama-3-8B
    "13b": 13_015_864_320,  # Llama-2-13b
    "30b": 32_528_943_616,  # llama-30b
    "70b": 70_553_706_496,  # Meta-Llama-3-70B
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_count_is_the_published_one(name: str, count: int) -> None:
    assert num_parameters(preset(name)) == count


@pytest.mark.parametrize("name", ["10m", "25m", "50m", "125m", "350m"])
def test_small_presets_are_near_their_names(name: str) -> None:
    assert num_parameters(preset(name)) == pytest.approx(int(name[:-1]) * 1e6, rel=0.05)


def test_demo_fits_its_purpose() -> None:
    """25 to 35 M parameters, nearly all of them in many equal blocks."""
    config = preset("demo")
    assert 25e6 <= num_parameters(config) <= 35e6
    outside = sum(1 for name, _ in parameter_shapes(config) if "layers." not in name)
    assert outside == 3 and config.num_layers >= 8
    assert 2 * config.vocab_size * config.hidden_size < 0.02 * num_parameters(config)


def test_count_is_the_closed_formula() -> None:
    hidden, ffn, kv = 8, 12, 4
    block = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * ffn + 2 * hidden
    assert num_parameters(TINY) == 2 * block + hidden + 2 * 10 * hidden
    assert num_parameters(replace(TINY, tie_embeddings=True)) == 2 * block + hidden + 10 * hidden


def test_flops_by_counting_matrix_products() -> None:
    """Every (n x k) weight costs 2nk per token; attention at position t costs 2 * 2 * hidden * (t + 1)."""
    seq = 4
    weights = sum(s[0] * s[1] for name, s in parameter_shapes(TINY) if len(s) == 2 and "embed" not in name)
    blocks = sum(s[0] * s[1] for name, s in parameter_shapes(TINY) if len(s) == 2 and "layers" in name)
    attention = 2 * 2 * 8 * (seq / 2) * TINY.num_layers  # the mean context of a causal mask is seq / 2
    assert flops_per_token(TINY, seq) == 3 * (2 * weights + attention)
    again = flops_per_token(TINY, seq, checkpointing=True) - flops_per_token(TINY, seq)
    assert again == 2 * blocks + attention
    assert flops_per_token(replace(TINY, tie_embeddings=True), seq) == flops_per_token(TINY, seq)


def test_activations_grow_with_what_they_hold() -> None:
    one = activation_bytes(preset("1b"), 1, 256)
    assert activation_bytes(preset("1b"), 2, 256) > one
    assert activation_bytes(preset("1b"), 1, 256, dtype_bytes=4) > one
    deep = replace(preset("1b"), num_layers=44)
    assert (
        activation_bytes(deep, 1, 256) - one == 22 * 256 * 2048 * 2
    )  # one input per block, and nothing else
    assert activation_bytes(preset("1b"), 1, 256, checkpointing=False) > 2 * one
    # Pieces bound the logits: with 16 times the tokens the loss still holds one piece.
    wide = replace(TINY, vocab_size=100_000)
    assert activation_bytes(wide, 16, 16, loss_chunk=16) < 2 * activation_bytes(wide, 1, 16, loss_chunk=16)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_heads": 3}, "hidden_size"),
        ({"num_heads": 8}, "even"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_layers": 0}, "num_layers"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        replace(TINY, **change)


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TINY.num_layers = 3  # type: ignore[misc]


def test_names() -> None:
    assert preset("preset:1B") is PRESETS["1b"]
    with pytest.raises(ConfigError, match="did you mean '125m'"):
        preset("124m")
    with pytest.raises(ConfigError, match="demo, 10m") as error:
        preset("gigantic")
    assert "\n" not in str(error.value)


def test_no_torch() -> None:
    """`offload plan` starts without torch."""
    code = "import sys, offload.models.presets, offload.models.pretrained; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
