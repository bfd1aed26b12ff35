"""The state formats in plain numpy, from their definition: tables and fractions instead of bit patterns.

Arithmetic is fp64 rounded once where the kernels round once, and elements are taken one block at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from offload.optim.coefficients import make_coefficients
from offload.optim.kernels import Segment

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]

BLOCK = 128
WORD, LONG = (1 << 32) - 1, (1 << 64) - 1

# What the codes stand for: values of y = x + bias. Sixteen (32) even steps per doubling, eight doublings.
M_BIAS, ROOT_BIAS = 16, 32
M_VALUES = np.array([2.0**e * (1 + k / 16) for e in range(4, 12) for k in range(16)] + [4096.0])
ROOT_VALUES = np.array([2.0**e * (1 + k / 32) for e in range(5, 13) for k in range(32)] + [8192.0])
M_SCALE, ROOT_SCALE = M_VALUES[127] - M_BIAS, ROOT_VALUES[255] - ROOT_BIAS


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & LONG
    return x ^ x >> 31


def noise_of(seed: int, step: int, element: int, key_element: int) -> int:
    """32 random bits of an element, with the keys of another (of its block's first, or its own)."""
    keys = mix(mix(mix(seed + 0x9E3779B97F4A7C15 & LONG) + step & LONG) + (key_element >> 32) & LONG)
    x = (element & WORD) ^ (keys & WORD)
    x = ((x ^ x >> 16) * 0x21F0AAAD + (keys >> 32)) & WORD
    x = (x ^ x >> 15) * 0xD35A2D97 & WORD
    return x ^ x >> 15


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a * b + c rounded once: the sum in fp64 rounded to odd, which keeps what rounding to fp32 needs to know."""
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.uint64) & 1) == 0
    inexact = np.isfinite(total) & (error != 0) & even
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, towards), total).astype(np.float32)


def canonical_bits(values: F32) -> U32:
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def to_bf16(value: np.float32, noise: int) -> int:
    """The neighbour below or above in magnitude, by the noise, as 16 bits."""
    bits = int(canonical_bits(np.float32([value]))[0])
    low, fraction = bits >> 16, bits & 0xFFFF
    up = fraction + noise >= 1 << 16 and low & 0x7FFF != 0x7F7F
    return low + up


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def code_of(y: np.float32, values: npt.NDArray[np.float64], noise_in_units: float) -> int:
    low = int(np.searchsorted(values, y, side="right")) - 1
    if low >= len(values) - 2:
        return len(values) - 2
    fraction = (float(y) - values[low]) / (values[low + 1] - values[low])
    return low + (fraction + noise_in_units >= 1)


@dataclass
class State:
    """One chunk in some format, as numpy arrays; bf16 as bit patterns."""

    weight: npt.NDArray[np.generic]
    residual: npt.NDArray[np.generic] | None
    exp_avg: npt.NDArray[np.generic]
    exp_avg_sq: npt.NDArray[np.generic]
    scale: F32 | None

    def copy(self) -> State:
        return State(
            *(None if a is None else a.copy() for a in (getattr(self, f.name) for f in fields(self)))
        )

    @property
    def format(self) -> str:
        return {4: "fp32", 2: "bf16", 1: "int8"}[self.exp_avg.itemsize]

    def master(self) -> F32:
        if self.residual is None:
            return self.weight.astype(np.float32)
        unit = 256 if self.residual.itemsize == 1 else 1
        bits = (self.weight.astype(np.int64) << 16) + self.residual.astype(np.int64) * unit
        return (bits & WORD).astype(np.uint32).view(np.float32)

    def set_master(self, at: slice, master: F32, noise: U32) -> None:
        if self.residual is None:
            self.weight[at] = master
            return
        bits = canonical_bits(master).astype(np.int64)
        unit = 256 if self.residual.itemsize == 1 else 1
        if unit == 256:
            bits = (bits + (noise & 0xFF)) // unit * unit
        high = (bits + 0x8000) >> 16
        self.weight[at] = high.astype(np.uint16)
        self.residual[at] = (bits - (high << 16)) // unit

    def moments(self) -> tuple[F32, F32]:
        if self.format == "fp32":
            return self.exp_avg.copy(), self.exp_avg_sq.copy()
        if self.format == "bf16":
            return from_bf16(self.exp_avg), from_bf16(self.exp_avg_sq)
        scales = np.repeat(self.scale.reshape(-1, 2), BLOCK, axis=0)[: len(self.exp_avg)]
        unit_m = scales[:, 0] / np.float32(M_SCALE)
        unit_root = scales[:, 1] / np.float32(ROOT_SCALE)
        x_m = np.sign(self.exp_avg) * (M_VALUES[np.abs(self.exp_avg.astype(int))] - M_BIAS)
        x_root = ROOT_VALUES[self.exp_avg_sq] - ROOT_BIAS
        root = (x_root * np.float64(unit_root)).astype(np.float32)
        return (x_m * np.float64(unit_m)).astype(np.float32), root * root

    def set_moments(self, at: slice, m: F32, v: F32, noise: U32) -> None:
        """Of an int8 state ``at`` lies in one block."""
        if self.format == "fp32":
            self.exp_avg[at], self.exp_avg_sq[at] = m, v
        elif self.format == "bf16":
            m16 = [to_bf16(value, int(n) >> 16) for value, n in zip(m, noise, strict=True)]
            v16 = [to_bf16(value, int(n) & 0xFFFF) for value, n in zip(v, noise, strict=True)]
            self.exp_avg[at] = m16
            kept = (m != 0) & (v != 0)
            self.exp_avg_sq[at] = np.where(kept, np.maximum(v16, 1), v16)
        else:
            self._set_codes(at, m, np.sqrt(v), noise)

    def _set_codes(self, at: slice, m: F32, root: F32, noise: U32) -> None:
        m_scale, root_scale = np.abs(m).max(), root.max()  # NaN wins
        m_scale = np.float32(0) if m_scale < 2.0**-100 else m_scale
        root_scale = np.float32(2.0**-49) if 0 < root_scale < 2.0**-49 else root_scale
        scales = [s if np.isfinite(s) else np.float32(np.nan) for s in (m_scale, root_scale)]
        pair = at.start // BLOCK * 2
        self.scale[pair : pair + 2] = scales
        m_codes, root_codes = np.zeros(len(m), np.int8), np.zeros(len(m), np.uint8)
        if scales[0] > 0:
            y = fma(np.abs(m), np.float32(M_SCALE) / scales[0], M_BIAS)
            for i, n in enumerate(noise):
                m_codes[i] = np.sign(m[i]) * code_of(y[i], M_VALUES, (int(n) >> 13) / (1 << 19))
        if scales[1] > 0:
            y = fma(root, np.float32(ROOT_SCALE) / scales[1], ROOT_BIAS)
            for i, n in enumerate(noise):
                code = code_of(y[i], ROOT_VALUES, (int(n) & 0x3FFFF) / (1 << 18))
                root_codes[i] = max(code, 1) if root[i] > 0 else code
        self.exp_avg[at], self.exp_avg_sq[at] = m_codes, root_codes


def adam(
    state: State, segments: list[Segment], grad: F32, *, adamw_mode: bool, grad_scale: float, seed: int
) -> None:
    """One step in place, by the definition."""
    with np.errstate(all="ignore"):
        for segment in segments:
            for begin in range(segment.begin, segment.end, BLOCK):
                end = min(begin + BLOCK, segment.end)
                _step(state, segment, slice(begin, end), grad[begin:end], adamw_mode, grad_scale, seed)


def _step(
    state: State,
    segment: Segment,
    at: slice,
    grad: F32,
    adamw_mode: bool,
    grad_scale: float,
    seed: int,
) -> None:
    c = make_coefficients(segment, adamw_mode)
    f = {name: np.float32(value) for name, value in c._asdict().items()}
    elements = [segment.element + i - segment.begin for i in range(at.start, at.stop)]
    int8 = state.format == "int8"
    noise = np.array(
        [noise_of(seed, segment.step, e, elements[0] if int8 else e) for e in elements], np.uint32
    )
    p = state.master()[at]
    m_old, v_old = (plane[at] for plane in state.moments())
    g = grad * np.float32(grad_scale)
    if c.decay_into_grad != 0:
        g = fma(p, f["decay_into_grad"], g)
    p = p * f["keep"]
    m = fma(f["lerp_weight"], g - m_old, g if c.lerp_from_grad else m_old)
    v = fma(f["one_minus_beta2"] * g, g, v_old * f["beta2"])
    step_size, denominator = f["step_size"], np.sqrt(v) / f["bias2_sqrt"] + f["eps"]
    if state.format != "fp32":  # the division is folded into both ends of the fraction
        bias1, bias2_sqrt = 1 - segment.beta1**segment.step, math.sqrt(1 - segment.beta2**segment.step)
        step_size = np.float32(segment.lr / bias1 * bias2_sqrt)
        denominator = np.sqrt(v) + np.float32(segment.eps * bias2_sqrt)
    state.set_moments(at, m, v, noise)
    state.set_master(at, p - step_size * m / denominator, noise)
