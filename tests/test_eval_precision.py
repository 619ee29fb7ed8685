"""What validation, test and prediction steps run in, and that training finds its switches as it left them."""

import lightning.pytorch as pl
import pytest
import torch
from conftest import Fault, Net, Paths, batches, trainer

from gnmr_lightning import GNMRConfig, GNMRPrecision

CONTROL = GNMRConfig(threshold=5.0, delta_threshold=4.0, warmup_steps=4, lock_interval=6, max_o=1)
STAGES = ("sanity", "validate", "test", "predict")


class Sees(Net):
    """Notes in each evaluation step which of its units run bf16, by stage."""

    def __init__(self):
        super().__init__()
        self.seen = {stage: [] for stage in STAGES}

    def look(self, batch):
        stage = "sanity" if self.trainer.sanity_checking else self.trainer.state.stage.value
        self.seen[stage].append([self.net[i].recovered.item() for i in (0, 2, 4)])
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.look(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.look(batch))

    def predict_step(self, batch, batch_idx):
        return self.look(batch)


class Switches(pl.Callback):
    """The switches at the start of each training batch, with the versions that autograd compares."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, *args):
        self.seen.append([(s.item(), s._version) for s in trainer.precision_plugin._switches])


def run(plugin, validation=None, model=None, **kwargs):
    """A fit of 20 steps in which net.2 is sick in step 7, so in bf16 from step 8 to 13."""
    model, paths, switches = model or Sees(), Paths(), Switches()
    interval = {"val_check_interval": 4} if validation else {"limit_val_batches": 0}
    fitted = trainer(plugin, callbacks=[Fault("net.2", [7]), paths, switches], **interval, **kwargs)
    fitted.fit(model, batches(20), validation)
    return model, paths, switches, fitted


@pytest.mark.parametrize(("precision", "bf16"), [("bf16", True), ("low", False)])
def test_every_evaluation_runs_all_units_alike_whatever_is_locked(precision, bf16):
    plugin = GNMRPrecision("int8", control=CONTROL, eval_precision=precision)
    model, paths, _, fitted = run(plugin, batches(2, ragged=7))
    assert paths.bf16[11] == {"net.2"}  # a validation lies between steps 11 and 12, in the middle of the lock
    fitted.validate(model, batches(1), verbose=False)
    fitted.test(model, batches(1), verbose=False)
    fitted.predict(model, batches(1))
    other = Sees()
    trainer(GNMRPrecision("int8", eval_precision=precision)).validate(other, batches(1), verbose=False)  # without a fit
    counts = {stage: len(seen) for stage, seen in model.seen.items()}
    assert counts == {"sanity": 2, "validate": 5 * 3 + 1, "test": 1, "predict": 1}
    assert all(units == [bf16] * 3 for seen in [*model.seen.values(), *other.seen.values()] for units in seen)


@pytest.mark.parametrize("precision", ["bf16", "low"])
def test_training_does_not_notice_an_evaluation(precision):
    """Locks, switches and their versions, and the weights to the bit."""
    with_it = run(GNMRPrecision("int8", control=CONTROL, eval_precision=precision), batches(2))
    without = run(GNMRPrecision("int8", control=CONTROL, eval_precision=precision))
    assert with_it[1].bf16 == without[1].bf16 == [{"net.2"} if 8 <= step <= 13 else set() for step in range(20)]
    assert with_it[2].seen == without[2].seen
    for a, b in zip(with_it[0].parameters(), without[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("base", ["bf16-mixed", "bf16-true"])
def test_bf16_validation_is_the_plain_models_and_low_is_not(base):
    """What comes out of the run is the plain model; the default says how that one does."""
    losses = {}
    for precision in ("bf16", "low"):
        model, *_, fitted = run(GNMRPrecision("float8_rowwise", base, eval_precision=precision), batches(2))
        losses[precision] = fitted.callback_metrics["val_loss"]
    other = Net()
    other.load_state_dict(model.state_dict())
    plain = trainer(precision=base)
    plain.validate(other, batches(2), verbose=False)
    # Training was the same in both runs, so is the plain model.
    assert losses["bf16"] == plain.callback_metrics["val_loss"] != losses["low"]
    assert losses["low"] == pytest.approx(losses["bf16"].item(), rel=0.02)


def test_a_failing_evaluation_step_gives_the_switches_back():
    plugin = GNMRPrecision("int8")
    plugin.convert_module(Net())
    plugin._apply(torch.tensor([False, True, False]))
    seen = []

    def step():
        with plugin.test_step_context():
            seen.extend(s.item() for s in plugin._switches)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        step()
    assert seen == [True, True, True]
    assert [s.item() for s in plugin._switches] == [False, True, False]


def test_a_graph_that_outlives_a_validation_can_still_be_differentiated():
    class Late(Net):
        """Steps every fourth batch, on the loss of the batch before: a validation lies between the two."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.steps = 0

        def training_step(self, batch, batch_idx):
            if batch_idx % 4 == 3:
                self.kept = self.loss(batch)
            elif batch_idx % 4 == 0 and batch_idx:
                self.optimizers().zero_grad()
                self.manual_backward(self.kept)
                self.optimizers().step()
                self.steps += 1

    assert run(GNMRPrecision("int8"), batches(2), Late())[0].steps == 4


@pytest.mark.parametrize("precision", ["bf16", "low"])
def test_evaluation_compiles_one_graph_more_and_training_keeps_its_own(precision):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, graphs = Sees(), []
    model.loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")

    class Graphs(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    fitted = trainer(
        GNMRPrecision("float8_rowwise", control=CONTROL, eval_precision=precision),
        callbacks=[Fault("net.2", [7]), paths := Paths(), Graphs()],
        val_check_interval=4,
        num_sanity_val_steps=0,
    )
    fitted.fit(model, batches(16), batches(2))
    assert paths.bf16[11] == {"net.2"}
    assert graphs == [2] * 4
