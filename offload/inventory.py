"""What a model consists of, as plain numbers: parameters, units, and where each lies in a plane.

Pure: names and shapes in, layout out. `offload plan` runs it on a list of shapes, the engine on the
parameters of a live module, and both get the same units.

Note [Layout of a weight plane]
A unit's trainable parameters come first, in registration order, each on a boundary of PARAM_ALIGNMENT_BYTES.
BLAS picks its code, and so its rounding, by alignment: without this a tier would differ from another in the
last bit. The trainable region is padded to ELEMENTS_ALIGNMENT elements, so that planes of 2 and 4 bytes per
element are whole pages; frozen parameters, which have no state, follow it. State planes are indexed by the
element number in the trainable region, padding included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .bytesize import PAGE_BYTES, align_up

PARAM_ALIGNMENT_BYTES = 256
"""A block of 8-bit moments (`placement.STATE_BLOCK` elements) of bf16 weights: none has elements of two parameters,
whose moments may differ by orders of magnitude. BLAS would need 64. The same for every format, so that layouts do
not depend on it."""
ELEMENTS_ALIGNMENT = 2048
"""2-byte elements fill a page at this count, and it is whole blocks of 8-bit moments: where chunks are cut."""

BLOCK_SHARE_MAX = 0.25
"""A list element above this share of the model is looked into: its own lists make better units."""

REST_SHARE = 1 / 8
"""In a model without block lists, units are filled up to this share of its bytes."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One stored parameter: a tied weight appears once, under its first name."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element of the copy that is computed with."""
    trainable: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """A parameter and its byte offset in its unit's weight plane."""

    info: ParamInfo
    offset: int

    @property
    def begin(self) -> int:
        """First element in the unit's state planes (of a trainable parameter)."""
        return self.offset // self.info.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.info.numel


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Parameters that are fetched, computed and released together. See Note [Layout of a weight plane]."""

    name: str
    params: tuple[PlacedParam, ...]
    elements: int
    """Elements of the trainable region, padding included: the length of every state plane."""
    weight_bytes: int
    """Bytes of the weight plane: trainable region, then frozen parameters, padded to a page."""

    @property
    def trainable(self) -> tuple[PlacedParam, ...]:
        return tuple(param for param in self.params if param.info.trainable)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All units of a model, in the order in which their first parameter was registered."""

    units: tuple[UnitLayout, ...]
    weight_itemsize: int
    """Bytes per element of a trainable weight: 2 for bf16, 4 for fp32."""
    activation_bytes: int = 0
    """Upper estimate of what the computation itself keeps in memory; 0 where nobody has told."""
    library_bytes: int = 0
    """Upper estimate of what libraries take in training beside that; 0 where nobody has told."""

    @property
    def parameters(self) -> int:
        return sum(param.info.numel for unit in self.units for param in unit.params)

    @property
    def trainable_parameters(self) -> int:
        return sum(param.info.numel for unit in self.units for param in unit.trainable)

    @property
    def matrix_elements_max(self) -> int:
        """Elements of the largest parameter that can be multiplied with; 0 where there is none."""
        params = (param.info for unit in self.units for param in unit.params)
        return max((info.numel for info in params if len(info.shape) >= 2), default=0)

    @property
    def elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)


def build_inventory(
    params: Iterable[ParamInfo], *, weight_itemsize: int, activation_bytes: int = 0
) -> Inventory:
    """Groups parameters into units and lays each unit out."""
    units = tuple(_lay_out(group, weight_itemsize) for group in group_into_units(list(params)))
    return Inventory(units, weight_itemsize, activation_bytes)


def group_into_units(params: Sequence[ParamInfo]) -> list[list[ParamInfo]]:
    """Cuts a model into units, by names: ``layers.7.attn.weight`` belongs to element 7 of the list ``layers``.

    Elements of module lists become units of their own, an element above BLOCK_SHARE_MAX of the model is
    cut by the lists inside it. What lies in no list is grouped in registration order, up to the size of
    the largest block.
    """
    total = sum(param.nbytes for param in params)
    tagged: list[tuple[str | None, ParamInfo]] = []  # block name or None, in registration order
    _tag_blocks(params, depth=1, total=total, tagged=tagged)
    order = {param.name: index for index, param in enumerate(params)}
    tagged.sort(key=lambda item: order[item[1].name])

    blocks: dict[str, list[ParamInfo]] = {}
    for block, param in tagged:
        if block is not None:
            blocks.setdefault(block, []).append(param)
    largest_block = max((sum(p.nbytes for p in block) for block in blocks.values()), default=0)
    rest_bytes_max = largest_block or int(total * REST_SHARE)

    units: list[list[ParamInfo]] = []
    opened: set[str] = set()
    rest: list[ParamInfo] = []  # the run of parameters outside blocks that is being filled
    for block, param in tagged:
        if block is None:
            if rest and sum(p.nbytes for p in rest) + param.nbytes > rest_bytes_max:
                rest = []
            if not rest:
                units.append(rest)
            rest.append(param)
        elif block not in opened:
            opened.add(block)
            units.append(blocks[block])
            rest = []
    return units


def _tag_blocks(
    params: Sequence[ParamInfo], *, depth: int, total: int, tagged: list[tuple[str | None, ParamInfo]]
) -> None:
    """Appends (block name or None, parameter) for each; ``depth`` is the nesting of lists looked at."""
    lists: dict[str, dict[str, list[ParamInfo]]] = {}
    for param in params:
        key = _list_element(param.name, depth)
        if key is None:
            tagged.append((None, param))
        else:
            lists.setdefault(key[0], {}).setdefault(key[1], []).append(param)
    for prefix, elements in lists.items():
        for element, members in elements.items():
            nested = {key for p in members if (key := _list_element(p.name, depth + 1)) is not None}
            if len(nested) >= 2 and sum(p.nbytes for p in members) > total * BLOCK_SHARE_MAX:
                _tag_blocks(members, depth=depth + 1, total=total, tagged=tagged)
            else:
                tagged.extend((f"{prefix}.{element}", param) for param in members)


def _list_element(name: str, depth: int) -> tuple[str, str] | None:
    """('model.layers', '7') for the first, second, ... list element in a parameter's path, or None.

    The last component names the parameter itself: the members of a ParameterList are no blocks.
    """
    path = name.split(".")[:-1]
    positions = [index for index, part in enumerate(path) if part.isdecimal()]
    if len(positions) < depth:
        return None
    at = positions[depth - 1]
    return ".".join(path[:at]), path[at]


def _lay_out(group: Sequence[ParamInfo], weight_itemsize: int) -> UnitLayout:
    placed: list[PlacedParam] = []
    offset = 0
    for param in (p for p in group if p.trainable):
        if param.itemsize != weight_itemsize:
            raise AssertionError(
                f"{param.name}: {param.itemsize} bytes per element, {weight_itemsize} expected"
            )
        placed.append(PlacedParam(param, offset))
        offset = align_up(offset + param.nbytes, PARAM_ALIGNMENT_BYTES)
    elements = align_up(offset // weight_itemsize, ELEMENTS_ALIGNMENT)
    offset = elements * weight_itemsize
    for param in (p for p in group if not p.trainable):
        placed.append(PlacedParam(param, offset))
        offset = align_up(offset + param.nbytes, PARAM_ALIGNMENT_BYTES)
    return UnitLayout(_common_name(group), tuple(placed), elements, align_up(offset, PAGE_BYTES))


def _common_name(group: Sequence[ParamInfo]) -> str:
    """The longest dotted prefix that all parameters share, or the first parameter's module."""
    paths = [param.name.split(".")[:-1] for param in group]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or ".".join(paths[0]) or group[0].name
