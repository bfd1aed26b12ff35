"""DeepSpeed's face: ``offload.initialize`` and the engine it returns. A script changes its import.

Note [Who counts micro-batches]
With :func:`offload.prepare` the loop counts: it divides its losses and calls ``optimizer.step()`` when it
wants. With :func:`initialize` the engine counts: a window is ``gradient_accumulation_steps`` calls of
``engine.backward(loss)``, each of which divides its loss by that number, once, and nobody else does. The
update happens in the ``engine.step()`` that ends the window. ``step()`` may be called

- after every ``backward()``, as DeepSpeed's scripts do: it does nothing until the window is complete; or
- only after the last ``backward()`` of the window, as a loop does that counts too.

Any other rhythm means that the script and the configuration disagree, and raises OffloadError, rather than
training with a wrong mean: a ``backward()`` too many, a ``step()`` in the midst of the window after two, a
second ``backward()`` after one forward (add the losses up first), a ``step()`` without ``backward()``. With
accumulation 1 there is no window: gradients of any number of ``backward()`` add up until ``step()``.
``set_gradient_accumulation_boundary()`` takes over the counting, and with it the responsibility.

An unfinished window stays pending: nothing of it is applied, and nothing is lost; the next ``backward()``
goes on with it. A window with a gradient that is not finite is refused as a whole, counted in
``skipped_steps``, and the schedule does not move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..api import ConfigLike, prepare
from ..config import BatchSizes, OffloadConfig
from ..errors import ConfigError, OffloadError
from ..ledger import Ledger
from ..optimizer import OffloadOptimizer
from ..placement import refuse_unbuilt
from ..plan import MemoryPlan
from ..resuming import Where
from . import saving
from .client import ClientOptimizer, bind_scheduler, check_scheduler, read_optimizer
from .counts import EngineCounts
from .loading import make_loader
from .schedulers import build_scheduler, check_schedule

logger = logging.getLogger("offload")

_NOT_BUILT = {
    "set_train_batch_size": "write the batch sizes into the configuration, before initialize",
    "compile": "call torch.compile on the model's parts before initialize",
}


class NotBuiltError(OffloadError, AttributeError):
    """A method of DeepSpeed's engine that this version does not have. ``hasattr`` says so too."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike | None = None,
    config_params: ConfigLike | None = None,
    *,
    resume: Where = False,
) -> tuple[TrainingEngine, OffloadOptimizer, DataLoader[Any] | None, Any]:
    """Takes over a model as ``deepspeed.initialize`` does. See Note [Who counts micro-batches].

    Args:
        args: its ``deepspeed_config``, if it has one, is the configuration.
        model: any module; it is changed in place.
        optimizer: see Note [Client optimizers]; the configuration's where it is None. It decides over the
            configuration's.
        model_parameters: parameters or groups to train, for the configuration's optimizer or for a callable;
            all that require a gradient where it is None. The groups of an optimizer decide over it.
        training_data: a dataset, for which a DataLoader is made: micro-batches, shuffled anew in each epoch
            in an order that the configuration's ``seed`` fixes. An iterable one keeps its own order.
        lr_scheduler: see Note [Client schedulers]; the configuration's where it is None.
        distributed_port, dist_init_required: for several ranks, which are refused as not built yet.
        mpu: refused.
        collate_fn: for the DataLoader.
        config, config_params: a dict, a path, JSON text, or an OffloadConfig.
        resume: as :func:`offload.prepare` takes it.

    Returns:
        The engine, its optimizer, the DataLoader or None, the scheduler or None.

    Raises:
        ConfigError, PlanError, StoreError: before the model has been changed.
    """
    settings = _settings(args, config, config_params)
    if mpu is not None:
        raise ConfigError("mpu: model parallelism is not supported; leave mpu out")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: a torch.nn.Module is needed, got {type(model).__name__}")
    sizes = settings.resolve_batch(1)
    refuse_unbuilt(settings)
    loader = make_loader(training_data, settings, sizes, collate_fn)
    params: list[Any] | None = None if model_parameters is None else list(model_parameters)
    client = None
    if optimizer is not None:
        wanted = [p for p in model.parameters() if p.requires_grad] if params is None else params
        client = read_optimizer(optimizer, wanted)
        if settings.optimizer is not None:
            logger.info("the program's optimizer is used; the configuration's optimizer block has no effect")
        settings = replace(settings, optimizer=client.settings)
        params = client.groups
    if lr_scheduler is not None:
        check_scheduler(lr_scheduler, client)
        if settings.scheduler is not None:
            logger.info("the program's scheduler is used; the configuration's scheduler block has no effect")
    else:
        check_schedule(settings, total_steps=None)
    _, ours = prepare(model, settings, params, resume=resume)
    try:
        if lr_scheduler is None:
            schedule = build_scheduler(settings, ours, total_steps=None)
        else:
            schedule = bind_scheduler(lr_scheduler, ours)
        engine = TrainingEngine(model, ours, schedule, settings, sizes, client)
    except BaseException:
        ours.engine.close()
        raise
    return engine, ours, loader, schedule


class TrainingEngine:
    """A model in training, as DeepSpeed's scripts know it. What it lacks is looked up in the module."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OffloadOptimizer,
        lr_scheduler: Any,
        config: OffloadConfig,
        sizes: BatchSizes,
        client: ClientOptimizer | None,
    ) -> None:
        self.module, self.optimizer, self.lr_scheduler = module, optimizer, lr_scheduler
        self.global_steps = 0
        """Windows that ended in a step, refused ones included, as in DeepSpeed."""
        self.global_samples = 0
        """Samples of those windows."""
        self.micro_steps = 0
        """Calls of ``backward()``, which are micro-batches."""
        self._config, self._sizes = config, sizes
        self._engine = optimizer.engine
        self._step_applied = False
        self._in_no_sync = False
        self._boundary: bool | None = None  # set by the script; None: the engine counts
        # - the open window
        self._pending = 0  # backward() in it
        self._seen = 0  # how many of them the last step() saw
        self._forwards = 0  # forwards in it that a backward may follow
        if client is not None:
            self._engine.on_close(client.retire())
        if callable(getattr(lr_scheduler, "state_dict", None)):
            self._engine.attach(scheduler=lr_scheduler)
        self._engine.attach(counts=EngineCounts(self))

    # -- a step -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        self._check_open()
        self._forwards += torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Differentiates the loss of one micro-batch, and counts it. See Note [Who counts micro-batches].

        Args:
            loss: a scalar.
            retain_graph: as in torch.
            scale_wrt_gas: divide by ``gradient_accumulation_steps``; False where the script has done so.

        Returns:
            The loss that was differentiated: the given one, divided if ``scale_wrt_gas``.
        """
        self._check_open()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise OffloadError(f"backward() needs the loss as a scalar tensor, got {what}")
        accumulation = self._sizes.accumulation
        if self._counts:
            if self._pending == accumulation:
                raise OffloadError(
                    f"{accumulation} micro-batches wait for step(), which is all that"
                    f" gradient_accumulation_steps {accumulation} says: call step(), or correct the number"
                )
            if 0 < self._forwards <= self._pending:
                raise OffloadError(
                    "a second backward() after one forward would count as a micro-batch of its own"
                    f" (gradient_accumulation_steps is {accumulation}): add the losses up and call backward()"
                    " once"
                )
        scaled = loss / accumulation if scale_wrt_gas and accumulation > 1 else loss
        scaled.backward(retain_graph=retain_graph)
        self._pending += 1
        self.micro_steps += 1
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends the micro-batch; at the end of the window updates the weights and moves the schedule on.

        Args:
            lr_kwargs: arguments for ``lr_scheduler.step``.
        """
        self._check_open()
        if self._in_no_sync:
            raise OffloadError("step() inside no_sync(): call it after the block")
        self._step_applied = False
        if self._counts:
            self._check_rhythm()
        is_boundary = self.is_gradient_accumulation_boundary()
        self._seen = self._pending
        if is_boundary:
            self._take_step(lr_kwargs or {})

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        ledger = self._engine.ledger
        applied, skipped = ledger.steps, ledger.skipped_steps
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._step_applied = ledger.steps > applied
        micro_batches = self._sizes.accumulation if self._boundary is None else self._pending
        self._pending = self._seen = self._forwards = 0
        if not self._step_applied and ledger.skipped_steps == skipped:
            return  # there was no gradient: nothing has happened
        self.global_steps += 1
        self.global_samples += micro_batches * self._sizes.micro
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0:
            logger.info(
                "step %d, refused %d, lr %s, gradient norm %s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self._engine.grad_norm,
            )

    @property
    def _counts(self) -> bool:
        """Whether there is a window that the engine counts."""
        return self._boundary is None and self._sizes.accumulation > 1

    def _check_rhythm(self) -> None:
        accumulation, fresh = self._sizes.accumulation, self._pending - self._seen
        if fresh == 1 or (self._seen == 0 and self._pending == accumulation):
            return
        if fresh == 0:
            raise OffloadError(
                "step() without backward() before it: micro-batches are counted by engine.backward(loss), and"
                f" {self._pending} of {accumulation} are there"
            )
        raise OffloadError(
            f"step() after {fresh} backward() in a window of gradient_accumulation_steps {accumulation}, of"
            f" which {self._pending} are done: call step() after each backward(), or only after the last"
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch whose step() comes next is the last one of its window."""
        if self._boundary is not None:
            return self._boundary
        current = self._pending + (self._pending == self._seen)
        return current >= self._sizes.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """From now on the script says whether ``step()`` updates the weights; None: the engine counts again.

        Losses are still divided by ``gradient_accumulation_steps``.
        """
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose gradients need not be exchanged with other ranks yet; ``step()`` is refused in it."""
        if self._in_no_sync:
            raise OffloadError("no_sync() inside no_sync()")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def zero_grad(self, set_to_none: bool = True, *, discard: bool = False) -> None:
        """Clears the gradients; ``step()`` does so already.

        Args:
            set_to_none: as in torch.
            discard: give up the micro-batches of an unfinished window, which is refused otherwise.
        """
        if self._pending and self._sizes.accumulation > 1 and not discard:
            raise OffloadError(
                f"zero_grad() would lose {self._pending} of {self._sizes.accumulation} micro-batches that"
                " wait for step(); leave it out, since step() clears the gradients, or say discard=True"
            )
        self.optimizer.zero_grad(set_to_none)
        self._pending = self._seen = self._forwards = 0

    # -- what has happened --------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the weights."""
        return self._step_applied

    @property
    def skipped_steps(self) -> int:
        """Steps refused because a gradient was not finite."""
        return self._engine.skipped_steps

    def get_lr(self) -> list[float]:
        """The learning rate of each group, with which the next step will be taken."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the gradients of the last step, before they were clipped; None before the first."""
        return self._engine.grad_norm

    def train_batch_size(self) -> int:
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self._sizes.accumulation

    def gradient_clipping(self) -> float:
        """The largest global norm of gradients that is applied; 0 is off."""
        return self._engine.clip_norm

    def report(self) -> Ledger:
        """The ledger: bytes per link and plane, stalls by cause, steps."""
        return self._engine.report()

    @property
    def plan(self) -> MemoryPlan:
        return self._engine.plan

    # -- the module ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where inputs have to be."""
        return self._engine.device

    def train(self, mode: bool = True) -> TrainingEngine:
        self.module.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """The module's, without a prefix: full tensors wherever the parameters are."""
        self._check_open()
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Writes weights to where they are; the optimizer's moments stay."""
        self._check_open()
        return self.module.load_state_dict(state_dict, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in their compute type into one file, and replaces a file of that name.

        A name that ends in ``.safetensors`` is written tensor by tensor. Any other is a pickle for
        ``torch.load``, whose weights have to fit in memory at once: refused where they do not.
        ``stage3_gather_16bit_weights_on_model_save`` is not needed for it.

        Returns:
            True, as DeepSpeed does where it has saved.
        """
        self._check_open()
        file = Path(save_dir) / save_filename
        if file.suffix == ".safetensors":
            saving.write_safetensors(
                self._engine, self.module, file, exclude_frozen=exclude_frozen_parameters
            )
        else:
            saving.write_pickle(self._engine, self.module, file, exclude_frozen=exclude_frozen_parameters)
        return True

    def export(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Writes a new directory of safetensors, with ``config.json`` where the model is transformers'.

        Args:
            dtype: of floating-point weights; their compute type where it is None. fp32 is the exact master.
        """
        self._check_open()
        saving.export_model(self._engine, self.module, path, dtype)

    # -- saving and going on ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path | None = None,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
    ) -> bool:
        """As ``OffloadEngine.save_checkpoint``: the schedule and an unfinished window are saved too. True."""
        self._check_open()
        self._engine.save_checkpoint(
            save_dir, tag, client_state, exclude_frozen=exclude_frozen_parameters, keep_last=keep_last,
            latest=save_latest,
        )  # fmt: skip
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """As ``OffloadEngine.load_checkpoint``; where there is nothing to load, None and no client state.

        Args:
            load_optimizer_states: False takes nothing but weights, as ``load_module_only``.
            load_lr_scheduler_states: False only where nothing but weights is taken.
        """
        self._check_open()
        return saving.load_checkpoint(
            self._engine,
            load_dir,
            tag,
            strict=load_module_strict,
            weights_only=load_module_only or not load_optimizer_states,
            schedule=load_lr_scheduler_states,
            custom_load_fn=custom_load_fn,
        )

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_BUILT:
            raise NotBuiltError(f"engine.{name}() is not built yet; {_NOT_BUILT[name]}")
        module = self.__dict__.get("module")
        if module is not None and not name.startswith("__") and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}, and neither has its module")

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back threads, descriptors, files and memory. Idempotent. See ``OffloadEngine.close``."""
        self._engine.close()

    def destroy(self) -> None:
        """As :meth:`close`."""
        self.close()

    def _check_open(self) -> None:
        if not self._engine.is_open:
            raise OffloadError("the engine is closed; what it left of the model is engine.module")


def _settings(args: Any, config: ConfigLike | None, config_params: ConfigLike | None) -> OffloadConfig:
    sources = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: OffloadConfig.from_any(source) for name, source in sources.items() if source is not None}
    if not given:
        raise ConfigError(f"no configuration: give it as one of {', '.join(sources)}")
    first = next(iter(given.values()))
    if any(other != first for other in given.values()):
        raise ConfigError(f"{' and '.join(given)} are different configurations; give one")
    return first
