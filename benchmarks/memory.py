"""What the plugin takes in memory: of the process, for each unit, and when a unit is moved to bf16 and back.

Peak memory is the operating system's, so each side trains in a process of its own; the sides alternate. The bytes of a
unit are those of the real tensors of a converted model, the bytes of a flip those of all floating-point tensors that
one flip makes: weights, gradients and optimizer states are floating point, a switch is not.

Figures: `rss_vs_torchao`, peak resident memory over that of stock torchao conversion, the worst recipe;
`bytes_per_unit`, control state, switches and counters of a unit that is one layer; `bytes_per_flip`.
"""

from __future__ import annotations

import resource
import statistics
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from examples.byte_gpt import ByteGPT, Windows
from gnmr_lightning import GNMRPrecision
from gnmr_lightning.linear import RecoverableLinear

from .common import QUIET, alone, arguments, interleave, ratio, report, spread
from .overhead import StockPrecision


def train(side: str, recipe: str, steps: int) -> None:
    """Trains a byte GPT of 13 million parameters in this process and prints its peak resident memory, in bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[GNMRPrecision(recipe, "bf16-true") if side == "ours" else StockPrecision(recipe)],
        max_steps=steps,
        **QUIET,
    )
    text = torch.randint(256, (100_000,), dtype=torch.uint8)
    trainer.fit(ByteGPT(n_layers=4, d_model=512, n_heads=8, seq_len=256), Windows(text, 8, 256, seed=0))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # Linux gives KiB


def peak(side: str, recipe: str, steps: int) -> list[float]:
    """Peak resident memory of a process of its own, bytes."""
    return [alone(f"from benchmarks.memory import train; train({side!r}, {recipe!r}, {steps})")]


class Made(TorchDispatchMode):
    """Adds up the bytes of the floating-point tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (list, tuple)) else [out]
        self.nbytes += sum(t.nbytes for t in made if isinstance(t, Tensor) and t.is_floating_point())
        return out


def main() -> None:
    args = arguments("memory", __doc__.splitlines()[0])
    rows: list[dict[str, Any]] = []
    ratios = []
    for recipe in ("int8",) if args.quick else ("float8_rowwise", "int8"):
        steps = 2 if args.quick else 4
        sides = {side: partial(peak, side, recipe, steps) for side in ("ours", "torchao")}
        peaks = interleave(sides, 1 if args.quick else 5)
        ratios.append(ratio(peaks, "ours", "torchao"))
        mb = statistics.median(peaks["ours"]) / 2**20
        rows.append({"what": f"peak resident memory, {recipe}", "ratio": ratios[-1], "MiB": mb})
        rows[-1]["spread"] = spread(peaks["ours"])

    model = ByteGPT(n_layers=4, d_model=128, n_heads=4, seq_len=64)
    plugin = GNMRPrecision("int8")
    plugin.convert_module(model)
    units = len(plugin.units)
    layers = [module for module in model.modules() if isinstance(module, RecoverableLinear)]
    parts = {
        "control state": plugin.controller.nbytes,
        "switches": sum(switch.nbytes for switch in plugin._switches) + plugin._probed_U.nbytes,
        "counters of work": sum(layer.flops.nbytes for layer in layers),
        "product errors, on the layer's device": sum(layer.probes.nbytes for layer in layers),
    }
    rows += [{"what": f"{what}, a unit", "bytes": nbytes / units} for what, nbytes in parts.items()]

    where = [parameter.data_ptr() for parameter in model.parameters()]
    with Made() as made:
        plugin._apply(torch.ones(units, dtype=torch.bool))
        plugin._apply(torch.zeros(units, dtype=torch.bool))
    assert where == [parameter.data_ptr() for parameter in model.parameters()]
    figures = {
        "rss_vs_torchao": max(ratios),
        "bytes_per_unit": sum(parts.values()) / units,
        "bytes_per_flip": made.nbytes / (2 * units),
    }
    columns = dict.fromkeys(("what", "ratio", "spread", "MiB", "bytes"))
    report(args, "memory", figures, [columns | row for row in rows])


if __name__ == "__main__":
    main()
