"""What the demo adds to a plain training run: a fault that a newcomer can watch being handled, and a closing table.

`python -m examples.demo [--no-fault] [--data PATH] ...` stands for `python -m gnmr_lightning fit --config
configs/demo.yaml ...`; everything else that is given goes to that command as it is. Both callbacks are named in the
config, so the long form does the same.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.common import callback_of, recovery, run, say
from gnmr_lightning import GNMRCallback, GNMRPrecision, backends
from gnmr_lightning.backends import Backend
from gnmr_lightning.linear import RecoverableLinear

CONFIG = "configs/demo.yaml"


class FaultyBackend(Backend):
    """A healthy backend whose `grad_output` is rounded with a scale that is far too large, as a stale scale would be.

    Rounding is stochastic, so the gradient stays right on average and drowns in noise: each value becomes 0 or one
    whole step.

    Args:
        healthy: the backend that computes all three matmuls.
        inflation: the scale over the right one, which maps the largest value to 127.
    """

    def __init__(self, healthy: Backend, inflation: float) -> None:
        self.healthy, self.inflation = healthy, inflation
        self.name = f"{healthy.name}+demo-fault"

    def _round(self, grad_MN: Tensor) -> Tensor:
        step = (grad_MN.abs().amax() * (self.inflation / 127)).float().clamp(min=1e-30)
        return (torch.floor(grad_MN / step + torch.rand_like(grad_MN, dtype=torch.float32)) * step).to(grad_MN.dtype)

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return self.healthy.output(x_MK, weight_NK)

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        sick = self._round(grad_MN)
        return self.healthy.grads(sick, x_MK, weight_NK, need_input=need_input, need_weight=need_weight)

    def takes_rows(self, rows: int, device_type: str) -> bool:
        return self.healthy.takes_rows(rows, device_type)


class DemoFault(L.Callback):
    """Makes the low-precision path of one unit sick for some steps, and well again.

    Args:
        unit: name of the unit.
        start: the first sick optimizer step.
        steps: how many steps it stays sick; 0 for no fault at all.
        inflation: how many times too large the scale of its grad_output is.

    Raises:
        ValueError: on fit, if the model has no such unit.
    """

    def __init__(
        self, unit: str = "blocks.2.mlp.up", start: int = 150, steps: int = 12, inflation: float = 1000.0
    ) -> None:
        self.unit, self.start, self.steps, self.inflation = unit, start, steps, inflation
        self.began: int | None = None
        self.ended: int | None = None
        self._linears: list[RecoverableLinear] = []
        self._names: tuple[str, str] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin = trainer.precision_plugin
        if not self.steps or not isinstance(plugin, GNMRPrecision):
            return
        units = {unit.name: unit for unit in plugin.units}
        if self.unit not in units:
            raise ValueError(f"unit={self.unit!r} is not in the model: write one of {', '.join(list(units)[:8])} ...")
        self._linears = [
            linear for linear in units[self.unit].linears.values() if isinstance(linear, RecoverableLinear)
        ]
        faulty = backends.register(FaultyBackend(plugin.backend, self.inflation))
        self._names = (plugin.backend.name, faulty.name)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        sick = self.start <= trainer.global_step < self.start + self.steps
        if self._names is None or sick == (self.began is not None and self.ended is None):
            return
        if sick:
            self.began = trainer.global_step
            self._put(self._names[1])
            say(
                trainer,
                f"step {self.began}: from here {self.unit} is sick (the scale of its grad_output is "
                f"{self.inflation:g} times too large)",
            )
        else:
            self.ended = trainer.global_step
            self._put(self._names[0])
            say(trainer, f"step {self.ended}: {self.unit} is well again")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._put_back()

    def _put_back(self) -> None:
        if self._names is not None:
            self._put(self._names[0])

    def _put(self, backend: str) -> None:
        for linear in self._linears:
            linear.backend = backend


class DemoReport(L.Callback):
    """The closing table on screen, and the same figures in `summary.json`.

    `steps` counts the whole run, also over a resume; shares and interventions are those of this process.

    Args:
        out: folder of `summary.json`.
    """

    def __init__(self, out: str = "runs/demo") -> None:
        self.out = Path(out)
        self._losses: deque[Tensor] = deque(maxlen=20)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self._losses.append(outputs["loss"].detach())

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or not self._losses:
            return
        val_loss = trainer.callback_metrics.get("val_loss")
        summary = {
            "steps": trainer.global_step,
            "train_loss": torch.stack(list(self._losses)).mean().item(),
            "val_loss": None if val_loss is None else val_loss.item(),
            **self._recovery(trainer),
            "fault": self._fault(trainer),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        _show(summary, path)

    @staticmethod
    def _recovery(trainer: L.Trainer) -> dict[str, Any]:
        """What recovery did and cost, and what it was allowed to."""
        plugin = trainer.precision_plugin
        max_o, units = (plugin.controller.budget, len(plugin.units)) if isinstance(plugin, GNMRPrecision) else (0, 0)
        return {**recovery(trainer), "max_o": max_o, "units": units}

    @staticmethod
    def _fault(trainer: L.Trainer) -> dict[str, Any] | None:
        """The demo's fault and what was done about it; None if this process had none."""
        fault, watcher = callback_of(trainer, DemoFault), callback_of(trainer, GNMRCallback)
        if fault is None or fault.began is None:
            return None
        assert watcher is not None  # a fault begins under GNMRPrecision alone, which attaches one
        last = fault.ended if fault.ended is not None else trainer.global_step
        events = [e for e in watcher.events if e.unit == fault.unit and e.step >= fault.began]
        locks = [e for e in events if e.kind == "locked" and e.step < last]
        steps_of = {
            kind: [e.step for e in events if e.kind == kind and locks and e.step > locks[0].step]
            for kind in ("renewed", "released")
        }
        return {
            "unit": fault.unit,
            "began": fault.began,
            "ended": fault.ended,
            "locked": [e.step for e in locks],
            "gnmr": locks[0].gnmr if locks else None,
            "rise": locks[0].rise if locks else None,
            **steps_of,
        }


def _show(summary: dict[str, Any], path: Path) -> None:
    console = Console()
    table = Table(title="The run", title_justify="left", show_header=False)
    validation = "not measured" if summary["val_loss"] is None else f"{summary['val_loss']:.4f}"
    for name, value in (
        ("recipe", summary["recipe"]),
        ("steps", str(summary["steps"])),
        ("train loss, mean of the last 20 steps", f"{summary['train_loss']:.4f}"),
        ("validation loss", validation),
        ("share of matmul FLOPs in bf16", f"{summary['bf16_share']:.2%}"),
        ("interventions (units moved to bf16)", str(summary["interventions"])),
        ("budget (units in bf16 at once)", f"{summary['max_o']} of {summary['units']}"),
    ):
        table.add_row(name, value)
    console.print(table)
    if (fault := summary["fault"]) is not None:
        table = Table(title="The fault that the demo put in", title_justify="left")
        for column in ("unit", "step", "what happened"):
            table.add_column(column)
        rows = [(fault["began"], "sick from here on")]
        rows += [(step, "found; runs bf16 from the next step on") for step in fault["locked"]]
        rows += [(step, "still at risk: stays in bf16") for step in fault["renewed"]]
        rows += [(step, "released, back in " + summary["recipe"]) for step in fault["released"]]
        if fault["ended"] is not None:
            rows.append((fault["ended"], "well again"))
        for step, what in sorted(rows, key=lambda row: row[0]):
            table.add_row(fault["unit"], str(step), what)
        if not fault["locked"]:
            table.add_row(fault["unit"], "-", "not found: its risk stayed below 1")
        console.print(table)
    console.print(f"Figures: {path}")


def arguments(given: Sequence[str]) -> list[str]:
    """The demo's own arguments as arguments of `python -m gnmr_lightning`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Trains a byte-level GPT with GNMRPrecision.",
        epilog="Further arguments go to `python -m gnmr_lightning fit`, for instance --trainer.max_steps=400.",
        allow_abbrev=False,
    )
    parser.add_argument("--no-fault", action="store_true", help="do not make a unit sick midway")
    parser.add_argument("--data", metavar="PATH", help="a text file or a folder of text files to train on")
    own, further = parser.parse_known_args(given)
    if own.data is not None and not Path(own.data).exists():
        parser.error(f"--data {own.data} does not exist: give a text file or a folder of text files")
    result = ["fit", "--config", CONFIG]
    if own.data is not None:
        result.append(f"--data.data={own.data}")
    if own.no_fault:
        result.append("--trainer.callbacks.steps=0")  # reaches the last callback of the config, which is the fault
    return [*result, *further]


def main(given: Sequence[str] | None = None) -> None:
    """Runs the demo on `given`, the process's own arguments by default."""
    run(arguments, given)


if __name__ == "__main__":
    main()
