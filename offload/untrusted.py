"""Small files, and JSON in them, that may come from a stranger: whatever is wrong is refused in one line.

Nothing is allocated by what such a file claims, and no link is followed to it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .bytesize import MiB, format_bytes
from .errors import CheckpointError

T = TypeVar("T")

BYTES_MAX = 1 << 56
"""Of one file, plane or tensor: more than a file system holds, and sums of some cannot overflow 63 bits."""
COUNT_MAX = (1 << 53) - 1
TEXT_MAX = 4096
HEAD_BYTES_MAX = 1024
"""Of the first line of what :func:`seal` makes."""


def read_small_file(path: Path, size_max: int, wanted: int | None = None) -> bytes:
    """The bytes of a regular file, or the first of them; no link is followed.

    Raises:
        CheckpointError: it is something else, or too large.
        FileNotFoundError: there is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"cannot be read: {what}") from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError("it is not a regular file")
        if about.st_size > size_max:
            raise CheckpointError(
                f"it has {format_bytes(about.st_size)}, and nothing of its kind has more than {format_bytes(size_max)}"
            )
        return _read_all(fd, size_max if wanted is None else wanted)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


def _read_all(fd: int, size_max: int) -> bytes:
    pieces = []
    while size_max > 0 and (piece := os.read(fd, min(size_max, MiB))):
        pieces.append(piece)
        size_max -= len(piece)
    return b"".join(pieces)


def load_json(text: bytes) -> Any:
    """JSON without what JSON does not have (NaN, and names that occur twice).

    Raises:
        CheckpointError: it is none.
    """

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    def refuse_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {' '.join(str(error).split())[:200]}") from None


def seal(text: bytes, **about: Any) -> bytes:
    """A file of two lines: what it is, with size and SHA-256 of the second; and ``text``, which is JSON."""
    head = {**about, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    return json.dumps(head).encode() + b"\n" + text + b"\n"


def head_of(data: bytes, kind: str, version: int) -> tuple[dict[str, Any], bytes]:
    """The first line of what :func:`seal` made of a ``format`` and ``version``, and the rest.

    Raises:
        CheckpointError: it is something else.
    """
    line, _, rest = data.partition(b"\n")
    try:
        head = json.loads(line) if len(line) < HEAD_BYTES_MAX else None
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("format") != kind:
        raise CheckpointError(f"it is no manifest of an {kind}, or its first line is damaged")
    if head.get("version") != version:
        raise CheckpointError(
            f"it is of version {shown(head.get('version'))[:40]} and this program reads version {version}"
        )
    return head, rest


def body_of(data: bytes, kind: str, version: int) -> bytes:
    """The second line of what :func:`seal` made, when it is whole. Raises as :func:`head_of` where it is not."""
    head, rest = head_of(data, kind, version)
    size, text = head.get("bytes"), rest[:-1]
    if type(size) is not int or size != len(text) or not rest.endswith(b"\n"):
        raise CheckpointError(
            f"it is cut short or damaged: {len(rest)} bytes where {shown(size)[:40]} and a newline belong"
        )
    if hashlib.sha256(text).hexdigest() != head.get("sha256"):
        raise CheckpointError(f"it is damaged: the SHA-256 of its {len(text)} bytes is another one")
    return text


def refuse(where: str, what: str) -> NoReturn:
    """Raises CheckpointError: what is wrong, and where in the JSON."""
    raise CheckpointError(f"{where}: {what}")


class Value:
    """A value of the JSON; where it stands is put into words only where it is refused."""

    __slots__ = ("_key", "_outer", "value")

    def __init__(self, key: str | int, value: Any, outer: Value | None = None) -> None:
        self._key, self.value, self._outer = key, value, outer

    @property
    def where(self) -> str:
        return str(self._key) if self._outer is None else f"{self._outer.where}[{self._key}]"

    def of_type(self, kind: type[T], name: str) -> T:
        if type(self.value) is not kind:
            refuse(self.where or "the manifest", f"{name} belongs here, not {shown(self.value)}")
        return self.value

    def whole(self, least: int, most: int) -> int:
        number = self.of_type(int, "a whole number")
        if not least <= number <= most:
            refuse(self.where, f"{shown(number)} is not from {least} to {most}")
        return number

    def text(self) -> str:
        text = self.of_type(str, "text")
        if not text or len(text) > TEXT_MAX or not text.isprintable():
            refuse(self.where, f"{shown(text)} is empty, too long, or cannot be printed")
        return text

    def flag(self) -> bool:
        return self.of_type(bool, "true or false")

    def one_of(self, known: Sequence[str] | dict[str, int]) -> str:
        text = self.text()
        if text not in known:
            refuse(self.where, f"{shown(text)} is not known")
        return text

    def elements(self, count_max: int, count: int | None = None) -> Iterator[Value]:
        values = self.of_type(list, "a list")
        if len(values) > count_max or (count is not None and len(values) != count):
            wanted = f"at most {count_max}" if count is None else str(count)
            refuse(self.where, f"{len(values)} entries where {wanted} belong")
        return (Value(index, value, self) for index, value in enumerate(values))

    def each(self, read: Callable[[Value], T], count_max: int, count: int | None = None) -> tuple[T, ...]:
        return tuple(read(value) for value in self.elements(count_max, count))

    def wholes(self, most: int, count_max: int, count: int | None = None) -> tuple[int, ...]:
        values = self.of_type(list, "a list")
        fits = len(values) <= count_max if count is None else len(values) == count
        if fits and {*map(type, values)} == {int} and min(values) >= 0 and max(values) <= most:
            return tuple(values)  # the usual case, of which there are many
        return self.each(lambda value: value.whole(0, most), count_max, count)


def shown(value: Any) -> str:
    """A value for a message, however long or odd it is."""
    text = (
        ascii(value) if isinstance(value, (str, int, float)) and not _is_huge(value) else type(value).__name__
    )
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >> 256 != 0
