"""The method: from one gradient norm per unit and step to the set of units that run bf16 next.

GNMR (Gradient Norm-to-Mean Ratio, arXiv 2606.00539, of which only the abstract was public to us: the definitions here
are this project's own reading) compares a unit's gradient norm n with its historical mean m. Delta-GNMR is the abrupt
part of it: the ratio minus the unit's mean ratio over a short window. With thresholds on both,

    GNMR = n / m        dGNMR = GNMR - mean(GNMR, last delta_window admitted steps)
    risk = max(GNMR / threshold, dGNMR / delta_threshold),      +inf where n is not finite.

Units whose risk is above 1 are locked to bf16 for `lock_interval` steps, highest risk first, never more than maxO
at once. What the formulas leave open is read as follows.

- m is the mean over the admitted steps before this one. Without any, or with m = 0, there is no evidence: GNMR is 1,
  dGNMR is 0. A zero norm does not begin a history (a fresh LoRA B gives exact zeros), the first non-zero one does.
- Admission: a norm that is not finite never enters the history; one with risk > 1 is first limited to threshold * m,
  so a spike cannot raise its own baseline, but a lasting change of level is learnt. Its ratio is limited alike before
  it enters the window of dGNMR.
- Order within an update: locks count down and units are released, then candidates are ranked; a unit released in this
  update competes like any other. Equal risks go by rising unit index. Norms that are not finite rank above all others
  and go by *falling* index: such a gradient flows backwards, from where it began to every earlier unit.
- `common_mode="median"` divides each ratio by the median ratio of all measured units (three at least) before it is
  ranked and before it enters the window; the limit of admission is multiplied by that median. `two_sided` then folds
  the ratio, max(r, 1/r), so that a collapse is a risk like a rise; a collapsed norm is admitted as at least
  m / threshold. The reported GNMR stays the plain n / m.

The controller knows neither modules nor devices: numbers in, decision out, float64 on the CPU, no loop over units, and
a state whose size does not depend on the number of steps.

Legend: U = units, W = window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

History = Literal["ema", "window", "cumulative"]
CommonMode = Literal["none", "median"]


@dataclass(frozen=True, kw_only=True)
class GNMRConfig:
    """The control policy. Steps are optimizer steps.

    Raises:
        ValueError: a field out of its range, in a sentence that says what to write instead.
    """

    threshold: float = 2.0
    """Risk is above 1 when GNMR is above this; above 1."""
    delta_threshold: float = 1.0
    """Risk is above 1 when Delta-GNMR is above this; positive. 1 asks for a rise by the unit's own mean norm."""
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
    """Steps that a locked unit runs bf16; at least 1."""
    max_o: int | float = 0.1
    """maxO, the most units locked at once: a number of units (int), or a share of them (float in (0, 1], at least
    one unit)."""
    two_sided: bool = False
    """Whether a collapse of the norm is a risk, too. Saturated and underflowing operands lower the norm."""
    common_mode: CommonMode = "none"
    """Whether a change that all units share ("median") is divided out: a bad batch or a learning-rate step."""

    def __post_init__(self) -> None:
        for name, least in (("delta_window", 1), ("history_window", 1), ("lock_interval", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} is not a number of steps: write an integer of at least {least}")
        for name, low, high in (("threshold", 1.0, math.inf), ("delta_threshold", 0.0, math.inf), ("ema_decay", 0, 1)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value < high:
                raise ValueError(f"{name}={value!r} is out of range: write a number above {low} and below {high}")
        for name, choices in (("history", get_args(History)), ("common_mode", get_args(CommonMode))):
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
    locked: Tensor
    """bool: the units that run bf16 in the next optimizer step."""
    newly_locked: Tensor
    """bool: those of them that this update locked."""
    released: Tensor
    """bool: units whose lock ended in this update; one of them may be newly locked again."""
    nonfinite: Tensor
    """bool: measured units whose norm is not finite."""


class GNMRController:
    """Decides which units run bf16, from their gradient norms.

    Args:
        config: the policy.
        n_units: U, at least 1.

    Raises:
        ValueError: no unit to control.
    """

    def __init__(self, config: GNMRConfig, n_units: int) -> None:
        if n_units < 1:
            raise ValueError(f"n_units={n_units} leaves nothing to control: give at least one unit")
        self.config = config
        self.n_units = n_units
        share = isinstance(config.max_o, float)
        self.budget = min(n_units, max(1, int(config.max_o * n_units)) if share else int(config.max_o))
        """maxO as a number of units."""
        U, f64 = n_units, torch.float64
        self._state = {
            "steps": torch.zeros(U, dtype=torch.int64),  # updates that the unit took part in
            "lock": torch.zeros(U, dtype=torch.int64),  # steps that are left of its lock
            "admitted": torch.zeros(U, dtype=torch.int64),  # norms in its history
            "ratios": torch.zeros(U, config.delta_window, dtype=f64),  # the last admitted ratios, newest last
            # The history: a window of norms, or one number (EMA before bias correction, or sum).
            "norms": torch.zeros(U, config.history_window if config.history == "window" else 1, dtype=f64),
        }

    @property
    def locked(self) -> Tensor:
        """(U,), bool: the units that run bf16 in the next optimizer step."""
        return self._state["lock"] > 0

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes; the same at every step."""
        return sum(tensor.nbytes for tensor in self._state.values())

    def update(self, norms: Tensor, *, stepping: Tensor | None = None, present: Tensor | None = None) -> Decision:
        """Takes one optimizer step's gradient norms and decides.

        Args:
            norms: (U,), floating point, CPU: L2 norm of each unit's gradient, not negative; inf and nan are allowed.
            stepping: (U,), bool: the units whose optimizer steps now, None for all. Nothing changes for the others,
                but their locks count against maxO.
            present: (U,), bool: the units that have a gradient, None for all. A stepping unit without one counts its
                lock down and is otherwise left alone.

        Raises:
            ValueError: norms of another length or type, or negative ones.
        """
        c, state = self.config, self._state
        n_U, stepping_U, measured_U = self._check(norms, stepping, present)
        finite_U = n_U.isfinite()
        nonfinite_U = measured_U & ~finite_U
        measured_U = measured_U & finite_U

        # The ratios.
        m_U = self._mean()
        known_U = measured_U & (m_U > 0)
        gnmr_U = torch.where(known_U, n_U / m_U, 1.0)
        common = self._common(gnmr_U, known_U)
        ratio_U = gnmr_U if common == 1.0 else torch.where(known_U, gnmr_U / common, 1.0)
        if c.two_sided:
            ratio_U = torch.maximum(ratio_U, 1 / ratio_U)
        in_window_U = state["admitted"].clamp(max=c.delta_window)
        delta_U = torch.where(known_U, ratio_U - state["ratios"].sum(1) / in_window_U, 0.0)
        risk_U = torch.maximum(ratio_U / c.threshold, delta_U / c.delta_threshold) * measured_U
        if nonfinite_U.any():
            gnmr_U, delta_U, risk_U = (t.masked_fill(nonfinite_U, math.inf) for t in (gnmr_U, delta_U, risk_U))
        risky_U = risk_U > 1

        # The decision.
        was_locked_U = state["lock"] > 0
        state["lock"].sub_((was_locked_U & stepping_U).long())
        locked_U = state["lock"] > 0
        newly_U = torch.zeros_like(locked_U)
        candidates_U = risky_U & ~locked_U & (state["steps"] >= c.warmup_steps)
        if candidates_U.any():
            chosen = self._rank(candidates_U, risk_U, nonfinite_U)[: self.budget - int(locked_U.sum())]
            newly_U[chosen] = True
            state["lock"][chosen] = c.lock_interval

        # The history.
        limited_U = n_U.minimum(c.threshold * common * m_U)
        if c.two_sided:
            limited_U = limited_U.maximum(common * m_U / c.threshold)
        self._admit(torch.where(risky_U & known_U, limited_U, n_U), ratio_U, measured_U & ((m_U > 0) | (n_U > 0)))
        state["steps"].add_(stepping_U)
        return Decision(
            gnmr=gnmr_U,
            delta_gnmr=delta_U,
            risk=risk_U,
            locked=locked_U | newly_U,
            newly_locked=newly_U,
            released=was_locked_U & ~locked_U,
            nonfinite=nonfinite_U,
        )

    def _check(self, norms: Tensor, stepping: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if norms.shape != (self.n_units,) or not norms.is_floating_point():
            raise ValueError(
                f"norms of shape {tuple(norms.shape)} and {norms.dtype} do not fit {self.n_units} units: give one "
                "floating-point norm for each unit"
            )
        n_U = norms.to(torch.float64)
        if (n_U < 0).any():
            raise ValueError(f"the norm {n_U.min().item()} is negative: give L2 norms")
        everyone = torch.ones(self.n_units, dtype=torch.bool)
        stepping_U = everyone if stepping is None else stepping
        return n_U, stepping_U, stepping_U if present is None else stepping_U & present

    def _mean(self) -> Tensor:
        """m, (U,): the historical mean; 0 where nothing was admitted yet."""
        c, admitted_U, norms_UW = self.config, self._state["admitted"], self._state["norms"]
        if c.history == "ema":
            return norms_UW[:, 0] / (1 - c.ema_decay**admitted_U).clamp(min=1e-300)
        counted_U = admitted_U.clamp(max=c.history_window) if c.history == "window" else admitted_U
        return norms_UW.sum(1) / counted_U.clamp(min=1)

    def _common(self, gnmr_U: Tensor, known_U: Tensor) -> float:
        """What all units share of their ratios; 1 where that is not asked for or cannot be told."""
        if self.config.common_mode == "none" or int(known_U.sum()) < 3:
            return 1.0
        median = gnmr_U[known_U].median().item()
        return median if 0 < median < math.inf else 1.0

    def _rank(self, candidates_U: Tensor, risk_U: Tensor, nonfinite_U: Tensor) -> Tensor:
        """Indices of the candidates, the first to be locked first."""
        began_late = (candidates_U & nonfinite_U).nonzero().flatten().flip(0)
        others = (candidates_U & ~nonfinite_U).nonzero().flatten()
        return torch.cat([began_late, others[risk_U[others].argsort(descending=True, stable=True)]])

    def _admit(self, n_U: Tensor, ratio_U: Tensor, admit_U: Tensor) -> None:
        c, state = self.config, self._state
        ratios_UW, norms_UW = state["ratios"], state["norms"]
        state["ratios"] = torch.where(admit_U[:, None], _push(ratios_UW, ratio_U.clamp(max=c.threshold)), ratios_UW)
        if c.history == "ema":
            new_UW = c.ema_decay * norms_UW + (1 - c.ema_decay) * n_U[:, None]
        elif c.history == "window":
            new_UW = _push(norms_UW, n_U)
        else:
            new_UW = norms_UW + n_U[:, None]
        state["norms"] = torch.where(admit_U[:, None], new_UW, norms_UW)
        state["admitted"].add_(admit_U)

    def state_dict(self) -> dict[str, Any]:
        """Locks, warm-up counts and history: tensors and plain values, copies."""
        state: dict[str, Any] = {name: tensor.clone() for name, tensor in self._state.items()}
        return {**state, "history": self.config.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved state; the decisions that follow are those of the run that saved it.

        Raises:
            ValueError: a state of another number of units, another kind of history or other window lengths.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        saved = {name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)}
        if shapes != saved or state_dict["history"] != self.config.history:
            raise ValueError(
                f"the saved control state (history={state_dict.get('history')!r}, shapes {saved}) does not fit this "
                f"controller (history={self.config.history!r}, shapes {shapes}): resume with the same units, history, "
                "history_window and delta_window"
            )
        self._state = {name: state_dict[name].clone() for name in self._state}


def _push(window_UW: Tensor, value_U: Tensor) -> Tensor:
    """The window with `value_U` as its newest entry, without its oldest."""
    return torch.cat([window_UW[:, 1:], value_U[:, None]], dim=1)
