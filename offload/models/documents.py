"""Finds text files and reads them as documents, in pieces of bounded size."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ..bytesize import KiB, MiB, format_bytes
from ..errors import ConfigError, TransferError

log = logging.getLogger(__name__)

TEXT_SUFFIXES: Final = frozenset({".txt", ".md", ".py", ".rst", ".text", ".jsonl"})
PACKAGE_FOLDERS: Final = frozenset({"site-packages", "dist-packages"})
SKIPPED_FOLDERS: Final = PACKAGE_FOLDERS | {"__pycache__"}
PIECE_BYTES: Final = 256 * KiB
"""Text is decoded and tokenised in pieces of about this size: a tokenizer's objects are ~100 times its
text."""
JSONL_LINE_BYTES_MAX: Final = 64 * MiB
"""One record is held whole; a longer line is no record but a file of another kind."""
_BINARY_PROBE_BYTES: Final = 8 * KiB


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the data, as it was when the folder was listed."""

    path: Path
    name: str
    """Path below the data folder: the same on every machine."""
    size: int
    mtime_ns: int


@dataclass(slots=True)
class ReadStats:
    """What was met while reading; filled as the documents are drawn."""

    bytes_read: int = 0
    undecodable: int = 0
    """Byte sequences that are no UTF-8, each replaced by U+FFFD."""
    files_binary: int = 0


def find_files(data: str | os.PathLike[str]) -> list[SourceFile]:
    """The text files at ``data``: the file itself, whatever its name, or those below a folder, sorted.

    Hidden folders, ``__pycache__`` and installed packages (``site-packages``, ``dist-packages``) below the
    folder are left out: on many machines Python's own library holds gigabytes of other people's packages.
    Give such a folder itself to read it. What is no regular file is left out too: opening a pipe would wait
    for ever.
    """
    root = Path(data)
    try:
        info = root.stat()
    except OSError as error:
        raise ConfigError(
            f"data {root} cannot be read: {error.strerror}; give a text file or a folder"
        ) from error
    if stat.S_ISREG(info.st_mode):
        if not os.access(root, os.R_OK):
            raise ConfigError(
                f"data {root} is not readable by this user; change its mode or give another file"
            )
        return [SourceFile(root, root.name, info.st_size, info.st_mtime_ns)]
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"data {root} is neither a file nor a folder; give a text file or a folder")
    found, skipped = [], 0
    for folder, names, files in os.walk(root):
        packages = [name for name in names if name in PACKAGE_FOLDERS]
        if packages:
            log.info("data %s: left out the installed packages in %s", root, Path(folder, packages[0]))
        names[:] = sorted(name for name in names if not (name.startswith(".") or name in SKIPPED_FOLDERS))
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix.lower() not in TEXT_SUFFIXES:
                continue
            source = _regular(path, root)
            if source is None:
                skipped += 1
            else:
                found.append(source)
    if skipped:
        log.info("data %s: skipped %d entries that are no readable regular file", root, skipped)
    if not found:
        kinds = " ".join(sorted(TEXT_SUFFIXES))
        raise ConfigError(
            f"data {root} holds no readable text file ({kinds}); give a file to read it whatever its name"
        )
    return found


def _regular(path: Path, root: Path) -> SourceFile | None:
    try:
        info = path.stat()  # follows links: a link to a file is that file, a broken one is nothing
    except OSError:
        return None
    if not stat.S_ISREG(info.st_mode) or not os.access(path, os.R_OK):
        return None
    return SourceFile(path, path.relative_to(root).as_posix(), info.st_size, info.st_mtime_ns)


def read_documents(
    source: SourceFile, *, field: str, stats: ReadStats, alone: bool
) -> Iterator[Iterator[str]]:
    """The documents of one file, each as pieces of text: a file is one document, a line of ``.jsonl`` is one.

    ``alone``: the user named this very file, so a binary one is an error and not skipped.
    """
    with _open(source) as file:
        if b"\0" in _read(file, source, _BINARY_PROBE_BYTES):
            if alone:
                raise ConfigError(f"data {source.path} is binary, not text; give a text file")
            stats.files_binary += 1
            log.info("data %s: skipped, it is binary", source.path)
            return
        file.seek(0)
        if source.path.suffix.lower() == ".jsonl":
            yield from map(_split, _jsonl(file, source, field, stats))
        else:
            yield _pieces(file, source, stats)


def _open(source: SourceFile) -> BinaryIO:
    try:
        return source.path.open("rb")
    except OSError as error:
        raise _read_error(error, source, 0, source.size) from error


def _read(file: BinaryIO, source: SourceFile, size: int, *, line: bool = False) -> bytes:
    try:
        return file.readline(size) if line else file.read(size)
    except OSError as error:
        raise _read_error(error, source, file.tell(), size) from error


def _read_error(error: OSError, source: SourceFile, offset: int, size: int) -> TransferError:
    return TransferError(error.errno or 5, "read", str(source.path), offset=offset, size=size, done=0)


def _pieces(file: BinaryIO, source: SourceFile, stats: ReadStats) -> Iterator[str]:
    """Text in pieces that end at a line where one ends, else at a character: a token is split at neither."""
    rest = b""
    first = True
    while block := _read(file, source, PIECE_BYTES):
        stats.bytes_read += len(block)
        block = rest + block
        cut = block.rfind(b"\n") + 1
        if cut == 0 and len(block) >= PIECE_BYTES:
            cut = _last_character_end(block)
        piece, rest = block[:cut], block[cut:]
        if piece:
            yield _decode(piece, stats, first)
            first = False
    if rest:
        yield _decode(rest, stats, first)


def _split(text: str) -> Iterator[str]:
    """The same pieces of a text that is in memory already."""
    start = 0
    while start < len(text):
        end = start + PIECE_BYTES
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _last_character_end(block: bytes) -> int:
    """Where the last complete UTF-8 character ends, looking back over at most one incomplete one (3
    bytes)."""
    for back in range(1, 4):
        byte = block[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) - back if length > back else len(block)
    return len(block)


def _decode(piece: bytes, stats: ReadStats, first: bool) -> str:
    if first:
        piece = piece.removeprefix(b"\xef\xbb\xbf")
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        text = piece.decode("utf-8", errors="replace")
        stats.undecodable += text.count("\ufffd") - piece.count(b"\xef\xbf\xbd")
        return text


def _jsonl(file: BinaryIO, source: SourceFile, field: str, stats: ReadStats) -> Iterator[str]:
    number = 0
    while line := _read(file, source, JSONL_LINE_BYTES_MAX + 1, line=True):
        number += 1
        where = f"data {source.path} line {number}"
        if len(line) > JSONL_LINE_BYTES_MAX:
            raise ConfigError(
                f"{where} is longer than {format_bytes(JSONL_LINE_BYTES_MAX)}; split the record"
            )
        stats.bytes_read += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(_decode(line, stats, number == 1))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}; .jsonl holds one object per line") from error
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{where} has no text in field {field!r}; {_fields_hint(record)}")
        # JSON can name half of a surrogate pair, which is no character and which tokenizers refuse.
        yield text.encode("utf-8", errors="replace").decode("utf-8")


def _fields_hint(record: object) -> str:
    if not isinstance(record, dict):
        return 'each line holds one object, such as {"text": ...}'
    names = sorted(name for name, value in record.items() if isinstance(value, str))
    return f"the fields that hold text are {', '.join(names)}" if names else "no field holds text"
