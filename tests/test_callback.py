"""The callback: what it logs and says, where it sits, and what it does without GNMRPrecision."""

import lightning.pytorch as pl
import pytest
import torch
from conftest import Fault, Net, batches, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends

CONTROL = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=4, lock_interval=3, max_o=1)


class SixteenRows(backends.Backend):
    """Exact products, but only for a multiple of 16 rows, as float8 has it on CUDA."""

    name = "sixteen_rows"

    def output(self, x_MK, weight_NK):
        return x_MK @ weight_NK.to(x_MK.dtype).t()

    def grad_input(self, grad_MN, weight_NK):
        return grad_MN @ weight_NK.to(grad_MN.dtype)

    def grad_weight(self, grad_MN, x_MK):
        return grad_MN.t() @ x_MK

    def takes_rows(self, rows, device_type):
        return rows % 16 == 0


def rows(path) -> list[dict[str, float]]:
    """The CSV log, a dict for each line, without empty cells."""
    import csv

    with open(path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_a_trainer_without_a_callback_gets_one_before_the_checkpoints(tmp_path):
    run = trainer(GNMRPrecision("int8"), callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    for _ in range(2):  # and only one, however often it is used
        run.fit(Net(), batches(2))
        kinds = [type(c) for c in run.callbacks]
        assert kinds.count(GNMRCallback) == 1
        assert kinds.index(GNMRCallback) < kinds.index(ModelCheckpoint)


def test_the_users_own_callback_is_used():
    mine = GNMRCallback(per_unit=True)
    run = trainer(GNMRPrecision("int8"), callbacks=[mine])
    run.fit(Net(), batches(3))
    assert [c for c in run.callbacks if isinstance(c, GNMRCallback)] == [mine]
    assert {f"gnmr/unit/net.{i}" for i in (0, 2, 4)} <= set(run.callback_metrics)


def test_what_is_logged_each_interval_is_about_that_interval(tmp_path):
    run = trainer(
        GNMRPrecision("int8", control=CONTROL),
        callbacks=[Fault("net.2", [7])],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=5,
    )
    run.fit(Net(), batches(20))
    by_step = {int(row["step"]): row for row in rows(tmp_path)}
    assert set(by_step) == {4, 9, 14, 19}
    assert [by_step[s]["gnmr/interventions"] for s in (4, 9, 14, 19)] == [0, 1, 0, 0]
    assert by_step[9]["gnmr/max"] > 100 > 5 > by_step[14]["gnmr/max"]
    assert by_step[9]["gnmr/max_delta"] == pytest.approx(by_step[9]["gnmr/max"] - 1, rel=0.1)
    # locked at 7, so in bf16 in steps 8, 9 and 10: two of the second interval's steps, one of the third's
    assert [by_step[s]["gnmr/bf16_share"] for s in (4, 9, 14, 19)] == pytest.approx([0, 2 * 3 / 40, 3 / 40, 0])
    assert [by_step[s]["gnmr/budget_use"] for s in (4, 9, 14, 19)] == pytest.approx([0, 3 / 5, 0, 0])
    assert [by_step[s]["gnmr/recovered"] for s in (4, 9, 14, 19)] == [0, 1, 0, 0]
    assert all(row["gnmr/nonfinite_steps"] == 0 == row["gnmr/fallback_calls"] for row in by_step.values())
    assert "gnmr/unit/net.2" not in by_step[9]


def test_the_number_of_recovered_units_is_in_the_progress_bar():
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(trainer.progress_bar_metrics.get("gnmr/recovered"))

    run = trainer(GNMRPrecision("int8", control=CONTROL), callbacks=[Fault("net.2", [7]), Look()])
    run.fit(Net(), batches(14))
    assert seen == [1.0 if 7 <= step <= 9 else 0.0 for step in range(14)]


def test_a_recovery_is_said_in_one_line(capsys, caplog):
    run = trainer(GNMRPrecision("int8", control=CONTROL), callbacks=[Fault("net.2", [7])])
    with caplog.at_level("INFO"):
        run.fit(Net(), batches(14))
    lines = [r.message for r in caplog.records if "runs bf16" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith("step 7: net.2 runs bf16 from the next step on (GNMR ")


def test_calls_that_fall_back_are_counted_and_named_once():
    """Case 2: here the last batch of each epoch has 7 rows."""
    callback = GNMRCallback()
    run = trainer(GNMRPrecision(SixteenRows()), callbacks=[callback], max_epochs=2)
    with pytest.warns(UserWarning, match=r"sixteen_rows cannot take .*net\.0, net\.2, net\.4 ran bf16") as caught:
        run.fit(Net(), batches(5, ragged=7))
    assert len([w for w in caught if "sixteen_rows cannot take" in str(w.message)]) == 1
    assert callback.totals()["fallback_calls"] == 2 * 3
    assert callback.totals()["bf16_share"] == pytest.approx(7 / (5 * 16 + 7))


def test_without_the_plugin_it_observes(tmp_path):
    """Any other precision: the same figures, no recovery, nothing converted, weights as without the callback."""

    def fit(*callbacks):
        model = Net()
        run = trainer(callbacks=list(callbacks), precision="bf16-mixed", gradient_clip_val=0.5)
        run.fit(model, batches(12))
        return model, run

    callback = GNMRCallback(control=GNMRConfig(method="gnmr", threshold=1.05, delta_threshold=0.05, warmup_steps=4))
    watched, run = fit(callback)
    assert callback.totals()["interventions"] > 0
    assert {"gnmr/max", "gnmr/interventions", "gnmr/recovered"} <= set(run.callback_metrics)
    assert not {"gnmr/bf16_share", "gnmr/fallback_calls"} & set(run.callback_metrics)
    for a, b in zip(watched.parameters(), fit()[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_observer_keeps_its_history_in_the_checkpoint(tmp_path):
    def fit(path, epochs, ckpt=None):
        callback = GNMRCallback(control=GNMRConfig(method="gnmr", threshold=1.05, delta_threshold=0.05, warmup_steps=4))
        checkpoint = ModelCheckpoint(path, save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)
        run = trainer(callbacks=[callback, checkpoint], max_epochs=epochs, enable_checkpointing=True)
        run.fit(Net(), batches(10), ckpt_path=ckpt, weights_only=True)
        return list(callback.events)

    whole = fit(tmp_path / "a", 2)
    first = fit(tmp_path / "b", 1)
    assert fit(tmp_path / "b", 2, tmp_path / "b" / "last.ckpt") == whole[len(first) :]
    assert whole[: len(first)] == first
    assert len(whole) > len(first) > 0


@pytest.mark.parametrize("argument", [{"control": GNMRConfig()}, {"granularity": "block"}, {"exclude": ["net.0"]}])
def test_a_policy_in_two_places_is_refused(argument):
    with pytest.raises(ValueError, match="give these arguments to GNMRPrecision instead"):
        trainer(GNMRPrecision("int8"), callbacks=[GNMRCallback(**argument)]).fit(Net(), batches(2))


def test_an_optimizer_without_units_is_measured_but_not_decided_on():
    class HeadFirst(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            head, rest = self.optimizers()
            for optimizer in (head, rest):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[6].parameters(), 0.1), torch.optim.SGD(self.net[:6].parameters(), 0.1)

    callback, plugin = GNMRCallback(), GNMRPrecision("int8")
    trainer(plugin, callbacks=[callback]).fit(HeadFirst(), batches(5))
    assert plugin.controller.state_dict()["steps"].tolist() == [5] * 3
    assert callback.totals()["nonfinite_steps"] == 0


def test_a_training_step_that_returns_nothing_is_no_measurement():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    plugin = GNMRPrecision("int8")
    trainer(plugin).fit(Skips(), batches(6))
    assert plugin.controller.state_dict()["admitted"].tolist() == [3] * 3


def test_events_are_bounded():
    callback = GNMRCallback()
    assert callback.events.maxlen == 1000
