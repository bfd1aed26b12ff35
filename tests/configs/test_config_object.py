"""The configuration as an object, its sources, its scenarios and its schema."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config import OffloadConfig
from offload.config.foreign import NO_EFFECT, REFUSED
from offload.config.legacy import MISPLACED
from offload.config.reader import block_keys
from offload.config.schema_json import schema, text
from offload.errors import ConfigError

SCENARIOS = Path(__file__).parents[2] / "swap_configs"
FILES = sorted(path for path in SCENARIOS.glob("*.json") if path.name != "schema.json")

KEYS = st.sampled_from(
    sorted(
        {key for _, keys in block_keys(OffloadConfig) for key in keys}
        | {key for keys in (*NO_EFFECT.values(), *REFUSED.values()) for key in keys}
        | {
            "type",
            "params",
            "optimizer",
            "scheduler",
            "cpu_offload",
            "cpu_offload_params",
            "num_threads",
            "aio",
        }
        | MISPLACED.keys()
    )
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "cpu", "nvme", "none", "1e9", "AdamW", "Adam", "WarmupLR", "OneCycle", "8GiB", "$X", "/a"]
    )
    | st.sampled_from([0, 1, 2, 3, 4096, 10**400, 1e9])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)


def plausible() -> st.SearchStrategy[dict[str, Any]]:
    """Blocks with the right keys, and values that are right more often than not."""
    blocks: dict[str, dict[str, Any]] = {}
    for path, keys in block_keys(OffloadConfig):
        leaf = dict.fromkeys(keys, LEAVES)
        blocks[path] = leaf
    tree: Any = None
    for path in sorted(blocks, key=len, reverse=True):
        strategy = st.fixed_dictionaries({}, optional=blocks[path])
        parent, _, key = path.rpartition(".")
        if path:
            blocks[parent][key] = strategy | LEAVES
        else:
            tree = strategy
    assert tree is not None
    return tree


@given(st.dictionaries(KEYS | st.text(max_size=4), TREES, max_size=6) | plausible())
@settings(deadline=None, max_examples=120)
def test_any_value_is_a_configuration_or_a_configuration_error(data: dict[str, Any]):
    before = repr(data)
    try:
        config = OffloadConfig.from_dict(data)
    except ConfigError as error:
        for line in str(error).splitlines():
            path, _, rest = line.partition(": ")
            assert path and rest, line
    else:
        assert_round_trip(config)
    assert repr(data) == before  # what is given is never changed


def assert_round_trip(config: OffloadConfig) -> None:
    written = json.loads(json.dumps(config.to_dict()))
    again = OffloadConfig.from_dict(written)
    assert again == config and again.digest() == config.digest() and again.to_dict() == config.to_dict()
    assert len(config.describe()) >= 30


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "train_micro_batch_size_per_gpu": st.integers(1, 64),
            "gradient_clipping": st.floats(0, 10),
            "optimizer": st.fixed_dictionaries(
                {"type": st.sampled_from(["Adam", "AdamW", "FusedAdam"])},
                optional={
                    "params": st.fixed_dictionaries(
                        {},
                        optional={
                            "lr": st.floats(0, 1),
                            "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
                            "weight_decay": st.floats(0, 1) | st.just("auto"),
                        },
                    )
                },
            ),
            "bf16": st.fixed_dictionaries({"enabled": st.booleans() | st.just("auto")}),
            "zero_optimization": st.fixed_dictionaries(
                {"stage": st.just(3)},
                optional={
                    "offload_param": st.fixed_dictionaries(
                        {"device": st.sampled_from(["none", "cpu", "nvme", "auto"])},
                        optional={"max_in_cpu": st.floats(0, 1e12), "pin_memory": st.booleans()},
                    ).map(lambda block: {**block, "nvme_path": ["/a", {"path": "/b", "weight": 0.1}]}),
                    "sub_group_size": st.integers(0) | st.floats(0, 1e18),
                },
            ),
            "memory": st.fixed_dictionaries(
                {"host_bytes": st.integers(1, 1 << 60) | st.sampled_from(["1GiB", "2e9"])}
            ),
        },
    )
)
@settings(deadline=None, max_examples=120)
def test_right_values_are_read_and_survive_a_round_trip(data: dict[str, Any]):
    assert_round_trip(OffloadConfig.from_dict(data))


@pytest.mark.parametrize("data", [[], None, 3, "text", [["a", 1]]])
def test_a_configuration_is_a_block(data: Any):
    with pytest.raises(ConfigError, match="stands where a block is expected"):
        OffloadConfig.from_dict(data)


def test_a_dictionary_that_holds_itself_is_refused():
    nested: dict[str, Any] = {}
    nested["compression_training"] = nested
    with pytest.raises(ConfigError):
        OffloadConfig.from_dict(nested)


def test_frozen():
    config = OffloadConfig.from_dict({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zero_optimization.stage = 1  # type: ignore[misc]
    assert hash(config) == hash(OffloadConfig.from_dict({}))


def test_equality_and_digest_follow_the_settings_not_the_spelling():
    new = OffloadConfig.from_dict({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    old = OffloadConfig.from_any(
        '{"zero_optimization": {"stage": "3", "cpu_offload": true, "overlap_comm": true}}'
    )
    assert new == old and new.digest() == old.digest() and new.notes != old.notes
    assert OffloadConfig.from_dict({"seed": 1}).digest() != OffloadConfig.from_dict({}).digest()
    assert len(new.digest()) == 12


def test_describe():
    lines = OffloadConfig.from_dict({"memory": {"host_bytes": "160MiB"}}).describe()
    assert "memory.host_bytes = 167772160 (160 MiB)" in lines
    assert 'zero_optimization.offload_param.device = "none"' in lines


def test_sources(tmp_path: Path):
    data = {"zero_optimization": {"stage": 3}}
    file = tmp_path / "run.json"
    file.write_text("// stage 3\n" + json.dumps(data), encoding="utf-8")
    wanted = OffloadConfig.from_dict(data)
    for source in (data, file, str(file), json.dumps(data), " # c\n" + json.dumps(data), wanted):
        assert OffloadConfig.from_any(source) == wanted


def test_sources_refused(tmp_path: Path):
    def refusal(source: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            OffloadConfig.from_any(source)
        return str(caught.value)

    binary, yaml, broken = tmp_path / "b.json", tmp_path / "a.yaml", tmp_path / "c.json"
    binary.write_bytes(b"\xff\xfe{}")
    yaml.write_text("zero_stage: 3\n")
    broken.write_text('{\n "seed": }')
    assert refusal(tmp_path / "missing.json").endswith(
        "cannot be read: No such file or directory; give a JSON file"
    )
    assert "Is a directory" in refusal(tmp_path)
    assert "it is not UTF-8 text" in refusal(binary)
    assert "is YAML" in refusal(yaml)
    assert refusal(broken).startswith(f"{broken}: line 2, column 10: }} where a value is expected")
    assert "NoneType is not one" in refusal(None)
    assert "list is not one" in refusal([])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenarios(path: Path):
    config = OffloadConfig.from_file(path)
    assert config.notes == ()
    assert_round_trip(config)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("// ") and first.endswith(".") and first.count(".") == 1
    config.resolve_batch(world_size=1)


def test_scenarios_are_all_there_and_differ():
    assert {path.stem for path in FILES} >= {
        "demo",
        "nvme_all",
        "nvme_optimizer",
        "cpu",
        "none",
        "fp32_nvme",
        "accumulate",
    }
    assert len({OffloadConfig.from_file(path).digest() for path in FILES}) == len(FILES)


def test_the_schema_file_is_in_step():
    """After a change: ``python -m offload.config.schema_json > swap_configs/schema.json``."""
    assert (SCENARIOS / "schema.json").read_text(encoding="utf-8") == text()


def matches(value: Any, rule: dict[str, Any]) -> bool:
    """The part of JSON Schema that our schema uses."""
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    kinds = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type", [])
    checks = [
        not kinds or any(isinstance(value, types[kind]) for kind in kinds),
        "enum" not in rule or value in rule["enum"],
        "const" not in rule or value == rule["const"],
        "anyOf" not in rule or any(matches(value, option) for option in rule["anyOf"]),
        "oneOf" not in rule or sum(matches(value, option) for option in rule["oneOf"]) == 1,
        "items" not in rule or all(matches(item, rule["items"]) for item in value),
        not isinstance(value, (int, float)) or value >= rule.get("minimum", value),
        not isinstance(value, (int, float)) or value <= rule.get("maximum", value),
    ]
    if isinstance(value, dict) and "properties" in rule:
        known = rule["properties"]
        checks.append(set(rule.get("required", [])) <= value.keys() <= known.keys())
        checks.append(all(matches(item, known[key]) for key, item in value.items() if key in known))
    return all(checks)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema_accepts_the_scenarios(path: Path):
    written = OffloadConfig.from_file(path).to_dict()
    assert matches(written, schema())
    assert not matches({**written, "que_depth": 1}, schema())
    assert not matches({**written, "zero_optimization": {"stage": 4}}, schema())


def test_a_file_may_name_its_schema():
    assert OffloadConfig.from_dict({"$schema": "schema.json"}).notes == ()


def test_the_schema_describes_every_setting():
    def walk(rule: dict[str, Any], path: str) -> None:
        for key, inner in rule.get("properties", {}).items():
            assert inner.get("description") or inner.get("const") or key in ("params", "path", "weight"), (
                f"{path}.{key}"
            )
            walk(inner, f"{path}.{key}")
        for option in rule.get("oneOf", []):
            walk(option, path)

    walk(schema(), "")


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, offload.config; print(*(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False"] * 3
