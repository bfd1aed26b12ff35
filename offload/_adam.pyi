from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

_Array = npt.NDArray[Any]

SQUARE_BLOCK: Final[int]
STATE_BLOCK: Final[int]

_Segment = tuple[int, int, int, int, float, float, float, float, float]

def isas() -> list[str]: ...
def adam(
    weight: _Array,
    residual: _Array | None,
    exp_avg: _Array,
    exp_avg_sq: _Array,
    scale: _Array | None,
    grad: _Array,
    segments: Sequence[_Segment],
    *,
    adamw_mode: bool,
    grad_scale: float,
    seed: int,
    threads: int,
    isa: str,
) -> None: ...
def lion(
    weight: _Array,
    residual: _Array | None,
    moment: _Array | None,
    grad: _Array,
    segments: Sequence[tuple[Any, ...]],
    *,
    grad_scale: float,
    seed: int,
    threads: int,
    isa: str,
) -> None: ...
def adagrad(
    weight: _Array,
    residual: _Array | None,
    moment: _Array | None,
    grad: _Array,
    segments: Sequence[tuple[Any, ...]],
    *,
    grad_scale: float,
    seed: int,
    threads: int,
    isa: str,
) -> None: ...
def sgd(
    weight: _Array,
    residual: _Array | None,
    moment: _Array | None,
    grad: _Array,
    segments: Sequence[tuple[Any, ...]],
    *,
    grad_scale: float,
    seed: int,
    threads: int,
    isa: str,
) -> None: ...
def encode_moments(
    exp_avg: _Array,
    exp_avg_sq: _Array,
    to_exp_avg: _Array,
    to_exp_avg_sq: _Array,
    to_scale: _Array | None,
    *,
    threads: int,
    isa: str,
) -> None: ...
def decode_moments(
    from_exp_avg: _Array,
    from_exp_avg_sq: _Array,
    from_scale: _Array | None,
    exp_avg: _Array,
    exp_avg_sq: _Array,
    *,
    threads: int,
    isa: str,
) -> None: ...
def block_square_sums(values: _Array, sums: _Array, *, threads: int, isa: str) -> None: ...
def split_master(master: _Array, weight: _Array, residual: _Array, *, threads: int, isa: str) -> None: ...
def join_master(weight: _Array, residual: _Array, master: _Array, *, threads: int, isa: str) -> None: ...
def assign_weight(weight: _Array, residual: _Array, fresh: _Array, *, threads: int, isa: str) -> None: ...
def crc32c(data: _Array, cuts: _Array, sums: _Array, *, threads: int, way: str) -> None: ...
def crc32c_ways() -> list[str]: ...
