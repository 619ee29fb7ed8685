"""A backend of one's own: weights rounded to powers of two, so that a product needs shifts and no multiplications.

No hardware here does that; the point is how little a backend is. Three products on 2-D operands, a name, and, where a
format asks for it, rules for devices and sizes. Control, recovery, logging and checkpoints then work as for any recipe.
docs/backends.md has the whole protocol.

Run it from the repository's root: `python -m examples.custom_backend`. It trains a small byte-level GPT.
"""

from __future__ import annotations

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from examples.byte_gpt import ByteGPT, SourceCode
from gnmr_lightning import GNMRPrecision
from gnmr_lightning.backends import Backend


class PowersOfTwo(Backend):
    """Each weight is the nearest power of two, by ratio; activations and gradients stay as they are."""

    name = "powers_of_two"

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(x_MK, _rounded(weight_NK).t())

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(grad_MN, _rounded(weight_NK))

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        return _product(grad_MN.t(), x_MK)  # the gradient of the rounded weight, given to the weight itself

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        # Such rules are for what a kernel cannot do. The layer is then listed with this reason and trains as before.
        if in_features % 4:
            return f"in_features={in_features}; {self.name} packs 4 exponents in a word"
        return None


def _rounded(weight_NK: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(weight_NK.float())  # |mantissa| is in [0.5, 1), or 0
    rounded = torch.ldexp(torch.where(mantissa.abs() > 0.5**0.5, 1.0, 0.5) * mantissa.sign(), exponent)
    return torch.where(weight_NK.isfinite(), rounded, weight_NK)  # NaN must stay NaN, or nobody notices it


def _product(left: Tensor, right: Tensor) -> Tensor:
    return (left.float() @ right.float()).to(left.dtype)  # results come in the dtype of the first operand


class Losses(Callback):
    """Keeps the loss of every step, and what the run cost in bf16."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bf16_share = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        plugin = trainer.precision_plugin
        assert isinstance(plugin, GNMRPrecision)
        low, bf16, _ = plugin.work().sum(0).tolist()
        self.bf16_share = bf16 / (low + bf16)


def main(max_steps: int = 100) -> Losses:
    """Trains for `max_steps` optimizer steps and prints what came of it."""
    seed_everything(1)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        plugins=[GNMRPrecision(PowersOfTwo())],
        callbacks=[losses],
        max_steps=max_steps,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(ByteGPT(n_layers=2, d_model=64, n_heads=2, seq_len=32), datamodule=SourceCode(batch_size=4, seq_len=32))
    tail = losses.losses[-10:]
    print(f"{PowersOfTwo.name}: loss {losses.losses[0]:.2f} -> {sum(tail) / len(tail):.2f} in {max_steps} steps,")
    print(f"{losses.bf16_share:.1%} of the layers' matmul FLOPs ran recovered, in bf16")
    return losses


if __name__ == "__main__":
    main()
