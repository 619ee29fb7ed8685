"""Writes what the benchmarks found into docs/results.md and docs/performance.md: tables and pictures. `make figures`.

The pages' prose is written by hand; each table stands between two marks that name it, `<!-- NAME -->` and
`<!-- /NAME -->`, and is made from the JSON files in benchmarks/results. Nothing is measured here.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from .common import cell
from .detection import suffix_of
from .quality import SETTINGS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"

DETECTORS = {
    "product_error": "**product_error (shipped)**",
    "product_error_every_step": "the same, every unit probed in every step",
    "gnmr": "plain GNMR",
    "gnmr_delta": "GNMR with Delta-GNMR",
    "two_sided": "two-sided",
    "common_mode": "two-sided, common mode removed",
    "standardised": "standardised",
    "gain": "local gain",
    "gain_standardised": "local gain, standardised",
    "error_alone": "product error without history",
    "zclip": "global norm z-score",
    "loss_spike": "loss spike",
    "random": "random",
}
"""In words."""

ARMS = {
    "bf16": "bf16",
    "none": "low precision, no control",
    "product_error": "**shipped default**",
    "gnmr": "plain GNMR",
    "random": "random units, same locks",
    "first_last": "static: first and last",
    "static": "static: best set of the development seed",
    "clip": "gradient clipping at 1",
    "zclip": "z-score clipping",
    "oracle": "oracle, one step late",
}


@cache
def load(name: str) -> dict[str, Any]:
    """A benchmark's committed result."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(*names: str) -> str:
    """What the figures were measured on."""
    lines = []
    for name in names:
        result = load(name)
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        cpu = result["machine"]
        lines.append(f"- `{name}`: {cpu['cpu']}, {cpu['cores']} cores, {cpu['gpu'] or 'no GPU'}; {versions}.")
    return "\n".join(lines)


def detection() -> str:
    """A row for each detector."""
    result = load("detection")
    figures = result["figures"]
    rows = []
    for name, words in DETECTORS.items():
        suffix = suffix_of(name)
        alarms = "" if suffix == "default" else f"_{suffix}"
        strong = [row for row in result["rows"] if row["detector"] == name and row["strength"] != "low"]
        # Nature makes outlier channels, too: they count double.
        strong += [row for row in strong if row["kind"] == "outlier_channel"]
        rows.append(
            [
                words,
                f"{figures[f'mean_recall3_{suffix}']:.2f}",
                f"{figures[f'recall3_{suffix}']:.2f}",
                f"{figures[f'mean_top1_{suffix}']:.2f}",
                f"{figures[f'top1_{suffix}']:.2f}",
                f"{statistics.fmean(row['recall3'] for row in strong):.2f}",
                f"{statistics.fmean(row['top1'] for row in strong):.2f}",
                f"{figures[f'both_of_two_{suffix}']:.2f}",
                f"{figures[f'false_alarms_per_1000{alarms}']:.1f}",
                f"{figures[f'false_alarms_must_not{alarms}']:.0f}",
            ]
        )
    header = ["detector", "recall in 3 steps, mean", "worst", "sick unit first, mean", "worst"]
    header += ["recall, all kinds", "sick unit first, all kinds"]
    return markdown([*header, "both of two sick units", "false alarms per 1,000", "alarms on must-nots"], rows)


def kinds() -> str:
    """A row for each kind of fault and strength."""
    of: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in load("detection")["rows"]:
        of.setdefault((row["kind"], row["strength"]), {})[row["detector"]] = row
    rows = []
    for (kind, strength), by in of.items():
        default, plain = by["product_error"], by["gnmr"]
        rows.append(
            [
                f"{kind}, {strength}",
                f"{default['loss_excess']:+.4f}" + (", a rise" if default["raises_loss"] else ""),
                *(f"{row[column]:.2f}" for row in (default, plain) for column in ("recall3", "top1")),
                "-" if math.isnan(default["delay"]) else f"{default['delay']:.1f}",
            ]
        )
    header = ["fault", "training loss, nats", "recall in 3 steps", "sick unit first"]
    return markdown([*header, "the same, plain", "the same, plain", "delay, steps"], rows)


def setting(name: str) -> str:
    """A row for each arm of one setting of the quality benchmark."""
    rows = []
    for row in load("quality")["rows"]:
        if row["setting"] == name:
            static = row["static_set"]
            closed = row["gap_closed"]
            rows.append(
                [
                    ARMS[row["arm"]] + (f" {static}" if static else ""),
                    f"{row['loss']:.4f} ± {row['loss_sd']:.4f}",
                    f"{row['minus_none']:+.4f} ± {row['minus_none_sd']:.4f}",
                    "-" if closed is None else f"{closed:.0%}",
                    f"{row['bf16_share']:.2%}",
                    str(row["diverged"]),
                    f"{row['largest_jump']:.2f}",
                ]
            )
    header = ["arm", "validation loss", "minus no control", "gap closed", "FLOPs in bf16", "diverged"]
    return markdown([*header, "largest jump of the loss"], rows)


GOALS = (
    ("recompiles", "max_recompiles", "0", "graphs compiled while random units are flipped, all recipes"),
    ("recompiles", "max_abs_diff_vs_eager", "0", "largest difference of a loss from eager's"),
    ("overhead", "eager_vs_torchao", "1.00", "step over stock torchao's, eager"),
    ("overhead", "compiled_vs_torchao", "1.02", "step over stock torchao's, each block compiled"),
    ("overhead", "control", "1.01", "step with control over without"),
    ("overhead", "control_with_clip", "1.00", "the same with clipping by norm"),
    ("overhead", "recovered_vs_bf16", "1.02", "step with all units recovered over plain bf16"),
    ("controller", "us_280", "100", "microseconds of a decision on 280 units"),
    ("signal", "vs_clip_grad_norm", "1.05", "norms of 280 units over torch's clip_grad_norm_"),
    ("memory", "rss_vs_torchao", "1.01", "peak memory over stock torchao's"),
    ("memory", "bytes_per_unit", "256", "bytes of state for a unit of one layer"),
    ("memory", "bytes_per_flip", "0", "bytes copied when a unit is flipped"),
    ("startup", "import_vs_deps", "1.05", "import over that of lightning, torchao and torchmetrics"),
    ("startup", "convert_1000_s", "1", "seconds to convert 1,000 layers"),
    ("startup", "compile_vs_torchao", "1.1", "first compiled step over stock torchao's"),
    ("startup", "first_recovery_vs_step", "1.5", "the first recovery's step over the steps before"),
)
"""Benchmark, figure, the most that it should be, and in words."""


def goals() -> str:
    """A row for each goal of speed: what was measured, and whether it is met."""
    rows = []
    for name, key, most, words in GOALS:
        value = load(name)["figures"][key]
        met = "yes" if value <= float(most) else "**no**"
        rows.append([words, f"`{name}`: `{key}`", most, cell(value), met])
    return markdown(["what", "figure", "goal, at most", "measured", "met"], rows)


def cases(name: str) -> str:
    """Every row of a benchmark, as it prints it."""
    rows = load(name)["rows"]
    return markdown(rows[0], (["-" if value is None else cell(value) for value in row.values()] for row in rows))


SPEED = tuple(dict.fromkeys(goal[0] for goal in GOALS))
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "results.md": {
        "machine": partial(machine, "detection", "quality"),
        "detection": detection,
        "kinds": kinds,
        **{name: partial(setting, name) for name in dict.fromkeys(row["setting"] for row in load("quality")["rows"])},
    },
    "performance.md": {
        "machine": partial(machine, *SPEED),
        "goals": goals,
        **{name: partial(cases, name) for name in SPEED},
    },
}


def filled(name: str) -> str:
    """A page of the docs with its tables as the results are now.

    Raises:
        ValueError: a table without its marks.
    """
    page = (DOCS / name).read_text(encoding="utf-8")
    for mark, table in TABLES[name].items():
        start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
        if (page.count(start), page.count(end)) != (1, 1):
            raise ValueError(f"{name} does not have the marks of the table {mark!r} once each: write {start}{end}")
        before, _, rest = page.partition(start)
        page = f"{before}{start}{table()}\n{end}{rest.partition(end)[2]}"
    return page


def pictures() -> None:
    """Draws detection and quality."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "gnmr", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    PICTURES.mkdir(exist_ok=True)

    figures = load("detection")["figures"]
    fig, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name in DETECTORS:
        suffix = suffix_of(name)
        x, y = figures[f"mean_recall3_{suffix}"], figures[f"mean_top1_{suffix}"]
        axes.scatter(x, y, color="C3" if suffix == "default" else "C0")
        axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", rotation=20, fontsize=7)
    axes.set(xlabel="recall within 3 steps", ylabel="sick unit first", xlim=(-0.05, 1.2), ylim=(-0.02, 1.2))
    fig.savefig(PICTURES / "detection.svg", metadata={"Date": None})

    rows = load("quality")["rows"]
    shown = [name for name in SETTINGS if any(r["setting"] == name and r["arm"] == "oracle" for r in rows)]
    fig, panels = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 3.2), layout="constrained", sharey=True)
    for axes, name in zip(panels, shown, strict=True):
        of = [r for r in rows if r["setting"] == name and r["arm"] not in ("bf16", "none")]
        gap = -next(r["minus_none"] for r in rows if r["setting"] == name and r["arm"] == "bf16")
        closed = [-r["minus_none"] / gap for r in of]
        error = [r["minus_none_sd"] / gap / math.sqrt(r["seeds"]) for r in of]
        colors = ["C3" if r["arm"] == "product_error" else "C7" if r["arm"] == "oracle" else "C0" for r in of]
        axes.bar([r["arm"] for r in of], closed, yerr=error, color=colors, capsize=2)
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_title(name)
        axes.tick_params(axis="x", rotation=70)
    panels[0].set_ylabel("share of the gap to bf16 closed")
    fig.savefig(PICTURES / "quality.svg", metadata={"Date": None})


def main() -> None:
    for name in TABLES:
        (DOCS / name).write_text(filled(name), encoding="utf-8")
    pictures()
    print(f"{', '.join(TABLES)} and the pictures in {DOCS} are written")


if __name__ == "__main__":
    main()
