"""Training loops drawn from a seed, as users write them, and one interpreter that runs a loop with any optimizer.

A loop is a list of actions, drawn before anything runs, so that plain PyTorch and every placement do the same. What
an action shows to user code (losses, outputs, gradients, state) is recorded and compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from plain_adamw import PlainAdamW
from random_models import PICKS, Batch, BombError
from torch import nn
from torch.utils import _pytree as pytree

import offload

Action = tuple[Any, ...]
REFUSED, WENT_ON = "refused", "went on"


@dataclass
class Loop:
    """Actions, and what they ask of the engine."""

    actions: list[Action]
    micro_batches: int
    """gradient_accumulation_steps of the configuration."""
    clip: float
    """gradient_clipping of the configuration."""
    waits: bool
    """Gradients have to wait for `step`: update 'backward' refuses something of it."""
    features: set[str] = field(default_factory=set)


TRAIN_ONCE = (
    "plain", "scaled", "two forwards, one loss", "gradient of the input", "penalty of the input", "in eval",
    "gathered", "after a forward without backward", "penalty of a weight", "twice the same batch",
)  # fmt: skip
"""Ways to one backward."""
TRAIN_TWICE = ("retained twice", "two losses", "two forwards, two backwards", "gradients of weights")
"""Ways to more than one, or whose gradients autograd hands out."""
LOOKS = (
    "eval", "no grad", "inference", "generate", "state dict", "optimizer state", "gather", "copy", "raises in forward",
    "interrupted in forward", "raises without grad", "buffers",
)  # fmt: skip
EDITS = ("clip", "clip by the optimizer", "scale", "forget one", "replace one", "through a view", "look")
SETTINGS = ("scheduler", "lr", "betas", "load own", "go back", "write", "freeze", "nothing")
ZEROES = ("none", "none", "none", "zeros", "model", "by hand", "not at all")


def draw_loop(seed: int, *, gentle: bool) -> Loop:
    """The loop of a seed.

    Args:
        gentle: nothing that update 'backward' refuses.
    """
    rng = random.Random(f"loop {seed}")
    loop = Loop([], 1, 0.0, waits=not gentle)
    if not gentle:
        loop.micro_batches = rng.choice((1, 1, 2, 3))
        loop.clip = rng.choice((0.0, 0.0, 0.05))
    add = loop.actions.append
    batches = iter(range(1000))
    for _ in range(rng.randint(2, 4)):
        micro_batches = 1 if gentle else rng.choice((loop.micro_batches, 1, 2, 3, 0))
        if rng.random() < 0.15 and micro_batches:
            add(("closure", [next(batches) for _ in range(micro_batches)]))
        else:
            for micro in range(micro_batches):
                if rng.random() < 0.4:
                    add(("look", rng.choice(LOOKS), next(batches)))
                twice = not gentle and rng.random() < 0.25
                add(("train", rng.choice(TRAIN_TWICE if twice else TRAIN_ONCE), next(batches)))
                if not gentle and micro < micro_batches - 1 and rng.random() < 0.15:
                    add(("break backward", next(batches), rng.random() < 0.5))
            if (
                not gentle and rng.random() < 0.15
            ):  # updated in backward, weights are not what they were by then
                add(("look", rng.choice(LOOKS), next(batches)))
            if not gentle:
                for _ in range(rng.choice((0, 0, 1, 2))):
                    add(("edit", rng.choice(EDITS), rng.random()))
                if rng.random() < 0.05:
                    add(("edit", "poison", rng.random()))
            if gentle or rng.random() < 0.9:
                add(("step",))
        how = rng.choice(ZEROES[:-1] if gentle else ZEROES)
        add(("zero", how))
        if rng.random() < 0.5:
            add(("set", rng.choice(SETTINGS), rng.random()))
        if rng.random() < 0.3:
            add(("look", rng.choice(LOOKS), next(batches)))
        if not gentle and rng.random() < 0.1:
            add(("stale", next(batches)))
    for action in loop.actions:
        loop.features.add(
            action[0]
            if action[0] in ("closure", "step", "stale", "break backward")
            else f"{action[0]}: {action[1]}"
        )
    loop.features |= {"clip by configuration"} if loop.clip else set()
    loop.features |= {f"micro-batches of the configuration: {loop.micro_batches}"}
    return loop


class Runner:
    """Runs a loop over a model and an optimizer, which may be the engine's."""

    def __init__(
        self, model: nn.Module, optimizer: Any, *, seed: int, width: int, dtype: torch.dtype, prefers: bool
    ) -> None:
        self.model, self.optimizer, self.seed, self.width, self.dtype = model, optimizer, seed, width, dtype
        self.seen: list[Any] = []
        self.scheduler: Any = None
        self.needs_grad = prefers
        self.waits = True
        self.saved: Any = None
        self.frozen: nn.Parameter | None = None
        self.params = [param for param in model.parameters() if param.requires_grad]

    @property
    def plain(self) -> PlainAdamW | None:
        return self.optimizer if isinstance(self.optimizer, PlainAdamW) else None

    def run(self, loop: Loop) -> None:
        torch.manual_seed(self.seed)
        self.waits = loop.waits
        for number, action in enumerate(loop.actions):
            self.seen.append(f"action {number}: {action}")
            getattr(self, "do_" + action[0].replace(" ", "_"))(*action[1:])

    def end(self) -> None:
        """What is left when the loop has ended."""
        self.seen.append("the end")
        self.do_look("eval", 999)
        self.see([self.states(), dict(self.model.state_dict()), dict(self.model.named_buffers())])

    @property
    def refused(self) -> int:
        """Steps that were refused because a gradient was not finite."""
        return self.plain.skipped if self.plain is not None else self.optimizer.engine.ledger.skipped_steps

    def batch(self, number: int, bomb: type[BaseException] | None = None) -> Batch:
        rng = random.Random(f"batch {self.seed} {number}")
        generator = torch.Generator().manual_seed(hash((self.seed, number)) % 2**31)
        rows = rng.choice((2, 3, 4))
        x = torch.randn(rows, self.width, generator=generator).to(self.dtype).requires_grad_(self.needs_grad)
        ids = torch.randint(0, 11, (rows,), generator=generator)
        return Batch(x, ids, tuple(rng.random() < 0.6 for _ in range(PICKS)), bomb)

    def see(self, value: Any) -> None:
        """Keeps what user code sees, by value."""
        self.seen.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value))

    def loss(self, output: Any) -> torch.Tensor:
        """A scalar of all tensors in an output of any form."""
        leaves = _tensors(output)
        loss = sum(leaf.float().square().mean() * (index + 1) for index, leaf in enumerate(leaves))
        self.see(loss)
        if not loss.requires_grad:  # all that this batch uses is frozen
            loss = loss + torch.zeros((), requires_grad=True)
        return loss

    # -- backward -----------------------------------------------------------------------------------------

    def do_train(self, how: str, number: int) -> None:
        getattr(self, "train_" + how.replace(",", "").replace(" ", "_"))(number)

    def train_plain(self, number: int) -> None:
        self.loss(self.model(self.batch(number))).backward()

    def train_scaled(self, number: int) -> None:
        (self.loss(self.model(self.batch(number))) / 3).backward()

    def train_two_forwards_one_loss(self, number: int) -> None:
        first, second = self.model(self.batch(number)), self.model(self.batch(number + 500))
        (self.loss(second) + self.loss(first)).backward()

    def train_two_forwards_two_backwards(self, number: int) -> None:
        losses = [self.loss(self.model(self.batch(number + more))) for more in (0, 500)]
        for loss in losses if number % 2 else losses[::-1]:
            loss.backward()

    def train_retained_twice(self, number: int) -> None:
        loss = self.loss(self.model(self.batch(number)))
        loss.backward(retain_graph=True)
        loss.backward()

    def train_two_losses(self, number: int) -> None:
        output = self.model(self.batch(number))
        first, second = self.loss(output), sum(leaf.float().sin().sum() for leaf in _tensors(output))
        first.backward(retain_graph=True)
        if second.requires_grad:
            second.backward()

    def _with_input(self, number: int) -> tuple[Batch, torch.Tensor]:
        batch = self.batch(number)
        batch.x.requires_grad_(True)
        return batch, self.loss(self.model(batch))

    def train_gradient_of_the_input(self, number: int) -> None:
        batch, loss = self._with_input(number)
        self.see(torch.autograd.grad(loss, batch.x, retain_graph=True))
        loss.backward()

    def train_penalty_of_the_input(self, number: int) -> None:
        batch, loss = self._with_input(number)
        (grad,) = torch.autograd.grad(loss, batch.x, create_graph=True)
        (loss + grad.float().square().sum()).backward()

    def train_gradients_of_weights(self, number: int) -> None:
        loss = self.loss(self.model(self.batch(number)))
        params = [param for param in self.params if param.requires_grad]
        self.see(torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True))
        loss.backward()

    def train_in_eval(self, number: int) -> None:
        self.model.eval()
        self.train_plain(number)
        self.model.train()

    def train_gathered(self, number: int) -> None:
        with offload.gather(self.model):
            loss = self.loss(self.model(self.batch(number)))
            (loss + 1e-3 * sum(param.float().square().sum() for param in self.params)).backward()

    def train_after_a_forward_without_backward(self, number: int) -> None:
        self.loss(self.model(self.batch(number + 500)))
        self.train_plain(number)

    def train_twice_the_same_batch(self, number: int) -> None:
        self.loss(self.model(self.batch(number)))
        kept = self.model(self.batch(number))  # its graph lives until the end of this
        self.train_plain(number)
        del kept

    def train_penalty_of_a_weight(self, number: int) -> None:
        owner = next((m for m in self.model.modules() if isinstance(m, nn.Linear)), None)
        if owner is None:
            self.train_plain(number)
        elif number % 2 or not self.waits:
            self.loss(self.model(self.batch(number))).add(1e-2 * owner.weight.float().norm()).backward()
        else:  # a graph that holds the parameter itself, while all units are used
            weight = owner.weight
            with torch.autograd.graph.disable_saved_tensors_hooks("nobody may pack it"):
                penalty = weight.float().norm()
            self.loss(self.model(self.batch(number))).add(1e-2 * penalty).backward()

    def do_closure(self, numbers: list[int]) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for number in numbers:
                loss = self.loss(self.model(self.batch(number)))
                loss.backward()
                total += loss.detach()
            return total

        self.see(self.optimizer.step(closure))

    def do_stale(self, number: int) -> None:
        """A graph from before the step, differentiated after it: torch refuses where a saved weight has changed."""
        old = self.loss(self.model(self.batch(number)))
        self.optimizer.zero_grad()
        self.train_plain(number + 500)
        self.optimizer.step()
        self.optimizer.zero_grad()
        try:
            old.backward()
        except (RuntimeError, offload.OffloadError):
            self.seen.append(REFUSED)
        else:
            self.seen.append(WENT_ON)
        self.optimizer.zero_grad()

    def do_break_backward(self, number: int, zero: bool) -> None:
        """An exception in the middle of a backward; the gradients that were finished before it stay, as in torch."""

        def fail(_grad: torch.Tensor) -> None:
            raise BombError("in backward")

        part = self.model.parts[len(self.model.parts) // 2]
        handle = part.register_forward_hook(lambda _m, _i, output: _first_grad(output, fail))
        with contextlib.suppress(BombError):
            self.loss(self.model(self.batch(number))).backward()
        handle.remove()
        if zero:
            self.optimizer.zero_grad()

    # -- between ------------------------------------------------------------------------------------------

    def do_look(self, how: str, number: int) -> None:
        model, optimizer = self.model, self.optimizer
        if how == "eval":
            model.eval()
            with torch.no_grad():
                self.see(_tensors(model(self.batch(number))))
            model.train()
        elif how in ("no grad", "inference"):
            with torch.inference_mode() if how == "inference" else torch.no_grad():
                self.see(_tensors(model(self.batch(number))))
        elif how == "generate":
            model.eval()
            batch = self.batch(number)
            with torch.no_grad():
                for _ in range(3):
                    x = _tensors(model(batch))[0]
                    batch = Batch(x, (batch.ids + 1) % 11, batch.picks)
            self.see(batch.x)
            model.train()
        elif how == "state dict":
            self.see(dict(model.state_dict()))
        elif how == "optimizer state":
            optimizer.state_dict()
            self.see(self.states())
        elif how == "gather":
            with offload.gather(model):
                self.see(list(model.parameters()))
        elif how == "copy":
            self.see(copy.deepcopy(self.params[number % len(self.params)]))
        elif how == "buffers":
            self.see(dict(model.named_buffers()))
        else:
            bomb = KeyboardInterrupt if "interrupted" in how else BombError
            grad = torch.no_grad() if "without" in how else contextlib.nullcontext()
            with contextlib.suppress(bomb), grad:
                model(self.batch(number, bomb))

    def states(self) -> list[torch.Tensor]:
        """Masters, moments and counts of steps of all trained parameters, by name."""
        names = {param: name for name, param in self.model.named_parameters()}
        if self.plain is not None:
            found = {names[param]: self.plain.values(param) for param in self.plain.masters}
        else:
            engine, found = self.optimizer.engine, {}
            for stored, state in offload.optimizer_state(engine):
                master = state.get("master")
                master = offload.read_master(engine, stored) if master is None else master
                moments = [state[name].reshape(master.shape) for name in ("exp_avg", "exp_avg_sq")]
                found[stored.name] = [master, *moments, state["step"]]
        return [pytree.tree_map(torch.clone, found[name]) for name in sorted(found) if found[name][0].numel()]

    def do_edit(self, how: str, chance: float) -> None:
        with_grad = [param for param in self.params if param.grad is not None]
        if not with_grad:
            return
        chosen = with_grad[int(chance * len(with_grad))]
        if how == "clip":
            self.see(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05))
        elif how == "clip by the optimizer":
            self.optimizer.clip_grad_norm_(0.05)
        elif how == "scale":
            for param in with_grad:
                param.grad.mul_(0.5)
        elif how == "forget one":
            chosen.grad = None
        elif how == "through a view":
            chosen.grad.t().mul_(0.5) if chosen.ndim == 2 else chosen.grad.data.add_(1e-3)
        elif how == "replace one":
            chosen.grad = chosen.grad.clone() * 2
        elif how == "poison" and chosen.numel():
            chosen.grad.detach()[(0,) * chosen.ndim] = float("inf")
        self.see([param.grad for param in self.params])

    def do_step(self) -> None:
        self.optimizer.step()

    def do_zero(self, how: str) -> None:
        if how == "none":
            self.optimizer.zero_grad()
        elif how == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            self.model.zero_grad()
        elif how == "by hand":
            for param in self.model.parameters():
                param.grad = None

    def do_set(self, how: str, chance: float) -> None:
        if how == "scheduler":
            if self.scheduler is None:
                self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.8**step)
            else:
                self.scheduler.step()
        elif how == "lr":
            for group in self.optimizer.param_groups:
                group["lr"] = 0.02 * chance
        elif how == "betas":
            self.optimizer.param_groups[-1]["betas"] = (0.5 + chance / 3, 0.9)
        elif how == "load own":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
            self.adopt(exact=True)
        elif how == "go back":
            if self.saved is None:
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.saved = weights, copy.deepcopy(self.optimizer.state_dict())
            else:
                self.model.load_state_dict(self.saved[0])
                self.adopt(exact=True)
                self.optimizer.load_state_dict(self.saved[1])
        elif how == "write":
            chosen = self.params[int(chance * len(self.params))]
            with offload.gather(chosen, modify=True), torch.no_grad():
                chosen.mul_(1.25)
            self.adopt(exact=False)
        elif how == "freeze":
            if self.frozen is not None:
                self.frozen.requires_grad_(True)
                self.frozen = None
            elif len(self.params) > 1:
                self.frozen = self.params[int(chance * len(self.params))].requires_grad_(False)

    def adopt(self, *, exact: bool) -> None:
        if self.plain is not None:
            self.plain.adopt(exact=exact)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in an output of any form, dataclasses too."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif leaf is not None:
            found += _tensors(list(vars(leaf).values()))
    return found


def _first_grad(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)
            return


def differences(got: list[Any], expected: list[Any]) -> Iterator[str]:
    """Where two recordings differ, in words."""
    place = "before the loop"
    if len(got) != len(expected):
        yield f"{len(got)} things were seen, {len(expected)} expected"
    for mine, other in zip(got, expected, strict=False):
        if mine == REFUSED and other == WENT_ON:
            continue  # the engine counts versions by unit, torch by parameter
        if isinstance(mine, str):
            place = mine
            if mine != other:
                yield f"{mine} where {other} was expected"
            continue
        leaves, others = pytree.tree_leaves(mine), pytree.tree_leaves(other)
        if len(leaves) != len(others):
            yield f"{place}: {len(leaves)} values, {len(others)} expected"
        for index, (a, b) in enumerate(zip(leaves, others, strict=False)):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                same = (
                    a.shape == b.shape
                    and a.dtype == b.dtype
                    and bool(((a == b) | (a.isnan() & b.isnan())).all())
                )
            else:
                same = a is b or a == b
            if not same:
                yield f"{place}: value {index} of {len(leaves)} is {a}, expected {b}"
