"""The plugin in a real Trainer: conversion, refusals, clipping, non-finite gradients, checkpoints."""

import copy
import itertools
from collections import OrderedDict
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from conftest import Fault, Net, Paths, batches, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.linear import RecoverableLinear
from gnmr_lightning.signal import UnitNorms

EAGER = GNMRConfig(method="gnmr", threshold=5.0, delta_threshold=4.0, warmup_steps=4, lock_interval=6, max_o=1)


class Record(pl.Callback):
    """Keeps the weights and the optimizer's state after each batch, and the gradients that the step saw."""

    def __init__(self):
        self.weights, self.states, self.grads = [], [], []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.grads.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])
        self.states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))


def fit(plugin, steps=12, model=None, callbacks=(), data=None, **kwargs):
    model = model or Net()
    record = Record()
    run = trainer(plugin, callbacks=[*callbacks, record], max_steps=steps, **kwargs)
    run.fit(model, data or batches(steps))
    return model, record, run


def same(a, b) -> bool:
    flat_a, flat_b = (torch.utils._pytree.tree_leaves(tree) for tree in (a, b))
    return len(flat_a) == len(flat_b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(flat_a, flat_b, strict=True)
    )


# -- conversion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["bf16-mixed", "bf16-true"])
def test_layers_are_converted_for_the_run_and_plain_after_it(base):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            seen.append([type(m) for m in pl_module.net if isinstance(m, nn.Linear)])

    model = Net()
    objects = list(model.net)
    keys = list(model.state_dict())
    plugin = GNMRPrecision("int8", base)
    fit(plugin, model=model, callbacks=[Look()], steps=2)
    assert seen == [[RecoverableLinear] * 3 + [nn.Linear]] * 2
    assert [type(m) for m in model.net] == [type(m) for m in Net().net]
    assert all(a is b for a, b in zip(model.net, objects, strict=True))
    assert list(model.state_dict()) == keys
    assert model.net[0].weight.dtype == (torch.bfloat16 if base == "bf16-true" else torch.float32)
    assert [u.name for u in plugin.units] == ["net.0", "net.2", "net.4"]
    assert [s.fqn for s in plugin.skipped] == ["net.6"]
    assert repr(plugin) == f"GNMRPrecision(recipe='int8', base={base!r}, 3 units, 1 linears skipped)"


def test_converting_twice_changes_nothing():
    model, plugin = Net(), GNMRPrecision("int8")
    plugin.convert_module(model)
    before = [(id(m), type(m), getattr(m, "backend", None)) for m in model.net]
    controller = plugin.controller
    plugin.convert_module(model)
    assert [(id(m), type(m), getattr(m, "backend", None)) for m in model.net] == before
    assert plugin.controller is controller
    other = GNMRPrecision("float8_rowwise", granularity="block")  # after a run that was killed before its teardown
    other.convert_module(model)
    assert model.net[0].backend == "float8_rowwise"
    assert [u.name for u in other.units] == ["net.0", "net.2", "net.4"]
    plugin.teardown()
    plugin.teardown()
    assert type(model.net[0]) is nn.Linear


def test_a_layer_that_a_killed_run_converted_is_plain_where_this_run_leaves_it_out():
    model = Net()
    GNMRPrecision("int8").convert_module(model)
    GNMRPrecision({"net.2": "float8_rowwise"}).convert_module(model)
    assert [type(model.net[i]) for i in (0, 2, 4)] == [nn.Linear, RecoverableLinear, nn.Linear]


def test_the_plain_classes_come_back_after_an_exception():
    class Crash(pl.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("boom")

    model = Net()
    with pytest.raises(RuntimeError, match="boom"):
        fit(GNMRPrecision("int8"), model=model, callbacks=[Crash()])
    assert type(model.net[0]) is nn.Linear


@pytest.mark.parametrize("recipe", backends.RECIPES)
@pytest.mark.parametrize("base", ["bf16-mixed", "bf16-true"])
def test_every_recipe_trains_validates_and_tests_with_default_settings(recipe, base):
    """Cases 1 and 2: inference_mode in validation, a ragged last batch."""
    model = Net()
    run = trainer(GNMRPrecision(recipe, base), max_epochs=4)
    first = run.validate(model, batches(10, ragged=7), verbose=False)[0]["val_loss"]
    run.fit(model, batches(40, ragged=7), batches(10, ragged=7))
    last = run.validate(model, batches(10, ragged=7), verbose=False)[0]["val_loss"]
    assert last < first - 0.1
    assert torch.isfinite(torch.tensor(last))


def test_the_demo_of_the_readme_needs_one_argument():
    run = trainer(GNMRPrecision())
    run.fit(Net(), batches(3))
    assert run.precision_plugin.backend.name == "int8"
    assert run.precision == "bf16-mixed"


def test_torch_compile_of_the_module_trains_in_one_graph_while_units_flip():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    class Flip(pl.Callback):
        graphs: ClassVar[list[int]] = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for index, switch in enumerate(trainer.precision_plugin._switches):
                switch.fill_(bool(batch_idx >> index & 1))

        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    class Silent(Net):
        def training_step(self, batch, batch_idx):  # dynamo cannot trace Lightning's self.log
            return self.loss(batch)

    def losses(model):
        record = Record()
        run = trainer(GNMRPrecision("float8_rowwise"), callbacks=[Flip(), record], num_sanity_val_steps=0)
        run.fit(model, batches(8), batches(2))
        return [*record.weights[-1], run.callback_metrics["val_loss"]]  # validated under inference_mode

    compiled = losses(torch.compile(Silent(), backend="aot_eager"))
    assert Flip.graphs == [1]
    for a, b in zip(compiled, losses(Silent()), strict=True):
        torch.testing.assert_close(a, b)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("recipe", "fp8", "recipe='fp8' is not known: write 'auto'"),
        ("base", "16-mixed", "base='16-mixed' is not known: write 'bf16-mixed' or 'bf16-true'"),
        ("base", "32-true", "base='32-true' is not known"),
        ("granularity", "layer", "granularity='layer' is not known: write 'linear' or 'block'"),
        ("include", "net.*", r"include='net.\*' is one string: write a list of patterns, \['net.\*'\]"),
        ("exclude", "net.0", "exclude='net.0' is one string"),
        ("control", {"threshold": 3}, r"is no policy: write control=GNMRConfig\(\.\.\.\)"),
        ("on_nonfinite", "stop", "on_nonfinite='stop' is not known: write 'skip' or 'raise' or 'ignore'"),
        ("eval_precision", "fp8", "eval_precision=.fp8. is not known: write .bf16. or .low."),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(argument, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        GNMRPrecision(**{argument: value})


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"exclude": ["*.mpl.*"]}, r"the pattern '\*\.mpl\.\*' matches no linear layer; the nearest names are"),
        ({"include": ["net.6"], "exclude": ["net.6"]}, "no linear layer is left to train in low precision"),
    ],
)
def test_a_cut_that_is_not_what_was_asked_is_refused_at_conversion(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(GNMRPrecision("int8", **kwargs))


def test_lightnings_own_refusal_of_fsdp1_names_the_plugin():
    """What the Trainer's constructor does on a GPU machine; the plugin is not asked anything before."""
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision`.*GNMRPrecision"):
        FSDPStrategy().precision_plugin = GNMRPrecision("int8")


def test_a_strategy_that_would_ignore_the_plugin_is_refused():
    # A strategy of another family: it behaves like a single device but is none (the real ones need other packages).
    members = {
        name: value for name, value in vars(SingleDeviceStrategy).items() if name not in ("__dict__", "__weakref__")
    }
    other = type("OtherStrategy", (Strategy,), {**members, "__init__": Strategy.__init__, "_root": torch.device("cpu")})
    other.root_device = property(lambda self: self._root)
    other.setup = Strategy.setup
    other.teardown = Strategy.teardown
    with pytest.raises(
        TypeError, match="OtherStrategy does not train what GNMRPrecision converts: use a single device"
    ):
        fit(GNMRPrecision("int8"), strategy=other())


def test_a_second_precision_is_lightnings_own_error():
    with pytest.raises(ValueError, match="both `precision=16-mixed` and `plugins=GNMRPrecision"):
        trainer(GNMRPrecision("int8"), precision="16-mixed")


def test_lbfgs_is_refused():
    class WithLBFGS(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="LBFGS runs forward and backward several times in one step"):
        fit(GNMRPrecision("int8"), model=WithLBFGS())


def test_a_controller_asked_for_too_early_says_when_to_ask():
    with pytest.raises(RuntimeError, match="before the Trainer has started"):
        _ = GNMRPrecision("int8").controller
    with pytest.raises(RuntimeError, match="recipe='auto' is chosen by the device"):
        _ = GNMRPrecision().backend


# -- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1e-3, 0.3, 100.0])
def test_clipping_by_norm_equals_torchs(clip):
    class Torchs(GNMRPrecision):
        def clip_grad_by_norm(self, optimizer, clip_val):
            torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    never = GNMRConfig(warmup_steps=1000)
    ours = fit(GNMRPrecision("int8", control=never), gradient_clip_val=clip)[1]
    torchs = fit(Torchs("int8", control=never), gradient_clip_val=clip)[1]
    for a, b in zip(ours.grads, torchs.grads, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)
    if clip == 100.0:  # far above the norm: not touched at all
        assert same(ours.grads, fit(GNMRPrecision("int8", control=never))[1].grads)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_clipping_adds_no_second_pass(monkeypatch, clip):
    passes = []
    measure = UnitNorms.measure
    monkeypatch.setattr(UnitNorms, "measure", lambda self, opt: passes.append(1) or measure(self, opt))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: pytest.fail("a second pass"))
    fit(GNMRPrecision("int8"), steps=5, gradient_clip_val=clip)
    assert len(passes) == 5


def test_a_gradient_changed_behind_the_callback_is_measured_again_for_clipping():
    class Doubles(Net):
        def on_before_optimizer_step(self, optimizer):
            for p in self.parameters():
                p.grad.mul_(1000)

    record = fit(GNMRPrecision("int8"), model=Doubles(), gradient_clip_val=0.5)[1]
    for grads in record.grads[1:]:
        assert torch.stack([g.norm() for g in grads]).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_clipping_by_value_is_lightnings():
    record = fit(GNMRPrecision("int8"), gradient_clip_val=0.001, gradient_clip_algorithm="value")[1]
    assert max(g.abs().max().item() for grads in record.grads[1:] for g in grads) == pytest.approx(0.001)


# -- non-finite gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_nonfinite_gradient_is_skipped_and_the_unit_locked(optimizer, clip, bad, caplog):
    callback, paths = GNMRCallback(), Paths()
    _, record, run = fit(
        GNMRPrecision("int8", control=EAGER),
        steps=14,
        model=Net(optimizer),
        callbacks=[callback, Fault("net.2", [7], bad), paths],
        gradient_clip_val=clip,
    )
    assert same(record.weights[7], record.weights[6])
    assert same(record.states[7], record.states[6])
    assert not same(record.weights[8], record.weights[7])
    assert all(w.isfinite().all() for w in record.weights[-1])
    assert paths.bf16 == [{"net.2"} if 8 <= step <= 13 else set() for step in range(14)]
    assert callback.totals()["nonfinite_steps"] == 1
    (line,) = [r.message for r in caplog.records if "not finite" in r.message or "runs bf16" in r.message]
    assert "step 7" in line
    assert "began in net.2" in line
    assert "the optimizer step is skipped" in line
    assert run.global_step == 14


def test_nonfinite_in_a_parameter_outside_of_all_units_is_skipped_too(caplog):
    class Head(Net):
        def on_before_optimizer_step(self, optimizer):
            pass

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (self.net[6].bias * float("nan")).sum() * 0 if batch_idx == 3 else loss

    record = fit(GNMRPrecision("int8", exclude=["net.0"]), model=Head(), steps=6)[1]
    assert same(record.weights[3], record.weights[2])
    assert all(w.isfinite().all() for w in record.weights[-1])
    assert any("not finite" in r.message for r in caplog.records)


def test_nonfinite_can_stop_the_run():
    plugin = GNMRPrecision("int8", on_nonfinite="raise", control=EAGER)
    with pytest.raises(FloatingPointError, match="a gradient is not finite, and on_nonfinite='raise' stops the run"):
        fit(plugin, callbacks=[Fault("net.2", [7], float("nan"))])


def test_nonfinite_can_be_ignored():
    plugin = GNMRPrecision("int8", on_nonfinite="ignore", control=EAGER)
    record = fit(plugin, callbacks=[Fault("net.2", [7], float("nan"))])[1]
    assert not same(record.weights[7], record.weights[6])
    assert record.weights[7][2].isnan().any()


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpointed(path, steps, ckpt=None, plugin=None, model=None):
    model, paths = model or Net(), Paths()
    plugin = plugin or GNMRPrecision("int8", control=EAGER)
    run = trainer(
        plugin,
        callbacks=[Fault("net.2", [7, 16]), paths, ModelCheckpoint(path, save_last=True, every_n_train_steps=1)],
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=-1,
    )
    run.fit(model, batches(10), ckpt_path=ckpt, weights_only=True)
    return model, paths, plugin


def test_ten_and_ten_steps_equal_twenty_to_the_bit(tmp_path):
    """Case 18; the first part ends while a unit is locked, and the second part locks again."""
    whole, all_paths, _ = checkpointed(tmp_path / "whole", 20)
    assert all_paths.bf16[8] == {"net.2"}
    assert all_paths.bf16[17] == {"net.2"}
    _, first, _ = checkpointed(tmp_path / "parts", 10)
    resumed, second, _ = checkpointed(tmp_path / "parts", 20, ckpt=tmp_path / "parts" / "last.ckpt")
    assert first.bf16 + second.bf16 == all_paths.bf16
    assert same(list(whole.parameters()), list(resumed.parameters()))


def test_a_checkpoint_holds_plain_keys_and_plain_values_and_loads_into_the_plain_model(tmp_path):
    """Case 21."""
    checkpointed(tmp_path, 10)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(Net().state_dict())
    assert saved["GNMRPrecision"]["units"] == ["net.0", "net.2", "net.4"]
    plain = Net()
    plain.load_state_dict(saved["state_dict"])
    trainer(max_steps=11).fit(plain, batches(20), ckpt_path=tmp_path / "last.ckpt")  # without the plugin
    # and the other way round: a plain run's checkpoint goes on under the plugin
    torch.save({k: v for k, v in saved.items() if k != "GNMRPrecision"}, tmp_path / "plain.ckpt")
    _, paths, _ = checkpointed(tmp_path / "b", 12, ckpt=tmp_path / "plain.ckpt")
    assert len(paths.bf16) == 2


def test_a_checkpoint_of_other_units_is_refused(tmp_path):
    checkpointed(tmp_path, 10)
    other = GNMRPrecision("int8", include=["net.0", "net.2"], control=EAGER)
    with pytest.raises(ValueError, match=r"about other units than this run's \(only there: net.4; only here: none\)"):
        checkpointed(tmp_path / "b", 12, ckpt=tmp_path / "last.ckpt", plugin=other)


def test_a_second_fit_goes_on_with_the_same_model_and_begins_anew_with_another():
    model, plugin = Net(), GNMRPrecision("int8", control=EAGER)
    run = trainer(plugin, max_epochs=1)
    run.fit(model, batches(10))
    steps = plugin.controller.state_dict()["steps"].tolist()
    run.validate(model, batches(2), verbose=False)
    assert plugin.controller.state_dict()["steps"].tolist() == steps == [10] * 3
    run.fit_loop.max_epochs = 2
    run.fit(model, batches(10))
    assert plugin.controller.state_dict()["steps"].tolist() == [20] * 3
    model.extra = nn.Linear(32, 32)  # the same module, but not the same units
    plugin.convert_module(model)
    assert plugin.controller.state_dict()["steps"].tolist() == [0] * 4
    plugin.convert_module(Net())
    assert plugin.controller.state_dict()["steps"].tolist() == [0] * 3


# -- what a user must never meet -----------------------------------------------------------------------------------


def test_parameters_that_are_frozen_or_unused_are_left_alone():
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.net[0].requires_grad_(False)
            self.unused = nn.Linear(32, 32)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)  # the frozen and the unused ones too

    model, plugin = Partly(), GNMRPrecision("float8_rowwise", include=["*"])
    with pytest.warns(
        UserWarning, match="1 converted linear layers did nothing in float8_rowwise until .* first step: unused;"
    ):
        fit(plugin, model=model)
    assert plugin.controller.state_dict()["admitted"].tolist() == [0, 12, 12, 12, 0]


@pytest.mark.parametrize("recipe", ["int8", "float8_rowwise"])
def test_a_tied_head_stays_tied(recipe, tmp_path):
    """Case 12."""

    class Tied(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mid, self.lm_head = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
            self.lm_head.weight = self.embed.weight

        def training_step(self, batch, batch_idx):
            tokens = batch[0][:, :8].abs().long() % 16
            logits = self.lm_head(self.mid(self.embed(tokens)))
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    for include in (None, ["*"]):
        model = Tied()
        fit(GNMRPrecision(recipe, include=include), model=model, steps=20)
        assert model.lm_head.weight is model.embed.weight
        assert model.embed.weight.isfinite().all()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_there_is_one_decision_per_optimizer_step(accumulate):
    plugin = GNMRPrecision("int8")
    fit(plugin, steps=5, accumulate_grad_batches=accumulate, data=batches(5 * accumulate))
    assert plugin.controller.state_dict()["steps"].tolist() == [5] * 3


@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_optimizers_decide_on_their_own_units(clip):
    """Case 14: manual optimization, one optimizer stepping twice as often; clipping before the step."""

    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.norms = []

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in itertools.compress((first, second), (True, batch_idx % 2 == 0)):
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                if clip is not None:
                    self.norms.append(self.net[0].weight.grad.norm().item())
                    self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[:3].parameters(), 0.1), torch.optim.SGD(self.net[3:].parameters(), 0.1)

    plugin = GNMRPrecision(
        "int8", control=GNMRConfig(method="gnmr", history="cumulative", threshold=100, delta_threshold=100)
    )
    model, callback, paths = Two(), GNMRCallback(), Paths()
    # net.0 and net.2 belong to the first optimizer, net.4 to the second
    trainer(plugin, callbacks=[callback, paths]).fit(model, batches(10))
    state = plugin.controller.state_dict()
    assert state["steps"].tolist() == [10, 10, 5]
    assert state["admitted"].tolist() == [10, 10, 5]
    assert not any(paths.bf16)
    if clip is not None:  # the norms are those before clipping, weight and bias together
        assert state["norms"][0].item() >= sum(model.norms[i] for i in range(0, 15, 1) if i % 3 != 1)


def test_recipes_by_pattern_train_side_by_side():
    recipe = {"net.[02]": "float8_rowwise_with_gw_hp", "net.4": "int8"}
    seen = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.update({f"net.{i}": getattr(m, "backend", None) for i, m in enumerate(pl_module.net)})

    *_, run = fit(GNMRPrecision(recipe), callbacks=[Look(), paths := Paths()], steps=5)
    plugin = run.precision_plugin
    assert {fqn: seen[fqn] for fqn in ("net.0", "net.2", "net.4", "net.6")} == {
        "net.0": "float8_rowwise_with_gw_hp",
        "net.2": "float8_rowwise_with_gw_hp",
        "net.4": "int8",
        "net.6": None,
    }
    assert [(s.fqn, s.reason) for s in plugin.skipped] == [("net.6", "matches no recipe's pattern")]
    assert paths.bf16 == [set()] * 5
    assert plugin.recipe == "float8_rowwise_with_gw_hp for net.[02], int8 for net.4"
    with pytest.raises(
        RuntimeError, match=r"several recipes \(float8_rowwise_with_gw_hp for net\.\[02\], int8 for net\.4"
    ):
        _ = plugin.backend


def test_the_first_match_is_a_layers_recipe_and_auto_is_one_too():
    plugin = GNMRPrecision({"net.4": "float8_tensorwise", "*": "auto"})
    assert "auto for *" in repr(plugin)
    model = Net()
    plugin.convert_module(model)
    assert [model.net[i].backend for i in (0, 2, 4, 6)] == ["int8", "int8", "float8_tensorwise", "int8"]
    assert plugin.recipe == "float8_tensorwise for net.4, int8 for *"


def test_a_block_of_several_recipes_is_one_unit_that_is_switched_as_a_whole():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.mlp(self.attn(x))

    model = nn.Sequential(OrderedDict(blocks=nn.ModuleList(Block() for _ in range(3))))
    recipe = {"*.attn": "float8_rowwise", "*.mlp": "fake(a=2, w=2, g=2)"}
    plugin = GNMRPrecision(recipe, "bf16-true", granularity="block")
    plugin.convert_module(model)
    assert [u.name for u in plugin.units] == ["blocks.0", "blocks.1", "blocks.2"]
    block, x = model.blocks[0], torch.randn(16, 16, dtype=torch.bfloat16)
    low = block(x)
    plugin._apply(torch.tensor([True, False, False]))
    recovered = block(x)
    plugin._apply(torch.zeros(3, dtype=torch.bool))
    assert torch.equal(block(x), low)
    plugin.teardown()
    assert torch.equal(block(x), recovered)
    assert (low - recovered).norm() > 0.1 * recovered.norm()  # 2 bits are really few


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({}, r"recipe=\{\} has no pattern: write it as in \{'\*\.mlp\.\*': 'int8'\}"),
        ({1: "int8"}, r"has the key 1, which is no pattern"),
        ({"*": "fp8"}, r"recipe='fp8' is not known"),
        ({"*": {"*": "int8"}}, r"is not known"),
    ],
)
def test_a_dict_that_is_no_recipe_is_refused_at_once(recipe, message):
    with pytest.raises(ValueError, match=message):
        GNMRPrecision(recipe)


def test_a_recipes_pattern_that_matches_nothing_lists_near_names():
    with pytest.raises(
        ValueError, match=r"the pattern 'net\.7' matches no linear layer; the nearest names are .*net\.6"
    ):
        fit(GNMRPrecision({"net.0": "int8", "net.7": "int8"}))


def test_each_recipe_has_its_own_rule_for_sizes():
    class Even(backends.Backend):
        name = "even"

        def refuses_layer(self, in_features, out_features, device_type):
            return None if out_features % 64 == 0 else f"out_features={out_features}; even needs 64"

    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 32), "c": nn.Linear(64, 32)})
    plugin = GNMRPrecision({"[ab]": Even(), "*": "int8"})
    plugin.convert_module(model)
    assert [u.name for u in plugin.units] == ["a", "c"]
    assert [(s.fqn, s.reason) for s in plugin.skipped] == [("b", "out_features=32; even needs 64")]


def test_skip_small_lists_what_torchaos_rule_leaves_out():
    sizes = {"tiny": (64, 64), "narrow": (4096, 2048), "wide": (2048, 8192), "large": (4096, 4096), "odd": (4096, 4090)}

    def taken(recipe, **kwargs):
        model = nn.ModuleDict({name: nn.utils.skip_init(nn.Linear, *size) for name, size in sizes.items()})
        plugin = GNMRPrecision(recipe, include=["*"], **kwargs)
        plugin.convert_module(model)
        return [u.name for u in plugin.units], {s.fqn: s.reason for s in plugin.skipped}

    units, reasons = taken("float8_rowwise", skip_small=True)
    assert units == ["wide", "large"]
    assert reasons["narrow"] == "in_features=4096, out_features=2048; too small to profit from rowwise float8"
    assert taken("float8_rowwise_with_gw_hp", skip_small=True)[0] == units
    assert taken("float8_tensorwise", skip_small=True)[0] == ["narrow", "wide", "large"]
    assert taken("float8_rowwise")[0] == list(sizes)
    with pytest.warns(UserWarning, match="skip_small=True leaves out no layer of int8: torchao has no rule for it"):
        assert taken("int8", skip_small=True)[0] == list(sizes)
