"""Models of `transformers`, trained through `examples/causal_lm.py`; what a run leaves behind is a plain one of theirs.

Small random configs of the real architectures, tied embeddings and gradient checkpointing on, every recipe.
"""

import logging
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
import transformers
from conftest import kinds, trainer
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.causal_lm import CausalLM
from gnmr_lightning import GNMRPrecision
from gnmr_lightning.backends import RECIPES
from gnmr_lightning.linear import LOW, RecoverableLinear
from gnmr_lightning.units import cut

VOCAB, B, T = 128, 2, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
CAUSAL = {
    "Llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "Qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "Qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
    "Mistral": transformers.MistralConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "GPT-NeoX": transformers.GPTNeoXConfig(**SIZES, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def causal(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def texts(n: int = 4) -> DataLoader:
    """Sequences that count upwards, from a random token on."""
    start = torch.randint(VOCAB, (n * B, 1), generator=torch.Generator().manual_seed(1))
    return DataLoader((start + torch.arange(T)) % VOCAB, B)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.seen.append(outputs["loss"].item())


class Work(pl.Callback):
    """The work of each unit, read while the layers are still converted."""

    def on_train_end(self, trainer, pl_module):
        self.done = trainer.precision_plugin.work()


def train(module, plugin, data, **kwargs):
    """The losses of a run, in which every converted layer worked in low precision."""
    losses, work = Losses(), Work()
    trainer(plugin, callbacks=[losses, work], **kwargs).fit(module, data)
    assert (work.done[:, LOW] > 0).all()
    return losses.seen


def check_saved(model, folder):
    """What `save_pretrained` wrote is what stock transformers writes, and gives the same logits when it is loaded."""
    model.save_pretrained(folder / "trained")
    loaded = type(model).from_pretrained(folder / "trained")
    loaded.save_pretrained(folder / "again")
    files = [load_file(folder / name / "model.safetensors") for name in ("trained", "again")]
    assert list(files[0]) == list(files[1])
    assert kinds(loaded) == kinds(model)
    tokens = next(iter(texts()))
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, loaded(tokens).logits)
    return loaded


# -- causal LMs ------------------------------------------------------------------------------------------------------


@cache
def bf16_losses(name):
    module, losses = CausalLM(causal(CAUSAL[name]), lr=3e-3, warmup=0), Losses()
    trainer(precision="bf16-mixed", callbacks=[losses]).fit(module, texts())
    assert losses.seen[-1] < losses.seen[0] - 0.05
    return losses.seen


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_lm_trains_as_in_bf16_and_is_plain_afterwards(name, recipe, tmp_path):
    model = causal(CAUSAL[name])
    before, weights = kinds(model), {key: value.clone() for key, value in model.state_dict().items()}
    plugin = GNMRPrecision(recipe)
    losses = train(CausalLM(model, lr=3e-3, warmup=0, gradient_checkpointing=True), plugin, texts())
    assert losses == pytest.approx(bf16_losses(name), abs=0.03)
    assert {s.fqn: s.reason for s in plugin.skipped} == {"model.lm_head": "the output head"}
    assert sum(len(unit.fqns) for unit in plugin.units) == sum(isinstance(m, nn.Linear) for m in model.modules()) - 1
    assert all(
        not torch.equal(value, weights[key])
        for key, value in model.state_dict().items()
        if "layers." in key and value.ndim == 2
    )

    assert kinds(model) == before
    for each in (model, check_saved(model, tmp_path)):
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight


def test_a_model_saved_during_the_run_is_saved_as_a_plain_one(tmp_path):
    class Saves(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            assert isinstance(pl_module.model.model.layers[0].mlp.up_proj, RecoverableLinear)
            pl_module.model.save_pretrained(tmp_path / "during")

    module = CausalLM(causal(CAUSAL["Llama"]))
    trainer(GNMRPrecision("int8"), callbacks=[Saves()]).fit(module, texts(2))
    loaded = type(module.model).from_pretrained(tmp_path / "during")
    assert kinds(loaded) == kinds(module.model)
    for (name, a), (_, b) in zip(module.model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_gradient_checkpointing_recomputes_the_blocks_and_changes_no_number():
    """Case 22. Twice the forward calls say that it was on: transformers ignores it in eval mode, without a word."""

    def run(checkpointing):
        calls = []
        model = causal(CAUSAL["Llama"]).eval()  # as from_pretrained gives it
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: calls.append(1))
        module = CausalLM(model, gradient_checkpointing=checkpointing)
        return train(module, GNMRPrecision("float8_rowwise"), texts(3)), len(calls)

    plain, checkpointed = run(False), run(True)
    assert (plain[1], checkpointed[1]) == (3, 6)
    assert plain[0] == checkpointed[0]


def test_rotary_frequencies_stay_exact_in_bf16_true():
    """No checkpoint holds them, so a model that is loaded again has exact ones."""
    model = causal(CAUSAL["Llama"])
    exact = model.model.rotary_emb.inv_freq.clone()
    train(CausalLM(model), GNMRPrecision("float8_rowwise", base="bf16-true"), texts(2))
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)


def test_validation_loss_is_the_mean_over_the_predicted_tokens_of_all_batches():
    tokens = torch.stack([text for batch in texts(2) for text in batch])
    labels = tokens.clone()
    labels[0], labels[1, :10], labels[2, 1:] = -100, -100, -100
    labels[3] = -100
    data = [
        {"input_ids": tokens[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2)
    ]  # the second predicts nothing
    data.append({"input_ids": tokens[:2], "labels": tokens[:2]})
    module = CausalLM(causal(CAUSAL["Llama"]))
    result = trainer().validate(module, DataLoader(data, batch_size=None), verbose=False)
    with torch.no_grad():
        logits = module.model(torch.cat([tokens[:4], tokens[:2]])).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), torch.cat([labels[:4], tokens[:2]])[:, 1:].flatten())
    assert result[0]["val_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_weight_decay_and_warmup_are_as_said():
    module = CausalLM(causal(CAUSAL["Llama"]), lr=0.1, weight_decay=0.5, warmup=4)
    config = module.configure_optimizers()
    optimizer, schedule = config["optimizer"], config["lr_scheduler"]["scheduler"]
    decayed, others = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    rates = []
    for _ in range(6):
        rates.append(decayed["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="every parameter of the model is frozen: leave some trainable"):
        CausalLM(causal(CAUSAL["Llama"]).requires_grad_(False))


def test_a_block_is_a_unit():
    plugin = GNMRPrecision("int8", granularity="block")
    train(CausalLM(causal(CAUSAL["Llama"])), plugin, texts(2))
    assert [unit.name for unit in plugin.units] == ["model.model.layers.0", "model.model.layers.1"]
    assert [len(unit.fqns) for unit in plugin.units] == [7, 7]


# -- what a layer is called, and what is no nn.Linear ----------------------------------------------------------------


def test_a_layer_inside_a_block_may_be_called_as_a_head_is():
    """GPT-J's "fc_out" is the second layer of each MLP; the model itself says that its head is lm_head."""
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 8}
    units, skipped = cut(causal(transformers.GPTJConfig(**sizes, bos_token_id=0, eos_token_id=0)))
    assert "transformer.h.1.mlp.fc_out" in [unit.name for unit in units]
    assert [s.fqn for s in skipped] == ["lm_head"]


def test_the_conv1d_of_gpt2_is_listed_as_skipped():
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = causal(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with pytest.raises(ValueError, match=r"no linear layer is left .*transformer\.h\.0\.attn\.c_attn: a Conv1D of"):
        cut(model)
    plugin = GNMRPrecision("int8", include=["*.h.*", "*.lm_head"])
    train(CausalLM(model), plugin, texts(2))
    assert [unit.name for unit in plugin.units] == ["model.lm_head"]
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    reason = "a Conv1D of transformers, no nn.Linear: its weight is transposed"
    assert {s.fqn: s.reason for s in plugin.skipped} == {f"model.transformer.h.0.{name}": reason for name in layers}
    assert model.lm_head.weight is model.transformer.wte.weight


# -- encoders --------------------------------------------------------------------------------------------------------


class Encoder(pl.LightningModule):
    """Tells from what kind of token a text begins with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, num_labels=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        self.model = transformers.BertForSequenceClassification(config).train()

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=(batch[:, 0] >= VOCAB // 2).long()).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


@cache
def bf16_encoder_losses():
    losses = Losses()
    trainer(precision="bf16-mixed", callbacks=[losses]).fit(Encoder(), texts())
    return losses.seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_encoder_trains_as_in_bf16_and_is_plain_afterwards(recipe, tmp_path):
    module, plugin = Encoder(), GNMRPrecision(recipe)
    before = kinds(module)
    assert train(module, plugin, texts()) == pytest.approx(bf16_encoder_losses(), abs=0.03)
    assert [s.fqn for s in plugin.skipped] == ["model.classifier"]
    assert len(plugin.units) == 2 * 6 + 1
    assert kinds(module) == before
    check_saved(module.model, tmp_path)
