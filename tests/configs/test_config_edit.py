"""Settings changed in the text of a configuration: the values are those wanted, and every comment stays."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from offload.config.edit import with_settings
from offload.config.parse import parse
from offload.errors import ConfigError

CHANGES = {"backend": "io_uring", "block_size": 4194304, "queue_depth": 8}
CONFIGS = sorted((Path(__file__).parents[2] / "swap_configs").glob("*.json"))

COMMENTED = """\
// head
{
  "bf16": {"enabled": true},  // on
  # aio comes
  "aio": {
    "block_size": 1048576, // one MiB
    "queue_depth": 8 /* low */
  }, // end
  "x": 1 // last, no comma
}
// foot
"""


def comments(text: str) -> list[str]:
    """Comments, and what stands in strings that looks like one: neither may change."""
    return re.findall(r"#[^\n]*|//[^\n]*|/\*.*?\*/", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.name != "schema.json"], ids=lambda path: path.name
)
def test_the_configurations_of_the_repository(path: Path) -> None:
    text = path.read_text()
    changed = with_settings(text, ("aio",), CHANGES, path.name)
    assert parse(changed) == {**parse(text), "aio": CHANGES} and comments(changed) == comments(text)
    assert changed.startswith(text[: text.rindex("}") - 2]), "nothing before the end has changed"
    again = with_settings(changed, ("aio",), {"queue_depth": 16}, path.name)
    assert again == changed.replace('"queue_depth": 8', '"queue_depth": 16')


def test_values_change_in_place_and_comments_stay_beside_them() -> None:
    changed = with_settings(COMMENTED, ("aio",), CHANGES, "run.json")
    expected = COMMENTED.replace("1048576", "4194304").replace(
        '"queue_depth": 8 /* low */', '"queue_depth": 8, /* low */\n    "backend": "io_uring"'
    )
    assert changed == expected


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{ }",
        "{\n}\n",
        "{ // comment\n}",
        '{"a": 1}',
        '{"a": 1,}',
        '{\n  "a": 1, // c, }\n}',
        '{\n  "a": "// no comment }", // c\n  "aio": null // d\n}',
        '{"aio": {}}',
        '{"aio": {"queue_depth": "auto", # e\n}}',
        '\ufeff{\r\n  "a": [1, 2], /* f */\r\n  "aio": {"block_size": 1}\r\n}\r\n',
        '# top\n\n{\n\t"a": {"b": {"aio": 5}}\n\t# end\n}',
    ],
)
def test_every_way_to_write_a_file(text: str) -> None:
    changed = with_settings(text, ("aio",), CHANGES, "run.json")
    before = parse(text)
    assert parse(changed) == {**before, "aio": {**(before.get("aio") or {}), **CHANGES}}
    assert [line.rstrip() for line in comments(changed)] == [line.rstrip() for line in comments(text)]


@pytest.mark.parametrize("seed", range(200))
def test_random_files(seed: int) -> None:
    rng = random.Random(seed)
    text = _written(rng, _block(rng, 0), 0)
    path = tuple(rng.choice(["aio", "b", "c", "zero"]) for _ in range(rng.randint(1, 3)))
    changes = {
        rng.choice(["d", "e", "queue_depth"]): rng.choice([1, "x", [1, {"y": 2}], {"z": None}])
        for _ in range(2)
    }
    before = parse(text)
    if _passes_a_value(before, path):
        with pytest.raises(ConfigError, match="is not a block"):
            with_settings(text, path, changes, "run.json")
        return
    changed = with_settings(text, path, changes, "run.json")
    expected = json.loads(json.dumps(before))
    place = expected
    for key in path:
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
    place.update(changes)
    assert parse(changed) == expected and comments(changed) == comments(text)


def _passes_a_value(data: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        data = data.get(key)
        if data is None:
            return False
        if not isinstance(data, dict):
            return True
    return False


def _block(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(["aio", "b", "c", "zero", "d", "e"], rng.randint(0, 4))
    return {key: _value(rng, depth) for key in keys}


def _value(rng: random.Random, depth: int) -> Any:
    if depth < 3 and rng.random() < 0.5:
        return _block(rng, depth + 1)
    return rng.choice([1, 2.5, None, True, "text", [1, 2], "a, b }"])


def _written(rng: random.Random, data: Any, depth: int) -> str:
    """JSON as people write it: on one line or several, with comments and with commas at the end."""
    if not isinstance(data, dict):
        return json.dumps(data)
    lines = rng.random() < 0.7
    inner, end = ("\n" + "  " * (depth + 1), "\n" + "  " * depth) if lines else (" ", " ")

    def comment() -> str:
        choice = rng.random()
        if choice < 0.2 and lines:
            return f" // c{rng.randint(0, 999)}, x"
        return f" /* d{rng.randint(0, 999)} */" if choice < 0.3 else ""

    text = "{" + comment()
    for number, (key, value) in enumerate(data.items()):
        is_last = number == len(data) - 1
        comma = "," if not is_last or rng.random() < 0.3 else ""
        text += f"{inner}{json.dumps(key)}: {_written(rng, value, depth + 1)}{comma}{comment()}"
    return text + end + "}"


def test_what_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match=r"run.json: line 1, column 9"):
        with_settings('{"aio": x}', ("aio",), CHANGES, "run.json")
    with pytest.raises(ConfigError, match=r"run.json: aio is not a block"):
        with_settings('{"aio": 5}', ("aio",), CHANGES, "run.json")
