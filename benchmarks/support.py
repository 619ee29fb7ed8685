"""What works where: every recipe on every model family, in both base precisions, eager and compiled.

A cell is one short run of the real Trainer, with a ragged last batch, in which a random subset of the units is moved to
bf16 before each step. It works if all of this holds:

- the run goes through, and its losses stay near those of the same model in bf16 without this package;
- both paths did work, and in an eager run validation in low precision stays near the bf16 run's, too;
- compiled: as many graphs as the same model without this package, in each epoch, whatever is moved;
- afterwards the layers are plain and `state_dict` has the plain model's keys.

A model of which torch compiles nothing without this package is not tried compiled; the cell says so.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch

from gnmr_lightning import GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.linear import BF16, LOW, RecoverableLinear
from gnmr_lightning.precision import Base

from .common import QUIET, report
from .families import FAMILIES, Family

WORKS, NOT_IN_STOCK, NOT_RUN = "works", "not in stock", "not run"
BASES: tuple[Base, ...] = get_args(Base)
_WIDTHS = (32, 128)
_EPOCHS = 2
_TOLERANCE = 0.1  # of the bf16 run's mean loss, for the mean difference of the losses


@dataclass(frozen=True)
class Cell:
    """One combination; its order is that of the matrix."""

    recipe: str
    family: str
    base: Base
    compiled: bool


def cells() -> list[Cell]:
    """All combinations."""
    return [Cell(*c) for c in product(backends.RECIPES, FAMILIES, BASES, (False, True))]


def pairwise() -> list[Cell]:
    """Few of them, in which any two values of two different axes meet."""
    return list(_pairwise())


def _pairwise() -> Iterator[Cell]:
    for j, family in enumerate(FAMILIES):
        for i, recipe in enumerate(backends.RECIPES):
            yield Cell(recipe, family, BASES[(i + j) % 2], False)
    # As many cells as the longer of the two axes has values; at 3 s each, no more.
    for j in range(max(len(FAMILIES), len(backends.RECIPES))):
        family = list(FAMILIES)[j % len(FAMILIES)]
        yield Cell(backends.RECIPES[j % len(backends.RECIPES)], family, BASES[j % 2], True)


@dataclass(frozen=True)
class _Run:
    losses: torch.Tensor  # of each training batch; of an eager run, then of validation
    graphs: list[int]  # compiled until the end of each epoch


class _Watch(pl.Callback):
    """Moves random units before each step, and keeps the losses and the graphs."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.losses: list[torch.Tensor] = []
        self.graphs: list[int] = []
        self.work = torch.zeros(0)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if isinstance(plugin := trainer.precision_plugin, GNMRPrecision):
            plugin._apply(torch.rand(len(plugin.units), generator=self.generator) < 0.5)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"] if isinstance(outputs, dict) else outputs)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if isinstance(plugin := trainer.precision_plugin, GNMRPrecision):
            self.work = plugin.work().sum(0)


def _fit(
    model: Family, width: int, compiler: str | None, accelerator: str, ragged: bool, **precision: Any
) -> tuple[_Run, _Watch]:
    if compiler is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.compile_parts(compiler)
    watch = _Watch()
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=_EPOCHS,
        limit_train_batches=1.0 if ragged else 2,
        callbacks=[watch],
        limit_val_batches=0 if compiler else 1,  # it doubles the graphs; tests/test_eval_precision.py compiles it, too
        num_sanity_val_steps=0,
        **QUIET,
        **precision,
    )
    trainer.fit(model, model.data(width), model.data(width))
    losses = watch.losses if compiler else [*watch.losses, trainer.callback_metrics["val_loss"]]
    return _Run(torch.tensor(losses).float(), watch.graphs), watch


def _build(family: str, width: int) -> Family:
    torch.manual_seed(0)
    return FAMILIES[family](width)


@cache
def _stock(family: str, width: int, base: Base, compiler: str | None, accelerator: str, ragged: bool) -> _Run:
    """The same model without this package."""
    return _fit(_build(family, width), width, compiler, accelerator, ragged, precision=base)[0]


def check(cell: Cell, compiler: str = "aot_eager", accelerator: str = "cpu", ragged: bool = True) -> str:
    """Runs one cell.

    Args:
        cell: which.
        compiler: the backend of `torch.compile`.
        accelerator: the Trainer's.
        ragged: whether there is a last batch of 7; to compile, that is a second graph.

    Returns:
        `WORKS`, `NOT_IN_STOCK`, or what is wrong, in a sentence.
    """
    try:
        return _check(cell, compiler if cell.compiled else None, accelerator, ragged)
    except Exception as error:  # whatever it is, it is this cell's result
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _check(cell: Cell, compiler: str | None, accelerator: str, ragged: bool) -> str:
    backend = backends.resolve(cell.recipe)
    device_type = "cuda" if accelerator in ("cuda", "gpu") else "cpu"
    width = next((d for d in _WIDTHS if backend.refuses_layer(d, d, device_type) is None), _WIDTHS[0])
    # Graphs are counted before any compiler sees them, so stock needs none.
    graphs = _stock(cell.family, width, cell.base, "eager", accelerator, ragged).graphs if compiler is not None else []
    if graphs and not graphs[-1]:
        return NOT_IN_STOCK
    model = _build(cell.family, width)
    keys = list(model.state_dict())
    never = GNMRConfig(warmup_steps=10**9)  # the watch decides
    plugin = GNMRPrecision(cell.recipe, cell.base, control=never, eval_precision="low")
    run, watch = _fit(model, width, compiler, accelerator, ragged, plugins=[plugin])
    if compiler is not None and run.graphs != graphs:
        return f"{run.graphs} graphs by the end of each epoch, {graphs} without this package"
    if not (watch.work[LOW] > 0 and watch.work[BF16] > 0):
        return f"FLOPs in low precision {watch.work[LOW]:g}, in bf16 {watch.work[BF16]:g}: one path did nothing"
    expected = _stock(cell.family, width, cell.base, None, accelerator, ragged).losses
    expected = expected[: len(run.losses)]
    difference = ((run.losses - expected).abs().mean() / expected.abs().mean()).item()
    if not difference <= _TOLERANCE:
        return f"losses differ by {difference:.0%} from those in bf16"
    if any(isinstance(module, RecoverableLinear) for module in model.modules()) or list(model.state_dict()) != keys:
        return "the model is not plain after the run"
    return WORKS


def run_all(
    wanted: list[Cell], compiler: str = "aot_eager", accelerator: str = "cpu", verbose: bool = False
) -> dict[Cell, str]:
    """The result of each cell of the whole matrix; `NOT_RUN` for those that are not in `wanted`."""
    results = dict.fromkeys(cells(), NOT_RUN)
    for number, cell in enumerate(wanted, 1):
        results[cell] = check(cell, compiler, accelerator)
        if verbose:
            print(f"{number}/{len(wanted)}", *asdict(cell).values(), results[cell], flush=True)
    return results


def render(results: dict[Cell, str], compiler: str, device: str) -> str:
    """The page of the documentation: a table for each base precision, a footnote for each thing that is wrong."""
    notes: dict[str, int] = {}

    def mark(cell: Cell) -> str:
        result = results[cell]
        if result in (WORKS, NOT_RUN):
            return {WORKS: "yes", NOT_RUN: "-"}[result]
        return "stock" if result == NOT_IN_STOCK else f"no [{notes.setdefault(result, len(notes) + 1)}]"

    lines = [
        _HEAD.format(compiler=compiler, device=device, **{p: version(p) for p in ("torch", "lightning", "torchao")})
    ]
    for base in BASES:
        lines += [
            f"## {base}",
            "",
            f"| model | {' | '.join(backends.RECIPES)} |",
            "| --- " * (len(backends.RECIPES) + 1) + "|",
        ]
        for family in FAMILIES:
            marks = [
                " / ".join(mark(Cell(recipe, family, base, compiled)) for compiled in (False, True))
                for recipe in backends.RECIPES
            ]
            lines.append(f"| {family} | {' | '.join(marks)} |")
        lines.append("")
    lines += [f"[{number}] {note}\n" for note, number in notes.items()]
    lines += ["## The models", ""]
    lines += [f"- {name}: {' '.join((family.__doc__ or '').split())}" for name, family in FAMILIES.items()]
    return "\n".join(lines) + "\n"


_HEAD = """# What works where

Made by `python -m benchmarks.support --write docs/support.md`, from runs on {device}, with torch {torch},
lightning {lightning}, torchao {torchao}. Do not edit.

Each cell is "eager / compiled" (backend {compiler}): one short training run with a last batch of 7 samples, in which
random units are moved to bf16 before each step; the eager one also validates in low precision. What has to hold is said
in `benchmarks/support.py`. Trained models of these families are also copied, pickled, exported by `torch.export`, one
to ONNX and one quantised by torchao, each like the plain model: `tests/test_export.py`.

| cell | meaning |
| --- | --- |
| yes | works |
| no [n] | does not; note n says what is wrong |
| stock | torch does not compile this model without this package either |
| - | not run: nothing is claimed |
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the cells that `make test` runs")
    parser.add_argument("--compiler", default="aot_eager", help="torch.compile's backend; default aot_eager")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and rows there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of the documentation there")
    args = parser.parse_args()
    args.seed = 0
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    accelerator, device = ("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else ("cpu", "a CPU")
    results = run_all(pairwise() if args.quick else cells(), args.compiler, accelerator, verbose=True)
    counts: dict[str, int] = {}
    for result in results.values():
        key = result if result in (WORKS, NOT_IN_STOCK, NOT_RUN) else "fails"
        counts[key] = counts.get(key, 0) + 1
    figures = {f"cells_{key.replace(' ', '_')}": float(count) for key, count in counts.items()}
    report(args, "support", figures, [{**asdict(cell), "result": result} for cell, result in results.items()])
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(render(results, args.compiler, device), encoding="utf-8")


if __name__ == "__main__":
    main()
