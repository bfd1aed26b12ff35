"""The model of a run: built without its values, which `offload.prepare` then reads one by one.

Note [Initial values of a preset]
``prepare`` asks for values unit by unit. In a preset that is the order of ``named_parameters()``, in which
the constructor draws: with one seed, the values are those of ``Decoder(config)`` bit for bit, whatever its
size and the memory, as no more than one of them exists at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import construct
from ..models.conversion import PretrainedValues
from ..models.decoder import Decoder, init_parameter_, to_hf_config
from ..models.presets import DecoderConfig
from ..models.pretrained import build_meta_model
from .progress import Advance
from .sources import CheckpointSource, ModelSource, PresetSource, Shapes

Read = Callable[[str], torch.Tensor]


def build(source: ModelSource, *, seed: int) -> tuple[nn.Module, Read]:
    """The model with parameters on the meta device and real buffers, and where their values come from."""
    if isinstance(source, PresetSource):
        with torch.device("meta"):
            decoder = Decoder(source.config)
        return decoder, _initial_values(source.config, dict(shapes_of(decoder)), seed)
    model: Any = build_meta_model(source.checkpoint.path, dtype=torch.float32)
    import transformers

    # What it says of config.json is for those who wrote it.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model.config.use_cache = False  # keys and values are for generation
    if getattr(model, "supports_gradient_checkpointing", False):
        _checkpoint_blocks(model)
    model.train()
    values = PretrainedValues(model, source.checkpoint)
    values.fill_buffers()
    return model, values.tensor


def _checkpoint_blocks(model: Any) -> None:
    """Each block keeps its input only and computes the rest again in backward."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name from 5.x on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _initial_values(config: DecoderConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> Read:
    """See Note [Initial values of a preset]."""
    torch.manual_seed(seed)

    def read(name: str) -> torch.Tensor:
        value = torch.empty(shapes[name])
        init_parameter_(config, name, value)
        return value

    return read


def shapes_of(model: nn.Module) -> Shapes:
    """Names and shapes in the model's own order, a tied parameter once."""
    return [(name, tuple(param.shape)) for name, param in model.named_parameters()]


def fill_later(model: nn.Module, read: Read, advance: Advance) -> None:
    """As `construct.fill_later`, telling how many of the values have been read."""
    shapes = dict(shapes_of(model))
    total = sum(_numel(shape) for shape in shapes.values())
    done = 0

    def counted(name: str) -> torch.Tensor:
        nonlocal done
        value = read(name)
        done += value.numel()
        advance(done, total)
        return value

    construct.fill_later(model, counted)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def hf_config(source: ModelSource, precision: str, eos_id: int) -> dict[str, Any]:
    """``config.json`` of an export."""
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    if isinstance(source, CheckpointSource):
        kept = {key: value for key, value in source.checkpoint.config.items() if key != "dtype"}
        return {**kept, "torch_dtype": dtype}
    config = dict(to_hf_config(source.config, dtype=dtype))
    return {**config, "eos_token_id": eos_id}
