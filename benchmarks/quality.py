"""What does recovery buy? Final validation loss of whole runs under known trouble, against honest baselines.

Every run goes on from one model of 0.3 million parameters that was pretrained in fp32 for 1,000 steps: younger models
pass through sudden improvements, whose time is chance and hides all else. Every arm of a setting and seed has the same
initial weights, batches and faults, and trains through GNMRPrecision; arms differ in who is moved to bf16, or in how
gradients are clipped. Faults come in bursts, on one unit at a time. The oracle knows the sick unit, one step late, as a
controller at best can. All policies were chosen on the development seeds; figures come from the reported seeds alone.
See docs/results.md.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from examples.byte_gpt import SourceCode, Windows
from gnmr_lightning import GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.backends import Backend

from . import stress
from .common import QUIET, arguments, report
from .faults import FaultyBackend, install

DEVELOPMENT, REPORTED = range(201, 203), range(11, 16)
PRETRAINING, STEPS, BATCH_SIZE, MAX_O, BURST = 1000, 200, 16, 2, 15
NEVER = GNMRConfig(warmup_steps=10**9, max_o=MAX_O)

Fault = tuple[int, str, float]
"""Unit, kind, factor."""


@dataclass(frozen=True)
class Setting:
    """What is trained, in which format, with which trouble."""

    backend: Callable[[], Backend]
    faults: tuple[tuple[str, float], ...] = ()
    """Kinds and factors, of which each burst takes one; none for trouble that comes by itself, or not at all."""
    lr: float = 1e-3
    momentum: float | None = None
    """Of SGD; None for AdamW."""
    other_text: bool = False
    """Whether the text is another than the one that the model was pretrained on."""
    arms: tuple[str, ...] = ()


ARMS = ("bf16", "none", "product_error", "gnmr", "random", "first_last", "static", "clip", "zclip", "oracle")
_FEW = ("bf16", "none", "product_error")
_BURSTS = (
    ("input_saturated", 32.0),
    ("input_coarse", 200.0),
    ("weight_saturated", 16.0),
    ("outlier_channel", 256.0),
    ("grad_noise", 3000.0),
)
SETTINGS = {
    "stress": Setting(lambda: stress.Rounded(8), _BURSTS, arms=ARMS),
    "stress_4bit": Setting(
        lambda: stress.Rounded(4, stochastic=False),
        lr=0.2,
        momentum=0.9,
        arms=(*_FEW, "gnmr", "random", "clip", "zclip"),
    ),
    "stress_4bit_adam": Setting(lambda: stress.Rounded(4), lr=2e-2, arms=(*_FEW, "gnmr", "clip")),
    "coarse": Setting(lambda: stress.Rounded(3), arms=(*_FEW, "gnmr")),
    "blockwise": Setting(
        lambda: backends.resolve("float8_blockwise"),
        (("outlier_channel", 2.0**24),),
        arms=ARMS,
    ),
    "finetune_int8": Setting(
        lambda: stress.Rounded(8),
        (("outlier_channel", 256.0),),
        5e-4,
        other_text=True,
        arms=ARMS,
    ),
    "finetune_float8": Setting(
        lambda: backends.resolve("fake(a=e4m3, w=e4m3, g=e5m2)"),
        (("outlier_channel", 2.0**24),),
        5e-4,
        other_text=True,
        arms=(*_FEW, "gnmr", "random", "clip", "oracle"),
    ),
    "healthy": Setting(lambda: stress.Rounded(8), arms=(*_FEW, "gnmr")),
    "healthy_finetune": Setting(
        lambda: backends.resolve("fake(a=e4m3, w=e4m3, g=e5m2)"), lr=5e-4, other_text=True, arms=_FEW
    ),
}
"""In the float8 settings the factor is above e4m3's range, 2^18 from its largest value to its smallest: a block or
tensor with the outlier channel in it keeps that channel alone."""


def schedule(seed: int, setting: Setting, n_units: int, steps: int) -> dict[int, Fault]:
    """The sick unit and its fault by step: bursts of 15 steps, with 5 to 15 healthy steps between them."""
    if not setting.faults:
        return {}
    choose = random.Random(seed)
    plan: dict[int, Fault] = {}
    step = 45
    while step < steps - BURST:
        fault = (choose.randrange(n_units), *choose.choice(setting.faults))
        plan.update(dict.fromkeys(range(step, step + BURST), fault))
        step += BURST + choose.randint(5, 15)
    return plan


@dataclass
class Drive(L.Callback):
    """Puts the faults in, and moves units where the arm does so itself."""

    plugin: GNMRPrecision
    healthy: Backend
    plan: dict[int, Fault]
    force: Callable[[int], Tensor] | None = None
    """Step -> the units to run in bf16; None where the plugin's controller decides."""
    z_clip: bool = False
    losses: list[float] = field(default_factory=list)
    locks: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of each lock, for the random arm to repeat on other units."""
    _since: dict[int, int] = field(default_factory=dict)
    _backends: list[FaultyBackend] = field(default_factory=list)
    _mean: float = math.nan
    _square: float = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._backends = install(self.plugin.units, self.healthy)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, number: int) -> None:
        sick = self.plan.get(number)
        for index, backend in enumerate(self._backends):
            backend.fault = sick[1:] if sick is not None and sick[0] == index else None
        if self.force is not None:
            self.plugin._apply(self.force(number))
        locked = set() if self.force else set(self.plugin.controller.locked.nonzero().flatten().tolist())
        for unit in self._since.keys() - locked:
            self.locks.append((self._since.pop(unit), number - 1))
        for unit in locked - self._since.keys():
            self._since[unit] = number

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        if not self.z_clip:
            return
        # ZClip: a norm more than 2.5 deviations above its running mean is brought back to mean + 2.5^2 / z deviations.
        norm = self.plugin.measure(optimizer).total_norm
        if not math.isfinite(norm):
            return
        if math.isnan(self._mean):
            self._mean = norm
        deviation = max(math.sqrt(self._square), 1e-6)
        z = (norm - self._mean) / deviation
        if z > 2.5 and self._square > 0:
            target = self._mean + 2.5**2 / z * deviation
            self.plugin.clip_grad_by_norm(optimizer, target)
            norm = target
        self._square = 0.97 * self._square + 0.03 * (norm - self._mean) ** 2
        self._mean = 0.97 * self._mean + 0.03 * norm

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.losses.append(outputs["loss"].item())


@functools.cache
def other_texts() -> tuple[Tensor, Tensor]:
    """Training and validation text of the fine-tuning settings: C++ headers, which no pretraining has seen."""
    data = SourceCode(str(Path(torch.__file__).parent / "include" / "ATen"), max_mb=3.0)
    data.setup()
    return data.train_text, data.val_text


def pretrain(file: Path) -> None:
    """Trains a model on the standard library in fp32 and writes its weights."""
    torch.set_num_threads(1)  # so that they are the same from run to run
    torch.manual_seed(0)
    model = stress.StressGPT()
    batches = Windows(stress.texts()[0], BATCH_SIZE, stress.SEQ_LEN, 12345, batches=PRETRAINING)
    L.Trainer(accelerator="cpu", **QUIET, max_epochs=1).fit(model, batches)
    torch.save(model.state_dict(), file)


class _Decayed(stress.StressGPT):
    """Its learning rate rises for 30 steps and falls to zero at the last: final losses then vary little by chance."""

    steps: int
    momentum: float | None

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.momentum is not None:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        shape = lambda step: min(1.0, (step + 1) / 30, (self.steps - step) / (0.6 * self.steps))  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True)
class Job:
    """One setting and seed."""

    setting: str
    seed: int
    steps: int
    weights: Path
    """Of the pretrained model."""
    static: tuple[int, ...] = (2, 3)
    """The units that the static arm keeps in bf16."""


def run(job: Job, arm: str, locks: list[tuple[int, int]]) -> dict[str, Any]:
    """One arm: its final validation loss, bf16 share, whether it diverged, and its locks."""
    setting, seed, steps = SETTINGS[job.setting], job.seed, job.steps
    torch.manual_seed(seed)
    model = _Decayed(lr=setting.lr)
    model.steps, model.momentum = steps, setting.momentum
    train, validation = other_texts() if setting.other_text else stress.texts()
    model.load_state_dict(torch.load(job.weights, weights_only=True))
    healthy = setting.backend()
    control = {
        "product_error": GNMRConfig(max_o=MAX_O),
        "gnmr": GNMRConfig(method="gnmr", max_o=MAX_O),
    }.get(arm, NEVER)
    plugin = GNMRPrecision(healthy, control=control)
    n_units = 4 * stress.N_LAYERS
    plan = schedule(seed, setting, n_units, steps)
    choose = random.Random(seed)
    elsewhere = [(first, last, choose.randrange(n_units)) for first, last in locks]

    def units(*indices: int) -> Tensor:
        mask = torch.zeros(n_units, dtype=torch.bool)
        mask[list(indices)] = True
        return mask

    force: dict[str, Callable[[int], Tensor]] = {
        "bf16": lambda step: ~units(),
        "first_last": lambda step: units(0, n_units - 1),
        "static": lambda step: units(*job.static),
        "oracle": lambda step: units(plan[step - 1][0]) if step - 1 in plan else units(),
        "random": lambda step: units(*[unit for first, last, unit in elsewhere if first <= step <= last]),
    }
    drive = Drive(plugin, healthy, plan, force.get(arm), z_clip=arm == "zclip")
    clip = 1.0 if arm == "clip" else None
    trainer = L.Trainer(
        accelerator="cpu", **QUIET, plugins=[plugin], callbacks=[drive], max_epochs=1, gradient_clip_val=clip
    )
    torch.manual_seed(seed)  # of stochastic rounding
    work: list[Tensor] = []
    teardown = plugin.teardown
    plugin.teardown = lambda: work.append(plugin.work()) or teardown()  # type: ignore[method-assign, func-returns-value]
    trainer.fit(model, Windows(train, BATCH_SIZE, stress.SEQ_LEN, seed, batches=steps))
    with torch.no_grad():
        losses = [model._loss(batch) for batch in Windows(validation, 16, stress.SEQ_LEN, 1, batches=24)]
    loss = torch.stack(losses).mean().item()
    # Diverged: not finite, or the last steps are no better than a model that knows nothing but byte frequencies.
    end = statistics.fmean(drive.losses[-10:])
    flops = work[0].sum(0)
    return {
        "setting": job.setting,
        "arm": arm,
        "seed": seed,
        "loss": loss,
        "bf16_share": (flops[1] / flops[:2].sum()).item(),
        # Above the mean of the 20 steps before: whether the run spiked.
        "largest_jump": max(drive.losses[t] - statistics.fmean(drive.losses[t - 20 : t]) for t in range(20, steps)),
        "diverged": not (math.isfinite(loss) and math.isfinite(end) and end < 3.5),
        "locks": drive.locks + [(first, steps) for first in drive._since.values()],
    }


def arms(job: Job) -> list[dict[str, Any]]:
    """All arms of one setting and seed; the random arm repeats the locks of the default, on other units."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for arm in SETTINGS[job.setting].arms:
        locks: list[tuple[int, int]] = next((row["locks"] for row in rows if row["arm"] == "product_error"), [])
        rows.append(run(job, arm, locks))
    return rows


def static_trials(job: Job) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Each block's last two layers kept in bf16: the candidates for the best static set."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sets = [(4 * block + 2, 4 * block + 3) for block in range(stress.N_LAYERS)]
    return [(pair, run(replace(job, static=pair), "static", [])) for pair in sets]


def main() -> None:
    args = arguments("quality", __doc__.splitlines()[0])
    steps = 80 if args.quick else STEPS
    names = ("stress",) if args.quick else tuple(SETTINGS)
    seeds = [args.seed + seed for seed in (REPORTED[:1] if args.quick else REPORTED)]
    with TemporaryDirectory() as folder, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        weights = Path(folder) / "pretrained.pt"
        pretrain(weights)
        static: dict[str, tuple[int, ...]] = {}
        trials = [n for n in names if "static" in SETTINGS[n].arms and not args.quick]
        for tried in pool.map(static_trials, [Job(name, DEVELOPMENT[0], steps, weights) for name in trials]):
            best, row = min(tried, key=lambda pair: pair[1]["loss"])
            static[row["setting"]] = best
        jobs = [Job(name, seed, steps, weights, static.get(name, (2, 3))) for seed in seeds for name in names]
        found = [row for rows in pool.map(arms, jobs) for row in _said(rows)]
    report(args, "quality", *summary(found, static))


def _said(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(
        *(f"{r['setting']} {r['seed']} {r['arm']} {r['loss']:.4f}" for r in rows), sep="\n", file=sys.stderr, flush=True
    )
    return rows


def summary(
    found: list[dict[str, Any]], static: dict[str, tuple[int, ...]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures, and a row for each setting and arm."""
    of: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in found:
        of[result["setting"], result["arm"]].append(result)
    rows: list[dict[str, Any]] = []
    for (setting, arm), results in of.items():
        none, bf16 = of[setting, "none"], of[setting, "bf16"]
        losses = [result["loss"] for result in results]
        over_none = [r["loss"] - n["loss"] for r, n in zip(results, none, strict=True)]
        gap = statistics.fmean(n["loss"] - b["loss"] for n, b in zip(none, bf16, strict=True))
        spread = statistics.stdev if len(results) > 1 else lambda values: 0.0
        rows.append(
            {
                "setting": setting,
                "arm": arm,
                "loss": statistics.fmean(losses),
                "loss_sd": spread(losses),
                "minus_none": statistics.fmean(over_none),
                "minus_none_sd": spread(over_none),
                # Closed gap over all seeds; without a gap there is none to close.
                "gap_closed": -statistics.fmean(over_none) / gap if gap > 0.003 else None,
                "bf16_share": statistics.fmean(r["bf16_share"] for r in results),
                "largest_jump": statistics.fmean(r["largest_jump"] for r in results),
                "diverged": sum(r["diverged"] for r in results),
                "static_set": str(static.get(setting, "")) if arm == "static" else "",
                "seeds": len(results),
                "losses": [round(loss, 4) for loss in losses],
            }
        )
    row = {(r["setting"], r["arm"]): r for r in rows}
    figures: dict[str, float] = {}
    for key, setting, arm, column in (
        ("gap_closed_stress", "stress", "product_error", "gap_closed"),
        ("oracle_gap_closed_stress", "stress", "oracle", "gap_closed"),
        ("random_gap_closed_stress", "stress", "random", "gap_closed"),
        ("plain_gap_closed_stress", "stress", "gnmr", "gap_closed"),
        ("bf16_share_stress", "stress", "product_error", "bf16_share"),
        ("gap_closed_stress_4bit", "stress_4bit", "product_error", "gap_closed"),
        ("plain_gap_closed_stress_4bit", "stress_4bit", "gnmr", "gap_closed"),
        ("gap_closed_blockwise", "blockwise", "product_error", "gap_closed"),
        ("oracle_gap_closed_blockwise", "blockwise", "oracle", "gap_closed"),
        ("random_gap_closed_blockwise", "blockwise", "random", "gap_closed"),
        ("bf16_share_blockwise", "blockwise", "product_error", "bf16_share"),
        ("gap_closed_finetune", "finetune_int8", "product_error", "gap_closed"),
        ("oracle_gap_closed_finetune", "finetune_int8", "oracle", "gap_closed"),
        ("gap_closed_finetune_float8", "finetune_float8", "product_error", "gap_closed"),
        ("oracle_gap_closed_finetune_float8", "finetune_float8", "oracle", "gap_closed"),
        ("healthy_bf16_share", "healthy", "product_error", "bf16_share"),
    ):
        if (setting, arm) in row and row[setting, arm][column] is not None:
            figures[key] = row[setting, arm][column]
    figures["worst_vs_none"] = max(r["minus_none"] for r in rows if r["arm"] == "product_error")
    return figures, rows


if __name__ == "__main__":
    main()
