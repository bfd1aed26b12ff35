"""Runs of elements of a chunk, and the hyper-parameters that they share: one class for each rule.

The order of the fields is that of the tuples which the extension takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

__all__ = ["AdagradSegment", "LionSegment", "Segment", "SgdSegment", "Span", "as_tuples"]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[begin, end)`` of a chunk. ``step`` counts from 1.

    ``element`` is the number of element ``begin`` within the whole model: with the seed and the step it decides how
    moments are rounded. Elements of one model must not share their numbers.
    """

    begin: int
    end: int
    step: int
    element: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Segment(Span):
    """Of Adam and AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class LionSegment(Span):
    """Of Lion, whose decay is decoupled."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class AdagradSegment(Span):
    """Of Adagrad. The sum is ``initial_accumulator_value`` before step 1, whatever its plane holds."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    initial_accumulator_value: float


@dataclass(frozen=True, slots=True)
class SgdSegment(Span):
    """Of SGD. With ``momentum`` 0 the plane of the moment is neither read nor written."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def as_tuples(segments: Sequence[Span]) -> list[tuple[Any, ...]]:
    """What the extension takes. `dataclasses.astuple` copies deeply, in ten times the time."""
    return [*map(_VALUES[type(segments[0])], segments)] if segments else []


_VALUES: dict[type[Span], Callable[[Span], tuple[Any, ...]]] = {
    kind: attrgetter(*(each.name for each in fields(kind)))
    for kind in (Segment, LionSegment, AdagradSegment, SgdSegment)
}
