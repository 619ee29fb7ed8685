"""Documents as packed sequences: what a causal LM is fine-tuned on, without padding.

All documents are put one after the other and cut into rows of `seq_len` tokens. A row may hold the end of one document
and the beginning of others; none sees another: positions begin anew with each document, which is how `transformers`
tells packed documents apart in attention, and the first token of a document is nobody's label. Each document ends
with the end-of-text token. With `prompt` and `completion`, only the completion is learnt.

Each batch is drawn by its own number, so a resumed run sees the batches that the uninterrupted one would have seen,
with no state to save.

Legend: N = rows of a text, B = rows of a batch, T = seq_len.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from examples.causal_lm import quiet_torchao
from examples.docstrings import docstrings

IGNORED = -100
"""The label of a token that nobody is to predict, as in `transformers`."""


class Document(NamedTuple):
    """One text; what is before it, `prompt`, is read and not learnt."""

    text: str
    prompt: str = ""


def read_documents(path: str | Path) -> list[Document]:
    """The documents of a file or of all files below a folder.

    A line of a `.jsonl` file is a document: {"text": ...} or {"prompt": ..., "completion": ...}. Any other file that
    is UTF-8 is one document; the others, and hidden ones, are left out of a folder.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: a line of a `.jsonl` file that is neither of the two, or a file that is no text.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data={str(path)!r} does not exist: give a .jsonl file, a text file or a folder")
    if path.suffix == ".jsonl":
        # Not splitlines: a string of JSON may hold line separators of Unicode as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
        return [_from_json(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if path.is_file():
        try:
            return [Document(path.read_text(encoding="utf-8"))]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text ({error}): give a .jsonl file, a text file or a folder"
            ) from None
    found = []
    for inside in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in inside.relative_to(path).parts)
        if inside.is_file() and not hidden and b"\0" not in (content := inside.read_bytes()) and _is_utf8(content):
            found += read_documents(inside)
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _from_json(line: str, where: str) -> Document:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): a .jsonl file has one JSON object a line") from None
    match fields:
        case {"text": str(text)}:
            return Document(text)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Document(completion, prompt)
    got = ", ".join(map(repr, fields)) if isinstance(fields, dict) else type(fields).__name__
    raise ValueError(
        f'{where} has {got}: write {{"text": "..."}} or {{"prompt": "...", "completion": "..."}}, with strings'
    )


def split(documents: Sequence[Document], validation_share: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, by a hash of each document's text; a single one is cut by position.

    Raises:
        ValueError: too few documents for a validation part.
    """
    if len(documents) == 1:
        text, prompt = documents[0]
        at = len(text) - int(validation_share * len(text))
        return [Document(text[:at], prompt)], [Document(text[at:])]
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        digest = hashlib.sha256(f"{document.prompt}\0{document.text}".encode("utf-8", "surrogatepass")).digest()
        sides[int.from_bytes(digest[:4], "big") < validation_share * 2**32].append(document)
    if not all(sides):
        raise ValueError(
            f"{len(documents)} documents leave none for {'validation' if sides[0] else 'training'} with "
            f"val_share={validation_share}: give more documents, or val_data"
        )
    return sides


class Rows(NamedTuple):
    """Packed documents, int64; each tensor has shape (N, T)."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


def pack(documents: Sequence[Document], tokenizer: Any, seq_len: int) -> Rows:
    """Packs `documents` into rows of `seq_len` tokens; what is left over at the end is dropped.

    Args:
        documents: each may be longer or shorter than a row; the part of one that begins a row has positions from 0.
        tokenizer: of `transformers`, with an end-of-text token.
        seq_len: T.

    Raises:
        ValueError: the tokenizer has no end-of-text token, or the documents do not fill a row.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token to part documents with: set its eos_token")
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    encoded = tokenizer([part for d in documents for part in (d.prompt, d.text)], add_special_tokens=False).input_ids
    for prompt, text in zip(encoded[::2], encoded[1::2], strict=True):
        read, learnt = begin + prompt, [*text, tokenizer.eos_token_id]
        tokens += read + learnt
        # Nothing comes before a document's first token that could predict it.
        labels += [IGNORED] * len(read) + learnt if read else [IGNORED, *learnt[1:]]
        positions += range(len(read) + len(learnt))
    rows = len(tokens) // seq_len
    if rows == 0:
        raise ValueError(
            f"{len(documents)} documents are {len(tokens)} tokens and do not fill one row of seq_len={seq_len}: "
            "give more text, or a smaller seq_len"
        )
    ids_NT, labels_NT, positions_NT = (
        torch.tensor(values[: rows * seq_len]).view(rows, seq_len) for values in (tokens, labels, positions)
    )
    # A document that goes on in the next row begins anew there. Where the row's first document ends, a running
    # minimum would not do: later documents have positions of their own, so only the leading run is moved.
    leading_NT = (positions_NT.diff(dim=1, prepend=positions_NT[:, :1] - 1) == 1).cumprod(1)
    return Rows(ids_NT, labels_NT, positions_NT - leading_NT * positions_NT[:, :1])


class Batches:
    """Batches of rows, dicts of int64 tensors (B, T): the same ones for the same seed.

    With a seed, rows are shuffled anew in each pass, what does not fill a batch is left for another pass, and the
    iteration does not end by itself: `len` is one pass. Without one, the rows come once and in order, and the last
    batch may be smaller.

    Args:
        rows: what to draw from.
        batch_size: B.
        seed: of the order; None for the rows' own.
        rank, world: this process takes the `rank`-th batch of every `world`.
        first: number of the batch that an iteration starts with, asked when it starts.
        most: of the batches, without a seed; None for all.

    Raises:
        ValueError: too few rows for a batch.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
        first: Callable[[], int] = lambda: 0,
        most: int | None = None,
    ) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world, self.first, self.most = rank, world, first, most
        # All ranks have as many batches, of the same sizes: with sharded weights a forward is a collective.
        per_rank = len(rows.input_ids) // world
        self.batches = per_rank // batch_size if seed is not None else -(-per_rank // batch_size)
        if self.batches == 0:
            raise ValueError(
                f"{len(rows.input_ids)} rows of text do not fill one batch of batch_size={batch_size} on each of "
                f"{world} processes: give more text, or a smaller batch_size or seq_len"
            )

    def __len__(self) -> int:
        return self.batches if self.most is None else min(self.most, self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # A generator, so that `first` is asked with the first batch: Lightning makes an iterator before, to try it.
        for number in count(self.first()) if self.seed is not None else range(len(self)):
            yield self.batch(number)

    def batch(self, number: int) -> dict[str, Tensor]:
        """Batch `number` of this rank, counted over all passes."""
        which, number = divmod(number, self.batches)
        order = self._order(which)[self.rank :: self.world][: len(self.rows.input_ids) // self.world]
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        return {name: values[chosen] for name, values in self.rows._asdict().items()}

    def _order(self, which: int) -> Tensor:
        """The rows' order in pass `which`."""
        if self.seed is None:
            return torch.arange(len(self.rows.input_ids))
        digest = hashlib.sha256(f"{self.seed} {which}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(len(self.rows.input_ids), generator=generator)


class PackedText(L.LightningDataModule):
    """A text for fine-tuning, packed.

    Args:
        data: a `.jsonl` file, a text file, or a folder of these; None for the docstrings of this project's
            dependencies.
        val_data: the same for validation; None takes a share of `data`.
        tokenizer: hub id or folder; None for that of the model (`FineTune.source`).
        batch_size: rows of a batch, on each device.
        seq_len: tokens of a row.
        val_share: share of the documents that validation takes.
        val_batches: the most batches of a validation, on each device; None for all.
        per_package: the most docstrings of one dependency, with `data=None`.
        seed: of the order.

    Raises:
        FileNotFoundError: `data` or `val_data` does not exist.
        ValueError: an argument out of its range; in `setup`, too little text.
    """

    def __init__(
        self,
        data: str | None = None,
        val_data: str | None = None,
        tokenizer: str | None = None,
        batch_size: int = 4,
        seq_len: int = 64,
        val_share: float = 0.1,
        val_batches: int | None = None,
        per_package: int = 400,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, path in (("data", data), ("val_data", val_data)):
            if path is not None and not Path(path).exists():
                raise FileNotFoundError(f"{name}={path!r} does not exist: give a .jsonl file, a text file or a folder")
        if not 0 < val_share < 1:
            raise ValueError(f"val_share={val_share} is no share: write a number above 0 and below 1")
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len} leaves nothing to predict: write 2 or more")
        self.data, self.val_data, self.tokenizer = data, val_data, tokenizer
        self.batch_size, self.seq_len = batch_size, seq_len
        self.val_share, self.val_batches, self.per_package, self.seed = val_share, val_batches, per_package, seed
        self._rows: tuple[Rows, Rows] | None = None

    def setup(self, stage: str | None = None) -> None:
        if self._rows is not None:
            return
        quiet_torchao()
        from transformers import AutoTokenizer  # slow to import, and not needed to read the arguments

        source: Any = self.tokenizer
        if source is None:
            if self.trainer is None:
                raise ValueError("tokenizer=None takes the model's, and there is no Trainer yet: name a tokenizer")
            source = self.trainer.lightning_module.source
        tokenizer = AutoTokenizer.from_pretrained(source)
        parts = self.documents()
        self._rows = (pack(parts[0], tokenizer, self.seq_len), pack(parts[1], tokenizer, self.seq_len))

    def documents(self) -> tuple[list[Document], list[Document]]:
        """The documents for training and for validation."""
        if self.data is None:
            found = docstrings(per_package=self.per_package)
            train, validation = ([Document(d.text) for d in found if d.validation == side] for side in (False, True))
        elif self.val_data is None:
            return split(read_documents(self.data), self.val_share)
        else:
            train, validation = read_documents(self.data), []
        return train, validation if self.val_data is None else read_documents(self.val_data)

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """The packed rows for training and for validation; known after `setup`."""
        if self._rows is None:
            raise RuntimeError("PackedText has no rows before setup()")
        return self._rows

    def train_dataloader(self) -> Batches:
        return Batches(self.rows[0], self.batch_size, self.seed, *self._place(), first=self._next_batch)

    def val_dataloader(self) -> Batches:
        return Batches(self.rows[1], self.batch_size, None, *self._place(), most=self.val_batches)

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _next_batch(self) -> int:
        """Number of the batch that the Trainer's next step begins with, also in a resumed run."""
        trainer = self.trainer
        if trainer is None:
            return 0
        per_epoch = int(trainer.num_training_batches)
        # The last step of an epoch takes what is left of it, be it less than accumulate_grad_batches.
        steps_per_epoch = -(-per_epoch // trainer.accumulate_grad_batches)
        epoch, step = divmod(trainer.global_step, steps_per_epoch)
        return epoch * per_epoch + step * trainer.accumulate_grad_batches
