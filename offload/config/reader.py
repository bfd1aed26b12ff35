"""Reads a tree of plain values into the declared blocks, and writes it back. Knows no setting by name."""

from __future__ import annotations

import dataclasses
import types
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from .kinds import Choice, Kind, Switch, is_auto, keyed
from .report import Report, UnfitError, join, show

Block = TypeVar("Block")
UnknownKey = Callable[[str, str, Sequence[str]], str]
"""(path of the block, the unknown key, the keys of the block) -> what is wrong; what to do."""


class Spec(NamedTuple):
    """One declared setting."""

    name: str
    kind: Kind
    default: Any
    is_required: bool


_SPECS: Final[dict[type[Any], tuple[Spec, ...]]] = {}


def specs(cls: type[Any]) -> tuple[Spec, ...]:
    """The settings a block declares, in order."""
    if cls not in _SPECS:
        hints = get_type_hints(cls, include_extras=True)
        _SPECS[cls] = tuple(
            Spec(
                field.name,
                _kind(hints[field.name]),
                None if field.default is MISSING else field.default,
                field.default is MISSING and field.default_factory is MISSING,
            )
            for field in dataclasses.fields(cls)
            if field.compare
        )
    return _SPECS[cls]


def _kind(hint: Any) -> Kind:
    if get_origin(hint) is Annotated:
        return next(item for item in get_args(hint)[1:] if isinstance(item, Kind))
    if get_origin(hint) in (Union, types.UnionType):  # "X | None": None is how an absent X is told
        return _kind(next(arm for arm in get_args(hint) if arm is not type(None)))
    if get_origin(hint) is Literal:
        return Choice(*get_args(hint))
    if hint is bool:
        return Switch()
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return BlockOf(hint)
    raise AssertionError(f"{hint} needs a kind")


def read_block(cls: type[Block], data: object, path: str, report: Report, unknown: UnknownKey) -> Block:
    """A ``cls`` from ``data``. Problems go to ``report``; the settings they are about keep their defaults."""
    given = keyed(data, path, report)
    known = [spec.name for spec in specs(cls)]
    for key in given:
        if key not in known:
            report.problem(join(path, key), unknown(path, key, known))
    # A required setting without a value stays None, which nobody sees: the report then holds a problem.
    values: dict[str, Any] = {spec.name: None for spec in specs(cls) if spec.is_required}
    for spec in specs(cls):
        where, value = join(path, spec.name), given.get(spec.name)
        is_wish = is_auto(value) and not spec.kind.takes_auto
        if spec.is_required and (value is None or is_wish):
            what = "is missing" if value is None else '"auto" is not filled in by anything'
            report.problem(where, f"{what}; write {_example(spec)}")
        elif is_wish:
            report.note(where, f'"auto" is taken as {_default(spec)}')
        elif value is not None:
            try:
                values[spec.name] = _read(spec.kind, value, where, report, unknown)
            except UnfitError as error:
                report.problem(where, str(error))
            else:
                if spec.kind.is_hint:
                    report.note(where, "a hint; the memory plan decides")
    return cls(**values)


def _read(kind: Kind, value: object, path: str, report: Report, unknown: UnknownKey) -> Any:
    if isinstance(kind, (BlockOf, OneOf)):
        return kind.read_with(value, path, report, unknown)
    return kind.read(value, path, report)


def _example(spec: Spec) -> str:
    if isinstance(spec.kind, Choice):
        return " or ".join(show(option) for option in spec.kind.options)
    return "a number"


def _default(spec: Spec) -> str:
    if spec.kind.is_hint:
        return "absent; the memory plan decides"
    return "absent" if spec.default in (None, ()) else f"its default, {show(spec.default)}"


class _Nested(Kind):
    takes_auto = True  # so that "auto" in place of a block is refused rather than dropped

    def read(self, value: object, path: str, report: Report) -> Any:
        raise AssertionError("a block is read by read_with")

    @abstractmethod
    def read_with(self, value: object, path: str, report: Report, unknown: UnknownKey) -> Any:
        """As ``read``, with what to say of a key that is not known."""


class BlockOf(_Nested):
    """A nested block."""

    def __init__(self, cls: type[Any]) -> None:
        self.cls = cls

    def read_with(self, value: object, path: str, report: Report, unknown: UnknownKey) -> Any:
        return read_block(self.cls, value, path, report, unknown)

    def write(self, value: Any) -> dict[str, Any]:
        return write_block(value)


class OneOf(_Nested):
    """``{"type": NAME, "params": {...}}``, where the name selects the class of ``cls.params``."""

    def __init__(self, cls: type[Any], options: Sequence[type[Any]]) -> None:
        self.cls: Final = cls
        self.options: Final[Mapping[str, type[Any]]] = {option.__name__: option for option in options}

    def read_with(self, value: object, path: str, report: Report, unknown: UnknownKey) -> Any:
        given = keyed(value, path, report)
        for key in given:
            if key not in ("type", "params"):
                report.problem(join(path, key), unknown(path, key, ["type", "params"]))
        if given.get("type") is None:
            report.problem(join(path, "type"), f"is missing; write one of {', '.join(self.options)}")
            return None
        where = join(path, "type")
        try:
            option = self.options[str(Choice(*self.options).read(given["type"], where, report))]
            where = join(path, "params")
            params = {} if given.get("params") is None else given["params"]
            return self.cls(
                params=read_block(option, params, where, report, self._unknown_in(option, unknown))
            )
        except UnfitError as error:
            report.problem(where, str(error))
            return None

    def _unknown_in(self, option: type[Any], unknown: UnknownKey) -> UnknownKey:
        """Says first which of the other options a setting belongs to."""

        def told(path: str, key: str, known: Sequence[str]) -> str:
            owners = [name for name, cls in self.options.items() if key in [spec.name for spec in specs(cls)]]
            if not owners:
                return unknown(path, key, known)
            name = option.__name__
            return f"is a setting of {', '.join(owners)}, not of {name}; {name} takes {', '.join(known)}"

        return told

    def write(self, value: Any) -> dict[str, Any]:
        return {"type": type(value.params).__name__, "params": write_block(value.params)}


def write_block(block: Any) -> dict[str, Any]:
    """Every setting of ``block`` that has a value, as JSON."""
    tree = {}
    for spec in specs(type(block)):
        value = getattr(block, spec.name)
        if value is not None and value != ():
            tree[spec.name] = spec.kind.write(value)
    return tree


def flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf of a written block."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, join(path, key))
        else:
            yield join(path, key), value


def block_keys(cls: type, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """(path, keys) of a block and of all blocks in it."""
    yield path, tuple(spec.name for spec in specs(cls))
    for spec in specs(cls):
        if isinstance(spec.kind, BlockOf):
            yield from block_keys(spec.kind.cls, join(path, spec.name))
