"""Blockwise float8, as DeepSeek-V3 trains: one scale for 1x128 values of activations and gradients, 128x128 of weights.

On SM90 and later the casts and products are torchao's blockwise training kernels. Elsewhere the operands are rounded
in plain torch, to the same values, and multiplied in high precision: that shows what the recipe does to a run, not its
speed. torchao's own plain-torch quantisers give these values too (a test compares them to the bit), but their file
imports Triton, which a CPU build of torch has not, and one of them loops over columns.

The number of rows may be any: the kernels want multiples of 128, and rows of zeros that are added to a block change
neither its scale nor a product.

Legend: M = rows (batch * sequence), K = in_features, N = out_features; R, C = rows and columns of any operand.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._triton import has_triton
from torchao.float8.config import e4m3_dtype

from . import Backend

_BLOCK = 128
_LARGEST = torch.finfo(e4m3_dtype).max
_EPS = 1e-12  # torchao's kernels take no block's largest value for smaller than this


class BlockwiseBackend(Backend):
    """The three matmuls in float8 with blocks of 128 values, by torchao's kernels from SM90, else emulated."""

    name = "float8_blockwise"

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        if _has_kernels(x_MK.device):
            return _kernels_output(x_MK, weight_NK)
        return _product(_rounded(x_MK, 1, _BLOCK), _rounded(weight_NK, _BLOCK, _BLOCK).t(), x_MK.dtype)

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        if _has_kernels(grad_MN.device):
            return _kernels_grad_input(grad_MN, weight_NK)
        return _product(_rounded(grad_MN, 1, _BLOCK), _rounded(weight_NK, _BLOCK, _BLOCK), grad_MN.dtype)

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        # The blocks lie along the rows here, since these are what the product sums over.
        if _has_kernels(grad_MN.device):
            return _kernels_grad_weight(grad_MN, x_MK)
        return _product(_rounded(grad_MN, _BLOCK, 1).t(), _rounded(x_MK, _BLOCK, 1), grad_MN.dtype)

    def refuses_device(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"{self.name} has no kernel for {device.type}: train on cpu or cuda"
        if _has_kernels(device) and find_spec("torchao.prototype.blockwise_fp8_training") is None:
            return f"{self.name} runs torchao's blockwise kernels here, which this torchao lacks: install 0.18 or later"
        return None

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        # On a CPU any size may be tried out. On a GPU padding a weight at each call would cost what float8 saves.
        if device_type != "cpu":
            for name, size in (("in_features", in_features), ("out_features", out_features)):
                if size % _BLOCK:
                    return f"{name}={size}; {self.name} needs a multiple of {_BLOCK}"
        return None


def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


# -- emulated ------------------------------------------------------------------------------------------------------


def _rounded(operand_RC: Tensor, rows: int, columns: int) -> Tensor:
    """The operand with each block of rows x columns rounded as its float8 codes and scale hold it, in float32."""
    padded = _pad(_pad(operand_RC.float(), 0, rows), 1, columns)
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (R / rows, rows, C / columns, columns)
    # Divided in float64, as torchao does: a scale that is off by its last bit moves values to other codes.
    scale = (_LARGEST / blocks.abs().amax((1, 3), keepdim=True).double().clamp(min=_EPS)).float()
    codes = (blocks * scale).clamp(-_LARGEST, _LARGEST).to(e4m3_dtype)
    rounded = codes.float() * (1.0 / scale)
    return rounded.reshape(padded.shape)[: operand_RC.shape[0], : operand_RC.shape[1]]


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right of float32 operands, summed in float32, in `dtype`.

    On a CPU the product itself is taken in float32: it is then the kernels' own up to the order of the sum, and bf16
    matmuls are far slower on most CPUs. A GPU is fast in bf16 only, at the price of rounding the operands once more.
    """
    if left.device.type == "cpu":
        return (left @ right).to(dtype)
    return left.to(dtype) @ right.to(dtype)


def _pad(operand_RC: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros after the last row (dim 0) or column (dim 1), up to a multiple."""
    missing = -operand_RC.shape[dim] % multiple
    if missing == 0:
        return operand_RC
    return F.pad(operand_RC, (0, 0, 0, missing) if dim == 0 else (0, missing))


# -- torchao's kernels, imported where they are called since their file imports Triton -------------------------------
# All are given rows in multiples of 128, also where only the alignment of a scale's columns asks for it.


def _kernels_output(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    x, x_scale = kernels.triton_fp8_blockwise_act_quant_lhs(_pad(x_MK, 0, _BLOCK).contiguous(), _BLOCK)
    weight_t, scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(weight_NK.contiguous(), _BLOCK)
    return _kernels_mm_weight(x, x_scale, weight_t, scale, x_MK.dtype)[: x_MK.shape[0]]


def _kernels_grad_input(grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    grad, grad_scale = kernels.triton_fp8_blockwise_act_quant_lhs(_pad(grad_MN, 0, _BLOCK).contiguous(), _BLOCK)
    weight, scale = kernels.triton_fp8_blockwise_weight_quant_rhs(weight_NK.contiguous(), _BLOCK)
    return _kernels_mm_weight(grad, grad_scale, weight, scale, grad_MN.dtype)[: grad_MN.shape[0]]


def _kernels_grad_weight(grad_MN: Tensor, x_MK: Tensor) -> Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    grad_t, grad_scale = kernels.triton_fp8_blockwise_act_quant_transposed_lhs(
        _pad(grad_MN, 0, _BLOCK).contiguous(), _BLOCK
    )
    x, x_scale = kernels.triton_fp8_blockwise_act_quant_rhs(_pad(x_MK, 0, _BLOCK).contiguous(), _BLOCK)
    if not _cublas_takes_blocks(grad_MN.device):
        return kernels.triton_fp8_gemm_1x128_128x1(grad_t, x, grad_scale, x_scale, out_dtype=grad_MN.dtype)
    rows = kernels.BLOCKWISE_1X128_SCALING_TYPE
    return F.scaled_mm(grad_t, x, grad_scale, rows, x_scale.t(), rows, output_dtype=grad_MN.dtype)


def _kernels_mm_weight(a: Tensor, a_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product with a weight, whose scales are one for 128x128 values."""
    from torchao.prototype.blockwise_fp8_training import kernels

    if not _cublas_takes_blocks(a.device):
        return kernels.triton_fp8_gemm_1x128_128x128(a, weight, a_scale, scale, out_dtype=dtype)
    rows, blocks = kernels.BLOCKWISE_1X128_SCALING_TYPE, kernels.BLOCKWISE_128X128_SCALING_TYPE
    scale = kernels._prepare_blockwise_scaled_mm_rhs_scale(scale, blocks)
    return F.scaled_mm(a, weight, a_scale, rows, scale, blocks, output_dtype=dtype)


def _cublas_takes_blocks(device: torch.device) -> bool:
    """cuBLAS has these scales on Hopper only and from CUDA 12.9; elsewhere torchao's Triton kernel multiplies."""
    if torch.cuda.get_device_capability(device)[0] != 9 or torch.version.cuda is None or not hasattr(F, "scaled_mm"):
        return False
    return tuple(int(part) for part in torch.version.cuda.split(".")[:2]) >= (12, 9)
