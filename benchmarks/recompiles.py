"""How many graphs are compiled after warm-up while random subsets of units are flipped, and whether results stay equal.

Three ways to compile (the module given to `Trainer.fit`, each block, each linear layer), every recipe, inductor,
`fullgraph=True`. Each step with random switches runs compiled and eager on the same weights;
`max_abs_diff_vs_eager` is the largest difference of a loss. Figures are the worst over all cases of ours. What inductor
itself changes by fusing shows in the rows of stock torchao, which are in no figure.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from examples.byte_gpt import ByteGPT, Windows
from gnmr_lightning import GNMRPrecision, backends
from gnmr_lightning.linear import RecoverableLinear

from .common import QUIET, arguments, report
from .overhead import NEVER, STOCK, StockPrecision

WARM_UP = 3


class Quiet(ByteGPT):
    """Without logging in the step, which dynamo cannot trace."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(batch)


class FlipAndCompare(pl.Callback):
    """Before each step flips a random subset of our units; after it, computes the same loss in eager mode."""

    def __init__(self, eager: nn.Module, seed: int) -> None:
        self.eager = eager
        self.generator = torch.Generator().manual_seed(seed)
        self.difference = 0.0
        self.graphs_warm = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, GNMRPrecision):
            plugin._apply(torch.rand(len(plugin.units), generator=self.generator) < 0.5)
        if batch_idx == WARM_UP:
            self.graphs_warm = graphs()
        with torch.no_grad(), plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            self.expected = pl_module._loss(batch).item()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.difference = max(self.difference, abs(outputs["loss"].item() - self.expected))


def graphs() -> int:
    """Graphs that dynamo has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def main() -> None:
    args = arguments("recompiles", __doc__.splitlines()[0])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    flips = 40 if args.quick else 200
    text = torch.randint(256, (50_000,), generator=torch.Generator().manual_seed(args.seed), dtype=torch.uint8)
    rows: list[dict[str, Any]] = []

    def case(recipe: str, way: str, precision: Any) -> dict[str, Any]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(args.seed)
        model = Quiet(n_layers=2, d_model=64, n_heads=2, seq_len=32)
        fitted: Any = model
        if way == "each block":
            for block in model.blocks:
                block.compile(fullgraph=True)
        elif way == "each linear":
            for linear in (m for m in model.blocks.modules() if isinstance(m, nn.Linear)):
                linear.compile(fullgraph=True)
        else:
            fitted = torch.compile(model, fullgraph=True)
        compare = FlipAndCompare(model, args.seed)
        trainer = pl.Trainer(
            accelerator="cpu",
            plugins=[precision],
            callbacks=[compare],
            max_steps=WARM_UP + flips,
            **QUIET,
            limit_val_batches=0,
        )
        trainer.fit(fitted, Windows(text, 4, 32, seed=args.seed))
        assert not any(isinstance(m, RecoverableLinear) for m in model.modules())
        return {
            "recipe": recipe,
            "compiled": way,
            "flips": flips if isinstance(precision, GNMRPrecision) else 0,
            "graphs": compare.graphs_warm,
            "recompiles": graphs() - compare.graphs_warm,
            "max_abs_diff_vs_eager": compare.difference,
        }

    for recipe in ("int8", "float8_rowwise") if args.quick else backends.RECIPES:
        for way in ("Trainer.fit(torch.compile(model))", "each block", "each linear"):
            precision = GNMRPrecision(recipe, control=NEVER)
            rows.append(case(recipe, way, precision))
    figures = {
        "max_recompiles": max(row["recompiles"] for row in rows),
        "max_abs_diff_vs_eager": max(row["max_abs_diff_vs_eager"] for row in rows),
    }
    for recipe in ("float8_rowwise",) if args.quick else STOCK[:3]:  # its int8 layer cannot be compiled with fullgraph
        rows.append(case(f"stock torchao, {recipe}, bf16-true", "each block", StockPrecision(recipe)))
    report(args, "recompiles", figures, rows)


if __name__ == "__main__":
    main()
