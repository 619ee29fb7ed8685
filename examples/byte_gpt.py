"""A byte-level GPT and a corpus that every machine has: what the demo, the tests and the benchmarks train.

The model is a plain pre-norm decoder, four linear layers a block, written without dropout so that a run depends on
its seed alone. The default corpus is the source code of the running Python's standard library: real text of some
megabytes, without a download. Batches are random windows, and each batch is drawn from a generator seeded with its
own number: a resumed run sees the batches that the uninterrupted one would have seen, with no state to save.

Legend: B = sequences of a batch, T = bytes of a sequence, D = d_model, V = 256, the byte values.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_VALIDATION_SHARE = 0.1


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, each on the normalised residual stream."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(d_model, 3 * d_model), "proj": nn.Linear(d_model, d_model)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(d_model, 4 * d_model), "down": nn.Linear(4 * d_model, d_model)})

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.attn_norm(x_BTD)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attn["proj"](attended.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x_BTD))))


class ByteGPT(L.LightningModule):
    """A decoder-only language model over bytes, with an untied head; logs `train_loss` and `val_loss` (nats a byte).

    Args:
        n_layers: number of blocks.
        d_model: width of the residual stream; a multiple of `n_heads`.
        n_heads: attention heads of a block.
        seq_len: the longest sequence that the model takes, in bytes.
        lr: AdamW's learning rate after warm-up.
        warmup: optimizer steps in which the learning rate rises linearly.
    """

    def __init__(
        self,
        n_layers: int = 5,
        d_model: int = 128,
        n_heads: int = 4,
        seq_len: int = 128,
        lr: float = 1e-3,
        warmup: int = 20,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={n_heads}: change one of them")
        self.lr, self.warmup = lr, warmup
        self.embed = nn.Embedding(VOCABULARY, d_model)
        self.position = nn.Parameter(torch.zeros(seq_len, d_model))
        self.blocks = nn.ModuleList(Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("embed.weight", "position", "head.weight")):
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the byte that follows each position; `tokens_BT` is int64."""
        x_BTD = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def _loss(self, window: Tensor) -> Tensor:
        """Cross-entropy of windows of shape (B, T + 1)."""
        logits_BTV = self(window[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), window[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, batch_size=len(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), batch_size=len(batch))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup + 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Windows:
    """Batches of random windows of a text: int64 tensors of shape (B, T + 1), the same ones for the same seed.

    Args:
        text: uint8, the whole text.
        batch_size: B.
        seq_len: T.
        seed: of the batches; two seeds share none.
        batches: how many batches an iteration gives; None for no end.
        first: number of the batch that an iteration starts with, asked when it starts.
    """

    def __init__(
        self,
        text: Tensor,
        batch_size: int,
        seq_len: int,
        seed: int,
        batches: int | None = None,
        first: Callable[[], int] = lambda: 0,
    ) -> None:
        self.text, self.batch_size, self.seq_len, self.seed = text, batch_size, seq_len, seed
        self.batches, self.first = batches, first

    def __iter__(self) -> Iterator[Tensor]:
        return islice(map(self.batch, count(self.first())), self.batches)

    def batch(self, number: int) -> Tensor:
        """Batch `number`."""
        # Through a hash, since neighbouring seeds of a generator give related streams.
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        starts = torch.randint(len(self.text) - self.seq_len, (self.batch_size, 1), generator=generator)
        return self.text[starts + torch.arange(self.seq_len + 1)].long()


class SourceCode(L.LightningDataModule):
    """Text as bytes: the standard library's source code, or any text file or folder of text files.

    Files go to training or validation by a hash of their path below the folder, so the split stays the same when
    files come or go. A single file, or a folder with too few files for that, is split by position, 9 to 1.

    Args:
        data: a text file or a folder; None for the running Python's standard library.
        batch_size: windows of a batch.
        seq_len: bytes of a window, as in the model.
        max_mb: at most this much text is read, in 10^6 bytes; whole files, in the order of their hashes.
        val_batches: batches of the validation, the same ones each time.
        seed: of the windows.

    Raises:
        FileNotFoundError: `data` does not exist.
        ValueError: `data` holds too little text.
    """

    def __init__(
        self,
        data: str | None = None,
        batch_size: int = 16,
        seq_len: int = 128,
        max_mb: float = 8.0,
        val_batches: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if data is not None and not Path(data).exists():
            raise FileNotFoundError(f"data={data!r} does not exist: give a text file or a folder of text files")
        self.data, self.batch_size, self.seq_len, self.max_mb = data, batch_size, seq_len, max_mb
        self.val_batches, self.seed = val_batches, seed
        self.train_files: list[str] = []
        self.val_files: list[str] = []

    def setup(self, stage: str | None = None) -> None:
        root = Path(self.data if self.data is not None else sysconfig.get_path("stdlib"))
        files = _text_files(root, self.max_mb, only_library=self.data is None)
        self.train_files = [path for path in files if not _is_validation(path)]
        self.val_files = [path for path in files if _is_validation(path)]
        parts = [b"\n".join(map(files.__getitem__, paths)) for paths in (self.train_files, self.val_files)]
        if min(map(len, parts)) < 10 * self.seq_len:
            self.train_files = self.val_files = list(files)
            text = b"\n".join(files.values())
            at = len(text) - int(_VALIDATION_SHARE * len(text))
            parts = [text[:at], text[at:]]
        if min(map(len, parts)) <= self.seq_len:
            raise ValueError(
                f"{root} holds {sum(map(len, parts))} bytes of text; windows of seq_len={self.seq_len} need at least "
                f"{int((self.seq_len + 2) / _VALIDATION_SHARE)}: give more text"
            )
        self.train_text, self.val_text = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)

    def train_dataloader(self) -> Windows:
        trainer = self.trainer
        if trainer is None:
            return Windows(self.train_text, self.batch_size, self.seq_len, seed=2 * self.seed)
        # Every rank draws its own windows, and a resumed run goes on where it stopped.
        seed = 2 * (self.seed + trainer.global_rank * 1_000_003)
        first = lambda: trainer.global_step * trainer.accumulate_grad_batches  # noqa: E731
        return Windows(self.train_text, self.batch_size, self.seq_len, seed, first=first)

    def val_dataloader(self) -> Windows:
        return Windows(self.val_text, self.batch_size, self.seq_len, 2 * self.seed + 1, batches=self.val_batches)

    test_dataloader = val_dataloader


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def _is_validation(path: str) -> bool:
    return _digest(path)[0] < 256 * _VALIDATION_SHARE


def _text_files(root: Path, max_mb: float, *, only_library: bool) -> dict[str, bytes]:
    """Contents of the text files at `root` by path below it, in the order of their hashes, up to `max_mb`."""
    if root.is_file():
        return {root.name: root.read_bytes()[: int(max_mb * 1e6)]}
    found: dict[str, bytes] = {}
    for path in root.rglob("*.py" if only_library else "*"):
        inside = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in inside)
        if not path.is_file() or hidden or (only_library and _NOT_LIBRARY & set(inside)):
            continue
        content = path.read_bytes()
        if b"\0" not in content:  # a NUL byte tells a binary file
            found["/".join(inside)] = content
    taken: dict[str, bytes] = {}
    size = 0
    # Other bytes of the hash than the split's, or a small cap would leave validation files alone.
    for name in sorted(found, key=lambda name: _digest(name)[1:]):
        if size + len(found[name]) <= max_mb * 1e6:
            taken[name] = found[name]
            size += len(found[name])
    return taken
