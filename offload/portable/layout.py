"""Which planes go to which file of a checkpoint, and where. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..bytesize import PAGE_BYTES, GiB
from ..models.safetensors_file import FileLayout, TensorSpec, lay_out
from ..placement import Formats
from .manifest import WEIGHT, SavedParam, plane_elements, planes_of

SHARD_BYTES = 5 * GiB
"""A file is closed before it would become larger, unless one unit alone is, or there would be too many."""
SHARDS_MAX = 200
"""All are open at once."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, before it is written."""

    name: str
    layout: FileLayout


@dataclass(slots=True)
class FilePlan:
    """All files of a checkpoint."""

    files: list[PlannedFile] = field(default_factory=list)
    places: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Of each parameter and plane, and of each further tensor under ``("", name)``: number of the file, and offset."""

    @property
    def bytes_total(self) -> int:
        return sum(file.layout.size for file in self.files)


def plan_files(
    units: Sequence[Sequence[SavedParam]],
    formats: Formats,
    tensors: Mapping[str, TensorSpec],
    *,
    nonce: str,
    exclude_frozen: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> FilePlan:
    """Lays all out.

    Args:
        tensors: that are no parameters, by name.
        nonce: eight hexadecimal digits that no other saving to the same place has.
        exclude_frozen: leave out the weights of frozen parameters.
    """
    plan = FilePlan()
    wanted = [[param for param in unit if param.trainable or not exclude_frozen] for unit in units]
    for kind, of_unit in (
        ("weights", [[*_weights(unit)] for unit in wanted]),
        ("state", [[*_states(unit, formats)] for unit in wanted]),
        ("tensors", [[(("", name), spec) for name, spec in tensors.items()]]),
    ):
        total = sum(spec.num_bytes for unit in of_unit for _, spec in unit)
        aliases = {alias: param.name for unit in wanted for param in unit for alias in param.aliases}
        for number, shard in enumerate(_shards(of_unit, max(shard_bytes, total // SHARDS_MAX)), 1):
            specs = dict(shard)
            names = {spec.name for spec in specs.values()}
            here = {alias: name for alias, name in aliases.items() if kind == "weights" and name in names}
            layout = lay_out([*specs.values()], aliases=here, page_bytes=PAGE_BYTES)
            offset_of = dict(zip((spec.name for spec in layout.specs), layout.offsets, strict=True))
            for key, spec in specs.items():
                plan.places[key] = len(plan.files), offset_of[spec.name]
            plan.files.append(PlannedFile(f"{kind}-{nonce}-{number:05d}.safetensors", layout))
    return plan


_Keyed = tuple[tuple[str, str], TensorSpec]


def _weights(params: Iterable[SavedParam]) -> Iterator[_Keyed]:
    for param in params:
        yield (param.name, WEIGHT), TensorSpec(param.name, param.memory_shape, param.dtype)


def _states(params: Iterable[SavedParam], formats: Formats) -> Iterator[_Keyed]:
    for param in params:
        for plane, dtype in planes_of(formats, param).items():
            if plane != WEIGHT:
                shape = (
                    (plane_elements(plane, param.numel) // 2, 2) if plane == "scale" else param.memory_shape
                )
                yield (param.name, plane), TensorSpec(f"{param.name}.{plane}", shape, dtype)


def _shards(units: Iterable[list[_Keyed]], shard_bytes: int) -> Iterator[list[_Keyed]]:
    shard: list[_Keyed] = []
    filled = 0
    for unit in units:
        size = sum(spec.num_bytes for _, spec in unit)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard += unit
        filled += size
    if shard:
        yield shard
