"""The cost of the signal: norms of 280 units with 1,000 parameter tensors over one `torch.nn.utils.clip_grad_norm_`.

Both sides see the same gradients. torch's side also scales them, with a limit so high that it multiplies by one, as it
does in a training run whose norm is under the limit; the signal needs no such pass.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from gnmr_lightning.signal import UnitNorms
from gnmr_lightning.units import RecoverableUnit

from .common import arguments, interleave, ratio, report, spread

UNITS, PARAMETERS = 280, 1000


def main() -> None:
    args = arguments("signal", __doc__.splitlines()[0])
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rows: list[dict[str, Any]] = []
    for d in (64, 256) if args.quick else (64, 256, 512):
        linears = [nn.Linear(d, d) for _ in range(UNITS)]  # a weight and a bias each
        rest = [nn.Parameter(torch.zeros(d)) for _ in range(PARAMETERS - 2 * UNITS)]
        parameters = [p for linear in linears for p in linear.parameters()] + rest
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.SGD(parameters, 0.1)
        norms = UnitNorms([RecoverableUnit(f"{i}", {f"{i}": linear}) for i, linear in enumerate(linears)])

        def ours(norms: UnitNorms = norms, optimizer: torch.optim.Optimizer = optimizer) -> list[float]:
            started = time.perf_counter()
            norms.measure(optimizer)
            return [time.perf_counter() - started]

        def torchs(parameters: list[nn.Parameter] = parameters) -> list[float]:
            started = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(parameters, 1e12).item()
            return [time.perf_counter() - started]

        times = interleave({"ours": ours, "torch": torchs}, 40 if args.quick else 200)
        value = ratio(times, "ours", "torch")
        rows.append(
            {"d": d, "vs_clip_grad_norm": value, "spread": spread(times["ours"]), "ms": 1e3 * min(times["ours"])}
        )
    report(args, "signal", {"vs_clip_grad_norm": max(row["vs_clip_grad_norm"] for row in rows)}, rows)


if __name__ == "__main__":
    main()
