"""Any causal language model of `transformers`, plain or wrapped by PEFT, as a LightningModule.

Lightning has the loop and GNMRPrecision the low-precision layers, so all that is left is the loss, the optimizer and
three things that are easy to miss: `from_pretrained` gives a model in eval mode, in which gradient checkpointing does
nothing; the key-value cache of generation is of no use in training; and a cast of the whole model to bf16 (Lightning's
"bf16-true") takes the rotary frequencies with it, which no checkpoint holds and which bf16 is too coarse for.

    module = CausalLM(AutoModelForCausalLM.from_pretrained("path/or/hub-id"), lr=1e-5)
    Trainer(plugins=[GNMRPrecision("float8_rowwise")]).fit(module, batches)
    module.model.save_pretrained("tuned")

Legend: B = sequences of a batch, T = tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from gnmr_lightning import backends


class CausalLM(L.LightningModule):
    """Trains a `transformers` causal LM on its own loss; logs `train_loss`, `val_loss` and `test_loss` (nats a token).

    A batch is a dict of arguments of the model: `input_ids` and `labels`, both int64 (B, T), and what else it takes
    (`attention_mask`, `position_ids`). Labels are not shifted, the model does that; -100 marks a token that is not to
    be predicted. A tensor of tokens (B, T) is short for a batch whose labels are its input.

    Args:
        model: a causal LM of `transformers`, or a PEFT model around one; parameters that are frozen stay so. None for
            a subclass that hands it to `take` in `configure_model`.
        lr: AdamW's learning rate after warm-up.
        weight_decay: of the parameters with two or more dimensions; the others have none.
        warmup: optimizer steps in which the learning rate rises linearly; constant from there on.
        gradient_checkpointing: recompute each block in backward instead of keeping its activations.

    Raises:
        ValueError: no parameter of the model can be trained.
    """

    def __init__(
        self,
        model: nn.Module | None,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        warmup: int = 20,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.warmup = lr, weight_decay, warmup
        self.gradient_checkpointing = gradient_checkpointing
        self.model: Any = None
        if model is not None:
            self.take(model)

    def take(self, model: nn.Module) -> None:
        """Makes `model` the one that is trained.

        Raises:
            ValueError: no parameter of the model can be trained.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("every parameter of the model is frozen: leave some trainable, or add adapters with PEFT")
        self.model = model.train()
        if self.gradient_checkpointing:
            # Renamed in transformers 5. The reentrant kind gives a block no gradient where its input needs none, as
            # behind a frozen embedding.
            renamed = hasattr(model, "activation_checkpointing_enable")
            enable = "activation_checkpointing_enable" if renamed else "gradient_checkpointing_enable"
            getattr(self.model, enable)({"use_reentrant": False})

    def forward(self, **inputs: Tensor) -> Any:
        """The model's own output: `.logits` (B, T, vocabulary), and `.loss` if `labels` are given."""
        return self.model(**inputs, use_cache=False)

    def training_step(self, batch: dict[str, Tensor] | Tensor, batch_idx: int) -> Tensor:
        loss = self(**_named(batch)).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor] | Tensor, batch_idx: int) -> None:
        self._evaluate("val_loss", _named(batch))

    def test_step(self, batch: dict[str, Tensor] | Tensor, batch_idx: int) -> None:
        self._evaluate("test_loss", _named(batch))

    def _evaluate(self, name: str, batch: dict[str, Tensor]) -> None:
        # Weighted by the tokens that were predicted, so that exp of the mean is the perplexity of the whole text.
        predicted = int((batch["labels"][:, 1:] != -100).sum())
        if predicted:
            self.log(name, self(**batch).loss, prog_bar=True, batch_size=predicted, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup + 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def to(self, *args: Any, **kwargs: Any) -> CausalLM:
        """As `nn.Module.to`, but rotary frequencies keep their dtype, as in `from_pretrained(dtype=torch.bfloat16)`."""
        kept = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super().to(*args, **kwargs)
        for name, buffer in kept.items():
            owner, _, attribute = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, attribute, buffer.to(getattr(module, attribute).device))
        return self


def _named(batch: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch, "labels": batch} if isinstance(batch, Tensor) else batch


def quiet_torchao() -> None:
    """Imports what `transformers` needs for a model, without what torchao prints on a machine without a GPU."""
    with backends._quiet_on_cpu():
        import transformers.modeling_utils  # noqa: F401
