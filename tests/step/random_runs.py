"""One seed: a model, a loop, a precision and a few placements, and whether each gives what plain PyTorch gives."""

from __future__ import annotations

import contextlib
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_adamw import PlainAdamW
from random_loops import Loop, Runner, differences, draw_loop
from random_models import NEEDS_SEVERAL_UNITS, build_model
from torch import nn

import offload
from offload.accel import ENVIRONMENT
from offload.config import OffloadConfig
from offload.matmul import WideLinears, bf16_is_native
from offload.partition import Partition
from offload.placement import placement_of
from offload.plan import MemoryPlan

DEFAULTS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HOMES = ("none", "cpu", "nvme", "nvme")


USED_AGAIN = {
    "shared", "tied", "times", "train: two forwards, one loss", "train: gathered", "train: penalty of a weight",
}  # fmt: skip
"""With which a weight has several uses in one backward."""


@dataclass(frozen=True)
class Place:
    """Where things are and when they are updated."""

    param: str
    state: str
    update: str
    chunk: int | None
    tight: bool
    """As little host memory as the plan can do with."""
    accelerator: str
    backend: str
    generations: int
    verify: str
    paths: int

    def config(self, swap_path: Path, *, precision: str, loop: Loop, state_format: str) -> dict[str, Any]:
        paths = [str(swap_path / str(index)) for index in range(self.paths)]
        for path in paths:
            Path(path).mkdir(exist_ok=True)
        weighted = [
            {"path": path, "weight": index + 1} for index, path in enumerate(paths)
        ]  # else they are measured
        where = {"nvme_path": weighted if len(paths) > 1 else paths[0]}
        update = {"update": self.update, "state_format": state_format}
        return {
            "accelerator": self.accelerator,
            "bf16": {"enabled": precision == "bf16"},
            "gradient_accumulation_steps": loop.micro_batches,
            "gradient_clipping": loop.clip,
            "optimizer": {"type": "AdamW", "params": {**DEFAULTS, "betas": [0.9, 0.999]}},
            "zero_optimization": {
                "stage": 3,
                **({} if self.chunk is None else {"sub_group_size": self.chunk}),
                "offload_param": {"device": self.param, **where},
                "offload_optimizer": {"device": self.state, **update, **where},
            },
            "memory": {"host_bytes": "1GB", "device_bytes": "1GB"},
            "aio": {"backend": self.backend},
            "durability": {"generations": self.generations, "verify": self.verify},
        }


@dataclass(frozen=True)
class Case:
    """What a seed draws."""

    seed: int
    precision: str
    state_format: str
    groups: int
    loop: Loop
    features: frozenset[str]
    places: tuple[Place, ...]
    width: int


def draw(seed: int) -> Case:
    """Everything from one number."""
    rng = random.Random(f"case {seed}")
    precision, gentle = rng.choice(("fp32", "fp32", "bf16")), rng.random() < 0.5
    state_format = rng.choice(("fp32",) * 8 + ("bf16",))
    if state_format == "bf16" and precision == "bf16" and rng.random() < 0.5:
        state_format = "int8"
    _, drawn, width = build_model(seed, precision)
    loop = draw_loop(seed, gentle=gentle)
    if drawn.features & {
        "reentrant",
        "attention",
    }:  # torch has no autograd.grad through it, or no second derivative
        loop.actions = [("train", "plain", a[2]) if _asks_grad(a) else a for a in loop.actions]
    features = frozenset(drawn.features | loop.features | {precision, f"state in {state_format}"})
    places = [_draw_place(rng, gentle=gentle, state_format=state_format) for _ in range(rng.randint(2, 3))]
    if seed % 3 == 2:
        places = places[:2]
    return Case(seed, precision, state_format, rng.choice((1, 1, 2, 3)), loop, features, tuple(places), width)


def _asks_grad(action: tuple[Any, ...]) -> bool:
    return action[0] == "train" and action[1].startswith(("gradient", "penalty of the input"))


def _draw_place(rng: random.Random, *, gentle: bool, state_format: str) -> Place:
    accelerator = f"simulated:{rng.randrange(1000)}" if rng.random() < 0.1 else "auto"
    return Place(
        param=rng.choice(HOMES),
        state=rng.choice(
            HOMES if state_format == "fp32" else HOMES[1:]
        ),  # which an accelerator does not keep
        update=rng.choice(("step", "backward", "backward") if gentle else ("step",)),
        chunk=rng.choice((2048, 2048, 4096, None)),
        tight=rng.random() < 0.5,
        accelerator=accelerator,
        backend=rng.choice(("auto", "auto", "threads", "python")),
        generations=rng.choice((1, 1, 2)),
        verify=rng.choice(("resume", "resume", "always")),
        paths=rng.choice((1, 1, 1, 2)),
    )


def groups_of(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    numbers: list[dict[str, Any]] = [
        {},
        {"lr": 0.02, "weight_decay": 0.0},
        {"betas": (0.8, 0.95), "eps": 1e-6},
    ]
    groups = [{"params": trained[i :: case.groups], **numbers[i]} for i in range(case.groups)]
    return [group for group in groups if group["params"]]


def needs_grad(case: Case) -> bool:
    return "reentrant" in case.features or case.seed % 2 == 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        warnings.filterwarnings("ignore", message="Full backward hook")
        yield


def plain(case: Case) -> Runner:
    """The oracle."""
    model, _, width = build_model(case.seed, case.precision)
    bf16 = case.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    optimizer = PlainAdamW(groups_of(case, model), DEFAULTS, clip=case.loop.clip)
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    optimizer.round_weights()
    if bf16 and not bf16_is_native():
        WideLinears(model)
    if bf16 and case.loop.micro_batches > 1:  # micro-batches add up in fp32
        for param in optimizer.masters:
            param.grad_dtype = None
            param.register_post_accumulate_grad_hook(_widen)
    runner = Runner(model, optimizer, seed=case.seed, width=width, dtype=dtype, prefers=needs_grad(case))
    with _quiet():
        runner.run(case.loop)
        runner.end()
    return runner


def _widen(param: torch.Tensor) -> None:
    if param.grad is not None and param.grad.dtype is not torch.float32:
        param.grad = param.grad.float()


class LeftoverError(AssertionError):
    """Something is held that nobody uses any more."""


def offloaded(case: Case, place: Place, swap_path: Path) -> Runner:
    """The same with the engine, and what must hold whatever the loop: nothing stays open."""
    model, _, width = build_model(case.seed, case.precision)
    groups = groups_of(case, model)
    config = place.config(swap_path, precision=case.precision, loop=case.loop, state_format=case.state_format)
    if place.tight and place.accelerator == "auto" and not os.environ.get(ENVIRONMENT):
        config["memory"]["host_bytes"] = smallest_host_bytes(model, groups, config)
    model, optimizer = offload.prepare(model, config, groups)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    runner = Runner(model, optimizer, seed=case.seed, width=width, dtype=dtype, prefers=needs_grad(case))
    with contextlib.closing(optimizer.engine) as engine, _quiet():
        runner.run(case.loop)
        runner.end()
        engine.settle()
        assert engine.ledger.skipped_steps == runner.refused
        check_nothing_is_held(engine)
    return runner


def smallest_host_bytes(model: nn.Module, groups: list[dict[str, Any]], config: dict[str, Any]) -> int:
    settings = OffloadConfig.from_any(config)
    partition = Partition(model, groups, settings.precision)
    return MemoryPlan.build(placement_of(settings), partition.inventory).smallest.bytes_total("host")


def check_nothing_is_held(engine: Any) -> None:
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise LeftoverError("our saved-tensor hooks are still active")
    if engine.weights.streamed:
        residency = engine.weights.mover.residency
        residency.verify()
        if any(copy.leases for copy in residency.copies):
            raise LeftoverError("a lease is still open")
    if engine.pipeline.pending:
        raise LeftoverError("an update has not been applied")


def may_refuse(case: Case, place: Place) -> str:
    """What the engine may say instead: a pattern; empty where it has to train."""
    patterns = []
    if place.param == "nvme" or place.accelerator != "auto" or os.environ.get(ENVIRONMENT):
        keeps_slots = {"train: penalty of the input"}  # a second derivative keeps what it has used
        if case.features & (keeps_slots | NEEDS_SEVERAL_UNITS | {"checkpoint", "reentrant"}):
            patterns.append("weight slots are in use")
    if place.update == "backward":
        patterns += ["gradient slots wait"]
        if "set: freeze" in case.features:  # a frozen weight may be read after the update of its unit
            patterns.append("were updated between a forward and its backward")
        used_again = USED_AGAIN | {"train: penalty of a weight"}
        if "reentrant" in case.features and case.features & used_again:  # each recomputation makes a gradient
            patterns += [
                "got a gradient after its unit was updated",
                "were updated between a forward and its backward",
                "modified by an inplace operation",
            ]
    return "|".join(patterns)


IN_MEMORY = Place("none", "cpu", "step", None, False, "cpu", "auto", 1, "resume", 1)


def check(seed: int, swap_path: Path) -> Counter[str]:
    """Compares every placement of a seed with plain PyTorch. What happened, counted."""
    case, happened = draw(seed), Counter[str]()
    happened.update(case.features)
    exact = case.state_format == "fp32"  # else the oracle is the engine itself, with all in memory
    expected = plain(case) if exact else offloaded(case, IN_MEMORY, swap_path)
    happened["steps refused"] += expected.refused
    for place in case.places:
        refusal = may_refuse(case, place)
        try:
            got = offloaded(case, place, swap_path)
        except (offload.OffloadError, RuntimeError) as error:
            if not refusal or not re.search(refusal, str(error)) or "\n" in str(error):
                raise AssertionError(f"{place}: {error}") from error
            happened["refused: " + re.search(refusal, str(error))[0]] += 1
            continue
        for difference in differences(got.seen, expected.seen):
            raise AssertionError(f"{place}: {difference}")
        for name in ("param", "state", "update", "accelerator"):
            happened[f"{name} {str(getattr(place, name)).partition(':')[0]}"] += 1
    return happened
