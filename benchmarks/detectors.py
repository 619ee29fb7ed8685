"""The detectors that the detection benchmark compares: one score per unit and step, from what was recorded.

Each sees one step at a time and keeps its own history. The library's rules are the library's own controller, with no
budget in the way; the others are small and written for this comparison. A unit is detected where its score is above
the limit: 1 for the library's rules at their defaults, for the others a limit calibrated on the development seeds.

Legend: U = units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr_lightning import GNMRConfig, GNMRController


@dataclass(frozen=True)
class Step:
    """What one optimizer step showed."""

    norms: Tensor
    errors: Tensor
    began: Tensor
    incoming: Tensor
    loss: float
    total: float


class Rule:
    """A rule of the library: its score is the controller's risk. It sees the product errors that it has asked for."""

    def __init__(self, n_units: int, **policy: object) -> None:
        # Nothing is locked: the run was recorded without recovery.
        self.controller = GNMRController(GNMRConfig(warmup_steps=10**9, **policy), n_units)  # type: ignore[arg-type]

    def __call__(self, step: Step) -> Tensor:
        probed_U = self.controller.probed
        errors = step.errors.masked_fill(~probed_U[:, None], math.nan)
        return self.controller.update(step.norms, errors=errors, began=step.began & probed_U).risk


class _Mean:
    """Decayed mean and deviation of a value, bias-corrected; what is not finite or far away enters limited or not."""

    def __init__(self) -> None:
        self.total = self.square = self.weight = torch.zeros((), dtype=torch.float64)

    def score(self, value: Tensor, least: float = 0.02) -> Tensor:
        """How many deviations `value` lies above its mean; inf where it is not finite."""
        mean = self.total / self.weight
        deviation = (self.square / self.weight).clamp(min=least**2).sqrt()
        score = ((value - mean) / deviation).where(value.isfinite(), math.inf).nan_to_num(nan=0.0, posinf=math.inf)
        limited = value.where(~(score.abs() > 4), mean + 4 * deviation * score.sign()).nan_to_num(nan=0.0, posinf=0.0)
        known = self.weight > 0
        taken = value.isfinite()
        decay = torch.where(taken, 0.98, 1.0)
        off = (limited - mean).square() if known.all() else torch.zeros_like(limited)
        self.square = decay * self.square + torch.where(taken, off, 0.0)
        self.total = decay * self.total + torch.where(taken, limited, 0.0)
        self.weight = decay * self.weight + taken.double()
        return score


def _log(value: Tensor) -> Tensor:
    return value.clamp(min=1e-30).log()


def _without_common(value_U: Tensor) -> Tensor:
    finite = value_U[value_U.isfinite()]
    return value_U - (finite.median() if len(finite) else 0.0)


class CommonMode:
    """The log norm against its mean, freed from the median of all units, both ways."""

    def __init__(self, n_units: int, of: Callable[[Step], Tensor], standardised: bool) -> None:
        self.of, self.standardised, self.mean = of, standardised, _Mean()

    def __call__(self, step: Step) -> Tensor:
        value = _without_common(_log(self.of(step)))
        score = self.mean.score(value, least=0.05) if self.standardised else self._plain(value)
        return score.abs()

    def _plain(self, value: Tensor) -> Tensor:
        off = value - self.mean.total / self.mean.weight
        self.mean.score(value)
        return off.where(value.isfinite(), math.inf).nan_to_num(nan=0.0, posinf=math.inf)


class Global:
    """One number of the whole run says when (its z-score), the highest ratio of a unit's norm to its mean says who."""

    def __init__(self, n_units: int, of: Callable[[Step], float]) -> None:
        self.of, self.whole, self.units = of, _Mean(), _Mean()

    def __call__(self, step: Step) -> Tensor:
        z = self.whole.score(torch.tensor(self.of(step), dtype=torch.float64))
        z = torch.tensor(math.inf) if math.isnan(z.item()) else z
        own = self.units.score(_log(step.norms))
        return torch.where(own == own.max(), z, torch.minimum(z, torch.zeros(())))


class ErrorAlone:
    """The largest product error of a unit, with no history."""

    def __init__(self, n_units: int) -> None:
        pass

    def __call__(self, step: Step) -> Tensor:
        return step.errors.nan_to_num(nan=0.0, posinf=math.inf).amax(1)


class Random:
    """A random score, and so a random unit."""

    def __init__(self, n_units: int) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, step: Step) -> Tensor:
        return torch.rand(len(step.norms), generator=self.generator)


def _gain(step: Step) -> Tensor:
    return step.norms / step.incoming


DETECTORS: dict[str, Callable[[int], Callable[[Step], Tensor]]] = {
    "product_error": lambda n: Rule(n),
    "product_error_every_step": lambda n: Rule(n, probe_interval=1),
    "gnmr": lambda n: Rule(n, method="gnmr", delta_threshold=1e6),
    "gnmr_delta": lambda n: Rule(n, method="gnmr"),
    "two_sided": lambda n: Rule(n, method="gnmr", two_sided=True, delta_threshold=1e6),
    "common_mode": lambda n: Rule(n, method="gnmr", two_sided=True, common_mode="median", delta_threshold=1e6),
    "standardised": lambda n: CommonMode(n, lambda step: step.norms, standardised=True),
    "gain": lambda n: CommonMode(n, _gain, standardised=False),
    "gain_standardised": lambda n: CommonMode(n, _gain, standardised=True),
    "error_alone": ErrorAlone,
    "zclip": lambda n: Global(n, lambda step: math.log(max(step.total, 1e-30)) if step.total < math.inf else math.inf),
    "loss_spike": lambda n: Global(n, lambda step: step.loss),
    "random": Random,
}
"""By name; the first is the shipped default, at the limit that it ships with."""
