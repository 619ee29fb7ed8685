"""Who is sick? Recall, localisation and false alarms of detectors on runs with known faults.

Every detector sees the same recorded runs (see `recording.py`). The shipped rule keeps the limit it ships with. Each
other detector gets the limit at which it raises one false alarm in 1,000 healthy operator-steps on the development
seeds, so that recall is compared at the same cost. Figures come from the reported seeds alone.

A kind of fault at one strength "raises the loss" if the training loss of its episodes, the mean over their steps, is
above that of the healthy twins by more than two standard errors and by more than 0.002 nats. Others are listed, marked.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import stress
from .common import arguments, report
from .detectors import DETECTORS, Step
from .faults import KINDS, STRENGTHS
from .recording import DISTURBANCES, Stretch, record

DEVELOPMENT, REPORTED = range(101, 104), range(1, 6)
FALSE_ALARMS = 1.0  # per 1,000 healthy operator-steps, for the calibrated limits
FIRST = 20  # steps of a run that nobody is judged on: warm-up
MAX_O = 2


def steps(stretch: Stretch) -> Iterator[Step]:
    """The recorded steps of a stretch."""
    for i, norms in enumerate(stretch.norms):
        yield Step(norms, stretch.errors[i], stretch.began[i], stretch.incoming[i], stretch.loss[i], stretch.total[i])


Scored = list[tuple[Stretch, Tensor]]


def play(run: list[Stretch], make: Callable[[int], Callable[[Step], Tensor]]) -> Scored:
    """The detector's scores, (T, U), in each stretch of one run; every episode goes on from its point of the trunk."""
    at: dict[int, Any] = {}
    scored = []
    for stretch in run:
        if stretch.name == "trunk" and stretch.start == 0:
            detector = make(len(stretch.norms[0]))
        else:
            detector = copy.deepcopy(at[0 if stretch.name == "trunk" else stretch.start])
        scored.append((stretch, torch.stack([detector(step) for step in steps(stretch)])))
        if stretch.name == "trunk":
            at[stretch.start] = detector
    return scored


def healthy(scored: Scored) -> Tensor:
    """Scores of all judged healthy operator-steps without an event."""
    parts = []
    for stretch, scores in scored:
        if stretch.name == "healthy" or stretch.name == "trunk":
            parts.append(scores[FIRST if stretch.name == "trunk" and stretch.start == 0 else 0 :].flatten())
    return torch.cat(parts)


def raises_loss(runs: list[list[Stretch]]) -> dict[tuple[str, int], tuple[float, bool]]:
    """Mean excess of the training loss of each kind and strength, nats, and whether that is a rise."""
    excess: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        twins = {stretch.start: torch.tensor(stretch.loss) for stretch in run if stretch.name == "healthy"}
        for stretch in run:
            if len(stretch.sick) == 1:
                off = torch.tensor(stretch.loss) - twins[stretch.start]
                # A loss that is not finite is a loss that rose; its step was skipped, so it cost that step at least.
                excess[stretch.name, stretch.strength].append(off.nan_to_num(nan=1.0, posinf=1.0).mean().item())
    found = {}
    for key, values in excess.items():
        sample = torch.tensor(values)
        error = (sample.std() / math.sqrt(len(sample))).item()
        found[key] = (sample.mean().item(), sample.mean().item() > max(2 * error, 0.002))
    return found


def row(kind: str, strength: int, episodes: Scored, limit: float) -> dict[str, float | int]:
    """Figures of one kind and strength with one detector."""
    recall1 = recall3 = top1 = top_max_o = on_healthy = healthy_steps = 0
    n = len(episodes)
    delays: list[int] = []
    for stretch, scores in episodes:
        (unit,) = stretch.sick
        alarms_TU = scores > limit
        recall1 += bool(alarms_TU[0, unit])
        recall3 += bool(alarms_TU[:3, unit].any())
        if alarms_TU[:6, unit].any():
            delays.append(int(alarms_TU[:6, unit].int().argmax()))
        highest_U = scores[:3].amax(0)
        order = highest_U.argsort(descending=True, stable=True).tolist()
        ties = int((highest_U == highest_U[unit]).sum())
        top1 += int(order[0] == unit and ties == 1)
        top_max_o += unit in order[:MAX_O]
        on_healthy += int(alarms_TU[:3].sum() - alarms_TU[:3, unit].sum())
        healthy_steps += 3 * (scores.shape[1] - 1)
    return {
        "recall1": recall1 / n,
        "recall3": recall3 / n,
        "top1": top1 / n,
        "top_max_o": top_max_o / n,
        "delay": sum(delays) / len(delays) if delays else math.nan,
        "alarms_on_healthy_per_1000": 1000 * on_healthy / healthy_steps,
    }


def suffix_of(detector: str) -> str:
    """What the keys of a detector's figures end in."""
    return {"product_error": "default", "gnmr": "plain"}.get(detector, detector)


def main() -> None:
    args = arguments("detection", __doc__.splitlines()[0])
    torch.set_num_threads(1)
    kinds = ("input_saturated", "outlier_channel") if args.quick else tuple(KINDS)
    backend = stress.Rounded(8)
    development = [
        record(args.seed + seed, backend, kinds=kinds) for seed in (DEVELOPMENT[:1] if args.quick else DEVELOPMENT)
    ]
    reported = [record(args.seed + seed, backend, kinds=kinds) for seed in (REPORTED[:1] if args.quick else REPORTED)]
    harm = raises_loss(reported)
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for name, make in DETECTORS.items():
        own_limit = name.startswith("product_error")
        quiet = torch.cat([healthy(play(run, make)) for run in development])
        limit = 1.0 if own_limit else quiet.quantile(1 - FALSE_ALARMS / 1000, interpolation="higher").item()
        scored = [pair for run in reported for pair in play(run, make)]
        false_alarms = 1000 * (healthy(scored) > limit).double().mean().item()
        must_not = sum(int((scores > limit).sum()) for stretch, scores in scored if stretch.name in DISTURBANCES)
        for kind in KINDS:
            for strength in range(3):
                episodes = [p for p in scored if (p[0].name, p[0].strength) == (kind, strength) and len(p[0].sick) == 1]
                if not episodes:
                    continue
                excess, harmful = harm[kind, strength]
                about = {"detector": name, "kind": kind, "strength": STRENGTHS[strength]}
                harms = {"loss_excess": excess, "raises_loss": harmful}
                rows.append({**about, **harms, **row(kind, strength, episodes, limit), "limit": limit})
        judged = [r for r in rows if r["detector"] == name and r["raises_loss"] and r["strength"] != "low"]
        suffix = suffix_of(name)
        if judged:
            figures[f"recall3_{suffix}"] = min(r["recall3"] for r in judged)
            figures[f"top1_{suffix}"] = min(r["top1"] for r in judged)
            figures[f"mean_recall3_{suffix}"] = sum(r["recall3"] for r in judged) / len(judged)
            figures[f"mean_top1_{suffix}"] = sum(r["top1"] for r in judged) / len(judged)
        ours = "" if name == "product_error" else f"_{suffix}"
        figures[f"false_alarms_per_1000{ours}"] = false_alarms
        figures[f"false_alarms_must_not{ours}"] = must_not
        pairs = [pair for pair in scored if len(pair[0].sick) == 2 and not pair[0].name.startswith("nonfinite")]
        both = [all(bool((s[:3, unit] > limit).any()) for unit in stretch.sick) for stretch, s in pairs]
        figures[f"both_of_two_{suffix}"] = sum(both) / len(both)
    report(args, "detection", figures, rows)


if __name__ == "__main__":
    main()
