"""Fine-tuning by the command line: full and LoRA, stopped and resumed, sharded; and the pretrained byte model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import run_ranks, same
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from examples import byte_llama
from examples.byte_llama import END_OF_TEXT, Pretraining, byte_tokenizer, pretrained_byte_model
from examples.causal_lm import CausalLM
from examples.finetune import FineTune, arguments, main
from examples.packed_text import PackedText

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "LICENSE"
FSDP2 = ROOT / "configs" / "llama2_13b_fsdp2.yaml"
DATA = [f"--data.data={TEXT}", "--data.batch_size=2", "--data.seq_len=32", "--data.val_batches=6"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two blocks, tied embeddings, random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 272, "bos_token_id": None, "eos_token_id": END_OF_TEXT}
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens, tie_word_embeddings=True)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # `main` writes its arguments there


def _finetune(tiny: Path, steps: int, *more: str) -> dict[str, Any]:
    """The summary of a run of the command, two steps an epoch."""
    small = ["--trainer.limit_train_batches=2", f"--trainer.max_steps={steps}", "--trainer.accelerator=cpu"]
    quiet = ["--trainer.logger=false", "--model.lr=1e-2", "--model.warmup=1"]
    main(["--model", str(tiny), *small, *quiet, *DATA, *more])
    return json.loads(Path("runs/finetune/summary.json").read_text())


def _perplexity(model: Any, tokenizer: Path, batch_size: int = 2) -> float:
    """Of six batches of the validation part, in fp32, by hand."""
    data = PackedText(str(TEXT), tokenizer=str(tokenizer), batch_size=batch_size, seq_len=32, val_batches=6)
    data.setup()
    losses = []
    for batch in data.val_dataloader():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.mT, batch["labels"][:, 1:], reduction="none"))
    return torch.cat(losses).mean().exp().item()


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one_and_leaves_a_plain_model(
    tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = _finetune(tiny, 6)
    said = re.findall(r"step (\d): validation perplexity ([\d.]+)", capsys.readouterr().out)
    assert said == [(step, f"{perplexity:.4g}") for step, perplexity in whole["perplexity"].items()]
    last = torch.load("runs/finetune/last.ckpt", weights_only=True)
    _finetune(tiny, 4)
    assert torch.load("runs/finetune/last.ckpt", weights_only=True)["global_step"] == 4
    resumed = _finetune(tiny, 6, "--resume")
    again = torch.load("runs/finetune/last.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "GNMRPrecision", "global_step"):
        assert same(last[part], again[part]), part
    assert resumed == whole  # the perplexities of all four validations among them
    assert whole["recipe"] == "int8"
    assert list(whole["perplexity"]) == ["0", "2", "4", "6"]
    assert whole["perplexity"]["6"] < 0.8 * whole["perplexity"]["0"]

    model = AutoModelForCausalLM.from_pretrained("runs/finetune/model").eval()
    with torch.no_grad():
        assert _perplexity(model, Path("runs/finetune/model")) == pytest.approx(whole["perplexity"]["6"], rel=0.02)
    assert _perplexity(AutoModelForCausalLM.from_pretrained(tiny).eval(), tiny) == pytest.approx(
        whole["perplexity"]["0"], rel=0.02
    )


def test_lora_trains_adapters_alone_and_leaves_them_for_peft(tiny: Path) -> None:
    from peft import PeftModel

    summary = _finetune(tiny, 4, "--lora", "4", "--recipe", "float8_rowwise")
    assert summary["recipe"] == "float8_rowwise"
    before = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    after = torch.load("runs/finetune/last.ckpt", weights_only=True)["state_dict"]
    base = {name: value for name, value in after.items() if "lora_" not in name}
    assert len(after) - len(base) == 2 * 14
    for name, value in base.items():
        assert torch.equal(value, before[name.removeprefix("model.base_model.model.").replace(".base_layer", "")])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), "runs/finetune/model").eval()
    with torch.no_grad():
        tuned = _perplexity(model, tiny)
    assert tuned == pytest.approx(summary["perplexity"]["4"], rel=0.02)
    assert tuned < 0.99 * summary["perplexity"]["0"]

    # A full run into the same folder: no adapters are left in it, which would be loaded in place of the model.
    full = _finetune(tiny, 2)
    assert not list(Path("runs/finetune/model").glob("adapter_*"))
    model = AutoModelForCausalLM.from_pretrained("runs/finetune/model").eval()
    with torch.no_grad():
        assert _perplexity(model, tiny) == pytest.approx(full["perplexity"]["2"], rel=0.02)
    with pytest.raises(ValueError, match="the model runs/finetune/model is where this run's would go: move it away"):
        _finetune(Path("runs/finetune/model"), 2)


def test_a_bf16_run_and_one_without_recovery(tiny: Path) -> None:
    bf16 = _finetune(tiny, 2, "--recipe", "bf16")
    assert (bf16["recipe"], bf16["bf16_share"], bf16["interventions"]) == ("bf16-mixed", 1.0, 0)
    # In these two steps each unit would be locked, were the controller allowed to.
    strict = ["--trainer.plugins.control.threshold=1.0001", "--trainer.plugins.control.method=gnmr"]
    strict += ["--trainer.plugins.control.max_o=1.0", "--trainer.plugins.control.delta_threshold=0.0001"]
    eager = _finetune(tiny, 6, *strict, "--trainer.plugins.control.warmup_steps=1")
    silent = _finetune(tiny, 6, *strict, "--no-gnmr")
    assert eager["interventions"] > 0
    assert (silent["interventions"], silent["bf16_share"]) == (0, 0.0)


def test_without_a_model_the_pretrained_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.finetune.pretrained_byte_model", lambda settings: Path(f"made/{settings}"))
    assert arguments([])[3:] == ["--model.source=made/None"]
    quick = arguments(["--quick"])
    assert quick[3] == f"--model.source=made/{byte_llama.QUICK}"
    assert "--trainer.max_steps=10" in quick


def test_the_commands_arguments_are_the_clis(capsys: pytest.CaptureFixture) -> None:
    own = ["--model", "hub/id", "--data", str(TEXT), "--lora", "8", "--recipe", "int8", "--no-gnmr"]
    head, *rest = arguments([*own, "--trainer.devices=2"])
    assert head == "fit"
    assert rest[2:] == [
        "--model.source=hub/id",
        f"--data.data={TEXT}",
        "--model.lora_rank=8",
        "--trainer.plugins.recipe=int8",
        "--trainer.plugins.control.method=gnmr",
        "--trainer.plugins.control.warmup_steps=1000000000",
        "--trainer.devices=2",
    ]
    for given, complaint in (
        (["--data", "nowhere"], "--data nowhere does not exist: give a .jsonl file"),
        (["--recipe", "bf16", "--no-gnmr"], "--recipe bf16 has nothing to recover from"),
        (["--resume"], "--resume finds no runs/finetune/last.ckpt here: start without it"),
    ):
        with pytest.raises(SystemExit):
            arguments(["--model", "hub/id", *given])
        assert complaint in capsys.readouterr().err


def test_a_negative_rank_and_a_frozen_model_are_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="lora_rank=-1 is no rank: write 0 for none"):
        FineTune("hub/id", lora_rank=-1)
    with pytest.raises(ValueError, match="every parameter of the model is frozen: leave some trainable, or add"):
        CausalLM(AutoModelForCausalLM.from_pretrained(tiny).requires_grad_(False))


def test_a_model_that_cannot_tell_packed_documents_apart_is_refused(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=272, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "b")
    byte_tokenizer().save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="BloomForCausalLM takes no position_ids, which tell packed documents apart"):
        _finetune(tmp_path / "b", 2)


# -- sharded ---------------------------------------------------------------------------------------------------------


def test_llama2s_config_shards_a_tiny_model_over_two_processes_and_resumes(tiny: Path, tmp_path: Path) -> None:
    def args(name: str, steps: int, *more: str) -> list[str]:
        strategy = ["process_group_backend=gloo", "data_parallel_size=2"]
        trainer = [f"strategy.{s}" for s in strategy] + ["accelerator=cpu", "devices=2", "logger=false"]
        trainer += ["enable_progress_bar=false", "accumulate_grad_batches=1", "limit_train_batches=2"]
        trainer += [f"max_steps={steps}", f"default_root_dir={name}", f"callbacks.out={name}"]
        model = [f"--model.source={tiny}", "--model.lr=1e-2", "--model.warmup=1"]
        return ["fit", "--config", str(FSDP2), *(f"--trainer.{t}" for t in trainer), *model, *DATA, *more]

    runs = [args("whole", 4), args("half", 2), args("half", 4, "--ckpt_path=runs/llama2_13b/last.ckpt")]
    runs.append(args("lora", 4, "--model.lora_rank=4"))
    code = "import json, sys\nfrom gnmr_lightning.__main__ import main\nfor args in json.loads(sys.argv[1]): main(args)"
    run_ranks(tmp_path, ["-c", code, json.dumps(runs)], timeout_s=150)
    whole, half, lora = (json.loads(Path(name, "summary.json").read_text()) for name in ("whole", "half", "lora"))
    assert half == whole
    single = _finetune(tiny, 4, "--data.batch_size=4")
    # The same rows in the same steps; averages over ranks weigh tokens a little differently, and int8's scales are
    # each rank's own.
    for step, rel in (("0", 0.01), ("2", 0.03), ("4", 0.03)):
        assert whole["perplexity"][step] == pytest.approx(single["perplexity"][step], rel=rel)
    assert whole["perplexity"]["4"] < 0.9 * whole["perplexity"]["0"]
    assert lora["perplexity"]["0"] == whole["perplexity"]["0"]
    assert lora["perplexity"]["4"] < 0.99 * lora["perplexity"]["0"]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained("whole/model").eval()
        by_hand = _perplexity(model, Path("whole/model"), batch_size=4)
    assert by_hand == pytest.approx(whole["perplexity"]["4"], rel=0.02)


# -- the pretrained byte model ---------------------------------------------------------------------------------------


def test_bytes_are_tokens_and_come_back() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve ▁ <|x|> \x00\n\t日本"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (END_OF_TEXT, 257)


def test_a_model_is_pretrained_once_for_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    settings = Pretraining(**sizes, seq_len=16, batch_size=2, steps=3, max_mb=0.1)
    torch.manual_seed(7)
    folder = pretrained_byte_model(settings, tmp_path / "cache")
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))  # the caller's random state is his own
    facts = json.loads((folder / "training.json").read_text())
    assert facts["steps"] == 3
    assert 4.5 < facts["val_loss"] < 6.0  # ln 272 is 5.61
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids == [97, 98]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]

    other = Pretraining(**sizes, seq_len=16, batch_size=2, steps=2, max_mb=0.1)

    def refuse(settings: Pretraining, data: Any) -> Any:
        raise InterruptedError(f"would train {settings.steps} steps")

    monkeypatch.setattr(byte_llama, "_train", refuse)
    assert pretrained_byte_model(settings, tmp_path / "cache") == folder
    with pytest.raises(InterruptedError, match="would train 2 steps"):
        pretrained_byte_model(other, tmp_path / "cache")
