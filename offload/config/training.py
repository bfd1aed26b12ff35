"""What is trained and how: precision, optimizer and schedule. The names are DeepSpeed's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from .kinds import Choice, Pair, Real, Switch, Whole

Precision = Literal["bf16", "fp16", "fp32"]
Rule = Literal["adam", "lion", "adagrad", "momentum", "sgd"]
"""The mathematics of an update. "momentum" is SGD with a moment, "sgd" is SGD without."""
_DTYPE_ALIASES: Final = {"bfp16": "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16:
    """``bf16``: train in bfloat16 over an exact fp32 master."""

    enabled: Annotated[bool | Literal["auto"], Switch(auto=True)] = False
    """Compute in bfloat16. "auto" is for a front end to replace; left as it is, it means off. As
    DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16:
    """``fp16``: train in float16 over an fp32 master, with a scaled loss."""

    enabled: Annotated[bool | Literal["auto"], Switch(auto=True)] = False
    """Compute in float16. "auto" is for a front end to replace; left as it is, it means off. As DeepSpeed."""
    loss_scale: Annotated[float, Real()] = 0.0
    """A fixed loss scale; 0 adapts it while training. As DeepSpeed."""
    initial_scale_power: Annotated[int, Whole(maximum=126)] = 16
    """The adaptive scale starts at two to this power. As DeepSpeed."""
    loss_scale_window: Annotated[int, Whole(minimum=1)] = 1000
    """Steps without an overflow after which the adaptive scale doubles. As DeepSpeed."""
    hysteresis: Annotated[int, Whole(minimum=1)] = 2
    """Overflows after which the adaptive scale halves. As DeepSpeed."""
    consecutive_hysteresis: bool = False
    """A step without an overflow restores the full hysteresis. As DeepSpeed."""
    min_loss_scale: Annotated[float, Real()] = 1.0
    """The adaptive scale never falls below this. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTypes:
    """``data_types``: types that are not the compute type."""

    grad_accum_dtype: Annotated[Precision | None, Choice("fp32", "bf16", "fp16", aliases=_DTYPE_ALIASES)] = (
        None
    )
    """Type in which micro-batches are added up; absent: the compute type. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Params:
    """``optimizer.params``. What is absent is None here and has its default in :meth:`defaults`."""

    lr: Annotated[float | None, Real()] = None
    """Learning rate; absent: 0.01 for Adagrad, else 0.001. A schedule sets it at every step. As DeepSpeed."""
    weight_decay: Annotated[float | None, Real()] = None
    """Weight decay; 0 when absent, as in DeepSpeed's optimizers (torch's AdamW has 0.01). AdamW and Lion shrink the
    weight by it, the others add it to the gradient."""

    def _with(self, **numbers: Any) -> dict[str, Any]:
        """A group's numbers: those that were written, and ``numbers`` for the others."""
        return {
            key: other if getattr(self, key) is None else getattr(self, key) for key, other in numbers.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(_Params):
    """Adam, whose decay is added to the gradient (L2)."""

    rule: ClassVar[Rule] = "adam"
    """As the engine knows it."""
    betas: Annotated[tuple[float, float] | None, Pair()] = None
    """Decay of the two moments; [0.9, 0.999] when absent. As DeepSpeed."""
    eps: Annotated[float | None, Real()] = None
    """Added to the denominator; 1e-8 when absent. As DeepSpeed."""
    adam_w_mode: bool = True
    """Decoupled weight decay (AdamW). With type "Adam", false selects the L2 form of Adam. As DeepSpeed."""

    def defaults(self) -> dict[str, Any]:
        return self._with(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lion(_Params):
    """Lion: one moment, and steps of one size; the decay is decoupled."""

    rule: ClassVar[Rule] = "lion"
    """As the engine knows it."""
    betas: Annotated[tuple[float, float] | None, Pair()] = None
    """Weight of the moment in the update, and its decay; [0.9, 0.999] when absent, as DeepSpeed (the paper has
    [0.9, 0.99])."""

    def defaults(self) -> dict[str, Any]:
        return self._with(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(_Params):
    """Adagrad: steps shrink with the sum of the squares of the gradients."""

    rule: ClassVar[Rule] = "adagrad"
    """As the engine knows it."""
    lr_decay: Annotated[float | None, Real()] = None
    """The rate of a step is lr / (1 + (step - 1) * lr_decay); 0 when absent. As torch."""
    eps: Annotated[float | None, Real()] = None
    """Added to the denominator; 1e-10 when absent. As DeepSpeed."""
    initial_accumulator_value: Annotated[float | None, Real()] = None
    """The sum before the first step; 0 when absent. As torch."""

    def defaults(self) -> dict[str, Any]:
        return self._with(lr=1e-2, lr_decay=0.0, eps=1e-10, weight_decay=0.0, initial_accumulator_value=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(_Params):
    """Stochastic gradient descent, with or without momentum. Without, there is no state but the master."""

    momentum: Annotated[float | None, Real()] = None
    """Part of the moment that stays in a step; 0 when absent. As torch."""
    dampening: Annotated[float | None, Real(minimum=None)] = None
    """Part of the gradient that is kept out of the moment; 0 when absent. As torch."""
    nesterov: bool = False
    """Step along the moment of the step after. As torch."""

    @property
    def rule(self) -> Rule:
        return "momentum" if self.momentum else "sgd"

    def defaults(self) -> dict[str, Any]:
        return self._with(lr=1e-3, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0)


OptimizerParams = Adam | AdamW | Lion | Adagrad | SGD
OPTIMIZERS: Final[tuple[type[OptimizerParams], ...]] = (Adam, AdamW, Lion, Adagrad, SGD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """``optimizer``: absent when the program brings its own."""

    params: OptimizerParams = field(default_factory=AdamW)
    """The numbers of the rule; the class says which rule is applied."""

    @property
    def type(self) -> str:
        """The rule's name in DeepSpeed: "Adam" is the L2 form here, whatever the file called it."""
        return type(self.params).__name__

    @property
    def rule(self) -> Rule:
        """The rule as the engine knows it."""
        return self.params.rule

    @property
    def decoupled(self) -> bool:
        """Whether Adam's decay is that of AdamW."""
        return isinstance(self.params, AdamW)

    def defaults(self) -> dict[str, Any]:
        """The numbers of a parameter group that has none of its own, by torch's names."""
        return self.params.defaults()


_WarmupType = Literal["log", "linear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupLR:
    """Rises to a target and stays there."""

    warmup_min_lr: Annotated[float, Real()] = 0.0
    """Learning rate the warm-up starts from. As DeepSpeed."""
    warmup_max_lr: Annotated[float | None, Real()] = None
    """The target. Absent: the optimizer's own learning rate (DeepSpeed would take 0.001 whatever that is)."""
    warmup_num_steps: Annotated[int, Whole()] = 1000
    """Steps of warm-up. As DeepSpeed."""
    warmup_type: _WarmupType = "log"
    """Shape of the rise. As DeepSpeed."""
    last_batch_iteration: Annotated[int, Whole(minimum=-1)] = -1
    """The step that counts as done at the start; -1: none. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecayLR:
    """Rises to a target, then falls linearly to 0."""

    total_num_steps: Annotated[int | None, Whole(minimum=1)] = None
    """Step at which 0 is reached. Absent: the program that trains has to say. As DeepSpeed."""
    warmup_min_lr: Annotated[float, Real()] = 0.0
    """Learning rate the warm-up starts from. As DeepSpeed."""
    warmup_max_lr: Annotated[float | None, Real()] = None
    """The target. Absent: the optimizer's own learning rate (DeepSpeed would take 0.001 whatever that is)."""
    warmup_num_steps: Annotated[int, Whole()] = 1000
    """Steps of warm-up. As DeepSpeed."""
    warmup_type: _WarmupType = "log"
    """Shape of the rise. As DeepSpeed."""
    last_batch_iteration: Annotated[int, Whole(minimum=-1)] = -1
    """The step that counts as done at the start; -1: none. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosineLR:
    """Rises to the optimizer's learning rate, then falls along a cosine."""

    total_num_steps: Annotated[int | None, Whole(minimum=1)] = None
    """Step at which the end is reached. Absent: the program that trains has to say. As DeepSpeed."""
    warmup_min_ratio: Annotated[float, Real(maximum=1.0)] = 0.0
    """Where the warm-up starts, as a part of the optimizer's learning rate. As DeepSpeed."""
    warmup_num_steps: Annotated[int, Whole()] = 1000
    """Steps of warm-up. As DeepSpeed."""
    cos_min_ratio: Annotated[float, Real(maximum=1.0)] = 0.0001
    """Where the cosine ends, as a part of the optimizer's learning rate. As DeepSpeed."""
    warmup_type: _WarmupType = "log"
    """Shape of the rise. As DeepSpeed."""
    last_batch_iteration: Annotated[int, Whole(minimum=-1)] = -1
    """The step that counts as done at the start; -1: none. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCycle:
    """One rise and fall of the learning rate, the opposite for the momentum, then a decay."""

    cycle_min_lr: Annotated[float, Real()]
    """Lowest learning rate of the cycle. As DeepSpeed."""
    cycle_max_lr: Annotated[float, Real()]
    """Highest learning rate of the cycle. As DeepSpeed."""
    decay_lr_rate: Annotated[float, Real()] = 0.0
    """Rate of the decay after the cycle. As DeepSpeed."""
    cycle_first_step_size: Annotated[int, Whole(minimum=1)] = 2000
    """Steps of the rise. As DeepSpeed."""
    cycle_second_step_size: Annotated[int | None, Whole(minimum=1)] = None
    """Steps of the fall; absent: as many as of the rise. As DeepSpeed."""
    cycle_first_stair_count: Annotated[int, Whole()] = 0
    """Stairs of the rise; 0: a straight line. As DeepSpeed."""
    cycle_second_stair_count: Annotated[int | None, Whole()] = None
    """Stairs of the fall; absent: as many as of the rise. As DeepSpeed."""
    decay_step_size: Annotated[int, Whole()] = 0
    """Steps between two decays; 0: no decay. As DeepSpeed."""
    cycle_momentum: bool = True
    """Cycle the momentum (the first beta of Adam and Lion) against the learning rate. As DeepSpeed."""
    cycle_min_mom: Annotated[float, Real(below=1.0)] = 0.8
    """Lowest momentum. As DeepSpeed."""
    cycle_max_mom: Annotated[float, Real(below=1.0)] = 0.9
    """Highest momentum. As DeepSpeed."""
    decay_mom_rate: Annotated[float, Real()] = 0.0
    """Rate of the momentum's decay after the cycle. As DeepSpeed."""
    last_batch_iteration: Annotated[int, Whole(minimum=-1)] = -1
    """The step that counts as done at the start; -1: none. As DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRRangeTest:
    """Raises the learning rate step by step, to find where training breaks."""

    lr_range_test_min_lr: Annotated[float, Real()] = 1e-3
    """Learning rate of the first step. As DeepSpeed."""
    lr_range_test_step_size: Annotated[int, Whole(minimum=1)] = 2000
    """Steps between two rises. As DeepSpeed."""
    lr_range_test_step_rate: Annotated[float, Real()] = 1.0
    """How much each rise adds, in units of the first learning rate. As DeepSpeed."""
    lr_range_test_staircase: bool = False
    """Rise in stairs rather than in a straight line. As DeepSpeed."""
    last_batch_iteration: Annotated[int, Whole(minimum=-1)] = -1
    """The step that counts as done at the start; -1: none. As DeepSpeed."""


SchedulerParams = WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest
SCHEDULERS: Final[tuple[type[SchedulerParams], ...]] = (
    WarmupLR,
    WarmupDecayLR,
    WarmupCosineLR,
    OneCycle,
    LRRangeTest,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """``scheduler``: absent when the program brings its own."""

    params: SchedulerParams
    """The settings of the schedule; the class says which schedule it is."""

    @property
    def type(self) -> str:
        """The schedule's name in DeepSpeed."""
        return type(self.params).__name__
