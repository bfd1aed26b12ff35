"""Named decoder sizes, and their arithmetic: parameters, activations, FLOPs. Pure Python, no torch.

The shapes are those of ``decoder.Decoder`` to the letter (a test compares them), so that a plan for 70
billion parameters is made in milliseconds.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from ..errors import ConfigError

BYTE_VOCAB_SIZE: Final = 264
"""256 bytes + begin + end of text, rounded up to a multiple of 8 so that matrix units take the output
layer."""

LOSS_CHUNK_TOKENS: Final = 1024
"""Tokens whose logits exist in float32 at once; see ``decoder.Decoder``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a Llama-style decoder."""

    vocab_size: int
    hidden_size: int
    """Width of the residual stream; a multiple of ``num_heads``, and an even number per head (rotary
    pairs)."""
    intermediate_size: int
    """Inner width of the SwiGLU."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; divides ``num_heads``."""
    max_seq_len: int
    """Longest sequence, in tokens."""
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The output layer is the embedding matrix."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "tie_embeddings" and not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} must be above 0, got {getattr(self, field.name)}")
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise ConfigError(
                f"hidden_size {self.hidden_size} must give each of num_heads {self.num_heads} an even width"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Width of all keys (or all values) of one token."""
        return self.num_kv_heads * self.head_dim


def _shape(
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    seq: int,
    *,
    theta: float = 10_000.0,
    eps: float = 1e-5,
    tied: bool = False,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_seq_len=seq,
        rope_theta=theta,
        rms_norm_eps=eps,
        tie_embeddings=tied,
    )


# The byte vocabulary costs 0.3 M parameters, so a small model is nearly all blocks and learns text in tens
# of steps.
PRESETS: Final[dict[str, DecoderConfig]] = {
    #              vocab           hidden    ffn  layers heads kv    seq
    "demo": _shape(BYTE_VOCAB_SIZE, 512, 1_408, 10, 8, 8, 2_048),
    "10m": _shape(BYTE_VOCAB_SIZE, 256, 704, 12, 4, 4, 2_048),
    "25m": _shape(BYTE_VOCAB_SIZE, 384, 1_024, 14, 6, 6, 2_048),
    "50m": _shape(BYTE_VOCAB_SIZE, 512, 1_408, 16, 8, 8, 2_048),
    "125m": _shape(32_000, 768, 2_048, 14, 12, 12, 2_048, tied=True),
    "350m": _shape(32_000, 1_024, 2_816, 24, 16, 16, 2_048, tied=True),
    "1b": _shape(32_000, 2_048, 5_632, 22, 32, 4, 2_048),  # TinyLlama
    "3b": _shape(128_256, 3_072, 8_192, 28, 24, 8, 8_192, theta=500_000.0, tied=True),  # Llama 3.2
    "7b": _shape(32_000, 4_096, 11_008, 32, 32, 32, 4_096),  # Llama 2
    "8b": _shape(128_256, 4_096, 14_336, 32, 32, 8, 8_192, theta=500_000.0),  # Llama 3
    "13b": _shape(32_000, 5_120, 13_824, 40, 40, 40, 4_096),  # Llama 2
    "30b": _shape(32_000, 6_656, 17_920, 60, 52, 52, 2_048, eps=1e-6),  # Llama 1
    "70b": _shape(128_256, 8_192, 28_672, 80, 64, 8, 8_192, theta=500_000.0),  # Llama 3
}


def preset(name: str) -> DecoderConfig:
    """The configuration called ``name``, in any case, with or without ``preset:`` before it."""
    key = name.removeprefix("preset:").lower()
    if key in PRESETS:
        return PRESETS[key]
    near = difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{name!r} is not a preset; {hint}there are {', '.join(PRESETS)}")


def parameter_shapes(config: DecoderConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, in the order of ``Decoder(config).named_parameters()``.

    As there, a tied output layer is not listed a second time.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config.num_layers):
        shapes += [(f"model.layers.{layer}.{name}", shape) for name, shape in _block_shapes(config)]
    shapes.append(("model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        shapes.append(("lm_head.weight", (vocab, hidden)))
    return shapes


def _block_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.kv_size
    yield "self_attn.q_proj.weight", (hidden, hidden)
    yield "self_attn.k_proj.weight", (kv, hidden)
    yield "self_attn.v_proj.weight", (kv, hidden)
    yield "self_attn.o_proj.weight", (hidden, hidden)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def num_parameters(config: DecoderConfig) -> int:
    """Elements of all parameters, a tied matrix counted once."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


def init_std(config: DecoderConfig, name: str) -> float | None:
    """Standard deviation of the parameter's initial values; None: all ones (a norm).

    What is added to the residual stream is scaled by 1/sqrt(2 * layers), so that the stream's variance does
    not grow with depth.
    """
    if name.endswith("norm.weight"):
        return None
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 0.02 / math.sqrt(2 * config.num_layers)
    return 0.02


def flops_per_token(config: DecoderConfig, seq: int | None = None, *, checkpointing: bool = False) -> float:
    """Floating-point operations of forward and backward, per token of a sequence of ``seq`` (default: the
    longest).

    Two per multiply-add; the backward is twice the forward. Matrices: the blocks' and the output layer
    (looking up an embedding costs none). Attention: scores and values over the causal half.
    ``checkpointing`` adds the second forward of the blocks: what the machine does, not what the model needs.
    """
    seq = config.max_seq_len if seq is None else seq
    matrices = sum(math.prod(shape) for _, shape in _block_shapes(config) if len(shape) == 2)
    attention = config.hidden_size * seq  # multiply-adds: (scores + values) * hidden * seq / 2
    blocks = 2.0 * config.num_layers * (matrices + attention)
    head = 2.0 * config.vocab_size * config.hidden_size
    return 3 * (blocks + head) + (blocks if checkpointing else 0)


def activation_bytes(
    config: DecoderConfig,
    micro_batch: int,
    seq: int,
    checkpointing: bool = True,
    dtype_bytes: int = 2,
    loss_chunk: int = LOSS_CHUNK_TOKENS,
) -> int:
    """Upper estimate of what one training step allocates beside parameters and their ``.grad``, in bytes, on
    a CPU.

    ``micro_batch`` sequences of ``seq`` tokens; ``dtype_bytes`` is the size of an activation (2: bf16, 4:
    fp32). The peak is in one of three places:

    - in the loss: the blocks' inputs, the logits of one piece of ``loss_chunk`` tokens in the activations'
      type and in float32, their gradients, and the gradient of the output layer on its way into ``.grad``;
    - in the backward of a block: the blocks' inputs, what its operations saved (with ``checkpointing`` of
      one block, without it of all), the gradients of its widest part, and that of its largest weight on its
      way into ``.grad``;
    - at the end: the gradient of the embedding on its way into ``.grad``.

    Where autograd sums several gradients of one matrix (pieces of the loss, tied embeddings) it holds both
    terms and the sum; and a tied matrix's gradient waits through all the blocks.

    Not counted: scratch memory of BLAS libraries (some MiB per thread) and of the engine.
    """
    b, wide = dtype_bytes, 4  # bytes of an activation; of what is computed in float32 inside
    tokens = micro_batch * seq
    piece = min(tokens, loss_chunk)
    hidden, ffn, kv, vocab = config.hidden_size, config.intermediate_size, config.kv_size, config.vocab_size
    layers = config.num_layers

    # A norm keeps x and x/rms in float32 (x only where it had to be converted), x/rms converted, and its
    # output.
    norm = hidden * (wide + 2 * b if b == wide else 2 * wide + 2 * b)
    # q, k, v, rotated q and k, attention's output, its sum with the stream, and one log-sum per head in
    # float32.
    attention = b * (4 * hidden + 3 * kv) + wide * config.num_heads
    mlp = b * 4 * ffn  # gate, up, silu(gate), and their product
    saved = tokens * (2 * norm + attention + mlp)
    # Gradients of the product, of silu(gate), of gate and of up, and of the stream where it branches.
    gradients = tokens * b * (4 * ffn + 3 * hidden)
    block_weight = b * hidden * max(ffn, hidden)

    inputs = tokens * b * hidden * (layers + 1)
    # float32 logits and log-probabilities, the gradients of both, and logits and gradient in the
    # activations' type.
    logits = piece * vocab * (3 * wide if b == wide else 4 * wide + 2 * b)
    matrix = b * vocab * hidden
    waiting = matrix if config.tie_embeddings else 0
    in_loss = logits + matrix * (1 if piece == tokens else 3) + tokens * (2 * norm)
    in_block = gradients + block_weight + waiting
    in_embedding = matrix * (3 if config.tie_embeddings else 1) + tokens * b * hidden
    if checkpointing:
        in_block += saved
    else:
        in_loss, in_block = in_loss + layers * saved, in_block + layers * saved
    return max(inputs + in_loss, inputs + in_block, in_embedding)
