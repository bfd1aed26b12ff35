"""Checks and results that need more than one setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import ConfigError
from .legacy import block_at
from .report import Report, join, show
from .training import Precision, WarmupCosineLR, WarmupDecayLR, WarmupLR

if TYPE_CHECKING:
    from .config import OffloadConfig

_ZERO: Final = "zero_optimization"
_PARAM: Final = "zero_optimization.offload_param"
_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_FORMAT: Final = "zero_optimization.offload_optimizer.state_format"
_UPDATE: Final = "zero_optimization.offload_optimizer.update"

_NVME_ONLY: Final = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
_OFFLOAD_ONLY: Final = ("pin_memory", "ratio")

# Note [Batch sizes]
# train = micro * accumulation * ranks. Two given: the third follows. One given: an absent accumulation is 1,
# then an absent micro is 1 (or what train leaves). None given: micro and accumulation are 1. What does not
# divide is refused.


class BatchSizes(NamedTuple):
    """``train == micro * accumulation * ranks``."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(config: OffloadConfig, world_size: int) -> BatchSizes:
    """The three batch sizes on ``world_size`` ranks. See Note [Batch sizes]."""
    if world_size < 1:
        raise ConfigError(f"world_size: {world_size} is below 1; start at least one rank")
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is not None and micro is not None and accumulation is None:
        accumulation = train // (micro * world_size)
    elif accumulation is None:
        accumulation = 1
    if micro is None:
        micro = 1 if train is None else train // (accumulation * world_size)
    product = micro * accumulation * world_size
    if train is not None and train != product:
        raise ConfigError(f"train_batch_size: {_mismatch(config, world_size)}")
    if accumulation > 1 and config.zero_optimization.offload_optimizer.update == "backward":
        raise ConfigError(f"{_UPDATE}: {_no_backward(f'{accumulation} micro-batches are added up')}")
    return BatchSizes(product, micro, accumulation)


def _mismatch(config: OffloadConfig, world_size: int | None) -> str:
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    product = (micro or 1) * (accumulation or 1)
    per_rank = (
        f"train_micro_batch_size_per_gpu {micro or '(absent)'}"
        f" x gradient_accumulation_steps {accumulation or '(absent)'}"
    )
    if world_size is None:
        return f"{train} does not divide by {per_rank}, on any number of ranks; leave one of the three out"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    fitting = train // product if train and train % product == 0 else 0
    instead = (
        f"run on {fitting} ranks, or leave one of the three out" if fitting else "leave one of the three out"
    )
    if micro is not None and accumulation is not None:
        return f"{train} is not {per_rank} x {ranks} = {product * world_size}; {instead}"
    return f"{train} does not divide by {per_rank} x {ranks}; write a multiple of {product * world_size}"


def _no_backward(because: str) -> str:
    return f'"backward" updates before the whole gradient is known, but {because}; write "step" or "deferred"'


def precision(config: OffloadConfig) -> Precision:
    """The compute type. "auto" that nothing replaced is off, and both off is fp32."""
    if config.bf16.enabled is True:
        return "bf16"
    return "fp16" if config.fp16.enabled is True else "fp32"


def check(config: OffloadConfig, given: dict[str, Any], report: Report) -> None:
    """Settings that contradict each other, and facts that follow from several. ``given``: what the user
    wrote."""
    if config.bf16.enabled is True and config.fp16.enabled is True:
        report.problem("bf16.enabled", "bf16 and fp16 are both on; keep one")
    _check_batch(config, report)
    _check_placement(config, given, report)
    _check_update(config, report)
    _check_format(config, report)
    _check_schedule(config, report)


def _check_batch(config: OffloadConfig, report: Report) -> None:
    train = config.train_batch_size
    product = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if train is not None and train % product and report.is_clean(*names):
        report.problem("train_batch_size", _mismatch(config, None))


def _check_placement(config: OffloadConfig, given: dict[str, Any], report: Report) -> None:
    zero = config.zero_optimization
    blocks = ((_PARAM, zero.offload_param), (_OPTIMIZER, zero.offload_optimizer))
    commits = config.durability.generations == 2
    if commits and not any(block.nvme_path for _, block in blocks):
        report.problem(
            "durability.generations",
            f"2 needs swap files to commit to; write a directory as {_OPTIMIZER}.nvme_path",
        )
    for path, block in blocks:
        if block.device == "nvme" and not block.nvme_path and report.is_clean(f"{path}.nvme_path"):
            report.problem(
                f"{path}.nvme_path", 'is needed for the device "nvme"; write a directory on the drive'
            )
        _note_idle(path, block.device, block_at(given, path) or {}, report, commits=commits)
    if zero.offload_param.device != "none" and zero.stage != 3 and report.is_clean(f"{_ZERO}.stage"):
        report.problem(
            _PARAM,
            f"needs stage 3, and the stage is {zero.stage}, which keeps all parameters on the compute "
            f'device; write "stage": 3, or the device "none"',
        )
    device = zero.offload_optimizer.device
    if device != "none" and (zero.stage == 0 or (device in ("nvme", "auto") and zero.stage != 3)):
        done = "offloads nothing" if zero.stage == 0 else "would use host memory"
        report.note(
            f"{_OPTIMIZER}.device", f"{show(device)} is done as asked; DeepSpeed {done} at stage {zero.stage}"
        )
    if device == "nvme" and zero.offload_optimizer.ratio < 1:
        report.problem(
            f"{_OPTIMIZER}.ratio",
            f'{zero.offload_optimizer.ratio:g} is for the device "cpu"; write 1, and set memory.host_bytes '
            "to keep part of the state in host memory",
        )
    if given.get("aio") and not commits and all(block.device in ("none", "cpu") for _, block in blocks):
        report.note("aio", "has no effect; no device is nvme")


def _note_idle(path: str, device: str, written: dict[str, Any], report: Report, *, commits: bool) -> None:
    """Settings of an offload block that its device does not use. ``commits``: two generations are asked for."""
    idle = {"none": (*_NVME_ONLY, *_OFFLOAD_ONLY), "cpu": _NVME_ONLY}.get(device, ())
    found = [key for key in idle if written.get(key) is not None and not (commits and key == "nvme_path")]
    if found:
        have = "has" if len(found) == 1 else "have"
        report.note(path, f"the device is {show(device)}, so {' and '.join(found)} {have} no effect")


def _check_update(config: OffloadConfig, report: Report) -> None:
    if config.zero_optimization.offload_optimizer.update != "backward":
        return
    if config.gradient_clipping is not None:
        report.problem(_UPDATE, _no_backward("gradient_clipping needs its norm"))
    if precision(config) == "fp16":
        report.problem(_UPDATE, _no_backward("fp16 needs to see every overflow"))
    if (config.gradient_accumulation_steps or 1) > 1:
        report.problem(
            _UPDATE, _no_backward(f"{config.gradient_accumulation_steps} micro-batches are added up")
        )


def _check_format(config: OffloadConfig, report: Report) -> None:
    kept_as = config.zero_optimization.offload_optimizer.state_format
    optimizer = config.optimizer
    if kept_as == "int8" and precision(config) == "fp32":
        report.problem(
            _FORMAT,
            '"int8" keeps the fp32 master as a bf16 weight and 8 bits, and the weights of this run are fp32; write '
            '"bf16", or set bf16.enabled = true',
        )
    elif kept_as == "int8" and optimizer is not None and optimizer.rule != "adam":
        report.problem(
            _FORMAT, f'"int8" is for Adam and AdamW, and the optimizer is {optimizer.type}; write "bf16"'
        )
    elif kept_as != "fp32" and optimizer is not None and optimizer.rule == "sgd":
        report.note(
            _FORMAT, "has an effect only where a parameter group has momentum: there is no moment to store"
        )


def _check_schedule(config: OffloadConfig, report: Report) -> None:
    if config.scheduler is None:
        return
    params, path = config.scheduler.params, "scheduler.params"
    lr = config.optimizer.params.lr if config.optimizer is not None else None
    if isinstance(params, (WarmupDecayLR, WarmupCosineLR)) and params.total_num_steps is None:
        report.note(join(path, "total_num_steps"), "is not given; the program that trains has to say it")
    if isinstance(params, (WarmupLR, WarmupDecayLR)):
        where = join(path, "warmup_max_lr")
        if params.warmup_max_lr is None:
            report.note(where, "is not given; the schedule rises to the optimizer's learning rate")
        elif lr is not None and lr != params.warmup_max_lr:
            report.note(
                where, f"{params.warmup_max_lr:g} is the rate that counts, not optimizer.params.lr {lr:g}"
            )
