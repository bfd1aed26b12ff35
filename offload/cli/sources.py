"""What ``--model`` names, before anything of it is loaded: shapes, limits and memory. No torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bytesize import MiB, format_bytes
from ..config import OffloadConfig
from ..errors import ConfigError
from ..inventory import Inventory, ParamInfo, build_inventory
from ..models.presets import PRESETS, DecoderConfig, activation_bytes, parameter_shapes, preset
from ..models.pretrained import PretrainedCheckpoint, open_checkpoint
from ..plan import WEIGHT_ITEMSIZE

Shapes = list[tuple[str, tuple[int, ...]]]

PREFIX = "preset:"

RUNTIME_BYTES = 64 * MiB
"""What the process takes in training beside the plan's own memory and the tensors of the computation.

Measured on x86-64 with torch 2.13 and two threads, from an interpreter that has imported torch to the
largest resident memory, less the slabs and the activations: 44 MiB with fp32 and 61 MiB with bf16 on a CPU
that widens its weights piece by piece. 20 MiB of it is library code that is paged in by first use, 12 MiB
this package and its dependencies. Counted with the activations.
"""
TRANSFORMERS_BYTES = 160 * MiB
"""As RUNTIME_BYTES, for transformers and what it loads (torch's compiler among it)."""


@dataclass(frozen=True, slots=True)
class PresetSource:
    """A decoder with random weights."""

    name: str
    config: DecoderConfig

    def shapes(self) -> Shapes:
        return parameter_shapes(self.config)

    @property
    def seq_max(self) -> int | None:
        return self.config.max_seq_len

    @property
    def vocab_size(self) -> int | None:
        return self.config.vocab_size

    @property
    def runtime_bytes(self) -> int:
        return RUNTIME_BYTES

    def activation_bytes(self, micro_batch: int, seq: int, itemsize: int) -> int:
        return activation_bytes(self.config, micro_batch, seq, dtype_bytes=itemsize)


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A causal language model saved by transformers."""

    name: str
    checkpoint: PretrainedCheckpoint

    def shapes(self) -> Shapes:
        return self.checkpoint.parameter_shapes()

    @property
    def seq_max(self) -> int | None:
        return self._number("max_position_embeddings", "n_positions", "n_ctx")

    @property
    def vocab_size(self) -> int | None:
        return self._number("vocab_size")

    @property
    def runtime_bytes(self) -> int:
        return RUNTIME_BYTES + TRANSFORMERS_BYTES

    def activation_bytes(self, micro_batch: int, seq: int, itemsize: int) -> int:
        """An upper bound for any transformer with activation checkpointing per block; 0 where unknown.

        It is the estimate of our own decoder for a wider one: one head as wide as all heads together, keys
        and values as wide as queries, and twice the inner width, because activation functions that are
        several operations (the tanh form of GELU keeps six tensors) keep more than SwiGLU's four. The logits
        of all tokens exist at once. A mixture of experts counts the experts that one token visits.
        """
        hidden = self._number("hidden_size", "n_embd", "d_model", "dim")
        layers = self._number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        vocab = self.vocab_size
        if hidden is None or layers is None or vocab is None:
            return 0
        heads = self._number("num_attention_heads", "n_head", "n_heads") or 1
        width = max(hidden, heads * (self._number("head_dim") or 0))
        inner = self._number("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
        inner = max(inner, self._number("moe_intermediate_size") or 0)
        inner *= self._number("num_experts_per_tok") or 1
        tied = self.checkpoint.config.get("tie_word_embeddings", True) is not False
        bound = DecoderConfig(
            vocab_size=vocab,
            hidden_size=width + width % 2,
            intermediate_size=2 * inner,
            num_layers=layers,
            num_heads=1,
            num_kv_heads=1,
            max_seq_len=seq,
            tie_embeddings=tied,
        )
        return activation_bytes(bound, micro_batch, seq, dtype_bytes=itemsize, loss_chunk=micro_batch * seq)

    def _number(self, *names: str) -> int | None:
        """The first of these settings that ``config.json`` has; in models of several parts, of the text."""
        config = self.checkpoint.config
        parts: list[Any] = [config, config.get("text_config")]
        for part in parts:
            for name in names if isinstance(part, dict) else ():
                value = part.get(name)
                if isinstance(value, int) and value > 0:
                    return value
        return None


ModelSource = PresetSource | CheckpointSource


def open_source(model: str) -> ModelSource:
    """What ``--model`` names.

    Raises:
        ConfigError, CheckpointError: there is no such preset or directory; says what was probably meant.
    """
    if model.startswith(PREFIX):
        return PresetSource(model, preset(model))
    if not Path(model).exists():
        near = difflib.get_close_matches(model.lower(), PRESETS, n=1, cutoff=0.6)
        hint = f"did you mean --model {PREFIX}{near[0]}?" if near else f"presets are written {PREFIX}NAME"
        raise ConfigError(f"--model {model}: there is no such directory; {hint}")
    return CheckpointSource(model, open_checkpoint(model))


def check_seq(source: ModelSource, seq: int) -> None:
    """Raises ConfigError where the model takes no sequence of that length."""
    if source.seq_max is not None and seq > source.seq_max:
        raise ConfigError(
            f"--seq {seq}: {source.name} takes at most {source.seq_max} tokens; give --seq {source.seq_max}"
        )


def inventory_of(config: OffloadConfig, source: ModelSource, shapes: Shapes, seq: int) -> Inventory:
    """The model as the plan takes it, all of it trainable.

    Args:
        shapes: of the parameters, in the order of the model.
    """
    itemsize = WEIGHT_ITEMSIZE[config.precision]
    activations = source.activation_bytes(config.resolve_batch(1).micro, seq, itemsize)
    return build_inventory(
        (ParamInfo(name, shape, itemsize, True) for name, shape in shapes),
        weight_itemsize=itemsize,
        activation_bytes=activations + source.runtime_bytes,
    )


def activation_note(config: OffloadConfig, source: ModelSource, seq: int) -> str:
    """What the plan's line "activations" consists of."""
    size = source.activation_bytes(config.resolve_batch(1).micro, seq, WEIGHT_ITEMSIZE[config.precision])
    runtime = f"{format_bytes(source.runtime_bytes)} for library code and scratch memory"
    if not size:
        return f"  note: activations are {runtime} only: config.json does not say the model's sizes"
    return f"  note: activations are {format_bytes(size)} at most for the computation, and {runtime}"
