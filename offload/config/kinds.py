"""The kinds of value a setting can have: how each is read, written back, and told to an editor.

A field of a block is declared ``name: Annotated[int, Whole(minimum=1)] = 4``. ``bool``, ``Literal`` and
nested blocks need no annotation. `reader` turns the declarations into kinds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple

from ..bytesize import parse_bytes
from .numbers import WHOLE_MAX, check_filled_in, number, real, whole
from .report import Report, UnfitError, join, show

AUTO: Final = "auto"


def is_auto(value: object) -> bool:
    """Whether a value asks for the automatic choice."""
    return isinstance(value, str) and value.strip().lower() == AUTO


class Kind(ABC):
    """One kind of value. ``takes_auto``: "auto" is a value of its own rather than a wish for the default."""

    takes_auto = False
    is_hint = False

    @abstractmethod
    def read(self, value: object, path: str, report: Report) -> Any:
        """The value as the engine gets it; :class:`UnfitError` says what is wrong with it."""

    def write(self, value: Any) -> Any:
        """The value as JSON, such that reading it again gives the same value."""
        return value

    def schema(self) -> dict[str, Any]:
        """What this kind accepts, as JSON Schema; null and, for most, "auto" are added by the caller.

        Blocks have none of their own: the generator of the schema goes into them.
        """
        raise AssertionError(f"{type(self).__name__} has no schema of its own")


class Switch(Kind):
    """true or false; 0, 1 and the words in quotes are read as well."""

    _WORDS: Final = {"true": True, "false": False}

    def __init__(self, *, auto: bool = False) -> None:
        self.takes_auto = auto

    def read(self, value: object, path: str, report: Report) -> bool | str:
        if isinstance(value, bool):
            return value
        if self.takes_auto and is_auto(value):
            return AUTO
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            check_filled_in(value)
            if value.strip().lower() in self._WORDS:
                return self._WORDS[value.strip().lower()]
        raise UnfitError(f"{show(value)} is neither true nor false; write one of them")

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Device(Kind):
    """The name of a compute device: "auto", "cpu", or a type with or without an index, as ``cuda:1``."""

    takes_auto = True
    _PATTERN: Final = r"[a-z]+(:[0-9]+)?"

    def read(self, value: object, path: str, report: Report) -> str:
        if not isinstance(value, str):
            raise UnfitError(f'{show(value)} is not the name of a device; write "auto", "cpu" or "cuda"')
        check_filled_in(value)
        name = value.strip().lower()
        if not re.fullmatch(self._PATTERN, name):
            raise UnfitError(f'{show(value)} is not the name of a device; write "auto", "cpu" or "cuda:0"')
        return name

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self._PATTERN}$"}


class Choice(Kind):
    """One of a few words or numbers. Case does not matter."""

    def __init__(self, *options: str | int, aliases: dict[str, str] | None = None) -> None:
        self.options = options
        self.takes_auto = AUTO in options
        self._spellings: dict[str, str | int] = {str(option).lower(): option for option in options}
        self._spellings.update(aliases or {})

    def read(self, value: object, path: str, report: Report) -> str | int:
        if isinstance(value, str):
            check_filled_in(value)
            spelling = value.strip().lower()
        elif isinstance(value, float) and value.is_integer():
            spelling = str(int(value))
        else:
            spelling = show(value)
        if spelling in self._spellings:
            return self._spellings[spelling]
        allowed = ", ".join(show(option) for option in self.options)
        raise UnfitError(f"{show(value)} is not one of {allowed}; write one of them")

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.options)}


class Whole(Kind):
    """A whole number in a range. ``hint``: a size of DeepSpeed's own buffers; rounded down, and only a
    wish."""

    def __init__(
        self, *, minimum: int = 0, maximum: int = WHOLE_MAX, auto: bool = False, hint: bool = False
    ) -> None:
        self.minimum, self.maximum, self.takes_auto, self.is_hint = minimum, maximum, auto, hint

    def read(self, value: object, path: str, report: Report) -> int | str:
        if self.takes_auto and is_auto(value):
            return AUTO
        size = whole(value, round_down=self.is_hint)
        if size != number(value):
            report.note(path, f"{show(value)} is taken as {size}")
        check_range(size, self.minimum, self.maximum)
        return size

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum} | ({"maximum": self.maximum} if self.maximum < WHOLE_MAX else {})
        return {"type": "number" if self.is_hint else "integer", **bounds}


class Real(Kind):
    """A number in a range; ``below`` is an upper bound that is itself excluded."""

    def __init__(
        self, *, minimum: float | None = 0.0, maximum: float | None = None, below: float | None = None
    ) -> None:
        self.minimum, self.maximum, self.below = minimum, maximum, below

    def read(self, value: object, path: str, report: Report) -> float:
        found = real(value)
        check_range(found, self.minimum, self.maximum)
        if self.below is not None and found >= self.below:
            raise UnfitError(f"{show(value)} is not below {self.below:g}; write a smaller number")
        return found

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "exclusiveMaximum": self.below}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}


def check_range(found: float, minimum: float | None, maximum: float | None) -> None:
    """Raises UnfitError where a number is out of its bounds."""
    if minimum is not None and found < minimum:
        raise UnfitError(f"{show(found)} is below {minimum:g}; write {minimum:g} or more")
    if maximum is not None and found > maximum:
        raise UnfitError(f"{show(found)} is above {maximum:g}; write {maximum:g} or less")


class Bytes(Kind):
    """A number of bytes: ``4096``, ``"8GiB"``, ``"8GB"``. ``multiple``: what it must be a multiple of."""

    def __init__(self, *, auto: bool = False, multiple: int = 1) -> None:
        self.takes_auto, self.multiple = auto, multiple

    def read(self, value: object, path: str, report: Report) -> int | str:
        if self.takes_auto and is_auto(value):
            return AUTO
        size = self._size(value)
        if size < 1:
            raise UnfitError(f"{show(value)} is below one byte; write a positive size")
        if size % self.multiple:
            lower = size // self.multiple * self.multiple
            nearest = f"{lower} or {lower + self.multiple}" if lower else f"{self.multiple}"
            raise UnfitError(f"{show(value)} is not a multiple of {self.multiple}; write {nearest}")
        return size

    @staticmethod
    def _size(value: object) -> int:
        if isinstance(value, str):
            check_filled_in(value)
            try:
                return min(WHOLE_MAX, parse_bytes(value))
            except (ValueError, OverflowError):
                raise UnfitError(
                    f'{show(value)} is not a number of bytes; write 4096, "8GiB" or "8GB"'
                ) from None
        return whole(value, round_down=False)

    def schema(self) -> dict[str, Any]:
        return {"type": ["integer", "string"]}


class Pair(Kind):
    """Two numbers from 0 to below 1: Adam's betas."""

    def read(self, value: object, path: str, report: Report) -> tuple[float, float]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UnfitError(f"{show(value)} is not a pair; write [0.9, 0.999]")
        first, second = (Real(below=1.0).read(item, path, report) for item in value)
        return first, second

    def write(self, value: tuple[float, float]) -> list[float]:
        return list(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": Real(below=1.0).schema(), "minItems": 2, "maxItems": 2}


class SwapPath(NamedTuple):
    """A directory on an NVMe drive, as it was written, and its share of the bytes (None: by measured
    bandwidth)."""

    path: str
    weight: float | None = None


class SwapPaths(Kind):
    """One directory or several: ``"/a"``, ``["/a", "/b"]``, ``[{"path": "/a", "weight": 2}, "/b"]``."""

    def read(self, value: object, path: str, report: Report) -> tuple[SwapPath, ...]:
        items = value if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise UnfitError("[] names no directory; write at least one")
        found = tuple(self._one(item) for item in items)
        names = [item.path for item in found]
        for name in names:
            if names.count(name) > 1:
                raise UnfitError(f"{show(name)} is listed more than once; keep one")
        return found

    @staticmethod
    def _one(item: object) -> SwapPath:
        weight = None
        if isinstance(item, dict):
            if not {"path"} <= item.keys() <= {"path", "weight"}:
                raise UnfitError(
                    f'{show(item)} is not a path with a weight; write {{"path": "/mnt/a", "weight": 2}}'
                )
            if item.get("weight") is not None:
                weight = real(item["weight"])
                if weight <= 0:
                    raise UnfitError(
                        f"weight {weight:g} is not above 0; write a positive number or leave the path out"
                    )
            item = item["path"]
        if not isinstance(item, str) or not item.strip() or "\0" in item:
            raise UnfitError(f'{show(item)} is not a directory; write a path such as "/mnt/nvme"')
        check_filled_in(item)
        return SwapPath(item, weight)

    def write(self, value: tuple[SwapPath, ...]) -> Any:
        items = [item.path if item.weight is None else item._asdict() for item in value]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items

    def schema(self) -> dict[str, Any]:
        weighted = {
            "type": "object",
            "properties": {"path": {"type": "string"}, "weight": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["path"],
            "additionalProperties": False,
        }
        one = {"anyOf": [{"type": "string"}, weighted]}
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": one, "minItems": 1}]}


def keyed(value: object, path: str, report: Report) -> dict[str, Any]:
    """``value`` as a block with string keys."""
    if not isinstance(value, dict):
        raise UnfitError(f"{show(value)} stands where a block is expected; write {{ ... }}")
    for key in value:
        if not isinstance(key, str):
            report.problem(join(path, ascii(key)), "is not a key; keys are strings")
    return {key: item for key, item in value.items() if isinstance(key, str)}
