"""Models as people have them: fast paths, several optimizers, layers that idle, batches without a sample.

Which recipe trains which model is the support matrix's part (test_support.py); here is what has to be right beyond it.
"""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from conftest import D, Net, batches, trainer
from torch import nn
from torch.nn import functional as F

from benchmarks.families import FAMILIES
from gnmr_lightning import GNMRPrecision
from gnmr_lightning.linear import RecoverableLinear


def fit(name, plugin, **kwargs):
    torch.manual_seed(0)
    model = FAMILIES[name](D)
    run = trainer(plugin, **kwargs)
    run.fit(model, model.data(D), model.data(D))
    return model, run


# -- nn.TransformerEncoder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "low"])
def test_the_fast_path_of_a_transformer_encoder_is_taken_as_without_the_plugin(monkeypatch, precision):
    """Case 24: in validation it reads the layers' weights and calls none of them, whatever eval_precision says."""
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(1) or fast(*a, **k))

    class Fast(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            layer = pl_module.net.encoder.layers[0]
            assert isinstance(layer.linear1, RecoverableLinear)
            assert isinstance(layer.linear2, RecoverableLinear)
            calls.clear()

        def on_validation_end(self, trainer, pl_module):
            self.calls = len(calls)

    fast_in_run = Fast()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*converted linear layers did nothing")
        model, run = fit(
            "nn.TransformerEncoder", GNMRPrecision("int8", eval_precision=precision), callbacks=[fast_in_run]
        )
    assert fast_in_run.calls == 3  # one layer, three batches
    assert [s.fqn for s in run.precision_plugin.skipped] == ["net.encoder.layers.0.self_attn.out_proj", "net.head"]
    in_run = run.callback_metrics["val_loss"]
    plain = trainer(precision="bf16-mixed")
    plain.validate(model, model.data(D), verbose=False)
    assert in_run == plain.callback_metrics["val_loss"]


# -- several optimizers ----------------------------------------------------------------------------------------------


def test_a_gan_decides_for_each_optimizer_when_it_steps():
    """Case 14: the critic steps in each of 6 batches, the generator in 2 of them, and not in the first one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*converted linear layers did nothing")
        _, run = fit("GAN", GNMRPrecision("int8"), max_epochs=2)
    plugin = run.precision_plugin
    steps = dict(
        zip([unit.name for unit in plugin.units], plugin.controller.state_dict()["steps"].tolist(), strict=True)
    )
    assert steps == {
        "net.generator.layers.0": 2,
        "net.generator.layers.1": 2,
        "net.critic.layers.0": 6,
        "net.critic.layers.1": 6,
    }


def test_manual_accumulation_decides_once_a_step():
    class Accumulates(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch) / 4)
            if batch_idx % 4 == 3:
                self.optimizers().step()
                self.optimizers().zero_grad()

    plugin = GNMRPrecision("int8")
    trainer(plugin).fit(Accumulates(), batches(12))
    assert plugin.controller.state_dict()["steps"].tolist() == [3] * 3


# -- layers that idle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("recurrent cell", "1 converted linear layers did nothing .*: net.unused;"),
        ("mixture of experts", "2 converted linear layers did nothing .*: net.experts.2.0, net.experts.2.2;"),
        ("teacher and student", None),  # the frozen teacher has nothing to train
    ],
)
def test_layers_that_idle_are_named_once(name, idle):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = fit(name, GNMRPrecision("int8"), max_epochs=2)
    said = [str(w.message) for w in caught if "did nothing" in str(w.message)]
    assert len(said) == (idle is not None)
    assert idle is None or re.match(idle, said[0])
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_frozen_model_under_no_grad_runs_on_the_path_of_its_unit():
    """The teacher's output in the training step: low precision unless its unit is recovered."""
    model = FAMILIES["teacher and student"](D)
    plugin = GNMRPrecision("float8_rowwise")
    x, teacher = torch.randn(12, 5, D), model.net.teacher

    def output():
        with torch.no_grad(), plugin.train_step_context():
            return teacher(x)

    plain = output()
    plugin.convert_module(model)
    low = output()
    plugin._apply(torch.tensor([unit.name.startswith("net.teacher") for unit in plugin.units]))
    assert torch.equal(output(), plain)
    assert not torch.equal(low, plain)
    torch.testing.assert_close(low, plain, rtol=0.2, atol=0.05)
    plugin.teardown()


# -- batches without a sample ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "float8_rowwise"])
def test_an_empty_batch_steps_and_changes_no_weight(recipe):
    """Case 4, in the Trainer: the loss is a sum, so its gradient is zero and not nan."""

    class Sums(Net):
        def loss(self, batch):
            x, y = batch
            return F.cross_entropy(self.net(x).float(), y, reduction="sum")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)  # without momentum, a zero gradient moves nothing

    class Weights(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.seen.append(nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())

    full = list(batches(4))
    empty = [part[:0] for part in full[0]]
    weights, plugin = Weights(), GNMRPrecision(recipe)
    data = torch.utils.data.DataLoader([*full[:2], empty, *full[2:]], batch_size=None)
    trainer(plugin, callbacks=[weights]).fit(Sums(), data)
    changed = [not torch.equal(a, b) for a, b in zip(weights.seen, weights.seen[1:], strict=False)]
    assert changed == [True, False, True, True]
    assert plugin.controller.state_dict()["steps"].tolist() == [5] * 3
