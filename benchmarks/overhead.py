"""What the plugin adds to a training step: against torchao's own conversion, against no control, against plain bf16.

Every side trains the same byte GPT with the same Lightning Trainer settings on the same batches, in short fits that
take turns with the other side's: one process, interleaved, the first two steps of each fit left out. One thread.

Figures (each the worst over the sizes and recipes measured): `eager_vs_torchao`, step time over stock torchao
conversion; `control` and `control_with_clip`, over the same layers without measuring; `recovered_vs_bf16`, all units
recovered over no conversion at all.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn

from examples.byte_gpt import ByteGPT, Windows
from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends

from .common import arguments, interleave, ratio, report, spread

NEVER = GNMRConfig(warmup_steps=10**9)


class StockPrecision(HalfPrecision):
    """torchao's own module conversion of the layers that GNMRPrecision would take, in bf16-true.

    int8 is torchao's module swap: its weight subclass does not quantise under torch 2.13 (it returns the plain
    product), so a comparison to it would be one to bf16.
    """

    def __init__(self, recipe: str) -> None:
        super().__init__("bf16-true")
        self.recipe = recipe

    def convert_module(self, module: nn.Module) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        module = super().convert_module(module)

        def taken(layer: nn.Module, fqn: str) -> bool:
            return isinstance(layer, nn.Linear) and not fqn.endswith("head")

        if self.recipe == "int8":
            quantize_(module, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=taken)
        else:
            config = Float8LinearConfig.from_recipe_name(self.recipe.removeprefix("float8_"))
            convert_to_float8_training(module, module_filter_fn=taken, config=config)
        return module


class Blind(GNMRCallback):
    """No control: the converted layers alone, without measuring or deciding."""

    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


class BlindPrecision(GNMRPrecision):
    """The same layers with Lightning's own optimizer step and clipping."""

    def __init__(self, recipe: str) -> None:
        super().__init__(recipe, "bf16-true", on_nonfinite="ignore", control=NEVER)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)


class AllRecovered(pl.Callback):
    """Keeps every unit in bf16: each decision of the controller would release them."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, GNMRPrecision)
        plugin._apply(torch.ones(len(plugin.units), dtype=torch.bool))


class Clock(pl.Callback):
    """Notes how long each training step takes, from batch start to batch start."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts.append(time.perf_counter())

    def times(self) -> list[float]:
        """Of all steps but the first two of the fit, in seconds."""
        return [b - a for a, b in zip(self.starts[2:-1], self.starts[3:], strict=True)]


def side(model: ByteGPT, batches: Any, steps: int, precision: Callable[[], Any], *kinds: type, **kwargs: Any) -> Any:
    """A round of one side: a short fit of its own model, which gives the times of its steps."""

    def run() -> list[float]:
        clock = Clock()
        trainer = pl.Trainer(
            accelerator="cpu",
            plugins=[precision()],
            callbacks=[*(kind() for kind in kinds), clock],
            max_steps=steps + 4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            **kwargs,
        )
        trainer.fit(model, batches)
        return clock.times()

    return run


def main() -> None:
    args = arguments("overhead", __doc__.splitlines()[0])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    text = torch.randint(256, (100_000,), generator=torch.Generator().manual_seed(args.seed), dtype=torch.uint8)

    def compare(d_model: int, what: str, ours: Any, theirs: Any, **kwargs: Any) -> float:
        """Median step time of `ours` over `theirs`; a side is a precision's maker and its callbacks' kinds."""
        batches = Windows(text, batch_size=4 if d_model <= 512 else 2, seq_len=64, seed=args.seed)
        steps, rounds = (5, 3) if args.quick else ({128: 12, 512: 5, 1024: 3}[d_model], 5)
        runs = {}
        for name, (precision, *kinds) in (("ours", ours), ("theirs", theirs)):
            torch.manual_seed(args.seed)
            model = ByteGPT(n_layers=2, d_model=d_model, n_heads=4, seq_len=64)
            runs[name] = side(model, batches, steps, precision, *kinds, **kwargs)
        times = interleave(runs, rounds)
        value = ratio(times, "ours", "theirs")
        step_ms = 1000 * statistics.median(times["ours"])
        rows.append({"what": what, "d_model": d_model, "ratio": value, "spread": spread(times["ours"]), "ms": step_ms})
        return value

    rows: list[dict[str, Any]] = []
    found: dict[str, list[float]] = {}
    for d_model in (128,) if args.quick else (128, 512, 1024):
        for recipe in backends.RECIPES:
            stock = partial(StockPrecision, recipe)
            ours = partial(GNMRPrecision, recipe, "bf16-true", control=NEVER)
            value = compare(d_model, f"{recipe} over stock torchao", (ours,), (stock,))
            found.setdefault("eager_vs_torchao", []).append(value)
        ours, blind = partial(GNMRPrecision, "int8", "bf16-true", control=NEVER), partial(BlindPrecision, "int8")
        value = compare(d_model, "control on over off", (ours,), (blind, Blind))
        found.setdefault("control", []).append(value)
        value = compare(d_model, "the same, with clipping", (ours,), (blind, Blind), gradient_clip_val=1.0)
        found.setdefault("control_with_clip", []).append(value)
        if d_model >= 512 or args.quick:
            plain = partial(HalfPrecision, "bf16-true")
            value = compare(d_model, "all recovered over bf16", (ours, AllRecovered), (plain,))
            found.setdefault("recovered_vs_bf16", []).append(value)
    report(args, "overhead", {key: max(values) for key, values in found.items()}, rows)


if __name__ == "__main__":
    main()
