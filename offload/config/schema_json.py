"""The configuration as JSON Schema, for editors: ``python -m offload.config.schema_json >
swap_configs/schema.json``.

Everything comes from the declarations: the kinds give the values, and the docstring under each field gives
the text that an editor shows.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from typing import Any

from .config import OffloadConfig
from .foreign import NO_EFFECT, REFUSED
from .kinds import AUTO
from .reader import BlockOf, OneOf, Spec, specs
from .report import join


def schema() -> dict[str, Any]:
    """The schema of a whole configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "offload configuration",
        **_block(OffloadConfig, ""),
    }


def _block(cls: type[Any], path: str) -> dict[str, Any]:
    texts = {
        name: text for base in reversed(cls.__mro__[:-1]) for name, text in _field_docstrings(base).items()
    }
    properties = {spec.name: _setting(spec, join(path, spec.name), texts[spec.name]) for spec in specs(cls)}
    properties |= _foreign(path)
    if path == "":
        properties["$schema"] = {"type": "string", "description": "Where an editor finds this schema."}
    required = [spec.name for spec in specs(cls) if spec.is_required]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _foreign(path: str) -> dict[str, Any]:
    """The settings of a block that are known and not read."""
    idle = {key: f"No effect here: {reason}." for key, reason in NO_EFFECT.get(path, {}).items()}
    refused = {
        key: f"Not supported while it is on: {reason}." for key, (_, reason) in REFUSED.get(path, {}).items()
    }
    return {key: {"description": text} for key, text in (idle | refused).items()}


def _setting(spec: Spec, path: str, text: str) -> dict[str, Any]:
    if isinstance(spec.kind, BlockOf):
        return {"description": text, **_block(spec.kind.cls, path)}
    if isinstance(spec.kind, OneOf):
        return {
            "description": text,
            "oneOf": [_option(path, name, cls) for name, cls in spec.kind.options.items()],
        }
    described: dict[str, Any] = {"description": text}
    if spec.default is not None and spec.default != ():
        described["default"] = spec.kind.write(spec.default)
    accepted = spec.kind.schema()
    if spec.is_required:
        return {**described, **accepted}
    return {**described, "anyOf": [accepted, {"enum": [AUTO, None]}]}


def _option(path: str, name: str, cls: type[Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": inspect.getdoc(cls),
        "properties": {"type": {"const": name}, "params": _block(cls, f"{path}.params"), **_foreign(path)},
        "required": ["type"],
        "additionalProperties": False,
    }


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """The string that follows each field in the source of ``cls``."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    if not isinstance(tree, ast.ClassDef):
        raise AssertionError(f"{cls} is not a class")
    texts = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise AssertionError(f"{cls.__name__}.{field.target.id} has no docstring")
            texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts


def text() -> str:
    """The schema as it stands in ``swap_configs/schema.json``."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
