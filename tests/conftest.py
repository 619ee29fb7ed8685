"""What the Trainer's tests share: a small model on data with a signal, a quiet Trainer, and a faulty backend."""

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gnmr_lightning import backends

D = 32


class Net(pl.LightningModule):
    """Four linears of equal size, of which the last, `net.6`, is the head; so three units: net.0, net.2, net.4."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, 4)]
        self.net = nn.Sequential(*layers)
        self.optimizer = optimizer

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 1e-3)


def batches(n: int = 40, batch_size: int = 16, ragged: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n * batch_size + ragged, D, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size)


def trainer(plugin=None, **kwargs) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = {"plugins": [plugin]} if plugin is not None else {}
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, **quiet, **plugins, **kwargs})


class Faulty(backends.Backend):
    """A healthy backend whose gradients of weight are multiplied by `factor` while `sick` is set."""

    def __init__(self, healthy: backends.Backend, factor: float) -> None:
        self.name = f"{healthy.name}+fault"
        self.healthy, self.factor, self.sick = healthy, factor, False

    def output(self, x_MK, weight_NK):
        return self.healthy.output(x_MK, weight_NK)

    def grad_input(self, grad_MN, weight_NK):
        return self.healthy.grad_input(grad_MN, weight_NK)

    def grad_weight(self, grad_MN, x_MK):
        return self.healthy.grad_weight(grad_MN, x_MK) * (self.factor if self.sick else 1.0)


class Fault(pl.Callback):
    """Makes the low-precision path of one layer sick in the given training batches."""

    def __init__(self, fqn: str, steps: range | list[int], factor: float = 1000.0) -> None:
        self.fqn, self.steps, self.factor = fqn, steps, factor

    def on_train_start(self, trainer, pl_module):
        layer = pl_module.get_submodule(self.fqn)
        self.backend = Faulty(backends.get(layer.backend), self.factor)
        layer.backend = backends.register(self.backend).name

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.backend.sick = trainer.global_step in self.steps


class Saturating(backends.Backend):
    """Clamps the input at a 32nd of its largest value while it is sick: norms fall, and nobody's norm rises."""

    def __init__(self, healthy, sick_kind="input"):
        self.healthy, self.name, self.sick, self.kind = healthy, f"{healthy.name}+saturating", False, sick_kind

    def output(self, x_MK, weight_NK):
        if self.sick and self.kind == "nan":
            x_MK = x_MK.clone()
            x_MK[0, 0] = math.nan
        elif self.sick:
            limit = x_MK.abs().amax() / 32
            x_MK = x_MK.clamp(-limit, limit)
        return self.healthy.output(x_MK, weight_NK)

    def grad_input(self, grad_MN, weight_NK):
        return self.healthy.grad_input(grad_MN, weight_NK)

    def grad_weight(self, grad_MN, x_MK):
        return self.healthy.grad_weight(grad_MN, x_MK)


class Paths(pl.Callback):
    """Records, for each training batch, which units ran bf16."""

    def __init__(self) -> None:
        self.bf16: list[set[str]] = []

    def on_train_start(self, trainer, pl_module):
        self.before = trainer.precision_plugin.work()

    def on_train_batch_end(self, trainer, pl_module, *args):
        plugin = trainer.precision_plugin
        done, self.before = plugin.work() - self.before, plugin.work()
        assert not ((done[:, 0] > 0) & (done[:, 1] > 0)).any(), "a unit changed its path within a step"
        self.bf16.append({unit.name for unit, work in zip(plugin.units, done, strict=True) if work[1] > 0})


def kinds(model: nn.Module) -> list[tuple[str, type]]:
    """Every module's name and class."""
    return [(name, type(module)) for name, module in model.named_modules()]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
