"""Models of transformers of every kind, tiny and random, with batches that fit each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, LENGTH = 67, 8
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**settings: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **settings))


def llama_tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def qwen3() -> nn.Module:
    """Norms of queries and keys, and an output layer tied to the embedding."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, tie_word_embeddings=True))


def qwen3_moe() -> nn.Module:
    """Experts in one parameter of three dimensions; each step uses others."""
    config = transformers.Qwen3MoeConfig(
        **DECODER, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        output_router_logits=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gemma3() -> nn.Module:
    """A local and a global layer, a scaled embedding that is tied."""
    config = transformers.Gemma3TextConfig(
        **DECODER, layer_types=["sliding_attention", "full_attention"], sliding_window=4,
        query_pre_attn_scalar=8,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> nn.Module:
    """Conv1D layers, whose weights are transposed, and an output layer tied to the embedding."""
    config = transformers.GPT2Config(
        **TOKENS, n_positions=64, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Two lists of blocks, one embedding for both, and a position bias that the first layer owns."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    """Convolutions over a spectrogram, frozen positions in the encoder, a tied output layer."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=8, max_target_positions=32, dropout=0.0, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


FAMILIES = {
    "llama": llama, "llama-tied": llama_tied, "qwen3": qwen3, "qwen3-moe": qwen3_moe, "gemma3": gemma3,
    "gpt2": gpt2, "bert": bert, "t5": t5, "whisper": whisper, "vit": vit,
}  # fmt: skip
DECODERS = ("llama", "qwen3", "qwen3-moe", "gemma3", "gpt2")
GENERATING = (*DECODERS, "t5", "whisper")

ZERO_GRADIENT = ("key.bias", "k_proj.bias", "c_attn.bias")
"""Softmax does not change when every key is moved by the same vector, with rotary positions hardly.

A third of GPT-2's c_attn are keys.
"""


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILIES[name]().train()


def batches(name: str, steps: int) -> list[dict[str, torch.Tensor]]:
    """Inputs with labels; every second text is to be reversed, so that a head learns something."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(steps)]
    if name == "whisper":
        sounds = [torch.randn(2, 8, 16, generator=generator) for _ in ids]
        return [{"input_features": sound, "labels": x} for sound, x in zip(sounds, ids, strict=True)]
    if name == "vit":
        images = [torch.randn(2, 3, 16, 16, generator=generator) for _ in ids]
        return [{"pixel_values": image, "labels": x[:, 0] % 5} for image, x in zip(images, ids, strict=True)]
    return [{"input_ids": x, "labels": x.flip(1) if step % 2 else x} for step, x in enumerate(ids)]


def inputs(name: str) -> dict[str, torch.Tensor]:
    """What a forward needs without labels."""
    batch = batches(name, 1)[0]
    labels = batch.pop("labels")
    return {**batch, "decoder_input_ids": labels} if name in ("t5", "whisper") else batch


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    loss: torch.Tensor = model(**batch).loss
    return loss
