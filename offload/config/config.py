"""The whole configuration: :class:`OffloadConfig`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ..bytesize import format_bytes
from ..errors import ConfigError
from . import resolve
from .foreign import NO_EFFECT, foreign_keys, set_aside
from .kinds import Device, Real, Whole, keyed
from .legacy import MISPLACED, modernise
from .parse import parse
from .reader import OneOf, block_keys, flatten, read_block, specs, write_block
from .report import Report, UnfitError, join, show
from .resolve import BatchSizes
from .schema import Aio, Durability, Memory, ZeroOptimization
from .training import OPTIMIZERS, SCHEDULERS, Bf16, DataTypes, Fp16, Optimizer, Precision, Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """One run's settings, checked and frozen. Made by the ``from_`` methods.

    Attributes are named as the keys are: ``config.zero_optimization.offload_param.device``. Two
    configurations are equal where their settings are, whatever spelling they were read from.
    """

    train_batch_size: Annotated[int | None, Whole(minimum=1)] = None
    """Samples of one optimizer step, over all ranks. See ``resolve_batch``. As DeepSpeed."""
    train_micro_batch_size_per_gpu: Annotated[int | None, Whole(minimum=1)] = None
    """Samples of one forward on one rank. As DeepSpeed."""
    gradient_accumulation_steps: Annotated[int | None, Whole(minimum=1)] = None
    """Micro-batches of one optimizer step. As DeepSpeed."""
    gradient_clipping: Annotated[float | None, Real()] = None
    """Upper bound on the global norm of the gradients; absent, null and 0 mean that nothing is clipped. As
    DeepSpeed, whose recent versions clip at 1.0 when it is absent: write 1.0 for that."""
    optimizer: Annotated[Optimizer | None, OneOf(Optimizer, OPTIMIZERS)] = None
    """Absent when the program brings its own. As DeepSpeed."""
    scheduler: Annotated[Scheduler | None, OneOf(Scheduler, SCHEDULERS)] = None
    """Absent when the program brings its own, or the learning rate is constant. As DeepSpeed."""
    bf16: Bf16 = field(default_factory=Bf16)
    """bfloat16 training. As DeepSpeed."""
    fp16: Fp16 = field(default_factory=Fp16)
    """float16 training. As DeepSpeed."""
    data_types: DataTypes = field(default_factory=DataTypes)
    """Types that are not the compute type. As DeepSpeed."""
    zero_optimization: ZeroOptimization = field(default_factory=ZeroOptimization)
    """What is cut over ranks, and where it lives. As DeepSpeed."""
    accelerator: Annotated[str, Device()] = "auto"
    """The compute device: auto takes what torch finds; "cpu", "cuda", "cuda:1", "xpu". Ours."""
    memory: Memory = field(default_factory=Memory)
    """Hard budgets for each tier. Ours."""
    aio: Aio = field(default_factory=Aio)
    """How swap files are read and written. As DeepSpeed."""
    durability: Durability = field(default_factory=Durability)
    """What survives a crash. Ours."""
    micro_batching: Literal["per_step", "per_unit"] = "per_step"
    """per_unit runs all micro-batches through one unit before the next, so weights are streamed once a step.
    Ours."""
    steps_per_print: Annotated[int, Whole()] = 10
    """Steps between two lines of progress; 0: none. As DeepSpeed."""
    dataloader_drop_last: bool = False
    """Leave out the last, smaller batch of the data loader that ``initialize`` builds. As DeepSpeed."""
    seed: Annotated[int, Whole()] = 0
    """Key of the stochastic rounding of 16-bit and 8-bit state. Ours."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was mapped, is deprecated, is a hint or has no effect, each with its path."""

    @classmethod
    def from_any(cls, source: OffloadConfig | Mapping[str, Any] | str | Path) -> OffloadConfig:
        """A configuration as it is, a dictionary, a path, or JSON text (recognised by its brace)."""
        if isinstance(source, OffloadConfig):
            return source
        if isinstance(source, Mapping):
            return cls.from_dict(source)
        if isinstance(source, Path) or (isinstance(source, str) and "{" not in source):
            return cls.from_file(source)
        if isinstance(source, str):
            return cls.from_dict(parse(source))
        raise ConfigError(
            f"configuration: {type(source).__name__} is not one; give a dict, a path or JSON text"
        )

    @classmethod
    def from_file(cls, path: str | Path) -> OffloadConfig:
        """The configuration in a JSON file, comments and trailing commas allowed."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null in the path
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"{ascii(str(path))[1:-1]}: cannot be read: {reason}; give a JSON file"
            ) from error
        if path.suffix in (".yaml", ".yml"):
            raise ConfigError(f"{path}: is YAML, which launchers read; give the DeepSpeed JSON it points to")
        return cls.from_dict(parse(text, str(path)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OffloadConfig:
        """The configuration in a dictionary. All problems are told in one :class:`ConfigError`, a line
        each."""
        report = Report()
        try:
            given = modernise(keyed(dict(data) if isinstance(data, Mapping) else data, "", report), report)
        except UnfitError as error:
            raise ConfigError(f"configuration: {error}") from None
        set_aside(given, report)
        config = read_block(cls, given, "", report, _unknown)
        if config.gradient_clipping == 0:
            config = replace(config, gradient_clipping=None)
        resolve.check(config, given, report)
        report.raise_problems()
        return replace(config, notes=tuple(report.notes))

    @property
    def precision(self) -> Precision:
        """The compute type: "bf16", "fp16" or "fp32"."""
        return resolve.precision(self)

    def resolve_batch(self, world_size: int) -> BatchSizes:
        """(train, micro, accumulation) on so many ranks. ConfigError with the numbers if they do not fit."""
        return resolve.resolve_batch(self, world_size)

    def to_dict(self) -> dict[str, Any]:
        """The effective settings as JSON values; reading them gives an equal configuration."""
        return write_block(self)

    def digest(self) -> str:
        """Twelve hexadecimal digits that are equal for equal configurations, on every machine."""
        import hashlib  # loads OpenSSL, which reading a configuration does not need

        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def describe(self) -> tuple[str, ...]:
        """The effective settings, ``path = value`` each, byte sizes also in words."""
        return tuple(f"{path} = {_describe(path, value)}" for path, value in flatten(self.to_dict()))


def _describe(path: str, value: object) -> str:
    is_size = isinstance(value, int) and path.startswith(
        ("memory.", "aio.block_size", "durability.write_bytes")
    )
    return f"{value} ({format_bytes(value)})" if is_size and isinstance(value, int) else json.dumps(value)


@functools.cache
def _places() -> dict[str, tuple[str, ...]]:
    """Path of every block -> all keys that are known there."""
    places = dict(block_keys(OffloadConfig))
    for path, options in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        places[path] = ("type", "params")
        places[f"{path}.params"] = tuple(spec.name for cls in options for spec in specs(cls))
    for path in NO_EFFECT:
        places[path] = (*places[path], *foreign_keys(path))
    return places


def _unknown(path: str, key: str, known: Sequence[str]) -> str:
    """What to say about a key that its block does not have: where it belongs, or what may have been meant."""
    import difflib  # only mistakes need it

    if key in MISPLACED:
        return MISPLACED[key]
    elsewhere = [
        place or "the top level" for place, keys in _places().items() if key in keys and place != path
    ]
    if elsewhere:
        return f"does not belong here; it belongs in {' or '.join(elsewhere)}"
    here = [*known, *foreign_keys(path)]
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.55)
    if near:
        return f"is not a setting; did you mean {show(near[0])}?"
    for place, keys in _places().items():
        if near := difflib.get_close_matches(key, keys, n=1, cutoff=0.8):
            return f"is not a setting; did you mean {join(place, near[0])}?"
    return f"is not a setting; remove it, or write one of {', '.join(known)}"
