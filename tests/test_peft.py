"""LoRA by PEFT around a frozen model in low precision: each unit is watched through its adapters and its products.

Cases 3 and 13. A frozen layer has no grad_weight product and no gradient of its own; its output and its grad_input are
low-precision products all the same, and a fault in one of them is a fault of the layer.
"""

import logging
import math

import lightning.pytorch as pl
import peft
import pytest
import torch
import transformers
from conftest import kinds, trainer
from test_huggingface import CAUSAL, SIZES, VOCAB, Losses, causal, texts, train
from torch import nn

from examples.causal_lm import CausalLM
from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.backends import RECIPES
from gnmr_lightning.linear import RecoverableLinear
from gnmr_lightning.units import cut

LAYERS = "model.base_model.model.model.layers"
ADAPTER = "an adapter of PEFT, left in the base precision"


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def lora(model=None, **kwargs):
    """A Llama with LoRA around q_proj, v_proj and down_proj."""
    model = causal(CAUSAL["Llama"]) if model is None else model
    torch.manual_seed(1)
    arguments = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **kwargs}
    return peft.get_peft_model(model, peft.LoraConfig(**arguments))


def adapters(model):
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


class Signals(pl.Callback):
    """What each optimizer step measured, with the adapters' gradients as they were."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        signal = trainer.precision_plugin.measure(optimizer)
        self.seen.append((signal, {name: p.grad.clone() for name, p in adapters(pl_module).items()}))


# -- what is watched -------------------------------------------------------------------------------------------------


def test_a_fresh_lora_is_watched_through_its_adapters_and_its_products():
    model, plugin, signals = lora(), GNMRPrecision("float8_rowwise"), Signals()
    frozen = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    trainer(plugin, callbacks=[signals]).fit(CausalLM(model), texts(3))
    names = [unit.name for unit in plugin.units]
    assert len(names) == 14
    wrapped = {f"{LAYERS}.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")}
    assert {name.removesuffix(".base_layer") for name in names if name.endswith(".base_layer")} == wrapped

    for step, (signal, grads) in enumerate(signals.seen):
        assert signal.finite
        assert signal.stepping.all()
        for index, name in enumerate(names):
            own = {n: grad for n, grad in grads.items() if n.startswith(f"{name.removesuffix('base_layer')}lora_")}
            assert len(own) == (2 if name.endswith(".base_layer") else 0)
            assert signal.present[index] == bool(own)
            squares = sum(grad.double().square().sum().item() for grad in own.values())
            assert signal.norms[index].item() == pytest.approx(math.sqrt(squares), rel=1e-6)
            # B is zero in the first step, and with it the gradient of A, exactly
            assert all((grad.count_nonzero() == 0) == (step == 0 and "lora_A" in n) for n, grad in own.items())
            output, grad_input, grad_weight = signal.errors[index].tolist()
            assert 1e-3 < output < 0.1
            assert math.isnan(grad_weight)
            # nothing behind the first block's projections is trained, so nobody asks for the gradient of their input
            first = any(f"layers.0.self_attn.{n}_proj" in name for n in "qkv")
            assert math.isnan(grad_input) if first else 1e-3 < grad_input < 0.1
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if "lora_" not in name)


def test_an_exact_recipe_would_show_no_error():
    """So the errors above are those of low precision."""

    class Exact(backends.Backend):
        name = "exact"

        def output(self, x_MK, weight_NK):
            return (x_MK.double() @ weight_NK.t().double()).to(x_MK.dtype)

        def grad_input(self, grad_MN, weight_NK):
            return (grad_MN.double() @ weight_NK.double()).to(grad_MN.dtype)

    signals = Signals()
    trainer(GNMRPrecision(Exact()), callbacks=[signals]).fit(CausalLM(lora()), texts(1))
    errors = signals.seen[0][0].errors
    assert errors[:, 0].max() < 3e-3  # bf16 rounds the result
    assert errors.nan_to_num().max() < 3e-3


class SickOutput(backends.Backend):
    """A healthy backend whose output is wrong while `sick` is set."""

    name = "sick output"

    def __init__(self, healthy, value):
        self.healthy, self.value, self.sick = healthy, value, False

    def output(self, x_MK, weight_NK):
        y_MN = self.healthy.output(x_MK, weight_NK)
        return y_MN * self.value if self.sick else y_MN

    def grad_input(self, grad_MN, weight_NK):
        return self.healthy.grad_input(grad_MN, weight_NK)


class Sick(pl.Callback):
    """Makes a layer sick from one training batch on, and notes which units run bf16."""

    def __init__(self, fqn, step, value):
        self.fqn, self.step, self.value, self.recovered = fqn, step, value, []

    def on_train_start(self, trainer, pl_module):
        layer = pl_module.get_submodule(self.fqn)
        self.backend = SickOutput(backends.get(layer.backend), self.value)
        layer.backend = backends.register(self.backend).name

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.backend.sick = batch_idx >= self.step
        linears = [(fqn, m) for fqn, m in pl_module.named_modules() if isinstance(m, RecoverableLinear)]
        self.recovered.append([fqn for fqn, linear in linears if linear.recovered])


@pytest.mark.parametrize(("value", "checkpointing"), [(3.0, False), (math.nan, True)])
@pytest.mark.parametrize(
    "fqn",
    [
        f"{LAYERS}.1.mlp.down_proj.base_layer",
        f"{LAYERS}.1.mlp.up_proj",  # without an adapter: it has no gradient in any step
        f"{LAYERS}.0.self_attn.q_proj.base_layer",  # behind it nothing is trained: it has no backward of its own
        f"{LAYERS}.0.self_attn.k_proj",
    ],
)
def test_a_frozen_layer_that_falls_sick_is_the_one_that_recovers(fqn, value, checkpointing):
    control = GNMRConfig(method="product_error", warmup_steps=2, lock_interval=2, max_o=1)
    model, sick = lora(), Sick(fqn, 4, value)
    module = CausalLM(model, gradient_checkpointing=checkpointing)
    trainer(GNMRPrecision("float8_rowwise", control=control), callbacks=[sick]).fit(module, texts(8))
    # still sick whenever its lock ends, which the few rows tell on which it tries low precision
    assert sick.recovered == [[]] * 5 + [[fqn]] * 3
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_block_is_watched_through_all_of_its_adapters():
    units, skipped = cut(lora(), granularity="block")
    assert [unit.name for unit in units] == ["base_model.model.model.layers.0", "base_model.model.model.layers.1"]
    for unit in units:
        assert len(unit.fqns) == 7
        assert len([p for p in unit.observed if p.requires_grad]) == 6
    assert len(skipped) == 13


def test_without_the_plugin_the_callback_observes_the_adapters():
    observing = trainer(precision="bf16-mixed", callbacks=[GNMRCallback(per_unit=True)])
    observing.fit(CausalLM(lora()), texts(3))
    ratios = {k.split("/")[-1]: v.item() for k, v in observing.callback_metrics.items() if "/unit/" in k}
    assert len(ratios) == 14
    for name, ratio in ratios.items():
        assert (ratio == 1) == (not name.endswith(".base_layer")), name  # 1 says that there is no evidence


def test_compiled_it_is_one_graph_with_the_same_losses():
    def run(compiled):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = lora(causal(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})))
        module, losses, signals = CausalLM(model), Losses(), Signals()
        if compiled:
            module.model.forward = torch.compile(module.model.forward, backend="aot_eager")
        trainer(GNMRPrecision("float8_rowwise"), callbacks=[losses, signals]).fit(module, texts(3))
        return losses.seen, [signal.errors for signal, _ in signals.seen]

    eager, compiled = run(False), run(True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled[0] == eager[0]
    for ours, theirs in zip(compiled[1], eager[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("config", "observed"),
    [
        (peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), 2),
        (peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), 4),
        (peft.LoHaConfig(r=2, target_modules=["q_proj"]), 2),
        (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_adapters_are_watched_alike(config, observed):
    model, signals = peft.get_peft_model(causal(CAUSAL["Llama"]), config), Signals()
    trainer(GNMRPrecision("float8_rowwise"), callbacks=[signals]).fit(CausalLM(model), texts(2))
    signal, _ = signals.seen[-1]
    assert signal.stepping.all()
    assert signal.present.sum() == observed
    assert ((signal.errors[:, 0] > 1e-3) & (signal.errors[:, 0] < 0.1)).all()


# -- which layers ----------------------------------------------------------------------------------------------------


def reasons(model, **kwargs):
    return {s.fqn.removeprefix("base_model.model."): s.reason for s in cut(model, **kwargs)[1]}


def test_adapters_and_the_copies_that_peft_leaves_idle_stay_as_they_are():
    model = lora(target_modules=["q_proj"], modules_to_save=["up_proj"])
    before = dict(reasons(model))
    assert before == {
        **{f"model.layers.{i}.self_attn.q_proj.lora_{x}.default": ADAPTER for i in (0, 1) for x in "AB"},
        **{f"model.layers.{i}.mlp.up_proj.original_module": "PEFT trains a copy of it instead" for i in (0, 1)},
        "lm_head": "the output head",
    }
    units = [unit.name.removeprefix("base_model.model.") for unit in cut(model)[0]]
    assert "model.layers.1.mlp.up_proj.modules_to_save.default" in units
    assert "model.layers.1.self_attn.q_proj.base_layer" in units
    # as patterns of the plain model's layers match them, too
    assert reasons(model, include=["*q_proj*"])["model.layers.0.self_attn.q_proj.lora_A.default"] == ADAPTER
    assert [unit.name for unit in cut(model, recipes=["*.0.*q_proj*"])[0]] == [
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer"
    ]


@pytest.mark.parametrize("how", ["lora", "copy"])
def test_the_head_is_known_under_peft(how):
    model = causal(transformers.LlamaConfig(**SIZES))
    if how == "lora":
        found = reasons(lora(model, target_modules=["q_proj", "lm_head"]))
        assert found["lm_head.base_layer"] == "the output head"
        assert found["lm_head.lora_A.default"] == ADAPTER
    else:
        found = reasons(lora(model, modules_to_save=["lm_head"]))
        assert found["lm_head.modules_to_save.default"] == "the output head"
        assert found["lm_head.original_module"] == "PEFT trains a copy of it instead"
    # the model says so; where none does, the name tells
    plain = nn.ModuleDict({"stem": nn.Linear(8, 8), "head": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["stem", "head"]))
    assert reasons(wrapped)["head.base_layer"] == "the output head"
    assert len(cut(wrapped)[0]) == 2


def test_a_layer_wrapped_twice_is_watched_through_both():
    model = peft.get_peft_model(
        causal(CAUSAL["Llama"]), peft.LoraConfig(r=2, target_modules=["q_proj"]), mixed=True, adapter_name="first"
    )
    model.add_adapter("second", peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter(["first", "second"])
    unit = cut(model)[0][0]
    assert unit.name.endswith("layers.0.self_attn.q_proj.base_layer.base_layer")
    names = {id(p): name for name, p in model.named_parameters()}
    watched = {names[id(p)].split("q_proj.")[1] for p in unit.observed}
    assert {"lora_A.first.weight", "lora_B.first.weight"} < {name.replace("base_layer.", "") for name in watched}
    assert any("hada_w1_a.second" in name for name in watched)


def test_the_conv1d_of_gpt2_is_skipped_under_peft_as_well():
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = causal(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model = lora(model, target_modules=["c_attn"], fan_in_fan_out=True)
    found = reasons(model, include=["*"])
    assert found["transformer.h.0.attn.c_attn.base_layer"].startswith("a Conv1D of transformers")
    assert found["transformer.h.0.attn.c_attn.lora_A.default"] == ADAPTER


# -- training and what it leaves behind ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bf16_losses():
    losses = Losses()
    module = CausalLM(lora(), lr=3e-2, warmup=0)
    trainer(precision="bf16-mixed", max_epochs=5, callbacks=[losses]).fit(module, texts(1))
    assert losses.seen[-1] < losses.seen[0] - 0.1
    return losses.seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_train_as_in_bf16_and_load_into_plain_peft(recipe, bf16_losses, tmp_path):
    model = lora()
    before, base = kinds(model), causal(CAUSAL["Llama"])
    module = CausalLM(model, lr=3e-2, warmup=0, gradient_checkpointing=True)
    losses = train(module, GNMRPrecision(recipe), texts(1), max_epochs=5)
    assert losses == pytest.approx(bf16_losses, abs=0.01)
    assert kinds(model) == before
    assert all(p.count_nonzero() > 0 for p in adapters(model).values())

    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    tokens = next(iter(texts()))
    with torch.no_grad():
        logits = model.eval()(tokens).logits
        assert torch.equal(loaded.eval()(tokens).logits, logits)
        plain = model.merge_and_unload()
        assert kinds(plain) == kinds(causal(CAUSAL["Llama"]))
        assert list(plain.state_dict()) == list(causal(CAUSAL["Llama"]).state_dict())
        torch.testing.assert_close(plain(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_merging_and_unmerging_during_the_run_is_seen_by_the_layers():
    """As an evaluation hook may do; the base layer's weight is the same tensor, changed in place."""
    model = lora(init_lora_weights=False)
    module, plugin = CausalLM(model), GNMRPrecision("int8")
    tokens = next(iter(texts()))

    class Merges(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.no_grad(), trainer.precision_plugin.val_step_context():
                self.apart = pl_module.model(tokens).logits
                with pl_module.model.disable_adapter():
                    self.without = pl_module.model(tokens).logits
                pl_module.model.merge_adapter()
                self.merged = pl_module.model(tokens).logits
                pl_module.model.unmerge_adapter()
                self.again = pl_module.model(tokens).logits

    merges = Merges()
    trainer(plugin, callbacks=[merges]).fit(module, texts(1))
    differs = (merges.without - merges.apart).abs().max()
    assert (merges.merged - merges.apart).abs().max() < differs / 10
    assert (merges.again - merges.apart).abs().max() < differs / 10


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    def run(epochs, ckpt_path=None):
        module, plugin = CausalLM(lora()), GNMRPrecision("float8_rowwise")
        runs = trainer(plugin, max_epochs=epochs)
        runs.fit(module, texts(3), ckpt_path=ckpt_path)
        return module, plugin, runs

    module, plugin, _ = run(2)
    _, _, half = run(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, plugin_2, _ = run(2, tmp_path / "half.ckpt")
    for (name, a), (_, b) in zip(module.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    states = [p.controller.state_dict() for p in (plugin, plugin_2)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0] if isinstance(states[0][k], torch.Tensor))
    assert set(torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]) == set(
        CausalLM(lora()).state_dict()
    )
