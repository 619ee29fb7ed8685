"""The rule of method="product_error": how far the error of a unit's low-precision products rose over its own mean.

A unit in low precision differs from the same unit in bf16 by the error of its three products (output, grad_input,
grad_weight) and by nothing else: that error is all that recovery can remove. `linear._probe` samples it. With e the
relative error of one product in this step and m its historical mean,

    risk = max over the products of e / max(r * m, floor),      +inf where e is not finite.

r is `error_threshold`, or with "auto" 1 + 10 s within 2 and 8, where s is the product's own relative deviation, the
root of the mean of (e / m - 1)^2: a product that is steady while it is healthy is believed sooner than one that is not,
as one with stochastically rounded gradients. The floor makes the rule blind to rises that nothing comes of; for the
gradients' products, whose errors the optimizer averages out, it is 5 times that for the output's.

Where m itself is above the floor, the format is coarse all the time (4 bits), and no rise tells when that does harm.
There the gradient norm does: the risk of such a unit is GNMR's, if that is higher.

As with GNMR, an e whose risk is above 1 enters the history limited, as r * m: a burst cannot raise its own baseline, a
lasting change is learnt. While a unit is locked, its errors come from the few rows on which it tries low precision:
they say whether it is still sick when its lock ends, and do not enter the history.

What all units share (a bad batch, a step of the learning rate, another loss scale) moves exact and low-precision
products alike, and cancels in e.

A unit is not probed in every step (see `GNMRConfig.probe_interval`): a step without evidence changes nothing.

Legend: U = units, 3 = the products for output, grad_input and grad_weight.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_DEVIATIONS, _LEAST, _MOST = 10.0, 2.0, 8.0  # of "auto"; see docs/method.md for the figures
_GRADIENT_FLOOR = 5.0  # times `floor`


class ErrorRise:
    """The history of the units' product errors, and the risk that it gives to new ones.

    Args:
        n_units: U.
        threshold: r, or "auto".
        floor: of the output's error; of the gradients' it is 5 times that.
        decay: of the historical means, per admitted step; bias-corrected.
    """

    def __init__(self, n_units: int, threshold: float | Literal["auto"], floor: float, decay: float) -> None:
        self._threshold, self._decay = threshold, decay
        self._floor_3U = np.array([[1.0], [_GRADIENT_FLOOR], [_GRADIENT_FLOOR]]) * floor
        values = partial(np.zeros, (3, n_units))
        # Decayed sums: of the errors, of (e / m - 1)^2, and of ones.
        self.errors_3U, self.squares_3U, self.weights_3U = values(), values(), values()

    def update(self, errors_3U: NDArray[np.float64], learn_U: NDArray[np.bool_]) -> tuple[NDArray, NDArray, NDArray]:
        """Judges one step's errors (nan where there was no product) by the history, then takes them into it.

        Divides by zero where there is no history: call it under `np.errstate(all="ignore")`.

        Args:
            errors_3U: float64.
            learn_U: bool: the units whose errors enter the history.

        Returns:
            risk and rise (e / m, the largest of the three), (U,) float64 each, 0 without evidence; and the units that
            are coarse all the time, bool.
        """
        mean_3U = self.errors_3U / self.weights_3U  # nan before the first error
        limit_3U = mean_3U * self._ratio()
        rise_3U = errors_3U / mean_3U
        risk_3U = errors_3U / np.maximum(limit_3U, self._floor_3U)

        admitted_3U = np.where(risk_3U > 1, limit_3U, errors_3U)
        taken_3U = (errors_3U < math.inf) & learn_U  # neither inf nor nan
        decay_3U = np.where(taken_3U, self._decay, 1.0)
        square_3U = np.square(admitted_3U / mean_3U - 1)
        self.errors_3U *= decay_3U
        self.errors_3U += np.where(taken_3U, admitted_3U, 0.0)
        self.squares_3U *= decay_3U
        self.squares_3U += np.where(taken_3U & (mean_3U > 0), square_3U, 0.0)
        self.weights_3U *= decay_3U
        self.weights_3U += taken_3U

        infinite_3U = errors_3U == math.inf
        np.copyto(risk_3U, math.inf, where=infinite_3U)
        np.copyto(rise_3U, 0.0, where=mean_3U == 0)  # no evidence
        np.copyto(rise_3U, math.inf, where=infinite_3U)
        coarse_U: NDArray = np.logical_or.reduce(mean_3U > self._floor_3U)
        return np.fmax.reduce(risk_3U, initial=0.0), np.fmax.reduce(rise_3U, initial=0.0), coarse_U  # nan: no evidence

    def _ratio(self) -> NDArray | float:
        """r, (3, U) or a number."""
        if self._threshold != "auto":
            return self._threshold
        return np.clip(1 + _DEVIATIONS * np.sqrt(self.squares_3U / self.weights_3U), _LEAST, _MOST)
