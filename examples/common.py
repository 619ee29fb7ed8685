"""What the example runs share: a short command that stands for a longer one, a line on screen, what recovery did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning as L

from gnmr_lightning import GNMRCallback, GNMRPrecision
from gnmr_lightning.__main__ import main as command_line

Kind = TypeVar("Kind", bound=L.Callback)


def run(arguments: Callable[[Sequence[str]], list[str]], given: Sequence[str] | None) -> None:
    """Says and runs the command that `arguments` makes of `given`, the process's own arguments by default."""
    args = arguments(sys.argv[1:] if given is None else given)
    print(f"$ python -m gnmr_lightning {' '.join(args)}")
    command_line(args)


def say(trainer: L.Trainer, line: str) -> None:
    """Prints a line once, above the progress bar if there is one."""
    if not trainer.is_global_zero:
        return
    bar = trainer.progress_bar_callback
    # The bar of the validation before the first step is closed by now, and would print nothing.
    print(line) if bar is None or trainer.sanity_checking else bar.print(line)


def callback_of(trainer: L.Trainer, kind: type[Kind]) -> Kind | None:
    """The run's first callback of a kind."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def recovery(trainer: L.Trainer) -> dict[str, Any]:
    """`recipe`, `bf16_share` and `interventions` of this process; without GNMRPrecision, those of a plain bf16 run."""
    plugin = trainer.precision_plugin
    if not isinstance(plugin, GNMRPrecision):
        return {"recipe": str(trainer.precision), "bf16_share": 1.0, "interventions": 0}
    watcher = callback_of(trainer, GNMRCallback)
    assert watcher is not None  # GNMRPrecision attaches one
    totals = watcher.totals()
    # None where a resumed run had no step left to do.
    return {"recipe": plugin.recipe, **{name: totals.get(name) for name in ("bf16_share", "interventions")}}
