"""What the plugin adds before the first step and in the first recovery: import, conversion, compilation.

Imports and compilations are measured in processes of their own, which alternate; inductor's caches are off. A recovery
has no graph to compile, since both paths are branches of the graph: the last figure is the proof.

Figures: `import_vs_deps`, import of the package over that of lightning, torchao and torchmetrics; `convert_1000_s`,
conversion of a model of 1,000 linears; `compile_vs_torchao`, first step with each block compiled, over stock
torchao's; `first_recovery_vs_step`, the step in which a unit of each size of layer is recovered for the first time,
over the median of the ten before, the worse of eager and compiled.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from examples.byte_gpt import ByteGPT, Windows
from gnmr_lightning import GNMRPrecision

from .common import QUIET, alone, arguments, interleave, ratio, report, spread
from .overhead import NEVER, StockPrecision

STEPS = 13
"""The first two settle, ten are compared with, and in the last one units are recovered."""
LAYERS = 1000
DEPENDENCIES = "lightning.pytorch, torchao.float8, torchao.prototype.quantized_training, torchmetrics"


class Clock(pl.Callback):
    """Notes how long each step takes; recovers a unit of each size of layer in the last one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        plugin = trainer.precision_plugin
        if number == STEPS - 1 and isinstance(plugin, GNMRPrecision):
            recovered = torch.zeros(len(plugin.units), dtype=torch.bool)
            seen = set()
            for index, unit in enumerate(plugin.units):
                sizes = tuple(linear.weight.shape for linear in unit.linears.values())
                recovered[index] = sizes not in seen
                seen.add(sizes)
            plugin._apply(recovered)
        self.started = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter() - self.started)


def fit(side: str, recipe: str, compiled: bool, n_layers: int) -> None:
    """Trains a byte GPT for a few steps in this process and prints each step's time, in seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT(n_layers, d_model=256, n_heads=4, seq_len=64)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[GNMRPrecision(recipe, "bf16-true", control=NEVER) if side == "ours" else StockPrecision(recipe)],
        callbacks=[clock],
        max_steps=STEPS,
        **QUIET,
    )
    text = torch.randint(256, (100_000,), dtype=torch.uint8)
    trainer.fit(model, Windows(text, 4, 64, seed=0))
    print(json.dumps(clock.times))


def import_time(modules: str) -> list[float]:
    """Seconds that importing `modules` takes."""
    return [alone(f"import time; t = time.perf_counter()\nimport {modules}\nprint(time.perf_counter() - t)")]


def steps(side: str, recipe: str, compiled: bool, n_layers: int) -> list[float]:
    """Seconds of each step."""
    return alone(f"from benchmarks.startup import fit; fit({side!r}, {recipe!r}, {compiled}, {n_layers})")


def convert() -> float:
    """Seconds to convert a model of 1,000 linears."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)), nn.Linear(16, 2))
    started = time.perf_counter()
    GNMRPrecision("int8").convert_module(model)
    return time.perf_counter() - started


def main() -> None:
    args = arguments("startup", __doc__.splitlines()[0])
    rows: list[dict[str, Any]] = []

    modules = {"ours": "gnmr_lightning", "deps": DEPENDENCIES}
    sides = {name: partial(import_time, module) for name, module in modules.items()}
    imports = interleave(sides, 1 if args.quick else 9)
    imported = ratio(imports, "ours", "deps")
    rows.append({"what": "import", "ratio": imported, "s": statistics.median(imports["ours"])})
    rows[-1]["spread"] = spread(imports["ours"])

    conversions = [convert() for _ in range(3 if args.quick else 10)][1:]
    rows.append({"what": f"conversion of {LAYERS} linears", "s": statistics.median(conversions)})

    compilations, recoveries = [], []
    for recipe in ("float8_tensorwise",) if args.quick else ("float8_tensorwise", "float8_rowwise"):
        first: dict[str, list[float]] = {"ours": [], "torchao": []}
        for compiled in (False, True):
            over = []
            for _ in range(1 if args.quick else 3):
                for side in first if compiled else ("ours",):
                    times = steps(side, recipe, compiled, 1 if args.quick else 2)
                    if compiled:
                        first[side].append(times[0])
                    if side == "ours":
                        over.append(times[-1] / statistics.median(times[2:-1]))
            recoveries.append(statistics.median(over))
            how = f"{recipe}, {'compiled' if compiled else 'eager'}"
            rows.append({"what": f"first recovery over a step, {how}", "ratio": recoveries[-1]})
        compilations.append(ratio(first, "ours", "torchao"))
        seconds = statistics.median(first["ours"])
        rows.append({"what": f"first compiled step, {recipe}", "ratio": compilations[-1], "s": seconds})
    figures = {
        "import_vs_deps": imported,
        "convert_1000_s": statistics.median(conversions),
        "compile_vs_torchao": max(compilations),
        "first_recovery_vs_step": max(recoveries),
    }
    columns = dict.fromkeys(("what", "ratio", "spread", "s"))
    report(args, "startup", figures, [columns | row for row in rows])


if __name__ == "__main__":
    main()
