"""Recovery from end to end, through the real Trainer: which unit runs bf16, in which steps, what stays untouched."""

import pytest
import torch
from conftest import Fault, Net, Paths, batches, trainer

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision

RECIPES = ["int8", "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sick_unit_and_only_it_runs_bf16_for_exactly_the_lock_interval(recipe):
    model, paths, callback = Net(), Paths(), GNMRCallback()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    control = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=5, lock_interval=6, max_o=1)
    run = trainer(GNMRPrecision(recipe, control=control), callbacks=[callback, Fault("net.2", [12]), paths])
    run.fit(model, batches(30))

    assert paths.bf16 == [{"net.2"} if 13 <= step <= 18 else set() for step in range(30)]
    assert [e[:3] for e in callback.events] == [(12, "net.2", "locked"), (18, "net.2", "released")]
    assert callback.events[0].gnmr > 100
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    totals = callback.totals()
    assert totals["interventions"] == 1
    assert totals["budget"] == 1
    assert totals["nonfinite_steps"] == 0
    # net.0 needs no gradient of its input, so it does 2 of 3 matmuls: 6 steps of 3 units-thirds in 30 steps of 8
    assert totals["bf16_share"] == pytest.approx(6 * 3 / (30 * 8))


def test_a_lasting_fault_is_locked_again_as_soon_as_its_lock_ends():
    paths = Paths()
    control = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=5, lock_interval=3, max_o=1)
    run = trainer(GNMRPrecision("int8", control=control), callbacks=[Fault("net.2", range(10, 30), 1e6), paths])
    run.fit(Net(), batches(24))
    # locked by step 10; released after 13 and, healthy in bf16, not locked again before it has run low once: step 14
    sick = {step for step, names in enumerate(paths.bf16) if names}
    assert {11, 12, 13, 15, 16, 17} <= sick
    assert not sick & {*range(11), 14, 18}


def test_warm_up_takes_no_action():
    paths = Paths()
    control = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=15, max_o=1)
    trainer(GNMRPrecision("int8", control=control), callbacks=[Fault("net.2", [14]), paths]).fit(Net(), batches(20))
    assert not any(paths.bf16)


def test_block_units_are_moved_as_a_whole():
    class Blocks(Net):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32)) for _ in range(3)
            )
            self.head = torch.nn.Linear(32, 4)

        def loss(self, batch):
            x, y = batch
            for block in self.net:
                x = x + block(x)
            return torch.nn.functional.cross_entropy(self.head(x).float(), y)

    paths = Paths()
    control = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=5, lock_interval=4, max_o=1)
    plugin = GNMRPrecision("int8", granularity="block", control=control)
    trainer(plugin, callbacks=[Fault("net.1.2", [10]), paths]).fit(Blocks(), batches(20))
    assert [unit.name for unit in plugin.units] == ["net.0", "net.1", "net.2"]
    assert plugin.units[1].fqns == ["net.1.0", "net.1.2"]
    assert paths.bf16 == [{"net.1"} if 11 <= step <= 14 else set() for step in range(20)]


def test_a_healthy_model_is_not_disturbed_by_a_switch():
    """Case 19: low -> bf16 -> low leaves the loss where it is."""

    def losses(switch_at):
        class Force(Paths):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                for switch in trainer.precision_plugin._switches:
                    if switch.item() != (batch_idx in switch_at):
                        switch.fill_(batch_idx in switch_at)

            def on_train_batch_end(self, trainer, pl_module, outputs, *args):
                self.bf16.append(outputs["loss"].item())

        force = Force()
        trainer(GNMRPrecision("float8_rowwise"), callbacks=[force]).fit(Net(), batches(40))
        return torch.tensor(force.bf16)

    stay, switched = losses(range(0)), losses(range(15, 25))
    assert (stay - switched).abs().max() < 0.02
    assert not torch.equal(stay, switched)
