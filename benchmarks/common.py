"""What all benchmarks share: their arguments, interleaved timing, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of every benchmark's Trainer."""


def arguments(name: str, description: str, **switches: str) -> argparse.Namespace:
    """The arguments that every benchmark takes, and its own `switches`: the help of each by its name."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="the same on fewer cases, under a minute on 2 cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and rows there, too")
    for switch, explained in switches.items():
        parser.add_argument(f"--{switch}", action="store_true", help=explained)
    return parser.parse_args()


def alone(code: str) -> Any:
    """What `code` prints last, run in a process of its own without inductor's caches, as JSON."""
    env = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def interleave(sides: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Times of each side, in seconds, from `rounds` rounds A B A B after one that is thrown away.

    Args:
        sides: by name, what runs one round and returns the times of its repetitions.
        rounds: how many rounds count.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            taken = run()
            if number:
                times[name].extend(taken)
    return times


def ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """Median time of `over` by median time of `under`."""
    return statistics.median(times[over]) / statistics.median(times[under])


def spread(times: list[float]) -> float:
    """Half the interquartile range by the median: how far one repetition lies from another; nan of one alone."""
    if len(times) < 2:
        return math.nan
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def report(args: argparse.Namespace, name: str, figures: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Prints the rows and the figures, and writes them to `--json FILE`."""
    if rows:
        columns = list(rows[0])
        cells = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        for line in cells:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        print()
    for key, value in figures.items():
        print(f"{key}: {cell(value)}")
    if args.json is not None:
        content = {
            "benchmark": name,
            "quick": args.quick,
            "seed": args.seed,
            "versions": {p: version(p) for p in ("gnmr_lightning", "torch", "lightning", "torchao", "torchmetrics")},
            "machine": {
                "cpu": _cpu(),
                "cores": os.cpu_count(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            },
            "figures": figures,
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def cell(value: Any) -> str:
    """A value as the tables show it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
