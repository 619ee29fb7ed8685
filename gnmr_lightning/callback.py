"""GNMRCallback: when to measure, and what to say about it.

Each optimizer step runs the straight line once: the norms, the controller's decision, the switch, the log. It runs in
`on_before_optimizer_step`, where the gradient is complete (accumulated, reduced, not yet clipped), and the decision
is in force from the next forward on. With GNMRPrecision as the Trainer's precision, norms, controller and switches
are the plugin's; with any other, the callback cuts the model into units itself and only observes.

Costs per optimizer step: the one host synchronisation of `UnitNorms.measure`, none of its own.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MetricCollection

from .controller import Decision, GNMRConfig, GNMRController
from .linear import FALLBACK_CALLS, RecoverableLinear
from .metrics import Bf16Share, BudgetUse, DecisionCount, FallbackCalls, MaxRatio
from .precision import GNMRPrecision
from .signal import Signal, UnitNorms
from .units import Granularity, RecoverableUnit, check_patterns, cut

log = logging.getLogger(__name__)

_MAX_EVENTS = 1000
_TOTALS = {"max": "max_gnmr"}  # clearer names where no gnmr/ stands before them


class Event(NamedTuple):
    """One unit that was locked to bf16, locked again as its lock ended, or released."""

    step: int
    """`Trainer.global_step` of the optimizer step whose gradient led to it; it is in force from the next one on."""
    unit: str
    kind: Literal["locked", "renewed", "released"]
    gnmr: float
    """The unit's GNMR in that step; inf for a gradient that was not finite."""
    rise: float
    """Error of the unit's worst low-precision product by its own mean; inf where it is not finite, 0 without one."""


@dataclass
class _Noted:
    """Plain numbers of the steps since the metrics were last updated."""

    steps: int = 0
    nonfinite: int = 0
    interventions: int = 0
    locked: int = 0
    highest: float = 0.0
    highest_delta: float = 0.0
    highest_rise: float = 0.0


class GNMRCallback(pl.Callback):
    """Watches the gradient norm of every recoverable unit, and has GNMRPrecision recover those at risk.

    The Trainer needs no GNMRCallback: GNMRPrecision attaches a default one. Give your own to log per unit, or to
    observe a run that uses another precision; the arguments after `per_unit` are for that case alone.

    Args:
        per_unit: also log each unit's GNMR, as `gnmr/unit/<name>`.
        control: the policy to observe with; default `GNMRConfig()`. Its method is taken as "gnmr": without
            low-precision products there are no errors to decide on.
        granularity, include, exclude: how to cut the model into units, as in `GNMRPrecision`.

    Logged every `Trainer.log_every_n_steps` optimizer steps, over the steps since the last time: `gnmr/max`,
    `gnmr/max_delta`, `gnmr/interventions`, `gnmr/budget_use`, `gnmr/nonfinite_steps`, and with GNMRPrecision alone
    `gnmr/max_error_rise`, `gnmr/bf16_share`, `gnmr/fallback_calls`; and `gnmr/recovered`, the units in bf16 now.

    Attributes:
        events: the last 1,000 locks, renewed locks and releases.

    Raises:
        ValueError: on fit, if a policy or a cut is given here and GNMRPrecision has its own.
    """

    def __init__(
        self,
        per_unit: bool = False,
        control: GNMRConfig | None = None,
        granularity: Granularity = "linear",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        check_patterns(include, exclude)
        self.per_unit = per_unit
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._control = control
        self._cut: dict[str, Any] = {"granularity": granularity, "include": include, "exclude": exclude}
        self._observes = control is not None or self._cut != {"granularity": "linear", "include": None, "exclude": ()}
        self._plugin: GNMRPrecision | None = None
        self._units: list[RecoverableUnit] = []
        self._controller: GNMRController | None = None
        self._norms: UnitNorms | None = None
        self._restored: dict[str, Any] | None = None
        self._work: Tensor | None = None
        self._nonfinite_in_a_row = 0
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned_shapes = False
        self._noted = _Noted()
        self._interval, self._total = _metrics(), _metrics()

    # -- the run -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, GNMRPrecision):
            if self._observes:
                raise ValueError(
                    "GNMRCallback(control=..., granularity=..., include=..., exclude=...) is for runs without "
                    "GNMRPrecision: give these arguments to GNMRPrecision instead"
                )
            self._plugin, self._units, self._controller = plugin, plugin.units, plugin.controller
            self._work = plugin.work()
        else:
            self._plugin = None
            self._units, _ = cut(pl_module, **self._cut)
            self._norms = UnitNorms(self._units)
            control = replace(self._control or GNMRConfig(), method="gnmr")
            self._controller = GNMRController(control, len(self._units))
            if self._restored is not None:
                self._controller.load_state_dict(self._restored)
                self._restored = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert self._controller is not None
        source = self._plugin or self._norms
        assert source is not None
        signal = source.measure(optimizer)
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self._say_idle(signal)
        if signal.stepping.any():
            decision = self._controller.update(
                signal.norms,
                errors=signal.errors,
                began=signal.began,
                stepping=signal.stepping,
                present=signal.present,
            )
            if self._plugin is not None:
                self._plugin.switch(decision)
            self._note(trainer.global_step, decision)
        else:  # an optimizer of parameters outside of all units
            decision = None
        if not signal.finite:
            self._say_nonfinite(trainer.global_step, signal, decision)
        else:
            self._nonfinite_in_a_row = 0
        self._count(signal, decision)
        self._log(trainer, pl_module, decision)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()  # before the layers, and their counts, are plain again

    # -- what is said ------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, float | int]:
        """Figures of this process's run, up to the last time of logging or its end.

        Returns:
            `bf16_share` (of matmul FLOPs), `interventions`, `nonfinite_steps`, `fallback_calls`, `max_gnmr`,
            `max_delta`, `budget_use`, and `budget` (units); without GNMRPrecision no `bf16_share`, no `fallback_calls`.
        """
        assert self._controller is not None, "totals() has something to say once a fit has started"
        metrics = self._total.items()
        figures = {_TOTALS.get(name, name): metric.compute().item() for name, metric in metrics if metric.update_called}
        return {**figures, "budget": self._controller.budget}

    def _note(self, step: int, decision: Decision) -> None:
        renewed_U = decision.released & decision.newly_locked
        for kind, mask_U, what in (
            ("released", decision.released & ~renewed_U, ""),
            ("renewed", renewed_U, "is still at risk and stays in bf16"),
            ("locked", decision.newly_locked & ~renewed_U, "runs bf16 from the next step on"),
        ):
            for index in mask_U.nonzero().flatten().tolist():
                event = Event(
                    step,
                    self._units[index].name,
                    kind,  # type: ignore[arg-type]
                    decision.gnmr[index].item(),
                    decision.rise[index].item(),
                )
                self.events.append(event)
                # One that is locked for a non-finite gradient is named in the line about that.
                if what and math.isfinite(event.gnmr) and self._plugin is not None:
                    why = f"product error {event.rise:.3g} times its mean, " if event.rise else ""
                    rank_zero_info(f"step {step}: {event.unit} {what} ({why}GNMR {event.gnmr:.3g})")

    def _say_idle(self, signal: Signal) -> None:
        """In an optimizer's first step, names its converted layers that have done nothing so far."""
        if self._plugin is None:
            return
        idle = [
            fqn
            for unit, stepping in zip(self._units, signal.stepping.tolist(), strict=True)
            for fqn, linear in unit.linears.items()
            if stepping
            and isinstance(linear, RecoverableLinear)
            and linear.weight.requires_grad
            and not linear.flops.any()
        ]
        if idle:
            rank_zero_warn(
                f"{len(idle)} converted linear layers did nothing in {self._plugin.recipe} until their "
                f"optimizer's first step: {', '.join(idle[:8])}{' ...' if len(idle) > 8 else ''}; they were not "
                "called, or with no rows, or under torch.no_grad: exclude them if that is meant"
            )

    def _say_nonfinite(self, step: int, signal: Signal, decision: Decision | None) -> None:
        """One line per such step: where it began, and what is done about it."""
        self._nonfinite_in_a_row += 1
        # It began where a product was not finite though its operands were; else, as a gradient flows backwards, in the
        # last unit that has one.
        names = [self._units[i].name for i in (~signal.norms.isfinite()).nonzero().flatten().tolist()][::-1]
        first = [self._units[i].name for i in signal.began.nonzero().flatten().tolist()] or names[:1]
        where = f"began in {', '.join(first)} and reached {len(names)} units" if first else "outside of all units"
        locked = [self._units[i].name for i in decision.newly_locked.nonzero().flatten().tolist()] if decision else []
        action = {"skip": "the optimizer step is skipped", "raise": "the run stops", "ignore": "the step goes on"}
        done = action[self._plugin.on_nonfinite] if self._plugin is not None else "observed only"
        _warn(
            f"step {step}: a gradient is not finite ({where}); {done}"
            + (f"; {', '.join(locked)} runs bf16 from the next step on" if locked and self._plugin else "")
            + (f"; {self._nonfinite_in_a_row} such steps in a row" if self._nonfinite_in_a_row > 1 else "")
        )

    def _count(self, signal: Signal, decision: Decision | None) -> None:
        """Notes one step; metrics take it when they are read, since updating them costs more than deciding."""
        noted = self._noted
        noted.nonfinite += not signal.finite
        if decision is not None:
            stepping_U = signal.stepping
            noted.steps += 1
            noted.highest = max(noted.highest, decision.gnmr.where(stepping_U, 0.0).max().item())
            noted.highest_delta = max(noted.highest_delta, decision.delta_gnmr.where(stepping_U, 0.0).max().item())
            noted.highest_rise = max(noted.highest_rise, decision.rise.max().item())
            noted.interventions += int((decision.newly_locked & ~decision.released).sum())
            noted.locked += int(decision.locked.sum())

    def _flush(self) -> None:
        """Gives what was noted since the last time to the metrics."""
        assert self._controller is not None
        noted, self._noted = self._noted, _Noted()
        work = None
        if self._plugin is not None and self._work is not None:
            now = self._plugin.work()
            work, self._work = now - self._work, now
            if not self._warned_shapes and work[:, FALLBACK_CALLS].any():
                self._warned_shapes = True
                names = [self._units[i].name for i in work[:, FALLBACK_CALLS].nonzero().flatten().tolist()]
                rank_zero_warn(
                    f"{self._plugin.recipe} cannot take the number of rows of a batch, so {', '.join(names[:8])}"
                    f"{' ...' if len(names) > 8 else ''} ran bf16 for it: make batch * sequence a multiple of 16"
                )
        for metrics in (self._interval, self._total):
            metrics["nonfinite_steps"].update(noted.nonfinite)
            if noted.steps:
                metrics["max"].update(torch.tensor([noted.highest]))
                metrics["max_delta"].update(torch.tensor([noted.highest_delta]))
                if self._plugin is not None:
                    metrics["max_error_rise"].update(torch.tensor([noted.highest_rise]))
                metrics["interventions"].update(noted.interventions)
                metrics["budget_use"].update(noted.locked, self._controller.budget, noted.steps)
            if work is not None:
                metrics["bf16_share"].update(work)
                metrics["fallback_calls"].update(work)

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, decision: Decision | None) -> None:
        changed = decision is not None and bool((decision.newly_locked | decision.released).any())
        due = trainer._logger_connector.should_update_logs  # as Lightning's own callbacks ask
        if decision is not None and (due or changed):
            pl_module.log("gnmr/recovered", decision.locked.sum().float(), prog_bar=True)
        if not due:
            return
        self._flush()
        values = {f"gnmr/{name}": m.compute().float() for name, m in self._interval.items() if m.update_called}
        if decision is not None and self.per_unit:
            values |= {f"gnmr/unit/{u.name}": g for u, g in zip(self._units, decision.gnmr.float(), strict=True)}
        pl_module.log_dict(values)
        self._interval.reset()

    # -- state, only of a run that is observed: with GNMRPrecision, the plugin keeps it -------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._plugin is not None or self._controller is None:
            return {}
        return {"controller": self._controller.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict.get("controller")


def _metrics() -> MetricCollection:
    """The metrics of one interval; without synchronisation, since logging must not cost a collective."""
    return MetricCollection(
        {
            "max": MaxRatio(sync_on_compute=False),
            "max_delta": MaxRatio(sync_on_compute=False),
            "max_error_rise": MaxRatio(sync_on_compute=False),
            "interventions": DecisionCount(sync_on_compute=False),
            "budget_use": BudgetUse(sync_on_compute=False),
            "nonfinite_steps": DecisionCount(sync_on_compute=False),
            "bf16_share": Bf16Share(sync_on_compute=False),
            "fallback_calls": FallbackCalls(sync_on_compute=False),
        },
        compute_groups=False,
    )


_warn = rank_zero_only(log.warning)
