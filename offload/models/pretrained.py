"""Checkpoints of transformers: opened without loading them, and written without holding them.

Importing this module, opening a checkpoint and asking for shapes need no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..bytesize import GiB, MiB, format_bytes
from ..errors import CheckpointError, ConfigError, StoreError, TransferError
from .safetensors_file import TensorEntry, TensorSpec, read_header, read_tensor, write_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "PretrainedCheckpoint",
    "TensorSpec",
    "build_meta_model",
    "export_specs",
    "open_checkpoint",
    "persistent_buffers",
    "write_checkpoint",
]

log = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_JSON_BYTES_MAX: Final = 256 * MiB

# Output layers that transformers ties, and what the matrices they are tied to are called.
_OUTPUT_NAMES: Final = ("lm_head.weight", "embed_out.weight")
_INPUT_SUFFIXES: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

# What transformers saves beside the weights and needs to open a tokenizer, or to generate.
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class PretrainedCheckpoint:
    """The headers of a model directory; values are read one tensor at a time."""

    path: Path
    config: dict[str, Any]
    """``config.json`` as it is."""
    entries: dict[str, TensorEntry]
    """What the files hold, by name."""
    tied: dict[str, str]
    """Names that the files leave out -> the name that holds the same matrix."""

    @property
    def names(self) -> list[str]:
        """Names in the files, in natural order: layer 2 before layer 10. Tied names are not among them."""
        return list(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name in self.tied

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).spec.shape

    def dtype(self, name: str) -> str:
        """torch's name of the type, such as ``"bfloat16"``."""
        return self._entry(name).spec.dtype

    def tensor(self, name: str) -> Tensor:
        """A copy of its own of one tensor, in the file's type; a tied name gives the matrix it is tied to."""
        return read_tensor(self._entry(name))

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of all that the files hold, in natural order. Needs no torch."""
        return [(name, entry.spec.shape) for name, entry in self.entries.items()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(entry.size for entry in self.entries.values())

    def _entry(self, name: str) -> TensorEntry:
        entry = self.entries.get(self.tied.get(name, name))
        if entry is None:
            hint = ""
            if name in _OUTPUT_NAMES and self.config.get("tie_word_embeddings") is False:
                hint = "; config.json says tie_word_embeddings false, so the file should hold it"
            raise CheckpointError(f"{self.path} has no tensor {name!r} among its {len(self.entries)}{hint}")
        return entry


def open_checkpoint(path: PathLike) -> PretrainedCheckpoint:
    """Reads ``config.json`` and the headers of all shards. Nothing else is read until a tensor is asked
    for."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"model {folder} is not a directory; give the one that holds config.json")
    config = read_config(folder)
    entries: dict[str, TensorEntry] = {}
    for file, wanted in _shards(folder).items():
        header = read_header(folder / file)
        missing = [name for name in wanted or () if name not in header]
        if missing:
            raise CheckpointError(
                f"{folder / file} lacks {missing[0]!r} and {len(missing) - 1} more that {_INDEX} promises;"
                f" copy the model again"
            )
        for name, entry in header.items():
            if wanted is None or name in wanted:
                entries[name] = entry
    if not entries:
        raise CheckpointError(f"model {folder} holds no tensors")
    entries = {name: entries[name] for name in sorted(entries, key=_natural)}
    return PretrainedCheckpoint(folder, config, entries, _tied_names(config, entries))


def read_config(folder: PathLike) -> dict[str, Any]:
    """``config.json`` of a model directory.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    return _read_json(Path(folder) / "config.json", "the directory is no model that transformers saved")


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the names the index expects there; None where there is no index."""
    if (folder / _SINGLE).exists():
        return {_SINGLE: None}
    if not (folder / _INDEX).exists():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise CheckpointError(
                f"model {folder} holds {pickles[0]}, a pickle, which can run code when read; convert it once"
                f" with AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) where you trust it"
            )
        raise CheckpointError(f"model {folder} holds neither {_SINGLE} nor {_INDEX}")
    weights = _read_json(folder / _INDEX, "copy the model again").get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{folder / _INDEX} has no weight_map")
    shards: dict[str, set[str] | None] = {}
    for name, file in weights.items():
        # A file of the same directory and nothing else: an index may come from anywhere.
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{folder / _INDEX} places {name!r} outside the directory, in {file!r}")
        names = shards.setdefault(file, set())
        if names is not None:
            names.add(name)
    return shards


def _tied_names(config: dict[str, Any], entries: dict[str, TensorEntry]) -> dict[str, str]:
    # transformers leaves settings at their default out of config.json, and most models are tied by default.
    # One that is not has its output layer in the file, so a missing layer without a word means tied.
    if config.get("tie_word_embeddings", True) is False or any(name in entries for name in _OUTPUT_NAMES):
        return {}
    inputs = [name for name in entries if name.endswith(_INPUT_SUFFIXES)]
    if len(inputs) != 1:
        return {}
    output = "embed_out.weight" if inputs[0].endswith("embed_in.weight") else "lm_head.weight"
    return {output: inputs[0]}


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts if part]


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise CheckpointError(f"{path} is larger than {format_bytes(_JSON_BYTES_MAX)}; {hint}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {hint}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {str(error)[:200]}; {hint}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; {hint}")
    return value


def build_meta_model(
    path: PathLike, *, dtype: torch.dtype | None = None, any_task: bool = False
) -> nn.Module:
    """transformers' model of ``config.json``: parameters on the meta device, buffers real and right.

    ``dtype``: of the parameters; default: the configuration's. ``any_task``: of the class that was saved, whatever
    it is for; else, and where the file names none, a causal language model. See Note [Real buffers].
    """
    import torch

    try:
        import transformers
        from transformers.initialization import no_init_weights
    except ModuleNotFoundError as error:
        raise ConfigError(f"model {path} needs transformers >= 5: pip install 'offload[hf]'") from error
    config_file = Path(path) / "config.json"
    read_config(path)
    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(path), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{config_file} is not understood: {' '.join(str(error).split())[:200]}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{config_file} describes quantised weights; load the model with transformers, and give it to"
            " offload.prepare"
        )
    saved = _saved_class(config) if any_task else None
    arguments = {} if dtype is None else {"dtype": dtype}
    with torch.device("cpu"), _parameters_on_meta(), no_init_weights():
        try:
            build = transformers.AutoModelForCausalLM.from_config if saved is None else saved._from_config
            model: nn.Module = build(config, **arguments)
        except ValueError as error:
            raise ConfigError(f"{config_file} is no causal language model: {str(error)[:200]}") from error
    model.tie_weights()  # type: ignore[operator]  # no_init_weights skipped it
    return model


def _saved_class(config: Any) -> Any:
    """The class of transformers that ``config.json`` says was saved; None where it names none."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)  # a name from a file: a model, or nothing
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


# Note [Real buffers]
# Under torch.device("meta") a module's buffers are on meta too, and what a checkpoint does not store (rotary
# frequencies, causal masks, ALiBi slopes) would be lost. So the model is built on the CPU with initialisation
# switched off, and each parameter moves to meta as it is registered: its memory was allocated, never
# touched, and so never backed by pages. Buffers are computed by the same code as always.
@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    from torch.nn import Parameter
    from torch.nn.modules.module import register_module_parameter_registration_hook

    owner = threading.get_ident()  # the hook is global; other threads' models are none of our business

    def to_meta(module: nn.Module, name: str, parameter: Parameter) -> Parameter | None:
        if threading.get_ident() != owner or parameter.is_meta:
            return None
        moved = Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that ``state_dict()`` holds, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The ``config.json`` of a model of transformers; None of any other."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    config: dict[str, Any] = dict(to_dict())
    if not config.get("architectures"):
        config["architectures"] = [type(model).__name__]
    return config


def export_specs(model: nn.Module) -> list[TensorSpec]:
    """What a checkpoint of ``model`` holds: parameters (a tied one once) and persistent buffers. No values
    are read."""
    tensors: dict[str, Any] = dict(model.named_parameters())
    tensors.update(persistent_buffers(model))
    return [TensorSpec(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]


def write_checkpoint(
    out_dir: PathLike,
    specs: Iterable[TensorSpec],
    fetch: Callable[[str], Tensor],
    config: dict[str, Any] | None,
    *,
    aliases: Mapping[str, str] | None = None,
    tokenizer_files: PathLike | None = None,
    shard_bytes: int = 5 * GiB,
    overwrite: bool = False,
) -> None:
    """Writes a directory that ``AutoModelForCausalLM.from_pretrained`` opens, one tensor in memory at a time.

    ``specs`` name every tensor once (a tied output layer not at all); ``fetch(name)`` returns it in exactly
    that shape and dtype and is called once, in the order of the shards. ``config``: no file where it is None.
    ``aliases``: other names of tied tensors, noted in the files. ``tokenizer_files``: a directory
    whose tokenizer is copied along. ``overwrite``: replace a checkpoint that is there.

    All is written to a temporary directory beside ``out_dir``, flushed, and renamed at the end: after an
    error or a crash ``out_dir`` is what it was.
    """
    out, listed = Path(out_dir).absolute(), list(specs)
    _check_target(out, overwrite)
    if len({spec.name for spec in listed}) != len(listed) or not listed:
        raise ConfigError(f"specs must name each tensor once, and at least one; got {len(listed)}")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes must be above 0, got {shard_bytes}")
    extra = _tokenizer_paths(tokenizer_files)
    total = sum(spec.num_bytes for spec in listed)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < total:
            raise StoreError(
                f"{out.parent} has {format_bytes(free)} free, the checkpoint needs {format_bytes(total)};"
                f" free space or give another directory"
            )
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp"))
    except StoreError:
        raise
    except OSError as error:
        text = f"{out.parent} cannot be written: {error.strerror}; give another directory"
        raise StoreError(text) from error
    try:
        _write_shards(temporary, listed, fetch, shard_bytes, total, aliases or {})
        for source in extra:
            shutil.copyfile(source, temporary / source.name)
        if config is not None:
            _write_text(temporary / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        temporary.chmod(0o755)  # mkdtemp's is for the owner alone
        for file in temporary.iterdir():
            _fsync(file)
        _fsync(temporary)
        _replace(temporary, out)
    except TransferError:
        raise
    except OSError as error:
        raise TransferError(
            error.errno or errno.EIO, "write", str(out), offset=0, size=total, done=0
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already where the rename succeeded
    log.info("wrote %d tensors, %s, to %s", len(listed), format_bytes(total), out)


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists and is not empty; give another directory, or overwrite")
    # Deleting a tree is for trees that we know: a checkpoint, not someone's home.
    if out.is_symlink() or not (out / "config.json").is_file() or any(p.is_dir() for p in out.iterdir()):
        raise ConfigError(f"{out} is no checkpoint directory, so it is not replaced; give another directory")


def _tokenizer_paths(folder: PathLike | None) -> list[Path]:
    if folder is None:
        return []
    found = [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not any("token" in path.name or "vocab" in path.name or "spiece" in path.name for path in found):
        raise ConfigError(f"{folder} holds no tokenizer files; give the directory of the model's tokenizer")
    return found


def _write_shards(
    folder: Path,
    specs: list[TensorSpec],
    fetch: Callable[[str], Tensor],
    shard_bytes: int,
    total: int,
    aliases: Mapping[str, str],
) -> None:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    if len(shards) == 1:
        write_file(folder / _SINGLE, shards[0], fetch, aliases=aliases)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names = {spec.name for spec in shard}
        here = {alias: kept for alias, kept in aliases.items() if kept in names}
        write_file(folder / name, shard, fetch, aliases=here)
        places.update({spec.name: name for spec in shard})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    _write_text(folder / _INDEX, json.dumps(index, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(temporary: Path, out: Path) -> None:
    """``temporary`` becomes ``out``; what was there goes last, and comes back if the rename fails."""
    aside: Path | None = None
    try:
        if out.exists() and any(out.iterdir()):
            aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".old"))
            out.rename(aside)  # onto an empty directory
        try:
            temporary.rename(out)
        except OSError:
            if aside is not None:
                log.error(
                    "cannot replace %s; the checkpoint that was there is in %s until moved back", out, aside
                )
                aside.rename(out)
            raise
        _fsync(out.parent)
    finally:
        if aside is not None and out.exists():
            shutil.rmtree(aside, ignore_errors=True)
