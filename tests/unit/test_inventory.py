"""Grouping and layout, against the rules written out by hand."""

import itertools

from offload.inventory import (
    ELEMENTS_ALIGNMENT,
    PARAM_ALIGNMENT_BYTES,
    ParamInfo,
    build_inventory,
    group_into_units,
)


def params(*names_and_sizes, trainable=True):
    return [ParamInfo(name, (size,), 2, trainable) for name, size in names_and_sizes]


def names(units):
    return [[p.name for p in unit] for unit in units]


def test_blocks_are_list_elements_and_the_rest_is_grouped_by_size():
    model = params(
        ("embed.weight", 100), ("pos.weight", 10),
        ("h.0.a.weight", 50), ("h.0.b.weight", 60), ("h.1.a.weight", 50), ("h.1.b.weight", 60),
        ("norm.weight", 5), ("head.weight", 100),
    )  # fmt: skip
    assert names(group_into_units(model)) == [
        ["embed.weight", "pos.weight"],
        ["h.0.a.weight", "h.0.b.weight"],
        ["h.1.a.weight", "h.1.b.weight"],
        ["norm.weight", "head.weight"],
    ]


def test_large_stages_are_cut_by_their_own_lists():
    model = [
        ParamInfo(f"stages.{s}.blocks.{b}.w.weight", (100,), 2, True) for s in range(2) for b in range(3)
    ] + params(("stages.0.down.weight", 10))
    assert [unit[0].name for unit in group_into_units(model)] == [
        "stages.0.blocks.0.w.weight", "stages.0.blocks.1.w.weight", "stages.0.blocks.2.w.weight",
        "stages.1.blocks.0.w.weight", "stages.1.blocks.1.w.weight", "stages.1.blocks.2.w.weight",
        "stages.0.down.weight",
    ]  # fmt: skip


def test_experts_stay_inside_their_block():
    model = [
        ParamInfo(f"layers.{n}.experts.{e}.w.weight", (10,), 2, True) for n in range(8) for e in range(4)
    ]
    assert [len(unit) for unit in group_into_units(model)] == [4] * 8


def test_parameter_lists_are_no_blocks():
    assert len(group_into_units(params(("items.0", 10), ("items.1", 10), ("w.weight", 100)))) >= 1
    assert all(
        "items" in p.name or "w" in p.name for u in group_into_units(params(("items.0", 1))) for p in u
    )


def test_model_without_lists_is_cut_by_size():
    model = params(*[(f"fc{n}.weight", 100) for n in range(16)])
    assert [len(unit) for unit in group_into_units(model)] == [2] * 8


def test_every_parameter_is_placed_once_without_overlap():
    model = params(("a.x", 17), ("a.y", 31), ("l.0.w.x", 1), ("l.1.w.x", 5000)) + params(
        ("a.frozen", 77), trainable=False
    )
    inventory = build_inventory(model, weight_itemsize=2)
    assert sorted(p.info.name for u in inventory.units for p in u.params) == sorted(p.name for p in model)
    for unit in inventory.units:
        spans = sorted((p.offset, p.offset + p.info.nbytes) for p in unit.params)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(offset % PARAM_ALIGNMENT_BYTES == 0 for offset, _ in spans)
        assert unit.weight_bytes % 4096 == 0 and spans[-1][1] <= unit.weight_bytes
        assert unit.elements % ELEMENTS_ALIGNMENT == 0
        assert all(p.end <= unit.elements for p in unit.trainable)
        frozen = [p for p in unit.params if not p.info.trainable]
        assert all(p.offset >= unit.elements * 2 for p in frozen)
