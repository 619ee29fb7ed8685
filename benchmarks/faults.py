"""Faults of the low-precision path, put in on purpose: what a stale scale, a saturated cast or an outlier channel does.

A fault is a change of one operand right before its cast, for one unit and some steps: whatever the recipe, the sick
unit's healthy kernels then work on it. bf16 never sees it. The library knows nothing of this: a `FaultyBackend` wraps
a recipe's backend, and `install` puts one in the place of each unit's healthy one.

Every kind comes in three strengths, low, middle and high; which of them harm is measured, not assumed.

Legend: M = rows (batch * sequence), K = in_features, N = out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnmr_lightning import backends
from gnmr_lightning.backends import Backend
from gnmr_lightning.linear import RecoverableLinear
from gnmr_lightning.units import RecoverableUnit

Operand = Literal["input", "weight", "grad_output"]
STRENGTHS = ("low", "middle", "high")
_LEVELS = 127  # of the format that the coarse kinds imitate


def _coarse(operand: Tensor, factor: float) -> Tensor:
    """Rounded to the nearest step of a scale that is `factor` times too large."""
    step = (operand.abs().amax().float() * (factor / _LEVELS)).clamp(min=1e-30)
    return (torch.round(operand / step) * step).to(operand.dtype)


def _noisy(operand: Tensor, factor: float) -> Tensor:
    """As `_coarse`, with stochastic rounding: right on average, and drowned in noise."""
    step = (operand.abs().amax().float() * (factor / _LEVELS)).clamp(min=1e-30)
    return (torch.floor(operand / step + torch.rand_like(operand, dtype=torch.float32)) * step).to(operand.dtype)


def _saturated(operand: Tensor, factor: float) -> Tensor:
    """Clamped at a `factor`-th of its largest value, as by a stale scale."""
    limit = operand.abs().amax() / factor
    return operand.clamp(-limit, limit)


def _flushed(operand: Tensor, factor: float) -> Tensor:
    """Values below a `factor`-th of the largest become zero, as where the format underflows."""
    return operand.masked_fill(operand.abs() < operand.abs().amax() / factor, 0.0)


def _nan(operand: Tensor, factor: float) -> Tensor:
    """One value is not finite: `factor` itself."""
    operand = operand.clone()
    operand[len(operand) // 2, operand.shape[1] // 2] = factor
    return operand


@dataclass(frozen=True)
class Kind:
    """One kind of fault: which operand it changes, how, and the factors of its three strengths."""

    operand: Operand
    change: Callable[[Tensor, float], Tensor] | None
    """None for an outlier channel, which changes input and weight together and not their product."""
    factors: tuple[float, float, float]


KINDS = {
    "grad_noise": Kind("grad_output", _noisy, (20, 60, 300)),
    "grad_coarse": Kind("grad_output", _coarse, (20, 60, 300)),
    "grad_saturated": Kind("grad_output", _saturated, (8, 32, 128)),
    "grad_underflow": Kind("grad_output", _flushed, (64, 16, 4)),
    "input_coarse": Kind("input", _coarse, (20, 60, 200)),
    "input_saturated": Kind("input", _saturated, (4, 8, 32)),
    "weight_saturated": Kind("weight", _saturated, (2, 4, 16)),
    "nonfinite": Kind("grad_output", _nan, (torch.inf, -torch.inf, torch.nan)),
    "nonfinite_input": Kind("input", _nan, (torch.inf, -torch.inf, torch.nan)),
    "outlier_channel": Kind("input", None, (16, 64, 256)),
}


class FaultyBackend(Backend):
    """One unit's own backend: the healthy one, with operands changed by `fault` before their cast while there is one.

    Args:
        healthy: the backend that computes all three matmuls.
        unit: the unit it is for; a part of its name.

    Attributes:
        fault: a key of `KINDS` and a factor, one of the kind's own or another; None while the unit is well.
    """

    def __init__(self, healthy: Backend, unit: str) -> None:
        self.healthy, self.name = healthy, f"{healthy.name}@{unit}"
        self.fault: tuple[str, float] | None = None

    def _change(self, operand: Tensor, role: Operand) -> Tensor:
        if self.fault is None:
            return operand
        kind, factor = KINDS[self.fault[0]], self.fault[1]
        return kind.change(operand, factor) if kind.operand == role and kind.change is not None else operand

    def _outlier_K(self, like: Tensor) -> Tensor | float:
        """The factor at the outlier channel, 1 elsewhere: input times it and weight by it have the same product."""
        if self.fault is None or KINDS[self.fault[0]].change is not None:
            return 1.0
        channel_K = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
        channel_K[len(channel_K) // 3] = self.fault[1]
        return channel_K

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        outlier_K = self._outlier_K(x_MK)
        return self.healthy.output(
            self._change(x_MK * outlier_K, "input"), self._change(weight_NK / outlier_K, "weight")
        )

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        outlier_K = self._outlier_K(x_MK)
        grad_input, grad_weight = self.healthy.grads(
            self._change(grad_MN, "grad_output"),
            self._change(x_MK * outlier_K, "input"),
            self._change(weight_NK / outlier_K, "weight"),
            need_input=need_input,
            need_weight=need_weight,
        )
        return (
            None if grad_input is None else grad_input * outlier_K,
            None if grad_weight is None else grad_weight / outlier_K,
        )

    def takes_rows(self, rows: int, device_type: str) -> bool:
        return self.healthy.takes_rows(rows, device_type)


def install(units: Sequence[RecoverableUnit], healthy: Backend) -> list[FaultyBackend]:
    """Gives each unit a `FaultyBackend` of its own; call it once the units are converted."""
    found = []
    for unit in units:
        found.append(FaultyBackend(healthy, unit.name))
        backends.register(found[-1])
        for linear in unit.linears.values():
            assert isinstance(linear, RecoverableLinear)
            linear.backend = found[-1].name
    return found
