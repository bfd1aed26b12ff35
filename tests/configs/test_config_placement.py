"""Where state lives: devices, paths, stages, old spellings and wrong places."""

from __future__ import annotations

from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.config.foreign import NO_EFFECT, REFUSED
from offload.config.kinds import SwapPath
from offload.config.reader import block_keys
from offload.errors import ConfigError

PARAM = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"


def read(data: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig.from_dict(data)


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(data)
    return str(caught.value)


def zero(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **block}}


def optimizer(**block: Any) -> dict[str, Any]:
    return zero(offload_optimizer={"device": "nvme", "nvme_path": "/a", **block})


AIO = {"queue_depth": 16, "block_size": 65536}


def test_g01_aio_nested_is_read_with_a_note():
    nested, right = read(zero(aio=AIO)), read({**zero(), "aio": AIO})
    assert nested == right and nested.aio.queue_depth == 16
    assert any(note.startswith("zero_optimization.aio: belongs at the top level") for note in nested.notes)


def test_g01_aio_twice():
    assert read({**zero(aio=AIO), "aio": AIO}).aio.queue_depth == 16
    merged = read({**zero(aio={"queue_depth": 16}), "aio": {"block_size": 65536}}).aio
    assert (merged.queue_depth, merged.block_size) == (16, 65536)
    text = refusal({**zero(aio=AIO), "aio": {"queue_depth": 8}})
    assert text == "zero_optimization.aio.queue_depth: 16 contradicts aio.queue_depth, which is 8; keep one"
    assert refusal(zero(aio=7)).startswith("zero_optimization.aio: belongs at the top level, as a block")


def test_g02_auto_is_the_default_everywhere_and_noted():
    """Every setting that is not a block takes "auto": it is the default, or a value of its own, never
    text."""
    for path, keys in block_keys(OffloadConfig):
        for key in keys:
            where = f"{path}.{key}" if path else key
            if path.startswith("optimizer") or key in ("optimizer", "scheduler", *_block_names()):
                continue
            tree: Any = "auto"
            for part in reversed(where.split(".")):
                tree = {part: tree}
            if key == "device":
                assert (
                    read({"zero_optimization": {"stage": 3, **tree["zero_optimization"]}}).notes is not None
                )
                continue
            config = read(tree)
            assert config == read({}) or "auto" in str(config.to_dict()), where
            noted = any(note.startswith(f"{where}: ") and '"auto"' in note for note in config.notes)
            default = _at(read({}), where)
            assert noted or default == "auto" or key == "enabled", where


def _block_names() -> set[str]:
    return {path.rpartition(".")[2] for path, _ in block_keys(OffloadConfig) if path}


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = getattr(config, key)
    return config


@pytest.mark.parametrize("ratio", [0, 0.1, "0.5", 0.9, 1])
def test_g06_ratio_on_cpu(ratio: float | str):
    assert read(optimizer(device="cpu", ratio=ratio)).zero_optimization.offload_optimizer.ratio == float(
        ratio
    )


def test_g06_ratio_refused():
    assert (
        refusal(optimizer(device="cpu", ratio=1.5)) == f"{OPTIMIZER}.ratio: 1.5 is above 1; write 1 or less"
    )
    assert refusal(optimizer(device="cpu", ratio=-0.1)).startswith(f"{OPTIMIZER}.ratio: -0.1 is below 0")
    assert "memory.host_bytes" in refusal(optimizer(ratio=0.5))
    assert read(optimizer(ratio=1.0)).notes == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": False}, {}),
        ({"cpu_offload": "true"}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload_params": True}, {"offload_param": {"device": "cpu"}}),
        ({"cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}),
        (
            {"cpu_offload": True, "cpu_offload_use_pin_memory": False},
            {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        ),
        ({"offload_optimizer": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"offload_param": False}, {}),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
        ({"max_live_parameters": 5}, {"stage3_max_live_parameters": 5}),
        ({"cpu_offload_use_pin_memory": True}, {}),
    ],
)
def test_g07_old_forms(old: dict[str, Any], new: dict[str, Any]):
    mapped = read(zero(**old))
    assert mapped == read(zero(**new))
    assert any(note.startswith(f"zero_optimization.{next(iter(old))}: ") for note in mapped.notes)


@pytest.mark.parametrize(
    "block",
    [
        {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
        {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}},
        {"cpu_offload_params": True, "offload_param": {"device": "none"}},
        {"cpu_offload_param": True, "cpu_offload_params": False},
        {"max_live_parameters": 5, "stage3_max_live_parameters": 6},
        {
            "stage3_gather_fp16_weights_on_model_save": True,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        {
            "cpu_offload": True,
            "cpu_offload_use_pin_memory": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    ],
)
def test_g07_old_and_new_in_conflict(block: dict[str, Any]):
    assert "contradicts" in refusal(zero(**block))


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0), (None, 0)])
def test_g07_a_switch_for_the_whole_block(value: bool | None, stage: int):
    assert read({"zero_optimization": value}).zero_optimization.stage == stage


def test_g07_old_and_new_that_agree():
    block = {"cpu_offload": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert read(zero(**block)).zero_optimization.offload_optimizer.pin_memory is False


def test_nested_twice_in_conflict():
    block = {"offload_optimizer": {"device": "cpu", "offload_optimizer": {"device": "none"}}}
    assert refusal(zero(**block)) == (
        f'{OPTIMIZER}.offload_optimizer.device: "none" contradicts {OPTIMIZER}.device, '
        'which is "cpu"; keep one'
    )


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("path", ["missing", None, "auto"])
def test_g08_nvme_needs_a_path(block: str, path: str | None):
    device = {"device": "nvme"} if path == "missing" else {"device": "nvme", "nvme_path": path}
    assert refusal(zero(**{block: device})) == (
        f'zero_optimization.{block}.nvme_path: is needed for the device "nvme"; '
        "write a directory on the drive"
    )


@pytest.mark.parametrize("path", ["~/swap", "swap/here", "/mnt/nvme/", "/tmp/a b", "/mnt/диск"])
def test_i09_paths_are_kept_as_written(path: str):
    block = read(optimizer(nvme_path=path)).zero_optimization.offload_optimizer
    assert block.nvme_paths == (SwapPath(path, None),)
    assert (
        read(optimizer(nvme_path=path)).to_dict()["zero_optimization"]["offload_optimizer"]["nvme_path"]
        == path
    )


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("", "is not a directory"),
        ("  ", "is not a directory"),
        ("/a\0b", "is not a directory"),
        (7, "is not a directory"),
        ({}, "is not a path with a weight"),
        ([], "names no directory"),
        ("$TMPDIR/swap", "shell variable"),
        (["/a", "/a"], "listed more than once"),
        ([{"path": "/a", "weight": 0}], "weight 0 is not above 0"),
        ([{"path": "/a", "wieght": 1}], "is not a path with a weight"),
        ([None], "is not a directory"),
    ],
)
def test_i09_bad_paths(path: object, part: str):
    text = refusal(optimizer(nvme_path=path))
    assert text.startswith(f"{OPTIMIZER}.nvme_path: ") and part in text and "\n" not in text


def test_several_paths():
    paths = ["/a", {"path": "/b", "weight": 2}, {"path": "/c"}]
    config = read(optimizer(nvme_path=paths))
    assert config.zero_optimization.offload_optimizer.nvme_paths == (
        SwapPath("/a"),
        SwapPath("/b", 2.0),
        SwapPath("/c"),
    )
    assert read(config.to_dict()) == config


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_paths_of_other_devices_are_never_opened(device: str):
    config = read(zero(offload_param={"device": device, "nvme_path": "/x"}))
    assert config.zero_optimization.offload_param.nvme_paths == ()
    assert f'{PARAM}: the device is "{device}", so nvme_path have no effect' in config.notes or any(
        "nvme_path" in note for note in config.notes
    )
    assert read(
        zero(offload_param={"device": "auto", "nvme_path": "/x"})
    ).zero_optimization.offload_param.nvme_paths


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (optimizer(buffer_size=1), f"{OPTIMIZER}.buffer_size: does not belong here; it belongs in {PARAM}"),
        (
            zero(offload_parameters={}),
            'zero_optimization.offload_parameters: is not a setting; did you mean "offload_param"?',
        ),
        (
            zero(stage3_param_persitance_threshold=1),
            "zero_optimization.stage3_param_persitance_threshold: is not a setting; "
            'did you mean "stage3_param_persistence_threshold"?',
        ),
        ({"aio": {"que_depth": 1}}, 'aio.que_depth: is not a setting; did you mean "queue_depth"?'),
        ({"stage": 3}, "stage: does not belong here; it belongs in zero_optimization"),
        ({"warmup_num_steps": 1}, "warmup_num_steps: does not belong here; it belongs in scheduler.params"),
        ({"lr": 1}, "lr: does not belong here; it belongs in optimizer.params"),
        (
            zero(gradient_clipping=1),
            "zero_optimization.gradient_clipping: does not belong here; it belongs in the top",
        ),
        (zero(bf16={}), "zero_optimization.bf16: does not belong here; it belongs in the top level"),
        ({"device": "cpu"}, f"device: does not belong here; it belongs in {PARAM} or {OPTIMIZER}"),
        (
            {"offload_optimizer_device": "cpu"},
            f"offload_optimizer_device: is a setting of Accelerate; write {OPTIMIZER}.device",
        ),
        (
            zero(offload_param_nvme_path="/x"),
            "zero_optimization.offload_param_nvme_path: is a setting of Accelerate",
        ),
        ({"zero3_init_flag": True}, "zero3_init_flag: is a setting of Accelerate; build the model inside"),
        ({"max_grad_norm": 1.0}, "max_grad_norm: DeepSpeed ignores it, so gradients are not clipped"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: DeepSpeed ignores it",
        ),
        ({"memory": {"host": 1}}, 'memory.host: is not a setting; did you mean "host_bytes"?'),
        ({"zzz": 1}, "zzz: is not a setting; remove it, or write one of train_batch_size"),
        ({"a b\n": 1}, '"a b\\n": is not a setting'),
        ({3: 4}, "3: is not a key; keys are strings"),
        (zero(offload_param="cpu"), f'{PARAM}: "cpu" stands where a block is expected; write'),
        (zero(offload_param="auto"), f'{PARAM}: "auto" stands where a block is expected; write'),
        (
            zero(offload_param={"device": "disk"}),
            f'{PARAM}.device: "disk" is not one of "none", "cpu", "nvme", "auto"',
        ),
    ],
)
def test_g11_wrong_names_and_wrong_places(data: dict[Any, Any], message: str):
    text = refusal(data)
    assert text.startswith(message) and "\n" not in text


def test_all_problems_are_told_at_once():
    data = {
        "train_batch_size": "many",
        "max_grad_norm": 1,
        "zero_optimization": {"stage": 7, "offload_param": {"device": "nvme"}, "overlap": True},
        "bf16": {"enabled": "yes"},
    }
    paths = [line.partition(":")[0] for line in refusal(data).splitlines()]
    assert sorted(paths) == [
        "bf16.enabled",
        "max_grad_norm",
        "train_batch_size",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.overlap",
        "zero_optimization.stage",
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, None])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_g13_offloaded_parameters_need_stage_3(stage: int | None, device: str):
    data = {"zero_optimization": {"stage": stage, "offload_param": {"device": device}}}
    assert refusal(data).startswith(f"{PARAM}: needs stage 3, and the stage is {stage or 0}")


@pytest.mark.parametrize(
    ("stage", "device", "is_noted"), [(0, "cpu", True), (1, "cpu", False), (2, "nvme", True)]
)
def test_offloaded_optimizer_state_on_every_stage(stage: int, device: str, is_noted: bool):
    data = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": device, "nvme_path": "/a"}}}
    config = read(data)
    assert config.zero_optimization.offload_optimizer.device == device
    assert any("is done as asked; DeepSpeed" in note for note in config.notes) is is_noted


@pytest.mark.parametrize("key", NO_EFFECT["zero_optimization"])
def test_settings_without_effect_are_noted_and_gone(key: str):
    config = read(zero(**{key: True}))
    assert config == read(zero())
    assert any(note.startswith(f"zero_optimization.{key}: has no effect here; ") for note in config.notes)
    assert read(zero(**{key: None})).notes == ()


ON: dict[str, Any] = {
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 4},
    "sparse_attention": {"mode": "fixed", "block": 16},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "bias_correction": False,
    "fp32_optimizer_states": False,
    "param_dtype": "bf16",
    "buffer_dtype": "fp32",
}
OFF: dict[str, Any] = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "tensor_parallel": {"autotp_size": 1},
    "sparse_attention": {"mode": "dense"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    "bias_correction": True,
    "fp32_optimizer_states": True,
    "param_dtype": "auto",
    "buffer_dtype": "auto",
}


@pytest.mark.parametrize(("path", "key"), [(path, key) for path, keys in REFUSED.items() for key in keys])
def test_settings_that_would_change_training_are_refused_while_on(path: str, key: str):
    def data(value: object) -> dict[str, Any]:
        tree: Any = {key: value}
        if path == "optimizer.params":
            return {"optimizer": {"type": "AdamW", "params": tree}}
        return {path: tree} if path else tree

    where = f"{path}.{key}" if path else key
    text = refusal(data(ON.get(key, {"enabled": True})))
    assert text.startswith(f"{where}: ") and "is not supported; " in text
    config = read(data(OFF.get(key, {"enabled": False})))
    assert any(note.startswith(f"{where}: ") and note.endswith("has no effect") for note in config.notes)
    assert read(data(None)).notes == ()
