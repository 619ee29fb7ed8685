"""A small pretrained Llama on every machine, without a download: what fine-tuning starts from when no model is named.

It is a LlamaForCausalLM of `transformers` over bytes, trained on the source code of Python's standard library and kept
in the user's cache folder as a model folder like any other, with a tokenizer. The same settings and the same corpus
are trained once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.seed import isolate_rng

from examples.byte_gpt import SourceCode
from examples.causal_lm import CausalLM, quiet_torchao

END_OF_TEXT = 256
"""The one token that is not a byte."""

_VOCABULARY = 272  # the next multiple of 16, which the FP8 kernels ask of a layer's sizes


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """What a pretrained byte model is made by; its cache knows it by these and by the corpus."""

    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    seq_len: int = 128
    """Bytes of a window."""
    batch_size: int = 16
    steps: int = 400
    lr: float = 2e-3
    max_mb: float = 8.0
    """The most text, in 10^6 bytes."""
    seed: int = 1


QUICK = Pretraining(hidden_size=32, intermediate_size=96, layers=2, heads=2, seq_len=32, steps=20, max_mb=0.5)
"""Seconds instead of minutes, for a first try of the machinery; it has hardly learnt anything."""


def byte_tokenizer() -> Any:
    """A tokenizer of `transformers` whose tokens are the bytes of UTF-8, each with its own value for an id."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # A vocabulary of bytes alone, and a fall-back to bytes for every character that is not in it.
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def cache_folder() -> Path:
    """Where pretrained models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnmr_lightning"


def pretrained_byte_model(settings: Pretraining | None = None, cache: Path | None = None) -> Path:
    """The folder of a pretrained byte model and its tokenizer, for `from_pretrained`; trains it if it is not there yet.

    Training is in fp32, which is the fastest on a CPU, and leaves the process's random state as it was. `training.json`
    in the folder holds the settings and the validation loss.

    Args:
        settings: by default `Pretraining()`, some minutes on two cores.
        cache: folder of the models; `cache_folder()` by default.
    """
    settings = settings or Pretraining()
    cache = cache_folder() if cache is None else cache
    data = SourceCode(None, settings.batch_size, settings.seq_len, settings.max_mb, seed=settings.seed)
    data.setup()
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for text in (data.train_text, data.val_text):
        digest.update(text.numpy().tobytes())
    folder = cache / f"byte-llama-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder

    print(f"Pretraining a byte model once, for {settings.steps} steps; it is kept as {folder}")
    with isolate_rng(), _quiet_lightning():
        module, val_loss = _train(settings, data)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        # Complete before it has its name: a run that is stopped leaves no half of a model behind.
        made = Path(scratch) / "model"
        module.model.save_pretrained(made)
        byte_tokenizer().save_pretrained(made)
        facts = {**asdict(settings), "val_loss": val_loss}
        (made / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has finished first, with the same model
                raise
    return folder


def _train(settings: Pretraining, data: SourceCode) -> tuple[CausalLM, float]:
    quiet_torchao()
    from transformers import LlamaConfig, LlamaForCausalLM

    L.seed_everything(settings.seed, verbose=False)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=4 * settings.seq_len,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    module = CausalLM(LlamaForCausalLM(config), lr=settings.lr, warmup=min(20, settings.steps // 4))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="32-true",
        max_steps=settings.steps,
        limit_train_batches=settings.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        callbacks=[TQDMProgressBar(refresh_rate=20)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module, trainer.callback_metrics["val_loss"].item()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's lines about the machine: they come again with the run that this one is for."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
