"""What the detection and quality benchmarks train: a small byte GPT, at a speed that allows thousands of steps here.

Older CPUs multiply in bf16 and int8 ten to twenty times slower than in fp32. The products of the sick, the healthy and
the bf16 layers are therefore computed in fp32 from operands that are rounded as the format has them, and rounded to
bf16 afterwards: what a kernel with a 32-bit accumulator gives. Everything else is the library's real path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.byte_gpt import ByteGPT
from gnmr_lightning.backends import Backend

EMPTY: tuple[Tensor, ...] = ()


class Bf16Backend(Backend):
    """bf16 products with fp32 accumulation, through fp32: what bf16-mixed computes, fast on any CPU."""

    name = "bf16_by_fp32"

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(x_MK, weight_NK.t())

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(grad_MN, weight_NK)

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        return _product(grad_MN.t(), x_MK)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return (left.bfloat16().float() @ right.bfloat16().float()).to(left.dtype)


class StressGPT(ByteGPT):
    """A ByteGPT whose head and attention compute in fp32, for the reason above."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = _run(block, x_BTD)
        with torch.autocast(x_BTD.device.type, enabled=False):
            return self.head(self.norm(x_BTD.float()))


def _run(block, x_BTD):
    qkv = block.attn["qkv"](block.attn_norm(x_BTD)).unflatten(-1, (3, block.n_heads, -1))
    q, k, v = qkv.float().permute(2, 0, 3, 1, 4)
    with torch.autocast(x_BTD.device.type, enabled=False):
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_BTD = x_BTD + block.attn["proj"](attended.transpose(1, 2).flatten(2))
    return x_BTD + block.mlp["down"](F.gelu(block.mlp["up"](block.mlp_norm(x_BTD))))
