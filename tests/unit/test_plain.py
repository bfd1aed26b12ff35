"""Plain values: what schedulers keep comes back equal, of the same types, through JSON; anything else is named."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import CheckpointError, ConfigError
from offload.plain import check_json, decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.tuples(st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.text() | st.sampled_from(["$map", "$tuple", "$float", "$counter"]), inner, max_size=2
        )
    ),
    max_leaves=20,
)


def through_json(value):
    return json.loads(json.dumps(encode(value, "it"), allow_nan=False))


@given(VALUES)
def test_every_value_comes_back_with_its_types(value):
    assert repr(decode(through_json(value), "it")) == repr(value)


@given(JSON)
def test_whatever_stands_in_a_file_is_a_value_or_refused_in_one_line(value):
    try:
        decode(value, "it")
    except CheckpointError as error:
        assert "\n" not in str(error)


@given(JSON)
def test_what_is_json_is_left_as_it_is(value):
    check_json(value, "client_state")


def test_numbers_of_torch_and_numpy_are_numbers():
    value = {
        "lr": torch.tensor(0.5),
        "n": np.int64(3),
        "x": np.float64(0.25),
        "inf": -math.inf,
        3: Counter({7: 2}),
    }
    assert decode(through_json(value), "it") == {
        "lr": 0.5,
        "n": 3,
        "x": 0.25,
        "inf": -math.inf,
        3: Counter({7: 2}),
    }
    assert math.isnan(decode(through_json(math.nan), "it"))
    assert type(decode(through_json({3: Counter()}), "it")[3]) is Counter


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, print]}, "scheduler['a'][1] is of type builtin_function_or_method"),
        ({"a": (1, {2: torch.ones(2)})}, "scheduler['a'][1][2] is of type Tensor"),
        ({"a": {1}}, "scheduler['a'] is of type set"),
    ],
)
def test_what_is_not_plain_is_named(value, where):
    with pytest.raises(ConfigError) as error:
        encode(value, "scheduler")
    assert str(error.value).startswith(where)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"best": math.inf}, "client_state['best'] is inf"),
        ({"best": (1, 2)}, "client_state['best'] is of type tuple"),
        ({"a": {3: 1}}, "client_state['a']: the key 3 is of type int"),
        ({"a": [torch.ones(1)]}, "client_state['a'][0] is of type Tensor"),
    ],
)
def test_what_json_does_not_hold_is_named(value, where):
    with pytest.raises(ConfigError) as error:
        check_json(value, "client_state")
    assert str(error.value).startswith(where)


def test_what_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    for look in (encode, check_json):
        with pytest.raises(ConfigError, match="holds itself"):
            look(loop, "it")
