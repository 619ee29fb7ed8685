"""The method: from numbers of each unit and step to the set of units that run bf16 next.

There are two rules of who is at risk. method="product_error", the default, judges the errors of a unit's low-precision
products: it is in `product_error.py`, and docs/method.md says why. method="gnmr" is the paper's plain rule on gradient
norms, and is here; the default takes it for units whose format is coarse all the time, and reports its GNMR and
Delta-GNMR for all. Locks and budget are the same for both.

GNMR (Gradient Norm-to-Mean Ratio, arXiv 2606.00539, of which only the abstract was public to us: the definitions here
are this project's own reading) compares a unit's gradient norm n with its historical mean m. Delta-GNMR is the abrupt
part of it: the ratio minus the unit's mean ratio over a short window. With method="gnmr" and thresholds on both,

    GNMR = n / m        dGNMR = GNMR - mean(GNMR, last delta_window admitted steps)
    risk = max(GNMR / threshold, dGNMR / delta_threshold),      +inf where n is not finite.

Units whose risk is above 1 are locked to bf16 for `lock_interval` steps, highest risk first, never more than maxO
at once. What the formulas leave open is read as follows.

- m is the mean over the admitted steps before this one. Without any, or with m = 0, there is no evidence: GNMR is 1,
  dGNMR is 0. A zero norm does not begin a history (a fresh LoRA B gives exact zeros), the first non-zero one does; its
  GNMR of 1 opens the window of dGNMR.
- Admission: a norm that is not finite never enters the history; one with risk > 1 is first limited to threshold * m,
  so a spike cannot raise its own baseline, but a lasting change of level is learnt. Its ratio is limited alike before
  it enters the window of dGNMR: the window holds admitted norm / m.
- A norm that is not finite has GNMR, dGNMR and risk +inf, in warm-up too, where nothing is done about it. A finite
  norm whose ratio overflows has risk +inf as well, but counts as finite: it is limited and admitted.
- Order within an update: locks count down and units are released, then candidates are ranked; a unit released in this
  update competes like any other. Locked in update t, a unit is in `locked` of the updates t .. t + lock_interval - 1
  and runs bf16 in the steps t + 1 .. t + lock_interval. Equal risks go by rising unit index. Here this departs from
  the design's rule on purpose: norms that are not finite rank above all others and go by *falling* index, because such
  a gradient flows backwards, from where it began to every earlier unit.
- `common_mode="median"` divides each ratio by the median ratio of the units that have one in this step (three at
  least; of an even number the lower middle one; not where the median is 0 or inf). Risk and the window of dGNMR see
  the divided ratio, else one bad batch would hide what follows it from dGNMR. The limit of admission is threshold *
  median * m, the norm at which the divided ratio is `threshold`: what all units share is learnt in full. The reported
  GNMR stays the plain n / m.
- `two_sided` folds the (divided) ratio, max(r, 1 / r), so that a collapse is a risk like a rise, and to exactly zero
  an infinite one. Risk and the window of dGNMR see the folded ratio, so moving away from m is a rise whichever way it
  goes, and coming back is none. A collapsed norm is admitted as at least m / threshold (times the median): a dying
  signal lowers its own baseline no faster than a spike may raise it.

The same norms give the same bits on every machine: only operations that are rounded alike everywhere (no fused ones),
and sums over the window along its outer dimension, unit by unit in one order, whatever the vector width. Neither
torch's default dtype nor its default device matters.

The controller knows neither modules nor devices: numbers in, decision out, float64 on the CPU, no loop over units, and
a state whose size does not depend on the number of steps. Tensors go in and out; between them it is numpy, because a
step at U = 280 is all call overhead, and a call of numpy takes a fourth of torch's. For the same reason the masks that
are the rule (every unit steps, every norm is finite and positive) are recognised and skip what only the others need.

Legend: U = units, W = window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .product_error import ErrorRise

Method = Literal["product_error", "gnmr"]
History = Literal["ema", "window", "cumulative"]
CommonMode = Literal["none", "median"]

_LARGEST = 1e300  # a finite norm above counts as this, so that no sum of norms overflows


@dataclass(frozen=True, kw_only=True)
class GNMRConfig:
    """The control policy. Steps are optimizer steps.

    Raises:
        ValueError: a field out of its range, in a sentence that says what to write instead.
    """

    method: Method = "product_error"
    """What risk is: "product_error", the rise of the error of the unit's low-precision products, and GNMR where that
    error is large all the time; or "gnmr", GNMR and Delta-GNMR of its gradient norm alone, the paper's plain rule."""
    error_threshold: float | Literal["auto"] = "auto"
    """method="product_error": risk is above 1 when a product's relative error is above this many times its own mean;
    above 1, or "auto", from 2 to 8 by how much the error varies while the unit is healthy."""
    error_floor: float = 0.1
    """method="product_error": a relative error of the output below this (of a gradient, below 5 times this) is no
    risk, however it rose; in (0, 1)."""
    probe_interval: int = 3
    """method="product_error": a unit's products are compared with exact ones in every probe_interval-th step, units
    taking turns, in each of its first 20 steps, in the last of a lock, and after a non-finite gradient; at least 1.
    A sick unit is found that many steps later at most, at that fraction of the cost."""
    threshold: float = 2.0
    """Risk by GNMR is above 1 when GNMR is above this; above 1."""
    delta_threshold: float = 1.0
    """Risk by GNMR is above 1 when Delta-GNMR is above this; positive. With 1, a settled unit (mean ratio 1)
    meets both limits at the same norm, 2 m, and Delta-GNMR speaks first only where the norms had been falling."""
    delta_window: int = 8
    """Admitted steps whose mean ratio Delta-GNMR is measured against; at least 1. Costs 8 bytes a unit and step."""
    history: History = "ema"
    """How the historical mean is made: "ema" (bias-corrected), "window" or "cumulative"."""
    ema_decay: float = 0.98
    """Decay per admitted step of history="ema"; in (0, 1)."""
    history_window: int = 16
    """Admitted steps in the mean of history="window"; at least 1."""
    warmup_steps: int = 20
    """First steps of each unit in which there is history but no action; 0 or more."""
    lock_interval: int = 10
    """Steps that a locked unit runs bf16; at least 1. With method="product_error" it is locked again at once if low
    precision, tried on a few rows, is still at risk then."""
    max_o: int | float = 0.1
    """maxO, the most units locked at once: a number of units (int), or a share of them (float in (0, 1], at least
    one unit)."""
    two_sided: bool = False
    """Risk by GNMR: whether a collapse of the norm is a risk, too. Saturated and underflowing operands lower it."""
    common_mode: CommonMode = "none"
    """Risk by GNMR: whether a change that all units share ("median") is divided out: a bad batch or a step of the
    learning rate."""

    def __post_init__(self) -> None:
        for name, least in (
            ("delta_window", 1),
            ("history_window", 1),
            ("lock_interval", 1),
            ("warmup_steps", 0),
            ("probe_interval", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} is not a number of steps: write an integer of at least {least}")
        for name, low, high in (
            ("threshold", 1, 1e9),
            ("delta_threshold", 0, 1e9),
            ("ema_decay", 0, 1),
            ("error_threshold", 1, 1e9),
            ("error_floor", 0, 1),
        ):
            value = getattr(self, name)
            if name == "error_threshold" and value == "auto":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value < high:
                raise ValueError(f"{name}={value!r} is out of range: write a number above {low} and below {high:g}")
        choices_of = {"method": Method, "history": History, "common_mode": CommonMode}
        for name, choices in ((name, get_args(literal)) for name, literal in choices_of.items()):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known: write {' or '.join(map(repr, choices))}")
        if not isinstance(self.two_sided, bool):
            raise ValueError(f"two_sided={self.two_sided!r} is not a switch: write True or False")
        count = isinstance(self.max_o, int) and not isinstance(self.max_o, bool) and self.max_o >= 1
        share = isinstance(self.max_o, float) and 0 < self.max_o <= 1
        if not (count or share):
            raise ValueError(
                f"max_o={self.max_o!r} is no budget: write a number of units (an integer of at least 1), or a share of "
                "the units (a float above 0 and at most 1)"
            )


@dataclass(frozen=True)
class Decision:
    """The outcome of one update; every tensor has shape (U,) and is the caller's to keep."""

    gnmr: Tensor
    """float64: n / m; 1 where there is no evidence or no measurement, inf where the norm is not finite."""
    delta_gnmr: Tensor
    """float64: Delta-GNMR; 0 where there is no evidence or no measurement, inf where the norm is not finite."""
    risk: Tensor
    """float64: above 1 for a unit that recovery would be spent on; 0 where there is no measurement."""
    rise: Tensor
    """float64: error of the unit's worst low-precision product by its own mean; 0 where there is no evidence."""
    locked: Tensor
    """bool: the units that run bf16 in the next optimizer step."""
    newly_locked: Tensor
    """bool: those of them that this update locked."""
    probed: Tensor
    """bool: the units whose products are compared with exact ones in the next step."""
    released: Tensor
    """bool: units whose lock ended in this update; one of them may be newly locked again."""
    nonfinite: Tensor
    """bool: measured units whose norm is not finite."""


_SETTLING = 20  # first steps of a unit that are all probed


class GNMRController:
    """Decides which units run bf16, from their gradient norms and product errors.

    Args:
        config: the policy.
        n_units: U, at least 1.

    Attributes:
        budget: maxO as a number of units, from 1 to U.

    Raises:
        ValueError: no unit to control.
    """

    def __init__(self, config: GNMRConfig, n_units: int) -> None:
        if n_units < 1:
            raise ValueError(f"n_units={n_units} leaves nothing to control: give at least one unit")
        self.config = config
        self.n_units = n_units
        # The share is rounded down, but 0.29 of 100 units is 29, not the 28.999... of its binary product.
        units = math.floor(config.max_o * n_units + 1e-9) if isinstance(config.max_o, float) else config.max_o
        self.budget = min(n_units, max(1, units))
        self._everyone = np.ones(n_units, dtype=bool)
        self._index_U = np.arange(n_units)
        counts = partial(np.zeros, dtype=np.int64)
        self._steps_U = counts(n_units)  # updates that the unit took part in
        self._until_U = counts(n_units)  # it is locked while steps < until
        self._admitted_U = counts(n_units)  # norms in its history
        self._ratios_WU = np.zeros((config.delta_window, n_units))  # ring of the last admitted ratios
        # The history: a ring of norms, or their decayed sum and the decayed sum of ones.
        self._norms = np.zeros((config.history_window, n_units) if config.history == "window" else n_units)
        self._weight_U = np.zeros(n_units)
        self._errors: ErrorRise | None = None
        self._probed_U = np.zeros(n_units, dtype=bool)
        if config.method == "product_error":
            self._errors = ErrorRise(n_units, config.error_threshold, config.error_floor, config.ema_decay)
            self._probed_U[:] = True

    @property
    def locked(self) -> Tensor:
        """(U,), bool: the units that run bf16 in the next optimizer step; a copy."""
        return torch.from_numpy(self._locked())

    @property
    def probed(self) -> Tensor:
        """(U,), bool: the units whose products are to be compared with exact ones in the next step; a copy."""
        return torch.from_numpy(self._probed_U.copy())

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes; the same at every step."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def update(
        self,
        norms: Tensor,
        *,
        errors: Tensor | None = None,
        began: Tensor | None = None,
        stepping: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Decision:
        """Takes one optimizer step's gradient norms and decides.

        Args:
            norms: (U,), floating point, CPU: L2 norm of each unit's gradient, not negative; inf and nan are allowed.
            errors: (U, 3), floating point, CPU: relative errors of each unit's low-precision products, nan where there
                were none; for method="product_error", which needs them, alone.
            began: (U,), bool: the units in whose products a value stopped being finite, None for none.
            stepping: (U,), bool: the units whose optimizer steps now, None for all. Nothing changes for the others,
                but their locks count against maxO.
            present: (U,), bool: the units that have a gradient, None for all. A stepping unit without one counts its
                lock down and is otherwise left alone.

        Raises:
            ValueError: norms or masks of another length, type or device, or negative norms. Nothing has changed then.
        """
        n_U, all_finite, all_positive = self._check_norms(norms)
        stepping_U, present_U, began_U = (
            self._check_mask(name, mask)
            for name, mask in (("stepping", stepping), ("present", present), ("began", began))
        )
        errors_3U = None if self._errors is None else self._check_errors(errors)
        stepping_U = self._everyone if stepping_U is None else stepping_U
        measured_U = self._everyone_if(stepping_U if present_U is None else stepping_U & present_U)
        with np.errstate(all="ignore"):  # a unit without a history has 0 / 0
            decision = self._update(n_U, all_finite, all_positive, errors_3U, began_U, stepping_U, measured_U)
        return Decision(**{name: torch.from_numpy(value_U) for name, value_U in decision.items()})

    def _update(
        self,
        n_U: NDArray,
        all_finite: bool,
        all_positive: bool,
        errors_3U: NDArray | None,
        began_U: NDArray | None,
        stepping_U: NDArray,
        measured_U: NDArray,
    ) -> dict[str, NDArray]:
        c = self.config
        nonfinite_U = np.zeros(self.n_units, dtype=bool)
        if not all_finite:
            finite_U = n_U < math.inf
            nonfinite_U = measured_U & ~finite_U
            measured_U = measured_U & finite_U
            n_U = np.where(finite_U, n_U, 0.0)

        # The ratios.
        m_U = self._mean()
        known_U = self._everyone_if(measured_U & (m_U > 0))
        gnmr_U = self._where(known_U, n_U / m_U, 1.0)
        common = self._common(gnmr_U, known_U)
        ratio_U = gnmr_U if common == 1.0 else self._where(known_U, gnmr_U / common, 1.0)
        if c.two_sided:
            ratio_U = np.maximum(ratio_U, 1 / ratio_U)
        recent_U = self._ratios_WU.sum(0) / np.minimum(self._admitted_U, c.delta_window)
        delta_U = self._where(known_U, ratio_U - recent_U, 0.0)
        risk_U = np.maximum(ratio_U / c.threshold, delta_U / c.delta_threshold)
        risk_U = norm_risk_U = self._where(measured_U, risk_U, 0.0)
        if not all_finite:
            gnmr_U, delta_U, risk_U = (np.where(nonfinite_U, math.inf, x_U) for x_U in (gnmr_U, delta_U, risk_U))
        rise_U = np.zeros(self.n_units)
        was_locked_U = self._locked()
        if self._errors is not None and errors_3U is not None:
            if stepping_U is not self._everyone:
                errors_3U = np.where(stepping_U, errors_3U, math.nan)
            risk_U, rise_U, coarse_U = self._errors.update(errors_3U, ~was_locked_U)
            risk_U = np.where(coarse_U, np.maximum(risk_U, norm_risk_U), risk_U)
            risk_U = self._trace(risk_U, began_U, nonfinite_U, stepping_U, measured_U, was_locked_U)
        any_risk = risk_U.max() > 1

        # The decision.
        self._steps_U += stepping_U
        locked_U = self._locked()
        released_U = was_locked_U > locked_U
        newly_U = np.zeros(self.n_units, dtype=bool)
        if any_risk:
            candidates_U = (risk_U > 1) & ~locked_U & (self._steps_U > c.warmup_steps)
            room = max(0, self.budget - int(locked_U.sum()))
            first_U = nonfinite_U if self._errors is None else risk_U == math.inf
            chosen = self._rank(candidates_U, risk_U, first_U)[:room]
            newly_U[chosen] = True
            locked_U[chosen] = True
            self._until_U[chosen] = self._steps_U[chosen] + c.lock_interval

        # The history.
        if norm_risk_U.max() > 1:
            limit_U = common * m_U
            limited_U = np.minimum(n_U, limit_U * c.threshold)
            if c.two_sided:
                limited_U = np.maximum(limited_U, np.minimum(limit_U / c.threshold, _LARGEST))
            n_U = np.where(known_U & (norm_risk_U > 1), limited_U, n_U)
            ratio_U = np.minimum(ratio_U, c.threshold)
        self._admit(n_U, ratio_U, measured_U if all_positive else measured_U & (known_U | (n_U > 0)))
        if self._errors is not None:
            self._plan_probes(stepping_U, locked_U, everyone=not all_finite)
        return {
            "gnmr": gnmr_U,
            "delta_gnmr": delta_U,
            "risk": risk_U,
            "rise": rise_U,
            "locked": locked_U,
            "newly_locked": newly_U,
            "probed": self._probed_U.copy(),
            "released": released_U,
            "nonfinite": nonfinite_U,
        }

    def _trace(
        self,
        risk_U: NDArray,
        began_U: NDArray | None,
        nonfinite_U: NDArray,
        stepping_U: NDArray,
        measured_U: NDArray,
        locked_U: NDArray,
    ) -> NDArray:
        """The risk of product errors, and inf where a value stopped being finite, as far as this step tells."""
        if began_U is not None and (began_U := began_U & stepping_U).any():
            return np.where(began_U, math.inf, risk_U)
        if not nonfinite_U.any():
            return risk_U
        # It began where no product was compared. If all units were reached, that may be anywhere: all are probed in the
        # next step, and known then. Else it is a layer's backward, and of the units that it reached the last one is the
        # nearest to it; one that ran bf16 is not the cause.
        if not measured_U.any() and not self._probed_U[stepping_U].all():
            return risk_U
        risk_U = risk_U.copy()
        risk_U[np.flatnonzero(nonfinite_U & ~locked_U)[-1:]] = math.inf
        return risk_U

    def _plan_probes(self, stepping_U: NDArray, locked_U: NDArray, *, everyone: bool) -> None:
        """Sets which units are probed in the next step: see `GNMRConfig.probe_interval`."""
        if everyone:
            self._probed_U = self._probed_U | stepping_U
            return
        due_U = (self._steps_U + self._index_U) % self.config.probe_interval == 0
        due_U |= self._steps_U < _SETTLING
        last_of_lock_U = self._until_U - self._steps_U == 1
        probed_U = np.where(locked_U, last_of_lock_U, due_U)
        self._probed_U = probed_U if stepping_U is self._everyone else np.where(stepping_U, probed_U, self._probed_U)

    def _locked(self) -> NDArray:
        return self._until_U > self._steps_U

    def _check_norms(self, norms: Tensor) -> tuple[NDArray, bool, bool]:
        """The norms in float64, whether all are finite, and whether all are finite and positive."""
        if norms.shape != (self.n_units,) or not norms.is_floating_point() or norms.device.type != "cpu":
            raise ValueError(
                f"norms of shape {tuple(norms.shape)} and {norms.dtype} on {norms.device} do not fit {self.n_units} "
                "units: give one floating-point norm for each unit, on the CPU"
            )
        n_U = _float64(norms)
        low, high = n_U.min(), n_U.max()  # both are nan where one norm is
        if not low >= 0 and (n_U < 0).any():
            raise ValueError(f"the norm {n_U[n_U < 0][0]} is negative: give L2 norms, which are 0 or above")
        if not high <= _LARGEST:
            n_U = np.where(n_U < math.inf, np.minimum(n_U, _LARGEST), n_U)
        return n_U, bool(high < math.inf), bool(low > 0 and high < math.inf)

    def _check_mask(self, name: str, mask: Tensor | None) -> NDArray | None:
        if mask is None:
            return None
        if mask.shape != (self.n_units,) or mask.dtype != torch.bool or mask.device.type != "cpu":
            raise ValueError(
                f"{name} of shape {tuple(mask.shape)} and {mask.dtype} on {mask.device} is no mask of "
                f"{self.n_units} units: give one bool for each unit, on the CPU, or None"
            )
        return self._everyone_if(mask.numpy())

    def _check_errors(self, errors: Tensor | None) -> NDArray:
        """The product errors, (3, U), float64."""
        shape = (self.n_units, 3)
        if errors is None:
            raise ValueError(
                "method='product_error' decides on the errors of low-precision products, and none were given: train "
                "with GNMRPrecision, or write method='gnmr'"
            )
        if errors.shape != shape or not errors.is_floating_point() or errors.device.type != "cpu":
            raise ValueError(
                f"errors of shape {tuple(errors.shape)} and {errors.dtype} on {errors.device} do not fit {shape[0]} "
                "units: give three floating-point errors for each unit, on the CPU"
            )
        return np.ascontiguousarray(_float64(errors).T)

    def _everyone_if(self, mask_U: NDArray) -> NDArray:
        """The mask, or `self._everyone` itself where it is true for all, which is the rule and saves work."""
        return self._everyone if mask_U is self._everyone or mask_U.all() else mask_U

    def _where(self, mask_U: NDArray, value_U: NDArray, other: float) -> NDArray:
        return value_U if mask_U is self._everyone else np.where(mask_U, value_U, other)

    def _mean(self) -> NDArray:
        """m, (U,): the historical mean; nan where nothing was admitted yet."""
        if self.config.history == "window":
            return self._norms.sum(0) / np.minimum(self._admitted_U, self.config.history_window)
        return self._norms / self._weight_U

    def _common(self, gnmr_U: NDArray, known_U: NDArray) -> float:
        """What all units share of their ratios; 1 where that is not asked for or cannot be told."""
        if self.config.common_mode == "none" or (count := int(known_U.sum())) < 3:
            return 1.0
        median = float(np.sort(gnmr_U[known_U])[(count - 1) // 2])
        return median if 0 < median < math.inf else 1.0

    def _rank(self, candidates_U: NDArray, risk_U: NDArray, nonfinite_U: NDArray) -> NDArray:
        """Indices of the candidates, the first to be locked first."""
        began_late = np.flatnonzero(candidates_U & nonfinite_U)[::-1]
        others = np.flatnonzero(candidates_U & ~nonfinite_U)
        return np.concatenate([began_late, others[np.argsort(-risk_U[others], kind="stable")]])

    def _admit(self, n_U: NDArray, ratio_U: NDArray, admit_U: NDArray) -> None:
        """Takes the norms and ratios of the units in `admit_U` into their history."""
        admit_U = self._everyone_if(admit_U)
        self._push(self._ratios_WU, ratio_U, admit_U)
        if self.config.history == "window":
            self._push(self._norms, n_U, admit_U)
        else:
            # sum(decay**age * n) / sum(decay**age) is Adam's bias-corrected EMA; with decay 1, the mean of all.
            decay: float | NDArray = self.config.ema_decay if self.config.history == "ema" else 1.0
            if admit_U is not self._everyone:
                decay, n_U = np.where(admit_U, decay, 1.0), np.where(admit_U, n_U, 0.0)
            self._norms *= decay
            self._norms += n_U
            self._weight_U *= decay
            self._weight_U += admit_U
        self._admitted_U += admit_U

    def _push(self, ring_WU: NDArray, value_U: NDArray, admit_U: NDArray) -> None:
        """Puts the admitted units' values in the place of their oldest."""
        index = self._index_U if admit_U is self._everyone else np.flatnonzero(admit_U)
        ring_WU[self._admitted_U[index] % len(ring_WU), index] = value_U[index]

    def _tensors(self) -> dict[str, Tensor]:
        """The state; the tensors share its memory."""
        arrays = {
            "steps": self._steps_U,
            "until": self._until_U,
            "admitted": self._admitted_U,
            "ratios": self._ratios_WU,
            "norms": self._norms,
            "weight": self._weight_U,
        }
        if self._errors is not None:
            arrays |= {
                "errors": self._errors.errors_3U,
                "error_squares": self._errors.squares_3U,
                "error_weights": self._errors.weights_3U,
                "probed": self._probed_U,
            }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _shape(self) -> dict[str, Any]:
        """What a state must agree on with the controller that goes on from it."""
        c = self.config
        windows = {"delta_window": c.delta_window} | (
            {"history_window": c.history_window} if c.history == "window" else {}
        )
        return {"n_units": self.n_units, "method": c.method, "history": c.history, **windows}

    def state_dict(self) -> dict[str, Any]:
        """Locks, warm-up counts and history: tensors and plain values, copies."""
        return {**self._shape(), **{name: tensor.clone() for name, tensor in self._tensors().items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved state; the decisions that follow are those of the run that saved it.

        Thresholds, decay, warm-up and budget may be others than in that run.

        Raises:
            ValueError: a state of another number of units, another kind of history or other window lengths, one that
                is incomplete, or one with more locked units than maxO allows. Nothing has changed then.
        """
        for name, here in self._shape().items():
            if (saved := state_dict.get(name)) != here:
                raise ValueError(
                    f"the saved control state has {name}={saved!r} and this run has {name}={here!r}: resume with the "
                    "same units, history and windows, or load the weights alone"
                )
        tensors = self._tensors()
        for name in sorted(tensors.keys() ^ (state_dict.keys() - self._shape().keys())):
            verb = "lacks" if name in tensors else "has an unknown"
            raise ValueError(f"the saved control state {verb} {name!r}: load what state_dict() of this version gave")
        for name, tensor in tensors.items():
            saved = state_dict[name]
            if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"the saved control state's {name!r} is no {tensor.dtype} tensor of shape {tuple(tensor.shape)}: "
                    "load what state_dict() gave"
                )
        if (locked := int((state_dict["until"] > state_dict["steps"]).sum())) > self.budget:
            raise ValueError(
                f"the saved control state has {locked} locked units and max_o={self.config.max_o!r} allows "
                f"{self.budget}: resume with max_o={locked} or more"
            )
        for name, tensor in tensors.items():
            tensor.copy_(state_dict[name])


def _float64(values: Tensor) -> NDArray:
    return values.detach().to(torch.float64).numpy()
