"""Runs with known faults, recorded step by step: the ground truth that the detection benchmark judges detectors on.

One `Trainer.fit` per seed. It trains a byte GPT through GNMRPrecision for a while (the trunk), and from two points of
the trunk, one in it and one at its end, plays short episodes: from the same weights, optimizer state and batches, once
with all units well, and once for each kind and strength of fault and each event that is no fault. Nothing is recovered
while recording, and every unit is probed in every step, so every detector sees the same run.

Legend: U = units, T = steps of a stretch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from examples.byte_gpt import Windows
from gnmr_lightning import GNMRConfig, GNMRPrecision
from gnmr_lightning.backends import Backend

from . import stress
from .common import QUIET
from .faults import KINDS, FaultyBackend, install

TRUNK, WARMUP = 140, 60
SICK, EPISODE = 6, 10
"""Steps of an episode that are sick, from its first on, and its length."""
DISTURBANCES = ("bad_batch", "lr_up", "lr_down", "loss_scale", "other_text", "clipping", "accumulation")
"""What must not be taken for a fault. Warm-up drift is in the trunk."""


@dataclass
class Stretch:
    """A trunk or an episode, and what was measured in it."""

    name: str
    """"trunk", "healthy", one of `DISTURBANCES` or of `KINDS`."""
    start: int
    """Index of the trunk it goes on from, or is; 0 or 1."""
    batches: range
    strength: int = 0
    sick: tuple[int, ...] = ()
    """The units that are sick in the first `SICK` steps."""
    loss: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    """T times (U,): gradient norms."""
    errors: list[Tensor] = field(default_factory=list)
    """T times (U, 3): relative errors of the products for output, grad_input and grad_weight."""
    began: list[Tensor] = field(default_factory=list)
    """T times (U,), bool."""
    incoming: list[Tensor] = field(default_factory=list)
    """T times (U,): norms of grad_output."""


def plan(seed: int, n_units: int, kinds: Sequence[str], units_a_fault: int = 2) -> list[Stretch]:
    """The stretches of one run, in order."""
    choose = random.Random(seed)
    stretches = []
    for start in (0, 1):
        stretches.append(Stretch("trunk", start, range(start * TRUNK, (start + 1) * TRUNK)))
        after = range((start + 1) * TRUNK, (start + 1) * TRUNK + EPISODE)
        stretches.append(Stretch("healthy", start, after))
        stretches += [Stretch(name, start, after) for name in DISTURBANCES]
        for kind in kinds:
            for strength in range(3):
                for unit in choose.sample(range(n_units), units_a_fault):
                    stretches.append(Stretch(kind, start, after, strength, (unit,)))
            pair = tuple(choose.sample(range(n_units), 2))
            stretches.append(Stretch(kind, start, after, 2, pair))
    return stretches


class Recorder(L.Callback):
    """Plays the plan, and keeps what was measured."""

    def __init__(self, stretches: list[Stretch], backends: list[FaultyBackend], plugin: GNMRPrecision) -> None:
        self.stretches, self.backends, self.plugin = stretches, backends, plugin
        self.snapshots: dict[int, Any] = {}
        self.steps = [(stretch, step) for stretch in stretches for step in range(len(stretch.batches))]
        self.incoming: list[Tensor] = []
        self.loss = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        units = self.plugin.units
        self.incoming = [torch.zeros(()) for _ in units]
        for index, unit in enumerate(units):
            for linear in unit.linears.values():
                linear.register_full_backward_pre_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def keep(module: nn.Module, grad_output: tuple[Tensor, ...]) -> None:
            self.incoming[index] = grad_output[0].detach().float().norm()

        return keep

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, number: int
    ) -> None:
        stretch, step = self.steps[number]
        optimizer = trainer.optimizers[0]
        if step == 0:
            before = None if number == 0 else self.steps[number - 1][0]
            if before is not None and before.name == "trunk":
                self.snapshots[before.start] = _state(pl_module, optimizer)
            if stretch.name != "trunk" or stretch.start:
                _restore(self.snapshots[0 if stretch.name == "trunk" else stretch.start], pl_module, optimizer)
            torch.manual_seed(stretch.batches[0])  # of stochastic rounding
        sick = step < SICK and stretch.sick
        for index, backend in enumerate(self.backends):
            fault = (stretch.name, KINDS[stretch.name].factors[stretch.strength]) if stretch.sick else None
            backend.fault = fault if sick and index in stretch.sick else None
        lr = 2e-3 * min(1.0, (stretch.batches[step] + 1) / WARMUP)
        lr *= {"lr_up": 3.0, "lr_down": 0.1}.get(stretch.name, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        trainer.gradient_clip_val = 0.3 if stretch.name == "clipping" else None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        stretch, _ = self.steps[trainer.fit_loop.total_batch_idx]
        signal = self.plugin.measure(optimizer)
        stretch.norms.append(signal.norms)
        stretch.errors.append(signal.errors)
        stretch.began.append(signal.began)
        stretch.total.append(signal.total_norm)
        stretch.incoming.append(torch.stack(self.incoming).double())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Tensor, number: int
    ) -> None:
        scale = 8.0 if self.steps[number][0].name == "loss_scale" else 1.0
        self.steps[number][0].loss.append(outputs["loss"].item() / scale)


def _state(module: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((module.state_dict(), optimizer.state_dict()))


def _restore(state: Any, module: nn.Module, optimizer: Optimizer) -> None:
    weights, moments = copy.deepcopy(state)
    module.load_state_dict(weights)
    optimizer.load_state_dict(moments)


class _Model(stress.StressGPT):
    """Its learning rate is the recorder's; the loss can be scaled."""

    lr: float
    scaled: set[int]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (8.0 if batch_idx in self.scaled else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def record(seed: int, healthy: Backend, units_a_fault: int = 2, kinds: Sequence[str] = tuple(KINDS)) -> list[Stretch]:
    """Trains, plays all episodes and gives what was measured.

    Args:
        seed: of the weights, the batches and the choice of sick units.
        healthy: the backend of well units.
        units_a_fault: how many units each fault is tried on at each of the two points of the trunk.
        kinds: the kinds of fault to play.
    """
    torch.manual_seed(seed)
    model = _Model()
    plugin = GNMRPrecision(healthy, control=GNMRConfig(warmup_steps=10**9, probe_interval=1))
    stretches = plan(seed, 4 * stress.N_LAYERS, kinds, units_a_fault)
    windows = Windows(stress.texts()[0], stress.BATCH_SIZE, stress.SEQ_LEN, seed)

    def batches() -> Iterator[Tensor]:
        noise = torch.Generator().manual_seed(seed)
        for stretch in stretches:
            for number in stretch.batches:
                batch = windows.batch(number)
                if stretch.name == "bad_batch" and number - stretch.batches[0] in (2, 3):
                    batch = torch.randint(256, batch.shape, generator=noise)
                elif stretch.name == "other_text":
                    batch = batch.flip(1)
                elif stretch.name == "accumulation":  # 4 micro-batches give the gradient of one that is 4 times larger
                    batch = torch.cat([windows.batch(10**6 + 4 * number + i) for i in range(4)])
                yield batch

    class Install(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            recorder.backends = install(plugin.units, healthy)

    recorder = Recorder(stretches, [], plugin)
    model.scaled = {number for number, (stretch, _) in enumerate(recorder.steps) if stretch.name == "loss_scale"}
    trainer = L.Trainer(
        plugins=[plugin],
        callbacks=[Install(), recorder],
        max_steps=-1,
        max_epochs=1,
        accelerator="cpu",
        **QUIET,
    )
    trainer.fit(model, DataLoader(list(batches()), batch_size=None))  # type: ignore[arg-type]
    return stretches
