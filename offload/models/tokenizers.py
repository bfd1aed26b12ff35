"""Text to token ids: bytes, which need no file, or a ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

IdArray = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What a dataset needs. Ids are below ``vocab_size``; ``digest`` changes when any id would."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def digest(self) -> str: ...
    def encode(self, text: str) -> IdArray: ...
    def decode(self, ids: IdArray | list[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8; then begin (256) and end of text (257)."""

    vocab_size: Final = 258
    bos_id: Final = 256
    eos_id: Final = 257
    digest: Final = "bytes-1"

    def encode(self, text: str) -> IdArray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: IdArray | list[int]) -> str:
        """The special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


# Only names that mean "end of text" in published tokenizers; asked for after the tokenizer's own files.
_EOS_NAMES: Final = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>")


class HfTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library, or a directory that transformers saved a tokenizer
    in.

    Nothing is added around a text, cut or padded, whatever the file says: documents are joined by ``eos_id``
    and packed by the dataset.
    """

    def __init__(self, path: str | os.PathLike[str], *, eos_token: str | None = None) -> None:
        """``eos_token``: what ends a document; default: what the directory's files say, or a well-known
        name."""
        self.path = Path(path)
        self._tokenizer = _open_tokenizer(self.path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id: int = self._find_eos(eos_token)
        text: str = self._tokenizer.to_str()
        self.digest: str = hashlib.sha256(f"{self.eos_id}:{text}".encode()).hexdigest()

    def encode(self, text: str) -> IdArray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: IdArray | list[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids])
        return text

    def _find_eos(self, eos_token: str | None) -> int:
        folder = self.path if self.path.is_dir() else self.path.parent
        declared = _read_json(folder / "tokenizer_config.json").get("eos_token")
        if isinstance(declared, dict):  # an AddedToken, written out
            declared = declared.get("content")
        names = [eos_token] if eos_token is not None else [declared, *_EOS_NAMES]
        for name in names:
            found = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
            if found is not None:
                return int(found)
        wanted = repr(eos_token) if eos_token is not None else "no end-of-text token"
        has = f"has no token {wanted}" if eos_token is not None else f"names {wanted}"
        raise ConfigError(f"tokenizer {self.path} {has}; give eos_token, one of its tokens")


def _open_tokenizer(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"tokenizer {path} does not exist; give a tokenizer.json or the directory it is in")
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tokenizer {path} needs the tokenizers library: pip install 'offload[hf]'"
        ) from error
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        # No tokenizer.json, but perhaps vocab.json and merges.txt or a SentencePiece model.
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer
    except Exception as error:  # both libraries raise bare Exception, and whatever their backends raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tokenizer {path} cannot be read: {reason}; give one with a tokenizer.json"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # optional file: what it would say is found otherwise, or reported as missing
    return value if isinstance(value, dict) else {}


def load_tokenizer(path: str | os.PathLike[str] | None) -> ByteTokenizer | HfTokenizer:
    """The tokenizer at ``path``; None: bytes, which every preset's vocabulary holds."""
    return ByteTokenizer() if path is None else HfTokenizer(path)
