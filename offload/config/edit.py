"""Changes single settings in the text of a configuration and leaves the rest of it, comments above all, as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .parse import Parser, parse

_INDENT = "  "


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a key and its value stand in the text."""

    begin: int
    value_begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a block stands in the text, and what is in it."""

    begin: int
    end: int
    members: dict[str, _Member]


def with_settings(text: str, path: tuple[str, ...], changes: Mapping[str, Any], name: str) -> str:
    """The text with settings of one block changed or added; the block is made where it is not there.

    Args:
        path: of the block: ``("zero_optimization", "offload_param")``.
        name: of the file, for errors.

    Raises:
        ConfigError: the text is no configuration, or something else stands where the block should.
    """
    before = parse(text, name)
    for key, value in changes.items():
        text = _with_setting(text, [*path, key], value, name)
    expected = _plain_change(before, path, changes)
    if parse(text, name) != expected:
        raise AssertionError(f"{name}: changed more than {'.'.join(path)}")
    return text


def _plain_change(data: dict[str, Any], path: tuple[str, ...], changes: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return {**data, **changes}
    return {**data, path[0]: _plain_change(data.get(path[0]) or {}, path[1:], changes)}


def _with_setting(text: str, keys: list[str], value: Any, name: str) -> str:
    """One setting. Goes down as far as blocks are there, and writes the rest of the path as it has to."""
    block = _block(text, _start(text, name), name)
    for depth, key in enumerate(keys):
        member = block.members.get(key)
        is_last = depth == len(keys) - 1
        if member is not None and not is_last and text[member.value_begin] == "{":
            block = _block(text, member.value_begin, name)
            continue
        rest: Any = value
        for inner in reversed(keys[depth + 1 :]):
            rest = {inner: rest}
        if member is None:
            return _added(text, block, key, rest)
        if not is_last and text[member.value_begin : member.end] != "null":
            raise ConfigError(f"{name}: {'.'.join(keys[: depth + 1])} is not a block; write {{ ... }}")
        shown = _shown(rest, _line_indent(text, member.begin))
        return text[: member.value_begin] + shown + text[member.end :]
    raise AssertionError("a path without keys")


def _added(text: str, block: _Block, key: str, value: Any) -> str:
    """A new member behind the last one, in the way the others are written."""
    members = list(block.members.values())
    if not members:
        indent = _line_indent(text, block.begin)
        inner = indent + _INDENT
        rest = text[block.begin + 1 : block.end - 1].strip()  # comments
        kept = f"\n{inner}{rest}" if rest else ""
        member = f"{inner}{json.dumps(key)}: {_shown(value, inner)}"
        return f"{text[: block.begin + 1]}{kept}\n{member}\n{indent}{text[block.end - 1 :]}"
    last = members[-1]
    comma = Parser(text, "").skip(last.end)
    has_comma = text[comma : comma + 1] == ","
    at = comma + 1 if has_comma else last.end
    on_one_line = "\n" not in text[block.begin : last.begin]
    if on_one_line:
        new = f" {json.dumps(key)}: {json.dumps(value)}"
    else:
        indent = _line_indent(text, last.begin)
        new = f"\n{indent}{json.dumps(key)}: {_shown(value, indent)}"
    if has_comma:
        # A comment behind the comma belongs to what stands before it.
        line_end = text.find("\n", at)
        at = at if on_one_line or line_end < 0 or line_end > block.end else line_end
        return f"{text[:at]}{new},{text[at:]}"
    line_end = text.find("\n", at)
    behind = text[at:line_end] if 0 <= line_end < block.end else ""
    if on_one_line or not behind.strip():
        return f"{text[:at]},{new}{text[at:]}"
    return f"{text[:at]},{behind}{new}{text[line_end:]}"


def _shown(value: Any, indent: str) -> str:
    """JSON; a block with blocks or more than one setting over several lines."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = indent + _INDENT
    members = [f"{inner}{json.dumps(key)}: {_shown(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(members) + f"\n{indent}}}"


def _line_indent(text: str, position: int) -> str:
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip())]


def _start(text: str, name: str) -> int:
    return Parser(text, name).skip(1 if text.startswith("\ufeff") else 0)


def _block(text: str, begin: int, name: str) -> _Block:
    """The members of the block that begins at ``begin``. The text has been parsed, and is right."""
    parser = Parser(text, name)
    members = {}
    position = parser.skip(begin + 1)
    while text[position] != "}":
        start = position
        key, position = parser.string(position)
        value_begin = parser.skip(parser.skip(position) + 1)
        _, end = parser.value(value_begin, 0)
        members[key] = _Member(start, value_begin, end)
        position = parser.separator(end, "}")
    return _Block(begin, position + 1, members)
