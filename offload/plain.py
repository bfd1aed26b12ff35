"""Python values as plain JSON and back: what schedulers and users keep, without pickle. Pure.

Note [Plain values]
JSON has no tuples, no counters, no keys but text and no infinities, and schedulers have all of them. Such a value is
an object with one name that begins with `$`: `{"$tuple": [...]}`, `{"$map": [[key, value], ...]}`, `{"$counter": ...}`
alike, and `{"$float": "inf"}`. What is none of these is refused by the place where it stands.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from .errors import CheckpointError, ConfigError

DEPTH_MAX = 64
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, where: str) -> Any:
    """A value as JSON that :func:`decode` turns into an equal one. See Note [Plain values].

    Args:
        where: what it is, for messages.

    Raises:
        ConfigError: it holds something else, as an object of a class, or a function.
    """
    return _encode(value, where, 0)


def check_json(value: Any, where: str) -> None:
    """Raises ConfigError where ``value`` is not what JSON holds as it is: it would come back as another one."""
    _check_json(value, where, 0)


def decode(value: Any, where: str) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        CheckpointError: nobody has encoded this.
    """
    return _decode(value, where, 0)


def _encode(value: Any, where: str, depth: int) -> Any:
    value = _scalar(value)
    if value is None or type(value) in (bool, int, str):
        return value
    if depth == DEPTH_MAX:
        raise ConfigError(f"{where} is nested more than {DEPTH_MAX} times, or holds itself")
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        named = type(value) is not Counter and all(
            type(key) is str and not key.startswith("$") for key in value
        )
        items = [
            [_encode(key, f"{where}: a key", depth + 1), _encode(item, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return dict(items) if named else {"$counter" if type(value) is Counter else "$map": items}
    raise ConfigError(
        f"{where} is of type {type(value).__name__}, which is not saved: numbers, text, lists, tuples and"
        " dictionaries are"
    )


def _scalar(value: Any) -> Any:
    """Numbers of torch and numpy, and of classes derived from Python's, as Python's own."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _check_json(value: Any, where: str, depth: int) -> None:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return
    if depth == DEPTH_MAX:
        raise ConfigError(f"{where} is nested more than {DEPTH_MAX} times, or holds itself")
    if type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ConfigError(f"{where}: the key {key!r} is of type {type(key).__name__}; JSON has text")
            _check_json(item, f"{where}[{key!r}]", depth + 1)
    else:
        what = str(value) if type(value) is float else f"of type {type(value).__name__}"
        raise ConfigError(
            f"{where} is {what}, which JSON does not hold; write numbers, text, true, false, null, lists and"
            " dictionaries"
        )


def _decode(value: Any, where: str, depth: int) -> Any:
    if depth > 2 * DEPTH_MAX:
        raise CheckpointError(f"{where} is nested too deeply")
    if type(value) is list:
        return [_decode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value) is not dict:
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    kind, inner = next(iter(value.items()))
    try:
        if len(value) != 1:
            raise ValueError
        if kind == "$float":
            return _FLOATS[inner]
        if type(inner) is not list:
            raise ValueError
        items = [_decode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(inner)]
        if kind == "$tuple":
            return tuple(items)
        if kind in ("$map", "$counter"):
            return dict(items) if kind == "$map" else Counter(dict(items))
        raise ValueError
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"{where}: {ascii(value)[:60]} is no value that was saved") from None
