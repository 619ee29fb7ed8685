"""Documents, their packing, and the order of the batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.byte_llama import END_OF_TEXT, byte_tokenizer
from examples.docstrings import docstrings, without_names
from examples.packed_text import IGNORED, Batches, Document, PackedText, Rows, pack, read_documents, split


def _rows(number: int) -> Rows:
    return Rows(*(torch.arange(number)[:, None] + 100 * part for part in range(3)))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_jsonl_text_and_folders_are_documents(tmp_path: Path) -> None:
    lines = '{"text": "one\u2028and\x85on"}\r\n\n{"prompt": "q", "completion": "a", "more": 1}\n'
    (tmp_path / "b.jsonl").write_bytes(lines.encode())
    (tmp_path / "a.txt").write_text("whole file\n")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "c.md").write_text("naïve")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / ".hidden").write_text("x")
    of_jsonl = [Document("one\u2028and\x85on"), Document("a", "q")]
    assert read_documents(tmp_path / "b.jsonl") == of_jsonl
    assert read_documents(tmp_path) == [Document("whole file\n"), *of_jsonl, Document("naïve")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": 1}', r"line 2 has 'text': write \{\"text\""),
        ('{"prompt": "a"}', r"line 2 has 'prompt': write"),
        ("[1]", r"line 2 has list: write"),
        ("{text}", r"line 2 is not JSON \(.*\): a \.jsonl file has one JSON object a line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=complaint):
        read_documents(tmp_path / "a.jsonl")


def test_what_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"is not UTF-8 text .*: give a \.jsonl file, a text file or a folder"):
        read_documents(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="data='nowhere' does not exist"):
        PackedText("nowhere")


def test_a_document_keeps_its_side_when_others_come() -> None:
    documents = [Document(f"text {i}") for i in range(200)]
    few, many = split(documents[:100], 0.2), split(documents, 0.2)
    assert few[0] == [d for d in many[0] if d in documents[:100]]
    assert few[1] == [d for d in many[1] if d in documents[:100]]
    assert 10 <= len(few[1]) <= 30
    assert split([Document("a" * 90 + "b" * 10)], 0.1) == ([Document("a" * 90)], [Document("b" * 10)])
    with pytest.raises(ValueError, match=r"2 documents leave none for validation with val_share=0\.01: give more"):
        split(documents[:2], 0.01)


def test_docstrings_are_split_by_file_and_each_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one_pkg", "two_pkg"):
        (tmp_path / package).mkdir()
        for i in range(30):
            own = f'"""{package} {i}"""\nclass A:\n    """{package} {i} A"""\n    def f(self):\n        """Common."""\n'
            (tmp_path / package / f"m{i}.py").write_text(own)
    (tmp_path / "one_pkg" / "template.py").write_text("{{ not python }}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = docstrings(("one_pkg", "two_pkg"), per_package=50, min_chars=1)
    assert found == docstrings(("one_pkg", "two_pkg"), per_package=50, min_chars=1)
    assert [d.text for d in found].count("Common.") == 1
    for package in ("one_pkg", "two_pkg"):
        sides = [[d.text for d in found if d.package == package and d.validation == v] for v in (False, True)]
        assert 30 <= len(sides[0]) <= 40
        assert 1 <= len(sides[1]) <= 10
        # "one_pkg 7" and "one_pkg 7 A" are of one file. Only where the limit cuts a file may a half of it be missing.
        files = [{text.split()[1] for text in side if text != "Common."} for side in sides]
        assert not files[0] & files[1]
    with pytest.raises(ModuleNotFoundError, match="'no_such_pkg' is not installed: run `make setup`"):
        docstrings(("no_such_pkg",))


def test_names_of_packages_are_left_out() -> None:
    assert (
        without_names("NumPy's np.array, torchmetrics, torch; snp") == "package's package.array, package, package; snp"
    )


# -- packing ---------------------------------------------------------------------------------------------------------


def test_rows_hold_all_tokens_in_order_with_positions_and_labels_of_their_documents() -> None:
    rows = pack([Document("abc"), Document("defgh", "xy"), Document("ijklmnop")], byte_tokenizer(), 8)
    ids = [[*b"abc", END_OF_TEXT, *b"xyde"], [*b"fgh", END_OF_TEXT, *b"ijkl"]]  # the rest does not fill a row
    assert rows.input_ids.tolist() == ids
    no = IGNORED
    assert (
        rows.labels.tolist()
        == [
            [no, *ids[0][1:4], no, no, *ids[0][6:]],  # the first token of a document and its prompt are nobody's label
            [*ids[1][:4], no, *ids[1][5:]],
        ]
    )
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3]]


def test_no_document_sees_another_of_its_row() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=272, bos_token_id=None, eos_token_id=END_OF_TEXT, **sizes)).eval()
    texts = ["first", "the second one", "3rd"]
    rows = pack([Document(text) for text in texts], byte_tokenizer(), sum(map(len, texts)) + len(texts))
    with torch.no_grad():
        packed = model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([[*text.encode(), END_OF_TEXT]])).logits[0] for text in texts]
        together = model(input_ids=rows.input_ids).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, torch.cat(alone), rtol=1e-2, atol=1e-3)


def test_too_little_text_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"1 documents are 4 tokens and do not fill one row of seq_len=8: give more"):
        pack([Document("abc")], byte_tokenizer(), 8)
    with pytest.raises(
        ValueError, match=r"3 rows of text do not fill one batch of batch_size=2 on each of 2 processes"
    ):
        Batches(_rows(3), 2, seed=0, world=2)


@pytest.mark.parametrize(("name", "value"), [("val_share", 1.0), ("seq_len", 1)])
def test_an_argument_out_of_range_is_one_sentence(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value} .*: write"):
        PackedText(**{name: value})  # type: ignore[arg-type]


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_pass_has_each_row_once_and_passes_differ() -> None:
    batches = Batches(_rows(12), 4, seed=3)
    first, second = (
        [batches.batch(i)["input_ids"].flatten().tolist() for i in of_pass] for of_pass in ((0, 1, 2), (3, 4, 5))
    )
    assert sorted(i for b in first for i in b) == sorted(i for b in second for i in b) == list(range(12))
    assert first != second
    assert first[0] == Batches(_rows(12), 4, seed=3).batch(0)["input_ids"].flatten().tolist()
    one = batches.batch(5)
    assert torch.equal(one["labels"], one["input_ids"] + 100)
    assert torch.equal(one["position_ids"], one["input_ids"] + 200)


def test_ranks_share_the_global_batches_of_one_process() -> None:
    single = Batches(_rows(17), 4, seed=3)
    ranks = [Batches(_rows(17), 2, seed=3, rank=rank, world=2) for rank in (0, 1)]
    assert len(single) == len(ranks[0]) == len(ranks[1]) == 4
    for number in range(4):
        parts = torch.cat([r.batch(number)["input_ids"] for r in ranks]).flatten()
        assert set(parts.tolist()) == set(single.batch(number)["input_ids"].flatten().tolist())


def test_an_iteration_goes_on_from_any_batch_and_evaluation_takes_all_rows_once() -> None:
    batches = Batches(_rows(12), 4, seed=3, first=lambda: 7)
    assert torch.equal(next(iter(batches))["input_ids"], batches.batch(7)["input_ids"])
    evaluation = Batches(_rows(7), 3)
    assert [batch["input_ids"].flatten().tolist() for batch in evaluation] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(list(Batches(_rows(7), 3, most=2))) == len(Batches(_rows(7), 3, most=2)) == 2
