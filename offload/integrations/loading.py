"""The loader of a script's dataset, as DeepSpeed makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..config import BatchSizes, OffloadConfig
from ..errors import ConfigError


def make_loader(
    dataset: Any,
    settings: OffloadConfig,
    sizes: BatchSizes,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    """The DataLoader over micro-batches that ``initialize`` returns for ``training_data``."""
    if dataset is None:
        return None
    make: Callable[..., DataLoader[Any]] = functools.partial(
        DataLoader,
        dataset,
        batch_size=sizes.micro,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
    )
    if isinstance(dataset, IterableDataset):
        return make()
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, DataLoader) or not has_both:
        raise ConfigError(
            f"training_data: a {type(dataset).__name__} is no dataset; give one with __getitem__ and __len__,"
            " or leave it out and keep your own loader"
        )
    if len(dataset) == 0:
        raise ConfigError("training_data: the dataset is empty")
    return make(shuffle=True, generator=torch.Generator().manual_seed(settings.seed))
