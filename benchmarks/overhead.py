"""What the plugin adds to a training step: against torchao's own conversion, against no control, against plain bf16.

Every side trains the same byte GPT with the same Lightning Trainer settings on the same batches. The fits of both
sides run in one process, in threads of which only one moves at a time, and take turns step by step: a machine's mood
lasts seconds, a step a fraction of one. Each side has two fits, since where its memory lies can make one of two equal
fits 3% slower than the other. One thread of torch. Our first 20 steps, in which every unit is probed, do not count.

Figures (each the worst over the sizes and recipes measured): `eager_vs_torchao` and `compiled_vs_torchao` (each block
compiled), step time over stock torchao conversion; `control` and `control_with_clip`, over the same layers without
measuring; `recovered_vs_bf16`, all units recovered, their locks renewed again and again, over no conversion at all.
Rows alone, of what a user may know: ours over Lightning's bf16-mixed, and what smartclip's z-score clipping, a monitor
of spikes without recovery, adds to bf16 (where it is installed). Composer's OptimizerMonitor cannot be installed beside
torch 2.7.1 or later.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import nn

from examples.byte_gpt import ByteGPT, Windows
from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision
from gnmr_lightning.controller import _SETTLING

from .common import QUIET, arguments, interleave, ratio, report, spread

NEVER = GNMRConfig(warmup_steps=10**9)
STOCK = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "int8")  # have a torchao layer on a CPU


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
    """The same layers with Lightning's own optimizer step and clipping; products are not compared with exact ones."""

    def __init__(self, recipe: str) -> None:
        control = GNMRConfig(method="gnmr", warmup_steps=10**9)
        super().__init__(recipe, "bf16-true", on_nonfinite="ignore", control=control)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)


class Recovered(pl.Callback):
    """Locks a share of the units, evenly spread, again and again, as if they stayed at risk.

    Their locks end in turns, so that in each step as many of them as in any other try low precision on a few rows.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, GNMRPrecision)
        control, units = plugin.controller, len(plugin.units)
        count = round(self.share * units)
        chosen = [(2 * i + 1) * units // (2 * count) for i in range(count)]
        released = [index for index in chosen if control._until_U[index] <= control._steps_U[index]]
        for index in released:
            step, length = control._steps_U[index], control.config.lock_interval
            control._until_U[index] = step + length - (step + index) % length
        if released:
            control._plan_probes(control._everyone, control._locked(), everyone=False)
            plugin._follow(control.locked, control.probed)


def smartclip() -> pl.Callback:
    """A peer's monitor of spikes."""
    from smartclip import ZScoreClip
    from smartclip.backends.torch.integrate import SmartClipCallback

    return SmartClipCallback(ZScoreClip())


class Turns(pl.Callback):
    """Holds a fit at the start of every batch until it is its turn, and notes how long its step took."""

    def __init__(self) -> None:
        self.turn, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.ends = False

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.waits.release()
        self.turn.acquire()
        trainer.should_stop = self.ends

    def step(self) -> list[float]:
        """Lets the fit do one step; its time, in seconds."""
        started = time.perf_counter()
        self.turn.release()
        self.waits.acquire()
        return [time.perf_counter() - started]


class Side:
    """A fit of one side, in a thread of its own that runs only while it is given a step to do."""

    def __init__(
        self,
        model: ByteGPT,
        batches: Any,
        precision: Callable[[], Any],
        *kinds: Callable[[], pl.Callback],
        **kwargs: Any,
    ) -> None:
        self.turns = Turns()
        trainer = pl.Trainer(
            accelerator="cpu",
            plugins=[precision()],
            callbacks=[*(kind() for kind in kinds), self.turns],
            max_epochs=1,
            **QUIET,
            limit_val_batches=0,
            **kwargs,
        )

        def fit() -> None:
            torch.set_num_threads(1)  # a setting of each thread
            trainer.fit(model, batches)

        self.thread = threading.Thread(target=fit, daemon=True)
        self.thread.start()
        self.turns.waits.acquire()

    def close(self) -> None:
        """Ends the fit."""
        self.turns.ends = True
        self.turns.turn.release()
        self.thread.join()


def steps(fits: list[Side]) -> list[float]:
    """One step of each fit; their times, in seconds."""
    return [taken for fit in fits for taken in fit.turns.step()]


def main() -> None:
    args = arguments("overhead", __doc__.splitlines()[0])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    text = torch.randint(256, (100_000,), generator=torch.Generator().manual_seed(args.seed), dtype=torch.uint8)

    def compare(d_model: int, what: str, ours: Any, theirs: Any, compiled: bool = False, **kwargs: Any) -> float:
        """Median step time of `ours` over `theirs`; a side is a precision's maker and its callbacks' makers."""
        torch._dynamo.reset()  # its limit of graphs is for all models of a process
        batches = Windows(text, batch_size=4 if d_model <= 512 else 2, seq_len=64, seed=args.seed)
        rounds = 8 if args.quick else {128: 60, 512: 20, 1024: 12}[d_model]
        sides: dict[str, list[Side]] = {"ours": [], "theirs": []}
        for name in ("ours", "theirs", "theirs", "ours"):
            precision, *kinds = ours if name == "ours" else theirs
            torch.manual_seed(args.seed)
            model = ByteGPT(n_layers=2, d_model=d_model, n_heads=4, seq_len=64)
            if compiled:
                for block in model.blocks:
                    block.compile(fullgraph=True)
            sides[name].append(Side(model, batches, precision, *kinds, **kwargs))
            for _ in range(_SETTLING if name == "ours" else 3):
                sides[name][-1].turns.step()
        times = interleave({name: partial(steps, fits) for name, fits in sides.items()}, rounds)
        for fit in (*sides["ours"], *sides["theirs"]):
            fit.close()
        value = ratio(times, "ours", "theirs")
        step_ms = 1000 * statistics.median(times["ours"])
        rows.append({"what": what, "d_model": d_model, "ratio": value, "spread": spread(times["ours"]), "ms": step_ms})
        print(f"{what}, d_model {d_model}: {value:.3f}", flush=True)
        return value

    rows: list[dict[str, Any]] = []
    found: dict[str, list[float]] = {}
    plain = partial(HalfPrecision, "bf16-true")
    for d_model in (128,) if args.quick else (128, 512, 1024):
        for recipe in STOCK:
            stock = partial(StockPrecision, recipe)
            ours = partial(GNMRPrecision, recipe, "bf16-true", control=NEVER)
            value = compare(d_model, f"{recipe} over stock torchao", (ours,), (stock,))
            found.setdefault("eager_vs_torchao", []).append(value)
            if recipe == "float8_rowwise" or (recipe == "float8_tensorwise" and not args.quick):
                value = compare(d_model, f"{recipe} over stock torchao, compiled", (ours,), (stock,), compiled=True)
                found.setdefault("compiled_vs_torchao", []).append(value)
        recipe = "float8_tensorwise"  # the fastest here, so the one in which control shows most
        ours, blind = partial(GNMRPrecision, recipe, "bf16-true", control=NEVER), partial(BlindPrecision, recipe)
        value = compare(d_model, "control on over off", (ours,), (blind, Blind))
        found.setdefault("control", []).append(value)
        value = compare(d_model, "the same, with clipping", (ours,), (blind, Blind), gradient_clip_val=1.0)
        found.setdefault("control_with_clip", []).append(value)
        if d_model >= 512 or args.quick:
            value = compare(d_model, "all recovered over bf16", (ours, partial(Recovered, 1.0)), (plain,))
            found.setdefault("recovered_vs_bf16", []).append(value)
        if not args.quick:
            ours = partial(GNMRPrecision, recipe, "bf16-mixed", control=NEVER)
            compare(
                d_model, "ours over Lightning's bf16-mixed", (ours,), (partial(MixedPrecision, "bf16-mixed", "cpu"),)
            )
            if importlib.util.find_spec("smartclip") is not None:
                compare(d_model, "bf16 with smartclip over without", (plain, smartclip), (plain,))
    report(args, "overhead", {key: max(values) for key, values in found.items()}, rows)


if __name__ == "__main__":
    main()
