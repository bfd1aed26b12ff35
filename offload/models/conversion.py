"""The values of a checkpoint under the names and in the shapes that a model of transformers has in memory.

Note [Names in files]
What is in the files need not be what the model is made of: experts are saved one by one and computed with as one
parameter, names have changed, a base model has been saved without the prefix of its head. transformers says how in
its weight conversions, which are its own to change; we ask it for the plan by names alone, and then read, tensor by
tensor, only what the one parameter that is wanted is made of.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .pretrained import PretrainedCheckpoint, persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor, nn


class PretrainedValues:
    """Reads the parameters of one model, built without values, from its checkpoint. See Note [Names in files]."""

    def __init__(self, model: nn.Module, checkpoint: PretrainedCheckpoint) -> None:
        """
        Raises:
            CheckpointError: the files lack a parameter, or hold it in another shape.
        """
        self._model, self._checkpoint = model, checkpoint
        self._key_of: dict[str, str] = {}
        """A name in the model -> the name in the files, where the tensor is taken as it is."""
        self._recipe_of: dict[str, _Recipe] = {}
        self._made: dict[str, Tensor] = {}  # by a conversion that gave more than was wanted
        self._read_plan()
        self._known_as: dict[str, str] = {}
        """The first name of a parameter -> the one that the files know it by."""
        for names, param in _named(model):
            self._known_as[names[0]] = next(filter(self._has, names), names[0])
            self._check_shape(self._known_as[names[0]], tuple(param.shape))

    def tensor(self, name: str) -> Tensor:
        """The value of a parameter, by its first name in the model."""
        name = self._known_as.get(name, name)
        recipe = self._recipe_of.get(name)
        if recipe is None:
            return self._checkpoint.tensor(self._key_of.get(name, name))
        if name not in self._made:
            self._made.update(recipe.make(self._model, self._checkpoint))
        value = self._made.pop(name, None)
        shape = self._model.get_parameter(name).shape
        if value is None or value.shape != shape:
            got = "nothing" if value is None else f"shape {tuple(value.shape)}"
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} of shape {tuple(shape)} is made of {len(recipe.parts)} tensors,"
                f" from {recipe.parts[0][1]!r} on, which give {got}; load the model with transformers"
            )
        return value

    def fill_buffers(self) -> None:
        """Reads the buffers that are saved with the weights: small, they stay in memory."""
        for name, buffer in persistent_buffers(self._model):
            if self._has(name):
                self._check_shape(name, tuple(buffer.shape))
                buffer.copy_(self._checkpoint.tensor(self._key_of.get(name, name)))

    def _has(self, name: str) -> bool:
        return name in self._key_of or name in self._recipe_of or name in self._checkpoint

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._recipe_of:
            return  # known when it is made
        key = self._key_of.get(name, name)
        saved = self._checkpoint.shape(key)
        if saved != shape:
            raise CheckpointError(
                f"{self._checkpoint.path}: {key!r} has shape {saved} and the model of config.json {shape}"
            )

    def _read_plan(self) -> None:
        """Says for each name in the files what becomes of it."""
        from transformers import conversion_mapping, core_model_loading

        transforms: list[Any] = conversion_mapping.get_model_conversion_mapping(self._model)  # type: ignore[arg-type]
        renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        state = dict(self._model.state_dict())
        prefix = getattr(self._model, "base_model_prefix", None)
        recipes: dict[str, _Recipe] = {}
        for key in self._checkpoint.names:  # natural order: expert 2 before expert 10
            name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, state)
            if pattern is None or key in state:
                self._key_of[key if key in state else name] = key
            else:
                recipes.setdefault(name, _Recipe(name, of_pattern[pattern])).parts.append((pattern, key))
        for recipe in recipes.values():
            self._recipe_of.update(dict.fromkeys(recipe.gives, recipe))


class _Recipe:
    """One conversion: parts in, one or more parameters out."""

    def __init__(self, name: str, converter: Any) -> None:
        self._name, self._converter = name, converter
        self.parts: list[tuple[str, str]] = []
        """Pattern of the conversion, and name in the files."""

    @property
    def gives(self) -> Iterator[str]:
        first, *_ = patterns = self._converter.target_patterns
        return (self._name.replace(first, pattern) for pattern in patterns)

    def make(self, model: nn.Module, checkpoint: PretrainedCheckpoint) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, key in self.parts:
            converter.add_tensor(self._name, key, pattern, functools.partial(checkpoint.tensor, key))
        try:
            made = converter.convert(self._name, model=model, config=model.config)
        except CheckpointError:
            raise
        except Exception as error:  # whatever transformers' operations raise for tensors that do not fit
            raise CheckpointError(
                f"{checkpoint.path}: {self._name} cannot be made of {len(self.parts)} tensors, from"
                f" {self.parts[0][1]!r} on: {' '.join(str(error).split())[:200]}; load the model with transformers"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _named(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """All names of each parameter, the first one first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return ((found, param) for param, found in names.items())
