"""A Llama-style decoder, small enough to read, that transformers opens as its own.

Parameter names are those of ``transformers.LlamaForCausalLM``, so a model trained here and written by
``pretrained.write_checkpoint`` loads with ``AutoModelForCausalLM.from_pretrained`` and gives equal logits.

Shape suffixes: B sequences, T tokens of one, N = B*T, D hidden, H heads, K key/value heads, E width of a
head, F inner width of the MLP, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError
from .presets import LOSS_CHUNK_TOKENS, DecoderConfig, init_std

IGNORE_INDEX: Final = -100
"""A label that counts neither in the loss nor in its mean."""

# Grouped heads without materialising the repeated keys and values; torch has it since 2.5.
_HAS_GQA: Final = "enable_gqa" in (inspect.getdoc(F.scaled_dot_product_attention) or "")


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares is taken in float32, as bf16 has too few digits for a sum."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of position * frequency. See Note [Frequencies stay float32]."""

    # Note [Frequencies stay float32]
    # At position 2000 a bf16 frequency (3 digits) gives an angle that is wrong by several radians. So
    # `inv_freq` survives model.bfloat16(), and because it follows from the configuration, it is computed
    # anew wherever the module goes. A model built on the meta device has it real from the start: nothing in
    # a checkpoint could fill it in later.

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        device = torch.get_default_device()
        real = torch.device("cpu") if device.type == "meta" else device
        self.register_buffer("inv_freq", self._frequencies(real), persistent=False)

    def _frequencies(self, device: torch.device) -> Tensor:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        return 1.0 / (self.theta**exponents)  # (E/2,)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.device.type != "meta":
            self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D) -> 2 x (T, E), in x's dtype
        positions = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        angles = torch.outer(positions, self.inv_freq.to(x.device))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, T, E)
    """Rotates the pairs (i, i + E/2): the layout of transformers, not the interleaved one of the paper."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Linear(nn.Linear):
    """``nn.Linear`` without bias, drawn once from its own distribution.

    torch would first draw the default one and throw it away: at a billion parameters that is seconds, and it
    would move the generator, so that parameters created one by one (``init_parameter_``) could not be
    bit-equal.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: the owner calls ``init_parameter_`` next, as it knows the name."""


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.kv_size)
        self.v_proj = Linear(config.hidden_size, config.kv_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BHTE = _rotate(self.q_proj(x_BTD).view(heads).transpose(1, 2), cos, sin)
        k_BKTE = _rotate(self.k_proj(x_BTD).view(heads).transpose(1, 2), cos, sin)
        v_BKTE = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        out_BHTE = _causal_attention(q_BHTE, k_BKTE, v_BKTE, self.group)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).reshape(x_BTD.shape))
        return out


def _causal_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, group: int) -> Tensor:
    if group == 1:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True)
    if _HAS_GQA:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
    k_BHTE, v_BHTE = (x.repeat_interleave(group, dim=1) for x in (k_BKTE, v_BKTE))
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer, and one unit of streaming."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        _init_parameters(self, config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Embedding(nn.Embedding):
    """``nn.Embedding``, drawn once; see :class:`Linear`."""

    def reset_parameters(self) -> None:
        """Nothing: the owner calls ``init_parameter_`` next."""


class Backbone(nn.Module):
    """Embedding, blocks and final norm: all but the output layer."""

    def __init__(self, config: DecoderConfig, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        init_parameter_(config, "embed_tokens.weight", self.embed_tokens.weight)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.head_dim, config.rope_theta)

    def forward(self, ids_BT: Tensor) -> Tensor:  # -> (B, T, D)
        x: Tensor = self.embed_tokens(ids_BT)
        cos, sin = self.rotary_emb(x)
        for block in self.layers:
            if self.checkpointing and self.training and torch.is_grad_enabled():
                # No block draws random numbers, so there is no generator state to keep and restore.
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """Token ids to logits, or with labels to the mean loss.

    ``torch.manual_seed`` before the constructor fixes every initial value; the order of drawing is the order
    of ``named_parameters()``, so ``init_parameter_`` reproduces any prefix of it.
    """

    def __init__(
        self, config: DecoderConfig, *, checkpointing: bool = True, loss_chunk: int = LOSS_CHUNK_TOKENS
    ) -> None:
        """``checkpointing``: in training keep only the input of each block and compute the rest again.

        ``loss_chunk``: tokens whose logits exist at once; see Note [Loss in pieces].
        """
        super().__init__()
        if loss_chunk < 1:
            raise ConfigError(f"loss_chunk must be at least 1 token, got {loss_chunk}")
        self.config, self.loss_chunk = config, loss_chunk
        self.model = Backbone(config, checkpointing=checkpointing)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        else:
            init_parameter_(config, "lm_head.weight", self.lm_head.weight)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """``input_ids`` (B, T) -> logits (B, T, V); with ``labels`` (B, T) -> mean loss, a float32 scalar.

        Labels are the ids themselves, as in transformers: the shift by one is done here, so the last token
        of a sequence predicts nothing. Labels of -100 are left out; if all are, the loss is 0.
        """
        if input_ids.shape[1] > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {input_ids.shape[1]} tokens is longer than "
                f"the model's max_seq_len {self.config.max_seq_len}"
            )
        hidden_BTD = self.model(input_ids)
        if labels is None:
            logits: Tensor = self.lm_head(hidden_BTD)
            return logits
        # Shifting the labels, not the states, keeps the states contiguous.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return self._loss(hidden_BTD.flatten(0, 1), targets.flatten())

    # Note [Loss in pieces]
    # Logits are vocab/hidden times larger than anything else in the model, and the loss wants them in
    # float32 three times over (logits, log-probabilities, gradient). So they exist for `loss_chunk` tokens
    # at a time; the backward computes each piece again. A batch of one piece is left whole: its backward
    # follows its forward at once, so recomputing would save nothing, and the output layer is used exactly
    # once per step.

    def _loss(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        count = (targets_N != IGNORE_INDEX).sum().clamp(min=1)
        pieces = math.ceil(hidden_ND.shape[0] / self.loss_chunk)
        if pieces == 1:
            return self._loss_sum(hidden_ND, targets_N) / count
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for hidden, targets in zip(
            torch.split(hidden_ND, self.loss_chunk), torch.split(targets_N, self.loss_chunk), strict=True
        ):
            if torch.is_grad_enabled():
                total = total + checkpoint(
                    self._loss_sum, hidden, targets, use_reentrant=False, preserve_rng_state=False
                )
            else:
                total = total + self._loss_sum(hidden, targets)
        return total / count

    def _loss_sum(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = self.lm_head(hidden_ND).float()
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def init_parameter_(config: DecoderConfig, name: str, parameter: Tensor) -> None:
    """Fills ``parameter`` with its initial values, drawn from torch's global generator.

    Called for all of ``parameter_shapes(config)`` in order, it gives bit for bit what the constructor gives
    from the same seed: so a model too large for memory can start from the same values, one parameter at a
    time.
    """
    if parameter.is_meta:
        return  # torch would find that out by way of its symbolic shapes, whose import takes 36 MiB
    std = init_std(config, name)
    if std is None:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, std)


def _init_parameters(module: nn.Module, config: DecoderConfig) -> None:
    for name, parameter in module.named_parameters():
        init_parameter_(config, name, parameter)


def to_hf_config(config: DecoderConfig, *, dtype: str = "float32") -> dict[str, object]:
    """The ``config.json`` under which transformers opens the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        # The byte tokenizer's; a caller with another tokenizer overwrites them.
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": dtype,
    }
