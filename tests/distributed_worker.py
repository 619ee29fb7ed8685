"""Run by test_distributed.py in processes of its own: `distributed_worker.py STRATEGY RECIPE CLIP SPIKE FOLDER`.

STRATEGY is single, ddp or fsdp2. Every rank trains the conftest's model on its part of the same batches and writes what
it saw, step by step, to FOLDER/STRATEGY-RANK.pt.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from conftest import D, Net, trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision
from gnmr_lightning.signal import UnitNorms

STEPS, GLOBAL_BATCH, SPIKE_STEP = 8, 16, 3


class Sharded(Net):
    def configure_model(self):
        # configure_model runs in every strategy; only FSDP2 gives a mesh
        if self.trainer.strategy.__class__ is ModelParallelStrategy:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if isinstance(layer, nn.Linear) and not isinstance(layer, FSDPModule):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def train_dataloader(self):
        """The same global batches for every world size, split by rank; the spike is in the data of all ranks."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        generator = torch.Generator().manual_seed(5)
        batches = []
        for _ in range(STEPS):
            x = torch.randn(GLOBAL_BATCH, D, generator=generator)
            y = torch.randint(4, (GLOBAL_BATCH,), generator=generator)
            batches.append((x[rank::world], y[rank::world]))
        return DataLoader(batches, batch_size=None)

    def on_before_optimizer_step(self, optimizer):
        pass


class Spike(pl.Callback):
    """Multiplies one unit's gradient in one step, before the GNMRCallback behind it measures."""

    def __init__(self, factor):
        self.factor = factor

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == SPIKE_STEP and self.factor != 1:
            pl_module.net[2].weight.grad.mul_(self.factor)


class Record(pl.Callback):
    def __init__(self):
        self.norms, self.totals, self.locked, self.clipped, self.bf16, self.state = [], [], [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        # the gradient that was stepped with, whole
        grads = [p.grad for p in pl_module.parameters()]
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        self.clipped.append(torch.stack([g.double().norm() for g in full]).norm().item())
        plugin = trainer.precision_plugin
        self.locked.append(plugin.controller.locked.tolist())
        self.bf16.append((plugin.work()[:, 1] > 0).tolist())
        self.state.append(plugin.controller.state_dict())


def main():
    strategy, recipe, clip, spike, folder = sys.argv[1:]
    torch.set_num_threads(1)
    record = Record()
    reduces = []
    measure, all_reduce = UnitNorms.measure, dist.all_reduce

    def counted_measure(self, optimizer):
        before = len(reduces)
        dist.all_reduce = lambda *args, **kwargs: reduces.append(1) or all_reduce(*args, **kwargs)
        try:
            signal = measure(self, optimizer)
        finally:
            dist.all_reduce = all_reduce
        record.norms.append(signal.norms.clone())
        record.totals.append(signal.total_norm)
        assert len(reduces) - before == (strategy == "fsdp2")
        return signal

    UnitNorms.measure = counted_measure
    model = Sharded("sgd")
    parameters = {name: id(module) for name, module in model.named_modules()}
    control = GNMRConfig(threshold=20.0, delta_threshold=19.0, warmup_steps=2, lock_interval=3, max_o=1)
    run = trainer(
        GNMRPrecision(recipe, "bf16-mixed", control=control),
        callbacks=[Spike(float(spike)), GNMRCallback(), record],
        devices=1 if strategy == "single" else 2,
        strategy={
            "single": "auto",
            "ddp": DDPStrategy(process_group_backend="gloo"),
            "fsdp2": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        }[strategy],
        gradient_clip_val=float(clip) or None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    run.fit(model)
    result = {
        **{name: getattr(record, name) for name in ("norms", "totals", "locked", "clipped", "bf16", "state")},
        "reduces": len(reduces),
        "kept": parameters == {name: id(module) for name, module in model.named_modules()},
        "plain": [type(m).__name__ for m in model.net if isinstance(m, nn.Linear)],
    }
    torch.save(result, Path(folder) / f"{strategy}-{run.global_rank}.pt")


if __name__ == "__main__":
    main()
