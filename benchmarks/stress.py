"""What the detection and quality benchmarks train: a small byte GPT with 8-bit linears, and text to train it on.

Legend: M = rows (batch * sequence), K = in_features, N = out_features.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.byte_gpt import Block, ByteGPT, SourceCode
from gnmr_lightning.backends import Backend

N_LAYERS, D_MODEL, SEQ_LEN, BATCH_SIZE = 5, 64, 64, 8


class StressBlock(Block):
    """A block whose attention, which is nobody's unit, runs in fp32: five times faster on a CPU, forth and back."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.attn_norm(x_BTD)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.float().permute(2, 0, 3, 1, 4)
        with torch.autocast(x_BTD.device.type, enabled=False):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attn["proj"](attended.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x_BTD))))


class StressGPT(ByteGPT):
    """A byte GPT of 20 recoverable linears and 0.3 million parameters."""

    def __init__(self, lr: float = 2e-3, warmup: int = 60) -> None:
        super().__init__(N_LAYERS, D_MODEL, 4, SEQ_LEN, lr, warmup)
        self.blocks = nn.ModuleList(StressBlock(D_MODEL, 4) for _ in range(N_LAYERS))


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8: the standard library's source code."""
    data = SourceCode(max_mb=4.0)
    data.setup()
    return data.train_text, data.val_text


class Rounded(Backend):
    """Operands rounded per tensor to integers of `bits` bits; products in fp32, as in a kernel with a wide accumulator.

    grad_output is rounded stochastically, which is what keeps a gradient right on average at few bits; or, as the other
    operands are, to the nearest.
    """

    def __init__(self, bits: int = 8, *, stochastic: bool = True) -> None:
        self.levels = 2 ** (bits - 1) - 1
        self.stochastic = stochastic
        self.name = f"rounded_{bits}" + ("" if stochastic else "_nearest")

    def _round(self, operand: Tensor, *, stochastic: bool = False) -> Tensor:
        operand = operand.float()
        step = operand.abs().amax().clamp(min=1e-30) / self.levels
        scaled = operand / step
        return (torch.floor(scaled + torch.rand_like(scaled)) if stochastic else torch.round(scaled)) * step

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return (self._round(x_MK) @ self._round(weight_NK).t()).to(x_MK.dtype)

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        rounded = self._round(grad_MN, stochastic=self.stochastic)
        return (
            (rounded @ self._round(weight_NK)).to(grad_MN.dtype) if need_input else None,
            (rounded.t() @ self._round(x_MK)).to(grad_MN.dtype) if need_weight else None,
        )
