"""Small runs of transformers' Trainer, with an engine and, as their oracle, with torch's optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from accelerate.state import AcceleratorState
from models import Placement, Training
from torch import nn

import offload

VOCABULARY, LENGTH = 131, 12
NONE, NVME = Placement(chunk=4096), Placement("nvme", "nvme", chunk=4096)
BACKWARD = Placement("nvme", "nvme", "backward", chunk=4096)


class Rows(torch.utils.data.Dataset):
    """Sequences of different lengths."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator).tolist()
        self._rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._rows[index]
        return {"input_ids": ids, "labels": ids, "length": len(ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def padded(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": padded(ids, 0),
        "labels": padded(ids, -100),
        "attention_mask": padded([torch.ones_like(row) for row in ids], 0),
    }


def llama(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_size=32, intermediate_size=56,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


class WithBuffers(nn.Module):
    """A module of one's own, with buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(VOCABULARY, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_more: Any) -> dict[str, torch.Tensor]:
        x = self.norm(self.tokens(input_ids).mean(1))
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 0]), "logits": logits}


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    return peft.get_peft_model(llama(), config)


@dataclass(frozen=True)
class Outcome:
    """What a run leaves."""

    history: list[dict[str, Any]] = field(repr=False)
    """What was logged, but for times."""
    weights: dict[str, torch.Tensor] = field(repr=False)

    def assert_equal(self, other: Outcome) -> None:
        """Every loss, norm and rate, and every weight, bit for bit."""
        assert self.history == other.history
        assert self.weights.keys() == other.weights.keys()
        for name, value in other.weights.items():
            assert torch.equal(self.weights[name], value), name


def outcome_of(trainer: transformers.Trainer) -> Outcome:
    timed = ("runtime", "per_second", "flos")
    history = [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]
    return Outcome(history, {name: value.clone() for name, value in trainer.model.state_dict().items()})


def arguments(out: Path, **more: Any) -> transformers.TrainingArguments:
    usual = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4, "logging_steps": 1,
        "warmup_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(out), **{**usual, **more})


@contextlib.contextmanager
def trainer_over(
    placement: Placement | None,
    folder: Path,
    swap_path: Path,
    *,
    model: Callable[[], nn.Module] = llama,
    kind: type = transformers.Trainer,
    rows: int = 9,
    precision: str = "fp32",
    config: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    **more: Any,
) -> Iterator[Any]:
    """A Trainer over an engine; of torch's optimizer where ``placement`` is None."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the run before: one for a process otherwise
    built, closing = model(), contextlib.nullcontext()
    if placement is None:
        trained = [param for param in built.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)
    else:
        settings = {**Training(precision=precision).config(placement, swap_path), **(config or {})}
        built, optimizer = offload.prepare(built, settings)
        closing = contextlib.closing(optimizer.engine)
    with closing:
        trainer = kind(
            model=built,
            args=arguments(folder, **more),
            data_collator=collate,
            train_dataset=Rows(rows, 1),
            eval_dataset=Rows(5, 9),
            callbacks=callbacks,
            optimizers=(optimizer, None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        yield trainer


def train(
    placement: Placement | None, folder: Path, swap_path: Path, *, resume: Any = None, **more: Any
) -> Outcome:
    with trainer_over(placement, folder, swap_path, **more) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        return outcome_of(trainer)
