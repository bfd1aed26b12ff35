"""The CPU kernel as an ordinary ``torch.optim.Optimizer``, for parameters that are in host memory anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final

import torch

from ..errors import CheckpointError, ConfigError
from ..placement import StateFormat, WeightFormat
from .adam import Adam
from .moments import ADAM_MOMENTS, decoded, encode
from .segments import Span
from .shard import PlaneSpec

__all__ = ["CPUAdam"]

_WEIGHT_FORMATS: Final[dict[torch.dtype, WeightFormat]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class CPUAdam(torch.optim.Optimizer):
    """Adam and AdamW over fp32 or bf16 parameters on the CPU: one fused pass over memory per parameter.

    fp32 parameters with ``state_format="fp32"`` get the bits of ``torch.optim.AdamW(fused=True)``, and the two
    load each other's ``state_dict()``. Of bf16 parameters the state holds a residual: what is trained is an fp32
    master (with "int8" one of 16 bits of mantissa), of which the parameter is the rounded copy.

    State of parameter ``i``: ``step`` (0-d fp32), ``exp_avg`` and ``exp_avg_sq`` in the parameter's shape,
    ``residual`` beside bf16, and with "int8" ``scale`` (flat, two values per block of 128 elements).

    Args:
        params: parameters or groups of them, as torch takes them.
        lr, betas, eps, weight_decay: may differ between groups, and change between steps.
        adamw_mode: decoupled weight decay; False adds ``weight_decay`` x parameter to the gradient.
        state_format: how the moments are stored: "fp32", "bf16" or "int8" (bf16 parameters only). See
            :class:`offload.optim.AdamPlanes`.
        threads: of the kernel; None for this rank's share of the cores.
        seed: of the stochastic rounding of "bf16" and "int8".

    Raises:
        ConfigError: a hyper-parameter is out of range, or a parameter is not on the CPU, or neither fp32 nor bf16.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        adamw_mode: bool = True,
        state_format: StateFormat = "fp32",
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        self._adam_of = {
            (dtype, decoupled): Adam(
                weight_format=weight_format,
                state_format=state_format,
                adamw_mode=decoupled,
                threads=threads,
                seed=seed,
            )
            for dtype, weight_format in _WEIGHT_FORMATS.items()
            for decoupled in (True, False)
            if not (state_format == "int8" and weight_format == "fp32")
        }
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "decoupled_weight_decay": adamw_mode})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adam_of": self._adam_of}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, after a check of everything that a step would fail at."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Returns what ``closure`` returns.

        Raises:
            ConfigError: a gradient is sparse; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        element, updates = 0, []
        for group in self.param_groups:
            self._check(group)
            for param in group["params"]:
                if param.grad is not None:
                    if param.grad.is_sparse:
                        raise ConfigError(
                            "CPUAdam takes dense gradients; build the embedding with sparse=False"
                        )
                    updates.append((param, param.grad, group, element))
                element += param.numel()
        for param, grad, group, first in updates:
            self._update(param, grad, group, first)
        return loss

    def _update(
        self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], element: int
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            for spec in self._specs(param):
                state[spec.name] = _empty(param, spec).zero_()
        state["step"] += 1
        flat = param.detach().contiguous().view(-1)
        planes = {name: plane.view(-1) for name, plane in state.items() if name != "step"}
        adam = self._adam_of[param.dtype, group["decoupled_weight_decay"]]
        segment = adam.segment(Span(0, param.numel(), int(state["step"]), element=element), group)
        adam.update({"weight": flat, **planes}, [segment], grad.contiguous().view(-1))
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))
        torch.autograd.graph.increment_version(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, in any state format, or what torch's Adam or AdamW gave.

        Raises:
            ValueError: the groups have other sizes.
            CheckpointError: a plane is missing or has another shape, or the state is that of ``amsgrad``; nothing has
                been changed then.
        """
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        converted = {
            param: self._converted(param, state_dict["state"][index], f"parameter {index}")
            for index, param in zip(saved_ids, params, strict=False)
            if index in state_dict["state"]
        }
        # torch would cast every plane to the type of its parameter.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(converted)

    def _converted(self, param: torch.Tensor, saved: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
        """Saved state in the format of this optimizer."""
        has_scale = "exp_avg" in saved and saved["exp_avg"].dtype is torch.int8
        planes = (*ADAM_MOMENTS, *(["scale"] if has_scale else []))
        for plane in ("step", *planes):
            if plane not in saved:
                raise CheckpointError(f"{name}: its state has no {plane}")
        if "max_exp_avg_sq" in saved:
            raise CheckpointError(f"{name}: its state is that of amsgrad, which CPUAdam does not have")
        for plane in ADAM_MOMENTS:
            if saved[plane].shape != param.shape:
                shapes = f"{tuple(param.shape)} expected, got {tuple(saved[plane].shape)}"
                raise CheckpointError(f"{name}: {plane} of shape {shapes}")
        fresh = {spec.name: _empty(param, spec) for spec in self._specs(param)}
        if fresh["exp_avg"].dtype is saved["exp_avg"].dtype:
            for plane in {*ADAM_MOMENTS, "scale"} & fresh.keys():
                fresh[plane].copy_(saved[plane])
        else:
            encode(decoded({name: saved[name].cpu() for name in planes}), fresh)
        if "residual" in fresh:
            _convert_residual(saved.get("residual"), fresh["residual"])
        return {"step": torch.as_tensor(saved["step"], dtype=torch.float32).detach().clone(), **fresh}

    def _specs(self, param: torch.Tensor) -> tuple[PlaneSpec, ...]:
        return self._adam_of[param.dtype, True].state_specs(param.numel())

    def _check(self, group: Mapping[str, Any]) -> None:
        for name, value in (
            ("lr", group["lr"]),
            ("eps", group["eps"]),
            ("weight_decay", group["weight_decay"]),
        ):
            if not float(value) >= 0:
                raise ConfigError(f"CPUAdam: {name} must be at least 0, got {value}")
        for beta in group["betas"]:
            if not 0 <= float(beta) < 1:
                raise ConfigError(f"CPUAdam: a beta must be in [0, 1), got {beta}")
        for setting in ("amsgrad", "maximize"):
            if group.get(setting):
                raise ConfigError(f"CPUAdam has no {setting}; leave it out")
        for param in group["params"]:
            if param.device.type != "cpu":
                raise ConfigError(f"CPUAdam updates parameters on the CPU, and one is on {param.device}")
            if (param.dtype, True) not in self._adam_of:
                known = " or ".join(str(dtype) for dtype, decoupled in self._adam_of if decoupled)
                raise ConfigError(f"CPUAdam updates {known} with this state_format, and one is {param.dtype}")


def _empty(param: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """A plane, in the shape of the parameter where it has one value per element."""
    return torch.empty(spec.numel if spec.name == "scale" else param.shape, dtype=spec.dtype)


def _convert_residual(saved: torch.Tensor | None, residual: torch.Tensor) -> None:
    """16 bits into 8 are cut off, 8 into 16 fit; torch's state has none: the weight is the master."""
    if saved is None:
        residual.zero_()
    elif saved.dtype is residual.dtype:
        residual.copy_(saved)
    elif residual.dtype is torch.int8:
        residual.copy_(saved >> 8)
    else:
        residual.copy_(saved.to(torch.int16) << 8)
