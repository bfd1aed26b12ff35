"""What ``--model`` names, before anything of it is loaded: shapes, limits and memory. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bytesize import MiB
from ..config import OffloadConfig
from ..errors import ConfigError
from ..inventory import Inventory, ParamInfo, build_inventory
from ..models.presets import PRESETS, DecoderConfig, activation_bytes, parameter_shapes, preset
from ..models.pretrained import PretrainedCheckpoint, open_checkpoint
from ..placement import WEIGHT_ITEMSIZE

Shapes = list[tuple[str, tuple[int, ...]]]

PREFIX = "preset:"

LIBRARY_BYTES = 48 * MiB
"""What the process takes in training beside the plan's own memory and the tensors of the computation.

Measured on x86-64 with torch 2.13, in fp32 and bf16 with one thread and two, as private memory from an
interpreter that has imported torch to the largest, less slabs and activations: 17 MiB with 10 M parameters
and 35 MiB with 32 M, of which 12 MiB are this package and its dependencies, 8 MiB the engine and the first
step's own, and the rest stacks of threads and holes in the heap. Pages of code add nothing: see
``memory``, Note [Code that ran once].
"""
TRANSFORMERS_BYTES = 160 * MiB
"""As LIBRARY_BYTES, for transformers and what it loads (torch's compiler among it)."""


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
    def library_bytes(self) -> int:
        return LIBRARY_BYTES

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
    def library_bytes(self) -> int:
        return LIBRARY_BYTES + TRANSFORMERS_BYTES

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
    inventory = build_inventory(
        (ParamInfo(name, shape, itemsize, True) for name, shape in shapes),
        weight_itemsize=itemsize,
        activation_bytes=source.activation_bytes(config.resolve_batch(1).micro, seq, itemsize),
    )
    return replace(inventory, library_bytes=source.library_bytes)


def plan_notes(inventory: Inventory) -> Iterator[str]:
    """What a plan does not count."""
    if not inventory.activation_bytes:
        yield "  activations are not counted: config.json does not say the model's sizes"
    yield "  the interpreter with torch, which is there before the run, takes a few hundred MiB besides"
