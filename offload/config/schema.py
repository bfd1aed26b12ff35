"""Where state lives and how it moves: the blocks of the configuration that place and size things.

Each field says what it does and where its name comes from. A hint is a size of DeepSpeed's own buffers: it is
read and kept, and the memory plan, which knows the budgets, decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from .kinds import Bytes, Choice, Real, SwapPath, SwapPaths, Whole

Device = Literal["none", "cpu", "nvme", "auto"]
_Hint = Whole(hint=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offload:
    """What the blocks for parameters and for optimizer state share."""

    device: Device = "none"
    """none: the compute device; cpu: host memory; nvme: swap files; auto: the plan chooses. As DeepSpeed;
    auto ours."""
    nvme_path: Annotated[tuple[SwapPath, ...], SwapPaths()] = ()
    """Directory for swap files, or several to stripe over, each with an optional weight. Never opened unless
    the device is nvme or auto, or durability.generations is 2. As DeepSpeed; the list is ours."""
    pin_memory: bool = True
    """Page-lock host memory for faster copies to the accelerator. As DeepSpeed."""

    @property
    def nvme_paths(self) -> tuple[SwapPath, ...]:
        """The directories that may be opened: none when the device is none or cpu."""
        return self.nvme_path if self.device in ("nvme", "auto") else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadParam(_Offload):
    """``zero_optimization.offload_param``: the home of the parameters between uses."""

    buffer_count: Annotated[int | None, _Hint] = None
    """Hint: buffers for parameters in flight. As DeepSpeed."""
    buffer_size: Annotated[int | None, _Hint] = None
    """Hint: elements of one such buffer. As DeepSpeed."""
    max_in_cpu: Annotated[int | None, _Hint] = None
    """Hint: elements of parameters kept in host memory when the device is nvme. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadOptimizer(_Offload):
    """``zero_optimization.offload_optimizer``: the home of the optimizer state, and when it is updated."""

    buffer_count: Annotated[int | None, _Hint] = None
    """Hint: buffers for optimizer state in flight. As DeepSpeed."""
    ratio: Annotated[float, Real(maximum=1.0)] = 1.0
    """Part of the optimizer state that is offloaded to host memory; the rest stays on the compute device. As
    DeepSpeed."""
    state_format: Literal["fp32", "bf16", "int8"] = "fp32"
    """How moments are stored: exact, half the bytes, or a quarter; int8 for bf16 training, with an 8-bit residual.
    Ours."""
    update: Literal["auto", "backward", "step", "deferred"] = "auto"
    """When the update runs: as gradients appear in backward, in ``step()``, or ahead of the next use. Results
    are the same. Ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOptimization:
    """``zero_optimization``: what is cut over ranks, and where it lives."""

    stage: Annotated[Literal[0, 1, 2, 3], Choice(0, 1, 2, 3)] = 0
    """Cut over ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters. As DeepSpeed."""
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    """The home of the parameters between uses; needs stage 3. As DeepSpeed."""
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    """The home of the optimizer state. As DeepSpeed, and on every stage."""
    sub_group_size: Annotated[int | None, _Hint] = None
    """Hint: elements updated at a time, which is a chunk here. As DeepSpeed."""
    reduce_bucket_size: Annotated[int | None, _Hint] = None
    """Hint: elements of gradients reduced at a time. As DeepSpeed."""
    allgather_bucket_size: Annotated[int | None, _Hint] = None
    """Hint: elements of parameters gathered at a time. As DeepSpeed."""
    stage3_prefetch_bucket_size: Annotated[int | None, _Hint] = None
    """Hint: elements of parameters fetched ahead of their use. As DeepSpeed."""
    stage3_param_persistence_threshold: Annotated[int | None, _Hint] = None
    """Hint: parameters with fewer elements stay on the compute device. As DeepSpeed."""
    stage3_max_live_parameters: Annotated[int | None, _Hint] = None
    """Hint: elements of parameters on the compute device at one time. As DeepSpeed."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """``save_16bit_model`` may gather the full weights. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """``memory``: hard budgets; a plan that does not fit is refused before step 1. Ours."""

    device_bytes: Annotated[int | Literal["auto"], Bytes(auto=True)] = "auto"
    """Bytes of accelerator memory that may be used; auto: what is free at start. Ours."""
    host_bytes: Annotated[int | Literal["auto"], Bytes(auto=True)] = "auto"
    """Bytes of host memory that may be used, caches included; auto: what is free at start. Ours."""
    nvme_bytes: Annotated[int | Literal["auto"], Bytes(auto=True)] = "auto"
    """Bytes of swap files, over all paths; auto: what the file systems have free. Ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aio:
    """``aio``: how swap files are read and written."""

    backend: Literal["auto", "io_uring", "libaio", "threads", "python"] = "auto"
    """Kernel interface; auto: the best that works here. Ours."""
    block_size: Annotated[int | Literal["auto"], Bytes(auto=True, multiple=4096)] = "auto"
    """Bytes of one request; larger helps bandwidth, smaller helps latency. As DeepSpeed."""
    queue_depth: Annotated[int | Literal["auto"], Whole(minimum=1, maximum=65536, auto=True)] = "auto"
    """Requests in flight for each path. As DeepSpeed."""
    thread_count: Annotated[int | Literal["auto"], Whole(minimum=1, maximum=1024, auto=True)] = "auto"
    """Threads of the backend "threads", for each path. DeepSpeed documents this name and reads
    ``intra_op_parallelism``; both count here."""
    direct_io: Literal["auto", "required", "off"] = "auto"
    """Bypass the page cache: auto falls back where the file system refuses, required fails there. Ours."""
    sqpoll: bool = False
    """With io_uring, a thread of the kernel picks requests up: less delay for each, most of a core for all. Ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durability:
    """``durability``: what survives a crash, and at what price. Ours."""

    generations: Annotated[Literal["auto", 1, 2], Choice("auto", 1, 2)] = "auto"
    """Complete states on disk: 2 can resume after a crash at any moment; 1 halves the space and cannot; auto: 2
    where optimizer state is at home on nvme and there is room. Ours."""
    verify: Literal["off", "resume", "always"] = "resume"
    """When checksums of swapped data are checked: never, when a run resumes, or at every read. Ours."""
    write_bytes_per_second: Annotated[int | None, Bytes()] = None
    """Upper bound on what a commit writes of state and weights at home in memory, over all paths, and on what a
    checkpoint that is saved in the background writes; absent: none. Ours."""
