"""Text to dictionary: JSON as people write it in configuration files.

Beyond JSON: ``#``, ``//`` and ``/* */`` comments and trailing commas. Stricter than JSON: a key given twice
in one block is refused, because the reader of the file cannot know which one counts. Every error names the
file, the line and the column.
"""

from __future__ import annotations

import re
from json.decoder import JSONDecodeError, JSONDecoder
from typing import Any, Final, NoReturn

from ..errors import ConfigError

_SKIP: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD: Final = re.compile(r"\$\{[^}\n]*\}?|\$\([^)\n]*\)?|-?[\w$.+\-]+|[^\s]")
_CONSTANTS: Final[dict[str, Any]] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_STRINGS: Final = JSONDecoder()
_DEPTH_MAX: Final = 100
_INT_DIGITS_MAX: Final = 4000  # longer ones are beyond every setting, and Python refuses to convert them


def parse(text: str, name: str = "configuration") -> dict[str, Any]:
    """The block that ``text`` holds. ``name`` is what errors call it: the file's path."""
    parser = Parser(text.removeprefix("\ufeff"), name)
    position = parser.skip(0)
    if position < len(parser.text) and parser.text[position] == '"':
        parser.fail(position, "the file starts with a key; put { in front and } at the end")
    value, position = parser.value(position, 0)
    position = parser.skip(position)
    if position < len(parser.text):
        parser.fail(position, f"{parser.word(position)} after the end of the configuration; remove it")
    if not isinstance(value, dict):
        parser.fail(0, "a configuration is one block; write { ... }")
    return value


class Parser:
    """Recursive descent over one text; every method takes a position and returns the next one."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def fail(self, position: int, what: str) -> NoReturn:
        line = self.text.count("\n", 0, position) + 1
        column = position - (self.text.rfind("\n", 0, position) + 1) + 1
        raise ConfigError(f"{self.name}: line {line}, column {column}: {what}")

    def skip(self, position: int) -> int:
        match = _SKIP.match(self.text, position)
        return match.end() if match else position

    def word(self, position: int) -> str:
        match = _WORD.match(self.text, position)
        return ascii(match[0][:40]) if match else "the end of the text"

    def value(self, position: int, depth: int) -> tuple[Any, int]:
        if depth > _DEPTH_MAX:
            self.fail(position, f"more than {_DEPTH_MAX} blocks inside each other; remove some")
        first = self.text[position : position + 1]
        if first == "{":
            return self._block(position, depth)
        if first == "[":
            return self._list(position, depth)
        if first == '"':
            return self.string(position)
        match = _WORD.match(self.text, position)
        word = match[0] if match else ""
        if word in _CONSTANTS:
            return _CONSTANTS[word], position + len(word)
        number = _NUMBER.match(self.text, position)
        if number is not None and number[0] == word:
            is_int = number[1] is None and number[2] is None and len(word) <= _INT_DIGITS_MAX
            return (int(word) if is_int else float(word)), number.end()
        return self._fail_at_word(position, word)

    def _fail_at_word(self, position: int, word: str) -> NoReturn:
        if not word:
            self.fail(position, "the text ends where a value is expected; close every { and [")
        if "$" in word:
            self.fail(
                position,
                f"{word} is a shell variable that nothing filled in; write its value, "
                "or let the shell write the file (a heredoc whose end mark is not quoted)",
            )
        if word in _PYTHON:
            self.fail(position, f"{word} is Python's spelling; write {_PYTHON[word]}")
        if word == "'":
            self.fail(position, 'strings stand in double quotes; write "..."')
        if word in "}],:":
            self.fail(position, f"{word} where a value is expected; write the value")
        self.fail(position, f'{word[:40]!a} is not a value; write a number, true, false, null or "text"')

    def string(self, position: int) -> tuple[str, int]:
        try:
            text, end = _STRINGS.raw_decode(self.text, position)
            return str(text), end
        except JSONDecodeError as error:
            what = error.msg.removesuffix(" at").lower()
            self.fail(error.pos, f'{what}; close the string with ", and write each backslash twice')

    def _block(self, position: int, depth: int) -> tuple[dict[str, Any], int]:
        block: dict[str, Any] = {}
        position = self.skip(position + 1)
        while self.text[position : position + 1] != "}":
            if self.text[position : position + 1] != '"':
                self.fail(
                    position,
                    f'{self.word(position)} where a key is expected; write "key": value, or close with }}',
                )
            start = position
            key, position = self.string(position)
            if key in block:
                self.fail(start, f"{key!a} is given twice in one block; keep one")
            position = self.skip(position)
            if self.text[position : position + 1] != ":":
                self.fail(position, f"{self.word(position)} after the key {key!a}; write a colon")
            block[key], position = self.value(self.skip(position + 1), depth + 1)
            position = self.separator(position, "}")
        return block, position + 1

    def _list(self, position: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        position = self.skip(position + 1)
        while self.text[position : position + 1] != "]":
            item, position = self.value(position, depth + 1)
            items.append(item)
            position = self.separator(position, "]")
        return items, position + 1

    def separator(self, position: int, close: str) -> int:
        """Past one comma, where there is one; the comma before ``close`` is allowed."""
        position = self.skip(position)
        found = self.text[position : position + 1]
        if found == ",":
            return self.skip(position + 1)
        if found != close:
            self.fail(position, f"{self.word(position)} where , or {close} is expected; write it")
        return position
