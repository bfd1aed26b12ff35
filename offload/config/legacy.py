"""Old spellings and common wrong places, brought to the form that `schema` declares.

Each move leaves a note. Where the old and the new form are both given and differ, that is a problem: nothing
is chosen silently. Forms whose meaning cannot be known for sure are not moved but refused, with the right
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .kinds import Switch, is_auto
from .report import Report, UnfitError, join, show

_Tree = dict[str, Any]
_ZERO: Final = "zero_optimization"
_PARAM: Final = "zero_optimization.offload_param"
_OPTIMIZER: Final = "zero_optimization.offload_optimizer"

# (block, old name, new name)
_RENAMED: Final = (
    ("", "bfloat16", "bf16"),
    (_ZERO, "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    (_ZERO, "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    (_ZERO, "prefetch_bucket_size", "stage3_prefetch_bucket_size"),
    (_ZERO, "param_persistence_threshold", "stage3_param_persistence_threshold"),
    (_ZERO, "model_persistence_threshold", "stage3_model_persistence_threshold"),
    (_ZERO, "max_live_parameters", "stage3_max_live_parameters"),
    (_ZERO, "max_reuse_distance", "stage3_max_reuse_distance"),
    (_ZERO, "module_granularity_threshold", "stage3_module_granularity_threshold"),
    (_ZERO, "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
    ("aio", "intra_op_parallelism", "thread_count"),
    ("aio", "num_threads", "thread_count"),
    ("optimizer.params", "adamw_mode", "adam_w_mode"),
)

# old switch -> the block it stands for
_CPU_OFFLOAD: Final = (
    ("cpu_offload", "offload_optimizer"),
    ("cpu_offload_param", "offload_param"),
    ("cpu_offload_params", "offload_param"),
)

_ACCELERATE: Final = "is a setting of Accelerate; write "

# what people write -> what to write instead, wherever it stands
MISPLACED: Final = {
    "max_grad_norm": 'DeepSpeed ignores it, so gradients are not clipped; write "gradient_clipping"',
    "zero_stage": _ACCELERATE + "zero_optimization.stage",
    "offload_optimizer_device": _ACCELERATE + "zero_optimization.offload_optimizer.device",
    "offload_param_device": _ACCELERATE + "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": _ACCELERATE + "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": _ACCELERATE + "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": _ACCELERATE + "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero3_init_flag": "is a setting of Accelerate; build the model inside offload.init instead",
    "mixed_precision": 'is a setting of Accelerate; write "bf16": {"enabled": true} or the same with fp16',
}

_OPTIMIZER_NAMES: Final = {
    "adam": "Adam",
    "adamw": "AdamW",
    "cpuadam": "Adam",
    "fusedadam": "Adam",
    "deepspeedcpuadam": "Adam",
    "torch.optim.adam": "Adam",
    "torch.optim.adamw": "AdamW",
    "lion": "Lion",
    "fusedlion": "Lion",
    "deepspeedcpulion": "Lion",
    "adagrad": "Adagrad",
    "deepspeedcpuadagrad": "Adagrad",
    "torch.optim.adagrad": "Adagrad",
    "sgd": "SGD",
    "torch.optim.sgd": "SGD",
}


def modernise(data: _Tree, report: Report) -> _Tree:
    """``data`` in today's spelling. ``data`` itself is not changed."""
    tree = _copy_blocks(data)
    tree.pop("$schema", None)  # tells an editor where the schema is
    _read_switches_as_blocks(tree, report)
    _unnest(tree, report)
    _move_aio(tree, report)
    _expand_cpu_offload(tree, report)
    for path, old, new in _RENAMED:
        _rename(tree, path, old, new, report)
    _name_optimizer(tree, report)
    _cap_steps_per_print(tree, report)
    return tree


def block_at(tree: _Tree, path: str) -> _Tree | None:
    """The block at ``path``, where there is one."""
    block: object = tree
    for key in path.split(".") if path else ():
        block = block.get(key) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else None


def _copy_blocks(data: _Tree, depth: int = 4) -> _Tree:
    """Copies as deep as this file writes."""
    return {
        key: _copy_blocks(value, depth - 1) if isinstance(value, dict) and depth else value
        for key, value in data.items()
    }


def _switch(value: object, path: str, report: Report) -> bool | None:
    """``value`` as a boolean; None where it is absent, "auto", or a problem (then reported)."""
    if value is None or is_auto(value):
        return None
    try:
        return bool(Switch().read(value, path, report))
    except UnfitError as error:
        report.problem(path, str(error))
        return None


def _read_switches_as_blocks(tree: _Tree, report: Report) -> None:
    """``"bf16": true`` for a block with ``enabled``, and its like."""
    forms: tuple[tuple[str, str, Callable[[bool], _Tree]], ...] = (
        ("", "fp16", lambda on: {"enabled": on}),
        ("", "bf16", lambda on: {"enabled": on}),
        ("", "bfloat16", lambda on: {"enabled": on}),
        ("", _ZERO, lambda on: {"stage": 1 if on else 0}),
        (_ZERO, "offload_optimizer", lambda on: {"device": "cpu" if on else "none"}),
        (_ZERO, "offload_param", lambda on: {"device": "cpu" if on else "none"}),
    )
    for path, key, form in forms:
        parent = block_at(tree, path)
        if parent is not None and isinstance(parent.get(key), bool):
            old, parent[key] = parent[key], form(parent[key])
            report.note(join(path, key), f"{show(old)} is an old form; read as {show(parent[key])}")


def _unnest(tree: _Tree, report: Report) -> None:
    """``"offload_optimizer": {"offload_optimizer": {...}}``, and the same for offload_param."""
    zero = block_at(tree, _ZERO)
    for key in ("offload_optimizer", "offload_param"):
        outer = block_at(zero or {}, key)
        if outer is not None and isinstance(outer.get(key), dict):
            where = join(join(_ZERO, key), key)
            report.note(where, "stands inside a block of the same name; read as one block")
            _merge(outer, outer.pop(key), join(_ZERO, key), where, report)


def _move_aio(tree: _Tree, report: Report) -> None:
    """``aio`` inside ``zero_optimization``, where widely copied texts put it."""
    zero = block_at(tree, _ZERO)
    if zero is None or zero.get("aio") is None:
        return
    inner, where = zero.pop("aio"), f"{_ZERO}.aio"
    if not isinstance(inner, dict) or not isinstance(tree.get("aio", {}), dict):
        report.problem(where, 'belongs at the top level, as a block; write "aio": { ... } there')
        return
    report.note(where, "belongs at the top level; read as if it stood there")
    _merge(tree.setdefault("aio", {}), inner, "aio", where, report)


def _merge(target: _Tree, source: _Tree, target_path: str, source_path: str, report: Report) -> None:
    for key, value in source.items():
        if target.get(key, value) != value and target[key] is not None:
            shown = show(key)[1:-1]
            report.problem(
                f"{source_path}.{shown}",
                f"{show(value)} contradicts {target_path}.{shown}, which is {show(target[key])}; keep one",
            )
        else:
            target[key] = value


def _rename(tree: _Tree, path: str, old: str, new: str, report: Report) -> None:
    block = block_at(tree, path)
    if block is None or old not in block:
        return
    value = block.pop(old)
    if value is None:
        return
    where = join(path, old)
    if block.get(new) is not None and block[new] != value:
        report.problem(
            where,
            f"{show(value)} contradicts {join(path, new)}, which is {show(block[new])}; keep the latter",
        )
        return
    block[new] = value
    report.note(where, f"is an old or other name; read as {join(path, new)}")


def _expand_cpu_offload(tree: _Tree, report: Report) -> None:
    """The switches from before ``offload_optimizer`` and ``offload_param`` existed."""
    zero = block_at(tree, _ZERO)
    if zero is None:
        return
    pin_path = f"{_ZERO}.cpu_offload_use_pin_memory"
    pin = _switch(zero.pop("cpu_offload_use_pin_memory", None), pin_path, report)
    expanded = []
    for old, new in _CPU_OFFLOAD:
        where, target_path = join(_ZERO, old), join(_ZERO, new)
        is_on = _switch(zero.pop(old, None), where, report)
        if is_on is None:
            continue
        block = zero.get(new) if zero.get(new) is not None else {}
        if not isinstance(block, dict):
            continue  # the reader refuses it
        device = block.get("device")
        wanted = "cpu" if is_on else "none"
        if device is not None and device != wanted:
            report.problem(
                where,
                f"{show(is_on)} contradicts {target_path}.device, which is {show(device)}; keep the latter",
            )
            continue
        zero[new] = {**block, "device": wanted}
        report.note(where, f'is an old form; read as {target_path}.device "{wanted}"')
        expanded.append(new)
    if pin is not None and not expanded:
        report.note(pin_path, "has no effect without cpu_offload; write pin_memory in the offload blocks")
    for new in dict.fromkeys(expanded if pin is not None else ()):
        if zero[new].get("pin_memory", pin) != pin:
            report.problem(pin_path, f"{show(pin)} contradicts {_ZERO}.{new}.pin_memory; keep the latter")
        zero[new]["pin_memory"] = pin
        report.note(pin_path, f"is an old form; read as {_ZERO}.{new}.pin_memory")


def _name_optimizer(tree: _Tree, report: Report) -> None:
    """DeepSpeed's names for one rule, and its rule that "Adam" means AdamW."""
    optimizer = block_at(tree, "optimizer")
    if optimizer is None or not isinstance(optimizer.get("type"), str):
        return
    written = optimizer["type"]
    name = _OPTIMIZER_NAMES.get(written.strip().lower().replace("_", ""))
    if name is None:
        if "$" not in written:
            known = ", ".join(dict.fromkeys(_OPTIMIZER_NAMES.values()))
            report.problem("optimizer.type", f"{show(written)} is not available; write one of {known}")
            optimizer["type"] = "AdamW"
        return
    params = block_at(optimizer, "params") or {}
    where = "optimizer.params.adam_w_mode"
    adam_w_mode = _switch(params.get("adam_w_mode"), where, Report())  # the reader tells its problems
    if name == "AdamW" and adam_w_mode is False:
        report.problem(where, 'false contradicts the type "AdamW"; write the type "Adam", or leave it out')
    elif name == "Adam" and adam_w_mode is not False:
        name = "AdamW"
        report.note(
            "optimizer.type",
            f"{show(written)} means AdamW, as in DeepSpeed; params.adam_w_mode false means Adam",
        )
    elif name.lower() != written.strip().lower():
        report.note("optimizer.type", f"{show(written)} is read as {name}")
    optimizer["type"] = name


def _cap_steps_per_print(tree: _Tree, report: Report) -> None:
    """Accelerate writes an infinite ``steps_per_print`` for "never"."""
    if tree.get("steps_per_print") in (float("inf"), "inf"):
        tree["steps_per_print"] = 0
        report.note("steps_per_print", "infinite means never; read as 0")
