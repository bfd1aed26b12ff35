"""Text to dictionary: the standard library is the oracle for plain JSON, line and column for everything
else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config.parse import parse
from offload.errors import ConfigError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.sampled_from([None, 2]), st.booleans())
@settings(deadline=None)
def test_plain_json_reads_as_the_standard_library_reads_it(
    value: dict[str, Any], indent: int | None, ascii_only: bool
):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse(text) == json.loads(text) == value


@given(st.text(alphabet="{}[]:,\"\\/#*-+.0123456789eEtruefalsn \n$'", max_size=40))
@settings(deadline=None, max_examples=150)
def test_any_text_is_a_block_or_a_configuration_error(text: str):
    try:
        parsed = parse(text)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert "line " in str(error)
    else:
        assert isinstance(parsed, dict)


@given(st.text(alphabet='{}[]:,"\\-+.0123456789eEtruefalsn \n', max_size=30).map(lambda body: "{" + body))
@settings(deadline=None, max_examples=250)
def test_what_the_standard_library_reads_is_read_the_same(text: str):
    try:
        wanted = json.loads(text, object_pairs_hook=_no_duplicates)
    except ValueError:
        return  # ours may read it: trailing commas
    assert parse(text) == wanted


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def test_comments_and_trailing_commas():
    text = """\ufeff// first
    # 中文注释, "quotes" and { braces }
    {
      "path": "http://host/#frag", // the marks inside a string are text
      "list": [1, 2,], /* over
      lines */ "block": {"a": 1e9,}, # last
    } // end"""
    assert parse(text) == {"path": "http://host/#frag", "list": [1, 2], "block": {"a": 1e9}}


def test_extreme_numbers():
    parsed = parse('{"a": 1e400, "b": NaN, "c": -Infinity, "d": 1' + "0" * 5000 + "}")
    assert parsed["a"] == parsed["d"] == math.inf and parsed["c"] == -math.inf and math.isnan(parsed["b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: the text ends where a value is expected; close every { and ["),
        ('{\n  "a": 1,\n  "a": 2}', "line 3, column 3: 'a' is given twice in one block; keep one"),
        ('{"é": {"b": 1, "b": 2}}', "line 1, column 16: 'b' is given twice in one block; keep one"),
        ('{"a": 1\n "b": 2}', "line 2, column 2: '\"' where , or } is expected; write it"),
        (
            '# c\n{"a":\n   $X}',
            "line 3, column 4: $X is a shell variable that nothing filled in; write its value",
        ),
        ('{"a": "$(pwd)", "b": $(nproc)}', "line 1, column 22: $(nproc) is a shell variable"),
        ('{"a": True}', "line 1, column 7: True is Python's spelling; write true"),
        ("{'a': 1}", 'line 1, column 2: "\'" where a key is expected'),
        ("{\"a\": 'x'}", 'line 1, column 7: strings stand in double quotes; write "..."'),
        ('{"a": 01}', "line 1, column 7: '01' is not a value"),
        ('{"a": "b', 'line 1, column 7: unterminated string starting; close the string with "'),
        ('{"a": "C:\\swap"}', "line 1, column 10: invalid \\escape"),
        ("[{}]", "line 1, column 1: a configuration is one block; write { ... }"),
        ("{} {}", "line 1, column 4: '{' after the end of the configuration; remove it"),
        ("{,}", "line 1, column 2: ',' where a key is expected"),
        ('{"a": [1,,2]}', "line 1, column 10: , where a value is expected"),
        ('{"a": ' + "[" * 200, "line 1, column 107: more than 100 blocks inside each other"),
    ],
)
def test_errors_name_the_place(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse(text, "run.json")
    assert str(caught.value).startswith(f"run.json: {message}")
