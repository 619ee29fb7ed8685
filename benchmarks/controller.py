"""How long one decision takes: `GNMRController.update` at 280, 10,000 and 100,000 units, with the default policy.

Product errors are drawn around 0.02 with a few large ones, so that updates lock and release units. Absolute times are
this machine's; what matters is that they stay far below a training step, and how they grow.
"""

from __future__ import annotations

import statistics
import time

import torch

from gnmr_lightning import GNMRConfig, GNMRController

from .common import arguments, report, spread


def main() -> None:
    args = arguments("controller", __doc__.splitlines()[0])
    torch.set_num_threads(1)
    figures, rows = {}, []
    for units in (280, 10_000, 100_000):
        generator = torch.Generator().manual_seed(args.seed)
        controller = GNMRController(GNMRConfig(), units)
        updates = (400 if args.quick else 4000) if units == 280 else 100 if units == 10_000 or not args.quick else 30
        times, locks = [], 0
        for step in range(updates + 30):
            norms = torch.rand(units, generator=generator, dtype=torch.float64) + 0.5
            errors = torch.rand(units, 3, generator=generator, dtype=torch.float64) * 0.02 + 0.01
            if step % 5 == 0:
                errors[int(torch.randint(units, (1,), generator=generator))] = 0.9
            started = time.perf_counter()
            decision = controller.update(norms, errors=errors)
            if step >= 30:
                times.append(time.perf_counter() - started)
            locks += int(decision.newly_locked.sum())
        figures[f"us_{units}"] = 1e6 * statistics.median(times)
        rows.append(
            {
                "units": units,
                "us": figures[f"us_{units}"],
                "spread": spread(times),
                "ns_per_unit": 1e3 * figures[f"us_{units}"] / units,
                "bytes_per_unit": controller.nbytes / units,
                "locks": locks,
            }
        )
    report(args, "controller", figures, rows)


if __name__ == "__main__":
    main()
