"""What test_distributed.py runs in each of two processes: `distributed_worker.py FOLDER`, with LOCAL_RANK set.

Every rank runs all scenarios, one Trainer after the other, since importing takes longer than training, and writes
what it saw, step by step, to FOLDER/SCENARIO-RANK.pt. Faults are put in on rank 1 alone: rank 0 can know of them only
through what the strategy or the signal reduces.
"""

import copy
import math
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from conftest import D, Paths, Saturating, trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.backends import Backend
from gnmr_lightning.signal import UnitNorms

STEPS, GLOBAL_BATCH, FAULT_STEP = 8, 16, 3
CLIP = 0.065  # between the norms of "clip": the test checks that some steps are clipped and some are not

SCENARIOS = {  # name: strategy, recipe, fault
    "ddp-int8": ("ddp", "int8", "spike"),
    "fsdp2-int8": ("fsdp2", "int8", "spike"),
    "fsdp2-float8_rowwise": ("fsdp2", "float8_rowwise", "spike"),
    "fsdp2-nan": ("fsdp2", "int8", "nan"),
    "ddp-product_error": ("ddp", "int8", "saturated"),
    "fsdp2-product_error": ("fsdp2", "float8_rowwise", "saturated"),
    "ddp-clip": ("ddp", "exact", None),
    "fsdp2-clip": ("fsdp2", "exact", None),
}


class Exact(Backend):
    """No low precision at all: fp32 products, so that half batches add up to whole ones to float accuracy."""

    name = "exact"

    def output(self, x_MK, weight_NK):
        return x_MK.float() @ weight_NK.T

    def grad_input(self, grad_MN, weight_NK):
        return grad_MN.float() @ weight_NK

    def grad_weight(self, grad_MN, x_MK):
        return grad_MN.float().T @ x_MK.float()


class Gain(nn.Module):
    """One parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Uneven(pl.LightningModule):
    """Sizes that two ranks cannot share evenly; `gain` has one element, so rank 1 has none of it."""

    def __init__(self, lr: float, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(D, 33), (33, D), (D, D), (D, 3)]
        layers = [layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.GELU())]
        self.net = nn.Sequential(*layers[:-1])  # units net.0, net.2 and net.4; net.6 is the head
        self.gain = Gain()
        self.lr, self.sharded = lr, sharded

    def configure_model(self):
        if self.sharded:
            for layer in (self.gain, *self.linears()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        self.before_conversion = self.identity()

    def linears(self):
        return [layer for layer in self.net if isinstance(layer, nn.Linear)]

    def identity(self):
        """Every module and parameter by name, as the objects they are."""
        return {name: id(x) for named in (self.named_modules(), self.named_parameters()) for name, x in named}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(self.gain(x)).float(), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        """The same global batches for every world size, split by rank."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        generator = torch.Generator().manual_seed(5)
        batches = []
        for _ in range(STEPS):
            x = torch.randn(GLOBAL_BATCH, D, generator=generator)
            y = torch.randint(3, (GLOBAL_BATCH,), generator=generator)
            batches.append((x[rank::world], y[rank::world]))
        return DataLoader(batches, batch_size=None)


class FaultOnRank1(pl.Callback):
    """Spoils rank 1's part of the gradient of `net.2` in one step: before DDP reduces it, or in its shard of FSDP2.

    Or, "saturated", its low-precision output for rank 1's rows, which raises no norm.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.factor = {"spike": 1000.0, "nan": math.nan}.get(kind, 1.0)

    def due(self, trainer) -> bool:
        return trainer.global_rank == 1 and trainer.global_step == FAULT_STEP

    def on_train_start(self, trainer, pl_module):
        if self.kind == "saturated":
            self.backend = Saturating(backends.get(pl_module.net[2].backend))
            pl_module.net[2].backend = backends.register(self.backend).name
        elif not pl_module.sharded:
            pl_module.net[2].weight.register_hook(lambda g: g * self.factor if self.due(trainer) else g)

    def on_train_batch_start(self, trainer, *args):
        if self.kind == "saturated":
            self.backend.sick = self.due(trainer)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if pl_module.sharded and self.due(trainer):
            pl_module.net[2].weight.grad.to_local()[0].mul_(self.factor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def local(parameter: nn.Parameter) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


class Record(Paths):
    """What one rank sees, step by step. `oracle` is made from whole gradients, one parameter at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list] = {name: [] for name in ("oracle", "stepped_with", "locked", "state", "moved")}

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.kept = [pl_module.identity() == pl_module.before_conversion]
        self.classes = [type(layer).__name__ for layer in pl_module.linears()]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights = [local(p) for p in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        units = trainer.precision_plugin.units
        squares = {id(p): whole(p.grad).square().sum().item() for p in pl_module.parameters()}
        of_units = [math.sqrt(sum(squares[id(ln.weight)] for ln in unit.linears.values())) for unit in units]
        self.seen["oracle"].append([*of_units, math.sqrt(sum(squares.values()))])

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        grads = [whole(p.grad).norm() for p in pl_module.parameters()]
        self.seen["stepped_with"].append(torch.stack(grads).norm().item())
        controller = trainer.precision_plugin.controller
        self.seen["locked"].append(controller.locked.tolist())
        self.seen["state"].append(copy.deepcopy(controller.state_dict()))
        now = [local(p) for p in pl_module.parameters()]
        self.seen["moved"].append(any(not torch.equal(a, b) for a, b in zip(self.weights, now, strict=True)))


class CountedNorms:
    """Counts, while it is entered, what each `UnitNorms.measure` measures and which collectives it calls."""

    def __init__(self) -> None:
        self.norms, self.totals, self.all_reduces, self.collectives = [], [], [], []

    def __enter__(self):
        measure, all_reduce = UnitNorms.measure, dist.all_reduce
        self._undo = measure, all_reduce

        def counted(norms, optimizer):
            calls = []
            dist.all_reduce = lambda *args, **kwargs: calls.append(1) or all_reduce(*args, **kwargs)
            try:
                with CommDebugMode() as collectives:
                    signal = measure(norms, optimizer)
            finally:
                dist.all_reduce = all_reduce
            self.norms.append(signal.norms.tolist())
            self.totals.append(signal.total_norm)
            self.all_reduces.append(len(calls))
            self.collectives.append(collectives.get_total_counts())
            return signal

        UnitNorms.measure = counted
        return self

    def __exit__(self, *exc):
        UnitNorms.measure, dist.all_reduce = self._undo


def train(strategy: str, recipe: str, fault: str | None) -> dict:
    """One run of the Trainer, and what this rank saw of it."""
    exact = recipe == "exact"
    record = Record()
    # With a fault, steps are so small that it passes without a trace.
    model = Uneven(lr=1e-5 if fault in ("spike", "saturated") else 0.5, sharded=strategy == "fsdp2")
    plugin = GNMRPrecision(
        Exact() if exact else recipe,
        include=["*"] if exact else None,
        control=GNMRConfig(
            method="product_error" if fault == "saturated" else "gnmr",
            threshold=20.0,
            delta_threshold=19.0,
            warmup_steps=2,
            lock_interval=3,
            max_o=1,
        ),
    )
    run = trainer(
        plugin,
        callbacks=[FaultOnRank1(fault), record, GNMRCallback()],
        devices=1 if strategy == "single" else 2,
        strategy={
            "single": lambda: "auto",
            "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
            "fsdp2": lambda: ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
            ),
        }[strategy](),
        gradient_clip_val=CLIP if exact else None,
        use_distributed_sampler=False,
    )
    with CountedNorms() as counted:
        run.fit(model)
    return {
        **record.seen,
        "norms": counted.norms,
        "totals": counted.totals,
        "all_reduces": counted.all_reduces,
        "collectives": counted.collectives,
        "bf16": [sorted(names) for names in record.bf16],
        "kept": [*record.kept, model.identity() == model.before_conversion],
        "classes": record.classes,
        "classes_after": [type(layer).__name__ for layer in model.linears()],
        "weights": [whole(p) for p in model.parameters()],
        "rank": run.global_rank,
        "world": run.world_size,
    }


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for name, scenario in SCENARIOS.items():
        result = train(*scenario)
        torch.save(result, Path(folder) / f"{name}-{result['rank']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
