"""What FP8 with control is worth on a CUDA GPU: tokens per second of a Llama of about a billion parameters.

On a CPU 8 bits are slower than bf16, so only a GPU can say what the other benchmarks cannot: how much faster FP8 is,
how much of that control and recovery take back, and what they cost in memory and in synchronisations of the host.

Every side trains the same model (weights in bf16, fused AdamW, each block compiled as one graph) on the same random
tokens with a Lightning Trainer. Two such models with their optimizer's states are much for one GPU, so the sides take
turns run by run, A B C A B C, not step by step, and each run frees its memory. A step is timed from its start to the
next one's by CUDA events, which wait for nothing. Synchronisations are counted in steps of their own, which torch's
warnings about them slow down. Units that are recovered are spread evenly over the model, the same in every step: their
locks are renewed again and again.

Figures: `tokens_per_s_bf16`, `tokens_per_s_torchao` (its rowwise recipe), `tokens_per_s_ours` (the same with nothing
recovered), `ours_vs_torchao` (tokens/s; more is better); `speedup_kept_5` and `speedup_kept_10`, the share of torchao's
gain over bf16 that is left with 5% and 10% of the units in bf16, absent where torchao gains nothing; the worst of our
sides in `host_syncs_per_step` and in `recompiles` (graphs compiled after warm-up); `peak_memory_vs_torchao`.
The row "ours, gnmr" compares no products with exact ones: its distance from "ours" is the price of that.

`--smoke` runs all of it on the CPU, tiny and without inductor, to see that it runs; what only a GPU can say is absent.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gnmr_lightning import GNMRConfig, GNMRPrecision
from gnmr_lightning.controller import _SETTLING

from .common import QUIET, arguments, report, spread
from .overhead import NEVER, Recovered, StockPrecision
from .recompiles import graphs

RECIPE = "float8_rowwise"
# Steps before the timed ones, in the first of which every unit is probed, and steps after them in which
# synchronisations are counted.
WARM_UP, COUNTED = _SETTLING + 4, 2


class Size(NamedTuple):
    """Of a model, its batches and its run."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequences: int
    tokens: int
    timed: int
    compiler: str


BILLION = Size(16, 2048, 16, 5632, 32_000, sequences=8, tokens=2048, timed=20, compiler="inductor")
# More blocks than dynamo would compile one by one; without inductor, whose C++ would take minutes.
SMOKE = Size(9, 32, 2, 64, 64, sequences=2, tokens=32, timed=2, compiler="aot_eager")


class Block(nn.Module):
    """Causal attention with rotary positions, and SwiGLU, each on the normalised residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        linear = partial(nn.Linear, bias=False)
        self.attn_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.q, self.k, self.v, self.o = (linear(size.width, size.width) for _ in range(4))
        self.gate, self.up = (linear(size.width, size.hidden) for _ in range(2))
        self.down = linear(size.hidden, size.width)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attn_norm(x_BTD)
        q, k, v = (of(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x_BTD = x_BTD + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(pl.LightningModule):
    """A decoder with an untied head, without logging."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for block in self.blocks:
            block.compile(backend=size.compiler, fullgraph=True)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x_BTD = self.embed(tokens[:, :-1])
        dims = torch.arange(0, self.size.width // self.size.heads, 2, dtype=torch.float32, device=self.device)
        position = torch.arange(x_BTD.shape[1], dtype=torch.float32, device=self.device)
        angle = position[:, None] * 10_000.0 ** (-dims / (2 * len(dims)))
        cos, sin = angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Meter(pl.Callback):
    """Marks the timed steps; counts graphs from warm-up on, and synchronisations of the host after the timed steps."""

    def __init__(self, timed: int, cuda: bool) -> None:
        self.timed, self.cuda = timed, cuda
        self.marks: list[Any] = []
        self.counting = ExitStack()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx - WARM_UP
        if step == 0:
            self.graphs_warm = graphs()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
        if 0 <= step <= self.timed:
            mark: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
            if self.cuda:
                mark.record()
            self.marks.append(mark)
        if self.cuda and step == self.timed:
            self.peak = torch.cuda.max_memory_allocated()
            self.warned = self.counting.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if self.cuda and step == self.timed + COUNTED:
            torch.cuda.set_sync_debug_mode("default")
            self.counting.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.recompiles = graphs() - self.graphs_warm
        plugin = trainer.precision_plugin
        self.work = plugin.work().sum(0).tolist() if isinstance(plugin, GNMRPrecision) else None

    def times(self) -> list[float]:
        """Of the timed steps, in seconds."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1000 if self.cuda else b - a for a, b in pairs]


def run(size: Size, device: str, precision: Callable[[], Precision], share: float, seed: int) -> dict[str, Any]:
    """One side's run: `times` of its steps, and what its row takes from it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(seed)
    meter = Meter(size.timed, device == "cuda")
    steps = WARM_UP + size.timed + COUNTED + 1  # the last one only ends the counting
    with torch.device(device):
        model = Llama(size)
        batches = torch.randint(size.vocabulary, (steps, size.sequences, size.tokens + 1))
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        plugins=[precision()],
        callbacks=[meter, *([Recovered(share)] if share else [])],
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found: dict[str, Any] = {"times": meter.times(), "graphs": meter.graphs_warm, "recompiles": meter.recompiles}
    if meter.work is not None:
        found["bf16_share"] = meter.work[1] / (meter.work[0] + meter.work[1])
    if meter.cuda:
        syncs = sum("synchronizing CUDA operation" in str(warning.message) for warning in meter.warned or ())
        found |= {"host_syncs_per_step": syncs / COUNTED, "peak_gb": meter.peak / 1e9}
    return found


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The figures, from the rows by side."""
    speed = {side: row["tokens_per_s"] for side, row in rows.items()}
    ours = [row for side, row in rows.items() if side.startswith("ours")]
    figures = {f"tokens_per_s_{side}": speed[side] for side in ("bf16", "torchao", "ours")}
    figures["ours_vs_torchao"] = speed["ours"] / speed["torchao"]
    figures["recompiles"] = max(row["recompiles"] for row in ours)
    if "peak_gb" in rows["ours"]:  # measured on a GPU
        figures["host_syncs_per_step"] = max(row["host_syncs_per_step"] for row in ours)
        figures["peak_memory_vs_torchao"] = rows["ours"]["peak_gb"] / rows["torchao"]["peak_gb"]
        gain = speed["torchao"] - speed["bf16"]
        if gain > 0:
            for percent in (5, 10):
                figures[f"speedup_kept_{percent}"] = (speed[f"ours, {percent}%"] - speed["bf16"]) / gain
    return figures


def main() -> None:
    args = arguments("gpu", __doc__.splitlines()[0], smoke="the same on the CPU with a tiny model, to see that it runs")
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA GPU and torch finds none: --smoke runs it on the CPU, tiny")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    size, device = (SMOKE, "cpu") if args.smoke else (BILLION, "cuda")
    if args.smoke:
        torch.set_num_threads(1)

    ours = partial(GNMRPrecision, RECIPE, "bf16-true", control=NEVER)
    blind = partial(GNMRPrecision, RECIPE, "bf16-true", control=GNMRConfig(method="gnmr", warmup_steps=10**9))
    sides: dict[str, tuple[Callable[[], Precision], float]] = {
        "ours": (ours, 0.0),  # first: on a GPU without rowwise float8 it is this one that says so in a sentence
        "bf16": (partial(HalfPrecision, "bf16-true"), 0.0),
        "torchao": (partial(StockPrecision, RECIPE), 0.0),
        "ours, 5%": (ours, 0.05),
        "ours, 10%": (ours, 0.1),
        "ours, gnmr": (blind, 0.0),
    }
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(1 if args.quick or args.smoke else 2):
        for side, (precision, share) in sides.items():
            runs[side].append(run(size, device, precision, share, args.seed))
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()

    rows = {}
    for side, of_side in runs.items():
        times = [taken for found in of_side for taken in found.pop("times")]
        middle = statistics.median(times)
        rows[side] = {
            "side": side,
            "tokens_per_s": size.sequences * size.tokens / middle,
            "spread": spread(times),
            "ms": 1000 * middle,
            **{key: max(found[key] for found in of_side) for key in of_side[0]},
        }
    report(args, "gpu", summary(rows), list(rows.values()))


if __name__ == "__main__":
    main()
