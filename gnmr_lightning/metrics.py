"""What is logged, as torchmetrics metrics: the height of the signal, the cost of recovery, and what went wrong.

Every rank takes the same decisions on the same norms, so a count of decisions is reduced over ranks by its maximum;
work (FLOPs, calls) is each rank's own, so it is reduced by its sum.

Legend: U = units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from .linear import BF16, FALLBACK_CALLS, LOW


class MaxRatio(Metric):
    """The highest value that any unit reached, for GNMR and for Delta-GNMR; 0 before the first update.

    Not-a-number values are refused by the controller, so the maximum is always defined; a non-finite gradient shows
    as infinity.

    >>> import torch
    >>> metric = MaxRatio()
    >>> metric.update(torch.tensor([0.9, 2.5, 1.1]))
    >>> metric.update(torch.tensor([1.0, 1.2, 1.4]))
    >>> metric.compute()
    tensor(2.5000, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    highest: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("highest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, ratios: Tensor) -> None:
        """Takes one step's ratios, shape (U,); an empty vector changes nothing."""
        if ratios.numel():
            self.highest = torch.maximum(self.highest, ratios.max().to(self.highest))

    def compute(self) -> Tensor:
        """The maximum, shape ()."""
        return self.highest


class DecisionCount(Metric):
    """Counts decisions that all ranks take alike: interventions, or steps with a non-finite gradient.

    >>> metric = DecisionCount()
    >>> metric.update(2)
    >>> metric.update(1)
    >>> metric.compute()
    tensor(3)
    """

    full_state_update = True  # `forward` would merge two batches as it merges ranks, by the maximum
    higher_is_better = False
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, count: int) -> None:
        """Adds `count` decisions."""
        self.count += count

    def compute(self) -> Tensor:
        """The sum, shape ()."""
        return self.count


class BudgetUse(Metric):
    """Mean share of the recovery budget maxO that was in use, over optimizer steps; in [0, 1], 0 before any step.

    >>> metric = BudgetUse()
    >>> metric.update(locked=0, budget=2)
    >>> metric.update(locked=1, budget=2)
    >>> metric.compute()
    tensor(0.2500, dtype=torch.float64)
    """

    full_state_update = True  # `forward` would merge two batches as it merges ranks, by the maximum
    used: Tensor
    steps: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("used", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("steps", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, locked: int, budget: int, steps: int = 1) -> None:
        """Takes `steps` steps in which `locked` units, added up over the steps, of at most `budget` are recovered."""
        self.used += locked / budget
        self.steps += steps

    def compute(self) -> Tensor:
        """The mean, shape ()."""
        return self.used / self.steps.clamp(min=1)


class Bf16Share(Metric):
    """Share of the convertible layers' matmul FLOPs that ran in bf16: what recovery cost, in [0, 1].

    Forward and both backward products count. Calls that fell back to bf16 for their shape are part of the share, since
    they cost as much; `FallbackCalls` tells them apart.

    >>> import torch
    >>> metric = Bf16Share()
    >>> metric.update(torch.tensor([[300.0, 0.0, 0.0], [60.0, 40.0, 0.0]]))  # per unit: low, bf16, fallback calls
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    low: Tensor
    bf16: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for path in ("low", "bf16"):
            self.add_state(path, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, work: Tensor) -> None:
        """Adds work done since the last update, shape (U, 3): see `GNMRPrecision.work`."""
        self.low += work[:, LOW].sum()
        self.bf16 += work[:, BF16].sum()

    def compute(self) -> Tensor:
        """The share, shape (); 0 where no work was done."""
        total = self.low + self.bf16
        return torch.where(total > 0, self.bf16 / total.clamp(min=1), torch.zeros_like(total))


class FallbackCalls(Metric):
    """Number of training calls of a layer that ran bf16 because of their shape, over all ranks.

    >>> import torch
    >>> metric = FallbackCalls()
    >>> metric.update(torch.tensor([[300.0, 0.0, 0.0], [0.0, 40.0, 2.0]]))
    >>> metric.compute()
    tensor(2)
    """

    full_state_update = False
    higher_is_better = False
    calls: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("calls", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, work: Tensor) -> None:
        """Adds work done since the last update, shape (U, 3): see `GNMRPrecision.work`."""
        self.calls += work[:, FALLBACK_CALLS].sum().long()

    def compute(self) -> Tensor:
        """The number, shape ()."""
        return self.calls
