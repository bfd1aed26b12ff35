"""transformers' Trainer over an engine, with checkpoints that are streamed. Imports transformers when it is used.

Note [Trainer]
``Trainer(optimizers=(optimizer, None))`` of transformers trains as it is. What it cannot know is that state may be
larger than memory: its checkpoints hold ``model.state_dict()`` and ``optimizer.state_dict()`` at once. Here
``checkpoint-N`` is a checkpoint of the engine, written and read chunk by chunk, with the Trainer's own small files
beside it and an index by which ``from_pretrained`` finds the weights. There is no ``optimizer.pt``, and no byte is
there twice. What a Trainer without this has saved is resumed from too.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from ..access import read_weight
from ..checkpoint import exported
from ..errors import ConfigError
from ..models.pretrained import persistent_buffers, write_checkpoint
from ..models.safetensors_file import TensorSpec, write_file
from ..optimizer import OffloadOptimizer
from ..portable.manifest import NAME, WEIGHT
from ..portable.reader import read_checkpoint
from ..saving import SavedEngine

INDEX, BUFFERS = "model.safetensors.index.json", "model-buffers.safetensors"
STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"


class EngineCheckpoints:
    """A mixin for ``transformers.Trainer`` and what inherits from it. See Note [Trainer].

    ``class MyTrainer(EngineCheckpoints, Seq2SeqTrainer): ...``; ``Trainer`` of this module is the plain one with it.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any  # the Trainer's

    @property
    def engine(self) -> SavedEngine:
        """Of the optimizer that the Trainer was given."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if not isinstance(optimizer, OffloadOptimizer):
            raise ConfigError(
                "give this Trainer the optimizer of offload.prepare: optimizers=(optimizer, None)"
            )
        return optimizer.engine

    def train(self, resume_from_checkpoint: str | bool | None = None, **more: Any) -> Any:
        """As the Trainer's. With True it goes on from the newest checkpoint that is whole.

        Raises:
            ConfigError: an argument contradicts the engine's configuration; nothing has been trained then.
        """
        self._check_arguments()
        if resume_from_checkpoint is True:
            whole = [path for path in Path(self.args.output_dir).glob("checkpoint-*") if _is_whole(path)]
            if whole:  # else the Trainer says what is missing
                newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]))
                resume_from_checkpoint = str(newest)
        return cast(Any, super()).train(resume_from_checkpoint=resume_from_checkpoint, **more)

    def _check_arguments(self) -> None:
        placement, args = self.engine.plan.placement, self.args
        if args.save_strategy != "no" and self.engine.is_in_swap_path(Path(args.output_dir)):
            raise ConfigError(
                f"TrainingArguments: output_dir {args.output_dir} lies in the swap path, where saving is committing;"
                " give a directory beside it"
            )
        if args.fp16:
            raise ConfigError("TrainingArguments: fp16 training is not built; leave fp16 out, or say bf16")
        if placement.update == "backward" and args.max_grad_norm > 0:
            raise ConfigError(
                f"TrainingArguments: max_grad_norm {args.max_grad_norm} needs all gradients before the first update;"
                " set max_grad_norm=0, or offload_optimizer.update to 'step'"
            )
        if 1 < (accumulation := args.gradient_accumulation_steps) != placement.micro_batches:
            raise ConfigError(
                f"TrainingArguments: gradient_accumulation_steps is {accumulation} here and {placement.micro_batches}"
                " in the engine's configuration, which says how gradients are added up; say the same in both"
            )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.engine.plan.placement.update == "backward":
            return None  # gradients are gone, and the norm is known after step()
        return cast(Any, super())._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, float], *args: Any, **more: Any) -> None:
        """As the Trainer's. With update in backward the norm of the gradients is the engine's."""
        if "loss" in logs and "grad_norm" not in logs and self.engine.grad_norm is not None:
            logs["grad_norm"] = self.engine.grad_norm
        cast(Any, super()).log(logs, *args, **more)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's: a directory for ``from_pretrained``, one tensor in memory at a time."""
        self._has_own_weights = not _internal_call or self.args.save_only_model
        cast(Any, super()).save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if state_dict is None and self._is_peft:
            state_dict = self._trained()
        cast(Any, super())._save(str(folder), state_dict=state_dict or {})
        if state_dict is None:
            (folder / "model.safetensors").unlink(missing_ok=True)  # of no tensors
            if self._has_own_weights:
                _write_weights(self.engine, self.model, folder)

    @property
    def _is_peft(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _trained(self) -> dict[str, torch.Tensor]:
        """What an adapter is made of: the base is not read."""
        state: dict[str, torch.Tensor] = dict(persistent_buffers(self.model))
        for stored in self.engine.partition.trainable:
            state.update(dict.fromkeys(stored.names, read_weight(self.engine, stored)))
        return state

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        (folder / STATE).unlink(missing_ok=True)  # not whole until the Trainer has written that again
        self.engine.save_checkpoint(folder.parent, folder.name, exclude_frozen=self._is_peft, latest=False)
        torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
        if not self._is_peft:
            _write_index(folder, dict(persistent_buffers(self.model)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_of_engine(resume_from_checkpoint):
            cast(Any, super())._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_of_engine(checkpoint):
            cast(Any, super())._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        schedule = torch.load(folder / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)
        for group, lr in zip(self.optimizer.param_groups, schedule.get("_last_lr", ()), strict=False):
            group["lr"] = lr  # or the engine would tell of another one than was configured
        self.engine.load_checkpoint(folder.parent, folder.name)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and _is_of_engine(best):
            self.engine.load_checkpoint(Path(best).parent, Path(best).name, weights_only=True)
        else:
            cast(Any, super())._load_best_model()


def _is_of_engine(checkpoint: str | Path) -> bool:
    return (Path(checkpoint) / NAME).is_file()


def _is_whole(checkpoint: Path) -> bool:
    """Whether its last file, the Trainer's state, was written to the end."""
    try:
        json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def _write_weights(engine: SavedEngine, model: torch.nn.Module, folder: Path) -> None:
    """Puts the weights among the other files of a model's directory."""
    specs, fetch = exported(engine, engine.partition.of_param.values(), persistent_buffers(model), None)
    with tempfile.TemporaryDirectory(prefix=".weights.", dir=folder) as beside:
        write_checkpoint(beside, specs, fetch, None)
        for file in sorted(Path(beside).iterdir(), key=lambda file: file.suffix == ".json"):  # the index last
            file.replace(folder / file.name)


def _write_index(folder: Path, buffers: dict[str, torch.Tensor]) -> None:
    """Tells ``from_pretrained`` in which of the engine's files each weight is."""
    saved = read_checkpoint(folder)
    files = {param.name: at[WEIGHT].file for param, at in zip(saved.params, saved.places, strict=True)}
    weight_map = {name: saved.files[file].name for name, file in files.items() if file is not None}
    if buffers:
        specs = [TensorSpec(name, tuple(value.shape), str(value.dtype)) for name, value in buffers.items()]
        (folder / BUFFERS).unlink(missing_ok=True)
        write_file(folder / BUFFERS, specs, lambda name: buffers[name].detach().cpu().contiguous())
        weight_map.update(dict.fromkeys(buffers, BUFFERS))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    made = type(name, (EngineCheckpoints, transformers.Trainer), {"__module__": __name__})
    return globals().setdefault(name, made)
