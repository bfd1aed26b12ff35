"""The public functions: a model and a configuration in, a model that trains anywhere out."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import construct, lifetime, machine
from .accel import open_accelerator
from .access import gathered
from .adapters import AdapterHooks
from .casts import CastGuard
from .checkpoint import StateDictHooks
from .config import OffloadConfig
from .config.schema import Aio
from .config.training import Optimizer
from .copies import CopyHooks
from .durability import choose_generations
from .engine import OffloadEngine
from .errors import ConfigError
from .hooks import ModuleHooks
from .inventory import Inventory
from .ledger import Ledger
from .matmul import WideLinears, bf16_is_native
from .models.conversion import PretrainedValues
from .models.pretrained import build_meta_model, open_checkpoint
from .optim import DeviceAdam, ShardOptimizer, make_optimizer
from .optimizer import OffloadOptimizer
from .partition import Partition, refuse_modules
from .placement import Placement, nvme_path_of, placement_of, refuse_unbuilt, swap_paths_of
from .plan import MemoryPlan
from .resuming import Where, check_resumable, find_target
from .saving import SavedEngine
from .store.swap import SwapStore
from .training_state import TrainingState, check

logger = logging.getLogger("offload")

ConfigLike = OffloadConfig | Mapping[str, Any] | str | Path


def prepare(
    model: nn.Module,
    config: ConfigLike,
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    *,
    activation_bytes: int = 0,
    library_bytes: int = 0,
    resume: Where = False,
    previous: bool = False,
) -> tuple[nn.Module, OffloadOptimizer]:
    """Takes over a model's parameters and returns it with the optimizer that trains it.

    Args:
        model: any module; it is changed in place and returned. Floating-point parameters are computed in the
            configuration's precision from now on, the values they have become the exact fp32 master.
        config: a dict, a path, JSON text, or an OffloadConfig.
        params: parameters or parameter groups to train; all that require a gradient where it is None.
        activation_bytes: what the computation keeps in host memory, for the plan; 0 leaves it out.
        library_bytes: what libraries take in training beside that, likewise.
        resume: go on from a commit: the newest of this model on the configuration's swap paths (True), or that of
            a swap directory. The values that the model has now do not count, and are given up first. Attach
            schedulers and data with ``optimizer.engine.attach(...)``: each is given what it had.
        previous: go on from the commit before the last one, for good, should the last one be damaged.

    Returns:
        The model and a torch optimizer; ``optimizer.engine`` has ``report()``, ``plan``, ``save_checkpoint()``,
        ``load_checkpoint()`` and ``close()``.

    Raises:
        ConfigError, PlanError, StoreError: before anything has been changed or created.
        CheckpointError: there is no commit to go on from, or one of another model; likewise.
        TransferError, or whatever else stops the weights on their way home: the parameters have their values
            back then (frozen ones of a wider type rounded to the precision, trained ones to 24 bits with int8
            state), and nothing of the engine stays.
    """
    settings = OffloadConfig.from_any(config)
    refuse_unbuilt(settings)
    chosen = settings.optimizer or Optimizer()
    construct.make_ordinary(model)
    optimizer = _make_optimizer(model, params, chosen)
    ledger = Ledger()
    with ExitStack() as undo:
        accelerator = open_accelerator(settings.accelerator)
        device, free_bytes = torch.device("cpu"), None
        if accelerator is not None:
            undo.callback(accelerator.close)
            device, free_bytes = accelerator.device, accelerator.memory()[0]
        partition = Partition(
            model,
            optimizer.param_groups,
            settings.precision,
            activation_bytes=activation_bytes,
            device=device,
        )
        inventory = dataclasses.replace(partition.inventory, library_bytes=library_bytes)
        has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        placement = placement_of(settings, device_free_bytes=free_bytes, has_momentum=has_momentum)
        refuse_modules(model, weights_are_streamed=placement.param_home == "nvme")
        if resume is False:
            ground = _new_run(settings, placement, inventory, ledger)
        else:
            ground = _old_run(settings, placement, inventory, ledger, partition, resume, previous=previous)
        if ground.store is not None:
            undo.callback(ground.store.close)
        here, there = _shard_optimizers(ground.plan, chosen, settings.seed)
        if ground.going_on is not None:
            check(
                ground.going_on, model, partition, optimizer=here, keeps_gradients=placement.update == "step"
            )
        engine = SavedEngine(
            partition,
            ground.plan,
            groups=optimizer.param_groups,
            optimizer=here,
            on_device=there,
            clip_norm=settings.gradient_clipping or 0.0,
            store=ground.store,
            ledger=ledger,
            source=None if ground.going_on else lambda stored: construct.initial_value(stored.param).cpu(),
            accelerator=accelerator,
            model=model,
            roots=ground.roots,
            aio=ground.aio,
            durability=settings.durability,
            going_on=ground.going_on,
        )
        undo.pop_all()
    _move_buffers(model, device)
    _watch(model, engine)
    optimizer.bind(engine)
    engine.take_over()
    for note in (*settings.notes, *ground.notes, ground.plan.report()):
        logger.info("%s", note)
    return model, optimizer


def _make_optimizer(
    model: nn.Module,
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    chosen: Optimizer,
) -> OffloadOptimizer:
    for engine in open_engines():
        if any(param in engine.partition.of_param for param in model.parameters()):
            raise ConfigError("the model, or a part of it, is prepared already; close its engine first")
    return OffloadOptimizer(_groups(model, params), chosen.defaults())


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What a run starts from."""

    plan: MemoryPlan
    store: SwapStore | None
    going_on: TrainingState | None
    roots: tuple[str, ...]
    """The swap paths."""
    aio: Aio
    notes: tuple[str, ...]


def _new_run(settings: OffloadConfig, placement: Placement, inventory: Inventory, ledger: Ledger) -> _Ground:
    placement, chosen = choose_generations(settings, placement, inventory)
    plan = MemoryPlan.build(placement, inventory)
    store, aio = None, settings.aio
    paths = swap_paths_of(settings)
    if paths is not None:
        verify = settings.durability.verify == "always"
        aio, weighted = machine.resolve(settings.aio, paths.all)
        store = SwapStore.open(dataclasses.replace(paths, all=weighted), plan, aio, ledger, verify=verify)
    roots = () if paths is None else paths.names
    notes = (chosen,) if chosen else ()
    return _Ground(plan=plan, store=store, going_on=None, roots=roots, aio=aio, notes=notes)


def _old_run(
    settings: OffloadConfig,
    placement: Placement,
    inventory: Inventory,
    ledger: Ledger,
    partition: Partition,
    resume: Where,
    *,
    previous: bool,
) -> _Ground:
    paths = check_resumable(settings)
    roots = paths.names
    target = find_target(resume, roots, partition, placement, inventory, previous=previous)
    aio, _ = machine.resolve(settings.aio, paths.all)
    store, state = target.open(aio, settings.durability, ledger)
    notes = (f"going on after step {state.step} of {store.path}",)
    return _Ground(plan=target.plan, store=store, going_on=state, roots=roots, aio=aio, notes=notes)


def _watch(model: nn.Module, engine: OffloadEngine) -> None:
    """Hooks into the model, and takes them off when the engine is closed."""
    lifetime.register(engine)
    engine.on_close(functools.partial(lifetime.forget, engine))
    construct.forget_sources(model)
    hooks: list[ModuleHooks | StateDictHooks] = [ModuleHooks(model, engine), StateDictHooks(model, engine)]
    guard, adapters = CastGuard(model, engine), AdapterHooks(model, engine)
    copies = CopyHooks(model, engine, {id_ for each in hooks for id_ in each.ids})
    for remove in (*(each.remove for each in hooks), copies.remove, guard.remove, adapters.remove):
        engine.on_close(remove)
    if engine.plan.placement.precision == "bf16" and engine.device.type == "cpu" and not bf16_is_native():
        engine.on_close(WideLinears(model).remove)


@contextmanager
def init(config: ConfigLike) -> Iterator[None]:
    """Builds a model that may be larger than memory: ``with offload.init(config): model = Model(...)``.

    Where parameters are homed on nvme they go to the swap path while the model is being built, and at most
    a quarter of `memory.host_bytes` of them stays in memory. Elsewhere the model is built as ever. Random
    numbers are drawn exactly as without it. Call :func:`prepare` with the same configuration next.

    Raises:
        ConfigError, StoreError: before anything is built.
    """
    settings = OffloadConfig.from_any(config)
    refuse_unbuilt(settings)
    path = nvme_path_of(settings)
    if path is None or settings.zero_optimization.offload_param.device != "nvme":
        yield
        return
    live_bytes_max = placement_of(settings).host_bytes // 4
    with construct.ConstructionPager(path, settings.aio, live_bytes_max=live_bytes_max):
        yield


def from_pretrained(path: str | Path, config: ConfigLike) -> nn.Module:
    """A model saved by transformers, of the class that was saved, whose weights are still on disk.

    Nothing of its weights is in memory until :func:`prepare` streams them to their home, tensor by tensor.
    Needs the extra ``hf``.

    Args:
        path: a directory with ``config.json`` and safetensors.

    Raises:
        ConfigError, CheckpointError: the directory holds no such model.
    """
    refuse_unbuilt(OffloadConfig.from_any(config))
    checkpoint = open_checkpoint(path)
    model = build_meta_model(path, dtype=torch.float32, any_task=True)
    values = PretrainedValues(model, checkpoint)
    values.fill_buffers()
    construct.fill_later(model, values.tensor)
    return model


@contextmanager
def gather(params: nn.Parameter | nn.Module | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Full, ordinary tensors for parameters that may be absent; a parameter of no engine is left as it is.

    Args:
        params: one parameter, several, or all of a module. Together they must fit in memory.
        modify: keep what is written to them. Elements that are not changed keep their exact master value.
    """
    if isinstance(params, nn.Parameter):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    by_engine: dict[OffloadEngine, list[nn.Parameter]] = {}
    engines = open_engines()
    for param in params:
        for engine in engines:
            if param in engine.partition.of_param:
                by_engine.setdefault(engine, []).append(param)
    with ExitStack() as stack:
        for engine, members in by_engine.items():
            stack.enter_context(gathered(engine, members, modify=modify))
        yield


def _shard_optimizers(
    plan: MemoryPlan, chosen: Optimizer, seed: int
) -> tuple[ShardOptimizer, ShardOptimizer | None]:
    """What updates on the CPU, and what updates on an accelerator where anything does."""
    placement = plan.placement
    here = make_optimizer(
        placement.rule,
        weight_format=placement.precision,
        state_format=placement.state_format,
        decoupled=chosen.decoupled,
        seed=seed,
    )
    if not plan.on_device:
        return here, None
    return here, DeviceAdam(weight_format=placement.precision, adamw_mode=chosen.decoupled)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Brings every buffer to the device that computes; types stay as they are, and what is shared stays shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def open_engines() -> list[OffloadEngine]:
    """The engines of this process that have not been closed."""
    return [resource for resource in lifetime.opened() if isinstance(resource, OffloadEngine)]


def _groups(
    model: nn.Module, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Parameter groups as dictionaries, without frozen parameters and without empty groups."""
    given: list[Any] = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        trained = [param for param in members if param.requires_grad]
        if trained:
            groups.append({**group, "params": trained})
    if not groups:
        raise ConfigError(
            "the model has no trainable parameter; set requires_grad on what should be trained, or use the"
            " model without an engine"
        )
    return groups
