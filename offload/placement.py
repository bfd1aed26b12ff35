"""What a configuration asks for, as the plan takes it; and what of it this version does not carry out yet.

Pure: no torch, so that `offload plan` and the engine start from the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Literal, NamedTuple, NoReturn, get_args

from . import metrics
from .bytesize import PAGE_BYTES, align_up
from .config import OffloadConfig
from .config.kinds import SwapPath
from .config.training import Optimizer, Rule
from .errors import ConfigError

Home = Literal["device", "host", "nvme"]
Update = Literal["backward", "step"]
WeightFormat = Literal["bf16", "fp32"]
StateFormat = Literal["fp32", "bf16", "int8"]

CHUNK_ELEMENTS_MAX = 4 << 20
STATE_BLOCK = 128
"""Elements that share the scales of their 8-bit moments; as in ``optim.kernels``."""

HOST_SHARE = 0.8
"""Of the memory that is available at the start, for `memory.host_bytes: "auto"`."""
DEVICE_SHARE = 0.9
"""Of the device memory that is free at the start, for `memory.device_bytes: "auto"`."""


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One state plane: its name, and ``itemsize`` bytes for every ``block`` elements begun."""

    name: str
    itemsize: int
    block: int = 1

    def size_bytes(self, elements: int) -> int:
        return -(-elements // self.block) * self.itemsize


MOMENTS: dict[Rule, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "momentum": ("momentum_buffer",),
    "sgd": (),
}
"""The planes of moments of each rule, by torch's names for them."""


class Formats(NamedTuple):
    """What decides which planes of state a trained parameter has."""

    rule: Rule
    precision: WeightFormat
    state_format: StateFormat


def in_plane(plane: str, begin: int, end: int) -> tuple[int, int]:
    """Where elements [begin, end) have their state in a plane: of scales, those of the blocks that have them."""
    return (begin // STATE_BLOCK * 2, -(-end // STATE_BLOCK) * 2) if plane == "scale" else (begin, end)


def _state_planes(rule: Rule, precision: WeightFormat, state_format: StateFormat) -> tuple[PlaneSpec, ...]:
    itemsize = {"fp32": 4, "bf16": 2, "int8": 1}[state_format]
    planes = [PlaneSpec(name, itemsize) for name in MOMENTS[rule]]
    if precision == "bf16":
        planes.insert(0, PlaneSpec("residual", 1 if state_format == "int8" else 2))
    if state_format == "int8":
        planes.append(PlaneSpec("scale", 8, STATE_BLOCK))
    return tuple(planes)


def state_formats(rule: Rule, precision: WeightFormat) -> tuple[StateFormat, ...]:
    """How the moments of a rule may be stored, the most exact first."""
    if not MOMENTS[rule]:
        return ("fp32",)
    return ("fp32", "bf16", "int8") if rule == "adam" and precision == "bf16" else ("fp32", "bf16")


STATE_PLANES: dict[Formats, tuple[PlaneSpec, ...]] = {
    Formats(rule, precision, kept_as): _state_planes(rule, precision, kept_as)
    for rule, precision in product(MOMENTS, get_args(WeightFormat))
    for kept_as in state_formats(rule, precision)
}
"""What lies side by side in the extent of a chunk."""

WEIGHT_ITEMSIZE = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Remedy:
    """Other settings that would be legal too, and what they make of the placement."""

    settings: str
    """As a user writes them, with their paths in the configuration."""
    param_home: Home
    state_home: Home
    update: Update
    device_share: float
    """See :class:`Placement`."""
    state_format: StateFormat


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What the configuration asks for, reduced to what sizes depend on."""

    precision: WeightFormat
    rule: Rule = "adam"
    state_format: StateFormat = "fp32"
    param_home: Home
    state_home: Home
    update: Update
    grad_itemsize: int
    """Bytes per element of a waiting gradient: the compute type's, or 4 where micro-batches add up in fp32."""
    micro_batches: int
    host_bytes: int
    nvme_bytes: int | None = None
    device_bytes: int | None = None
    """Of an accelerator's memory; None where the CPU computes: no plane is homed on "device" then."""
    pin_weights: bool = True
    pin_gradients: bool = True
    """Whether an accelerator is to copy from and to host memory by itself."""
    device_share: float = 0.0
    """Part of the optimizer state that stays on the device, in whole units, where the rest is at home in host
    memory (``ratio``)."""
    chunk_elements_max: int = CHUNK_ELEMENTS_MAX
    chunk_elements: int | None = None
    """Of chunks that are there already, in a store that is gone on from; None: the plan chooses."""
    generations: Literal[1, 2] = 1
    """Complete states on nvme. With two, what is at home in memory has its place there too, for commits."""
    remedies: tuple[Remedy, ...] = ()
    """Settings to propose where memory is short, the smallest change first."""

    def with_remedy(self, remedy: Remedy) -> Placement:
        return replace(
            self,
            param_home=remedy.param_home,
            state_home=remedy.state_home,
            update=remedy.update,
            device_share=remedy.device_share,
            state_format=remedy.state_format,
        )

    @property
    def has_device(self) -> bool:
        """Whether compute has memory of its own."""
        return self.device_bytes is not None

    @property
    def stores_weights(self) -> bool:
        """Whether weights are in the swap files, at home or as committed."""
        return self.param_home == "nvme" or self.generations == 2

    @property
    def stores_state(self) -> bool:
        """Whether optimizer state is in the swap files, at home or as committed."""
        return self.state_home == "nvme" or self.generations == 2

    @cached_property
    def formats(self) -> Formats:
        return Formats(self.rule, self.precision, self.state_format)

    @cached_property
    def state_planes(self) -> tuple[PlaneSpec, ...]:
        return STATE_PLANES[self.formats]

    @property
    def moments(self) -> tuple[str, ...]:
        return MOMENTS[self.rule]

    @property
    def residual_itemsize(self) -> int:
        """Bytes per element of the residual plane; 0 where there is none."""
        return next((plane.itemsize for plane in self.state_planes if plane.name == "residual"), 0)

    def plane_bytes(self, elements: int) -> tuple[tuple[str, int], ...]:
        """The planes in the extent of a chunk of so many elements. The last one's bytes fill a page up."""
        if not self.state_planes:
            return ()
        sizes = [plane.size_bytes(elements) for plane in self.state_planes]
        sizes[-1] += self.state_bytes(elements) - sum(sizes)
        return tuple((plane.name, size) for plane, size in zip(self.state_planes, sizes, strict=True))

    def state_bytes(self, elements: int) -> int:
        """Bytes of the extent of a chunk of so many elements."""
        return align_up(sum(plane.size_bytes(elements) for plane in self.state_planes), PAGE_BYTES)


def placement_of(
    config: OffloadConfig, *, device_free_bytes: int | None = None, has_momentum: bool = False
) -> Placement:
    """What a configuration asks for, with the budgets of this machine where it says "auto".

    One generation where that says "auto": `durability.choose_generations` knows better.

    Args:
        has_momentum: a parameter group has momentum, whatever the configuration says of SGD.
        device_free_bytes: free memory of the accelerator; None where the CPU computes.
    """
    zero, memory = config.zero_optimization, config.memory
    precision = config.precision
    if precision == "fp16":
        raise AssertionError("fp16 is refused before this")
    accumulation = config.resolve_batch(1).accumulation
    update: Update = "backward" if zero.offload_optimizer.update == "backward" else "step"
    grad_itemsize = WEIGHT_ITEMSIZE[precision]
    if config.data_types.grad_accum_dtype == "fp32" or (
        config.data_types.grad_accum_dtype is None and accumulation > 1
    ):
        grad_itemsize = 4
    host_bytes = memory.host_bytes
    if host_bytes == "auto":
        host_bytes = int(metrics.memory_available_bytes() * HOST_SHARE)
    has_device = device_free_bytes is not None
    states = zero.offload_optimizer
    state_home, device_share = _state_home(states.device, states.ratio, has_device=has_device)
    optimizer = config.optimizer or Optimizer()
    rule = "momentum" if optimizer.rule == "sgd" and has_momentum else optimizer.rule
    state_format = states.state_format if MOMENTS[rule] else "fp32"
    if (state_format != "fp32" or rule != "adam") and (state_home == "device" or device_share):
        _refuse_on_device(optimizer.type, rule, state_format, states.device)
    if not STATE_PLANES[Formats(rule, precision, state_format)] and state_home == "nvme":
        state_home = "host"  # there is none
    device_bytes = None
    if device_free_bytes is not None:
        device_bytes = int(device_free_bytes * DEVICE_SHARE)
        if memory.device_bytes != "auto":
            device_bytes = memory.device_bytes
    return Placement(
        precision=precision,
        rule=rule,
        state_format=state_format,
        param_home=_home(zero.offload_param.device, has_device=has_device),
        state_home=state_home,
        device_share=device_share,
        device_bytes=device_bytes,
        pin_weights=zero.offload_param.pin_memory,
        pin_gradients=zero.offload_optimizer.pin_memory,
        update=update,
        grad_itemsize=grad_itemsize,
        micro_batches=accumulation,
        host_bytes=host_bytes,
        nvme_bytes=None if memory.nvme_bytes == "auto" else memory.nvme_bytes,
        chunk_elements_max=min(zero.sub_group_size or CHUNK_ELEMENTS_MAX, CHUNK_ELEMENTS_MAX),
        generations=2 if config.durability.generations == 2 else 1,
        remedies=tuple(_remedies(config, update, rule, precision, has_device=has_device)),
    )


def _refuse_on_device(name: str, rule: Rule, state_format: StateFormat, device: str) -> NoReturn:
    change = 'device = "cpu" or "nvme"' if device == "none" else "ratio = 1"
    setting, what, other = "optimizer.type", name, "AdamW"
    if rule == "adam":
        setting, what, other = (
            "zero_optimization.offload_optimizer.state_format",
            f"{state_format!r}",
            '"fp32"',
        )
    raise ConfigError(
        f"{setting}: {what} is for state that the CPU updates, and this is, or a part of it, at home on the"
        f" accelerator; set zero_optimization.offload_optimizer.{change}, or use {other}"
    )


def _remedies(
    config: OffloadConfig, update: Update, rule: Rule, precision: WeightFormat, *, has_device: bool
) -> Iterator[Remedy]:
    """What may be changed to need less memory: one setting, or two, or all. See `config.resolve`.

    What changes results, a format of state that is not exact, comes after everything else.
    """
    zero = config.zero_optimization
    params, states, ratio, kept_as = (
        zero.offload_param.device,
        zero.offload_optimizer.device,
        zero.offload_optimizer.ratio,
        zero.offload_optimizer.state_format,
    )
    needs_whole_gradient = config.gradient_clipping is not None or config.resolve_batch(1).accumulation > 1
    may_update_early = update == "step" and not needs_whole_gradient
    updates: list[Update] = ["backward", update] if may_update_early else [update]
    whole = [states] if has_device and states == "cpu" and ratio < 1 else []
    choices = product(
        [kept_as, *_smaller_formats(rule, precision, kept_as)],
        [*((device, 1.0) for device in (*whole, *_below(states, has_device=has_device))), (states, ratio)],
        [*_below(params, has_device=has_device), params],
        updates,
    )
    remedies = []
    for new_format, (new_states, new_ratio), new_params, new_update in choices:
        state_home, share = _state_home(new_states, new_ratio, has_device=has_device)
        if (new_format != "fp32" or rule != "adam") and (state_home == "device" or share):
            continue
        settings = []
        if new_states != states:
            settings.append(_move(config, "offload_optimizer", new_states))
        if new_ratio != ratio:
            settings.append("zero_optimization.offload_optimizer.ratio = 1")
        if new_params != params:
            stage = "" if zero.stage == 3 else "zero_optimization.stage = 3 and "
            settings.append(stage + _move(config, "offload_param", new_params))
        if new_update != update:
            settings.append('zero_optimization.offload_optimizer.update = "backward"')
        if new_format != kept_as:
            name = "zero_optimization.offload_optimizer.state_format"
            settings.append(f'{name} = "{new_format}" (rounded, not the exact format)')
        if settings:
            param_home = _home(new_params, has_device=has_device)
            remedy = Remedy(" and ".join(settings), param_home, state_home, new_update, share, new_format)
            remedies.append((new_format != kept_as, len(settings), remedy))
    yield from (remedy for *_, remedy in sorted(remedies, key=itemgetter(0, 1)))


def _smaller_formats(rule: Rule, precision: WeightFormat, kept_as: StateFormat) -> tuple[StateFormat, ...]:
    """Formats of state that take less memory than the one asked for, the next first."""
    order = state_formats(rule, precision)
    return order[order.index(kept_as) + 1 :] if kept_as in order else ()


def _below(device: str, *, has_device: bool) -> list[str]:
    """Devices with more room than this one, the next first."""
    order = ["none", "cpu", "nvme"] if has_device else ["none", "nvme"]
    return order[order.index(device) + 1 :] if device in order else ["nvme"]


def _move(config: OffloadConfig, block: str, device: str) -> str:
    """The settings that home a block on a device with more room."""
    if device == "nvme":
        return _move_to_nvme(config, block)
    return f'zero_optimization.{block}.device = "{device}"'


def _move_to_nvme(config: OffloadConfig, block: str) -> str:
    """The settings that home a block on nvme, on the path that the other block has where there is one."""
    zero = config.zero_optimization
    own = [path.path for path in getattr(zero, block).nvme_path]
    known = [path.path for path in (*zero.offload_param.nvme_path, *zero.offload_optimizer.nvme_path)]
    path = nvme_path_of(config) or next(iter(known), None)
    if path is None:
        where = " with an nvme_path"
    else:
        where = "" if own == [path] else f' and zero_optimization.{block}.nvme_path = "{path}"'
    return f'zero_optimization.{block}.device = "nvme"{where}'


@dataclass(frozen=True, slots=True)
class SwapPaths:
    """The directories for swap files, each once, and which of them hold what."""

    all: tuple[SwapPath, ...]
    weights: frozenset[str]
    states: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The directories."""
        return tuple(path.path for path in self.all)

    def among(self, shares: Sequence[float], planes: Literal["weights", "states"]) -> list[float]:
        """Shares of all paths, reduced to those for one kind of plane; they add up to 1."""
        names: frozenset[str] = getattr(self, planes)
        kept = [share if path.path in names else 0.0 for path, share in zip(self.all, shares, strict=True)]
        total = sum(kept)
        return [share / total for share in kept] if total else list(shares)


def swap_paths_of(config: OffloadConfig) -> SwapPaths | None:
    """Where swap files go; None where nothing is homed on nvme, and nothing is to be committed."""
    zero = config.zero_optimization
    weights, states = zero.offload_param.nvme_paths, zero.offload_optimizer.nvme_paths
    found = {path.path: path for path in (*weights, *states)}
    if not found and config.durability.generations == 2:
        written = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
        found = {path.path: path for path in written}
    if not found:
        return None
    names = (frozenset(path.path for path in paths) for paths in (weights, states))
    return SwapPaths(tuple(found.values()), *names)


def nvme_path_of(config: OffloadConfig) -> str | None:
    """The first directory for swap files; None where there are none."""
    paths = swap_paths_of(config)
    return None if paths is None else paths.all[0].path


def refuse_unbuilt(config: OffloadConfig) -> None:
    """Raises ConfigError naming every setting that this version does not carry out yet."""
    zero, problems = config.zero_optimization, []

    def refuse(path: str, what: str, instead: str) -> None:
        problems.append(f"{path}: {what} is not built yet; {instead}")

    if config.precision == "fp16":
        refuse("fp16.enabled", "fp16 training", "use bf16, which needs no loss scale, or fp32")
    if zero.offload_optimizer.update == "deferred":
        refuse("zero_optimization.offload_optimizer.update", "'deferred'", "use 'step' or 'backward'")
    for block in ("offload_param", "offload_optimizer"):
        if getattr(zero, block).device == "auto":
            refuse(f"zero_optimization.{block}.device", "'auto'", "choose none, cpu or nvme")
    if config.micro_batching == "per_unit":
        refuse("micro_batching", "'per_unit'", "use 'per_step'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        refuse("WORLD_SIZE", "training on several ranks", "start one process")
    if problems:
        raise ConfigError("\n".join(problems))


def _home(device: str, *, has_device: bool) -> Home:
    """ "none" is the compute device: with a CPU as that, host memory."""
    if device == "nvme":
        return "nvme"
    return "device" if device == "none" and has_device else "host"


def _state_home(device: str, ratio: float, *, has_device: bool) -> tuple[Home, float]:
    """The home of optimizer state, and the part of it that stays on the compute device all the same."""
    home = _home(device, has_device=has_device)
    if not has_device or home != "host":
        return home, 0.0
    return ("device", 0.0) if ratio == 0 else (home, 1 - ratio)
