"""The rule of method="product_error": how far the error of a unit's low-precision products rose over its own mean.

A unit in low precision differs from the same unit in bf16 by the error of its three products (output, grad_input,
grad_weight) and by nothing else: that error is all that recovery can remove. `linear._probe` samples it. With e the
relative error of one product in this step and m its historical mean,

    risk = max over the products of e / max(r * m, floor),      +inf where e is not finite.

r is `error_threshold`, or with "auto" 1 + 10 s within 2 and 8, where s is the product's own relative deviation, the
root of the mean of (e / m - 1)^2: a product that is steady while it is healthy is believed sooner than one that is not,
as one with stochastically rounded gradients. The mean makes the rule blind to how coarse a format is by itself, which
the recovery of a few units does not change. The floor makes it blind to rises that nothing comes of; it is 5 times
higher for the gradients' products, whose errors the optimizer averages out, than for the output's.

As with GNMR, an e whose risk is above 1 enters the history limited, as r * m: a burst cannot raise its own baseline, a
lasting change is learnt. While a unit is locked, its errors come from the few rows on which it tries low precision:
they say whether it is still sick when its lock ends, and do not enter the history.

What all units share (a bad batch, a step of the learning rate, another loss scale) moves exact and low-precision
products alike, and cancels in e.

Legend: U = units, 3 = the products for output, grad_input and grad_weight.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

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
        self._floor_3 = torch.tensor([1.0, _GRADIENT_FLOOR, _GRADIENT_FLOOR], dtype=torch.float64, device="cpu") * floor
        values = partial(torch.zeros, n_units, 3, dtype=torch.float64, device="cpu")
        # Decayed sums: of the errors, of (e / m - 1)^2, and of ones.
        self.errors_U3, self.squares_U3, self.weights_U3 = values(), values(), values()

    def update(self, errors_U3: Tensor, learn_U: Tensor) -> tuple[Tensor, Tensor]:
        """Judges one step's errors (nan where there was no product) by the history, then takes them into it.

        Args:
            errors_U3: float64.
            learn_U: bool: the units whose errors enter the history.

        Returns:
            risk and rise (e / m, the largest of the three), (U,) float64 each; 0 without evidence.
        """
        mean_U3 = self.errors_U3 / self.weights_U3  # nan before the first error
        limit_U3 = mean_U3 * self._ratio()
        rise_U3 = errors_U3 / mean_U3
        risk_U3 = errors_U3 / limit_U3.maximum(self._floor_3)

        admitted_U3 = errors_U3.where(~(risk_U3 > 1), limit_U3)
        taken_U3 = (errors_U3 < math.inf) & learn_U[:, None]  # neither inf nor nan
        decay_U3 = torch.ones_like(errors_U3).masked_fill_(taken_U3, self._decay)
        square_U3 = (admitted_U3 / mean_U3 - 1).square_().nan_to_num_(nan=0.0)
        self.errors_U3.mul_(decay_U3).add_(admitted_U3.masked_fill(~taken_U3, 0.0))
        self.squares_U3.mul_(decay_U3).add_(square_U3.masked_fill_(~taken_U3, 0.0))
        self.weights_U3.mul_(decay_U3).add_(taken_U3)

        infinite_U = (errors_U3 == math.inf).any(1)
        risk_U, rise_U = (x_U3.nan_to_num(nan=0.0).amax(1) for x_U3 in (risk_U3, rise_U3))
        return risk_U.masked_fill_(infinite_U, math.inf), rise_U.masked_fill_(infinite_U, math.inf)

    def _ratio(self) -> Tensor | float:
        """r, (U, 3) or a number."""
        if self._threshold != "auto":
            return self._threshold
        return (1 + _DEVIATIONS * (self.squares_U3 / self.weights_U3).sqrt()).clamp(_LEAST, _MOST)
