"""G04: which values count as a number, for every setting that takes one."""

from __future__ import annotations

from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.config.kinds import Bytes, Real, Whole
from offload.config.numbers import WHOLE_MAX
from offload.config.reader import BlockOf, block_keys, specs
from offload.config.report import join
from offload.config.training import AdamW
from offload.errors import ConfigError


def number_settings() -> dict[str, Any]:
    """path -> kind, of every setting that takes one number."""
    found: dict[str, Any] = {}
    blocks: list[tuple[str, type[Any]]] = [("", OffloadConfig)]
    while blocks:
        path, cls = blocks.pop()
        for spec in specs(cls):
            if isinstance(spec.kind, BlockOf):
                blocks.append((join(path, spec.name), spec.kind.cls))
            elif spec.name == "optimizer":
                blocks.append(("optimizer.params", AdamW))
            elif isinstance(spec.kind, (Whole, Real, Bytes)):
                found[join(path, spec.name)] = spec.kind
    return found


NUMBERS = number_settings()
HINTS = [path for path, kind in NUMBERS.items() if kind.is_hint]
COUNTS = [path for path, kind in NUMBERS.items() if isinstance(kind, Whole) and not kind.is_hint]


def config_with(path: str, value: object) -> dict[str, Any]:
    tree: object = value
    for key in reversed(path.split(".")):
        tree = {key: tree}
    assert isinstance(tree, dict)
    if path.startswith("optimizer."):
        tree["optimizer"]["type"] = "AdamW"
    return tree


def read(path: str, value: object) -> Any:
    node: Any = OffloadConfig.from_dict(config_with(path, value))
    for key in path.split("."):
        node = getattr(node, key)
    return node


def refusal(path: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(config_with(path, value))
    return str(caught.value)


def test_the_walk_finds_settings():
    assert "zero_optimization.sub_group_size" in HINTS
    assert "train_batch_size" in COUNTS
    assert {"optimizer.params.lr", "memory.host_bytes"} <= NUMBERS.keys()
    assert {path for path, _ in block_keys(OffloadConfig)} >= {
        "memory",
        "aio",
        "zero_optimization.offload_param",
    }


@pytest.mark.parametrize("path", HINTS)
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (5e8, 500_000_000),
        (1e14, 10**14),
        (26214.4, 26214),
        ("1", 1),
        ("5e8", 500_000_000),
        (" 26214.4 ", 26214),
        (0, 0),
        (1e30, WHOLE_MAX),
        (10**400, WHOLE_MAX),
        (None, None),
        ("auto", None),
    ],
)
def test_g04_sizes(path: str, value: object, wanted: int | None):
    found = read(path, value)
    assert found == wanted and not isinstance(found, float)


def test_g04_changed_sizes_are_noted():
    notes = OffloadConfig.from_dict(config_with("zero_optimization.sub_group_size", 26214.4)).notes
    assert notes[0] == "zero_optimization.sub_group_size: 26214.4 is taken as 26214"
    notes = OffloadConfig.from_dict(config_with("zero_optimization.sub_group_size", 1e30)).notes
    assert notes[0] == f"zero_optimization.sub_group_size: 1e+30 is taken as {WHOLE_MAX}"
    notes = OffloadConfig.from_dict(config_with("zero_optimization.sub_group_size", 1e9)).notes
    assert notes == ("zero_optimization.sub_group_size: a hint; the memory plan decides",)


@pytest.mark.parametrize("path", NUMBERS)
@pytest.mark.parametrize(
    "value", [True, False, -2, float("inf"), float("nan"), "1e400", "h*h", "", [], {}, "$N"]
)
def test_g04_never_a_number(path: str, value: object):
    if path == "steps_per_print" and value == float("inf"):
        assert read(path, value) == 0  # "never", as one launcher writes it
        return
    line = refusal(path, value)
    assert line.startswith(f"{path}: ") and "; " in line and "\n" not in line


@pytest.mark.parametrize("path", COUNTS)
def test_g04_counts_are_whole(path: str):
    assert refusal(path, 2.5) == f"{path}: 2.5 is not a whole number; write 2 or 3"
    assert read(path, "2") == read(path, 2.0) == read(path, "2.0") == 2


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("8GiB", 8 << 30),
        ("160 MiB", 160 << 20),
        ("8GB", 8 * 10**9),
        (4096, 4096),
        (1e9, 10**9),
        ("1e9", 10**9),
    ],
)
def test_byte_sizes(value: object, wanted: int):
    assert read("memory.host_bytes", value) == wanted
    assert read("durability.write_bytes_per_second", value) == wanted


def test_byte_sizes_refused():
    assert "write 4096" in refusal("memory.host_bytes", "half")
    assert "below one byte" in refusal("memory.host_bytes", 0)
    assert refusal("aio.block_size", 1_000_000).endswith("write 999424 or 1003520")
    assert refusal("aio.block_size", 5).endswith("write 4096")


def test_auto_stays_auto_where_it_is_a_value():
    for path in ("memory.host_bytes", "aio.queue_depth", "aio.block_size", "durability.generations"):
        config = OffloadConfig.from_dict(config_with(path, "auto"))
        assert read(path, "AUTO") == "auto" and not [note for note in config.notes if '"auto"' in note]
