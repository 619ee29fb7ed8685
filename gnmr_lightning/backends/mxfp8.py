"""MXFP8: float8 with one power of two for 32 values along what a product sums over, the format of Blackwell GPUs.

torchao's `MXTensor` casts and multiplies. From SM100 it calls the hardware's matmul; elsewhere it is told to emulate:
the operands are rounded to the format's values and multiplied in float32, slow and right.

Every operand of every product is cast on its own, so the three products are one function. Blocks along the rows, in
grad_weight, are filled up with zeros, which change neither a scale nor a sum: the number of rows may be any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from . import Backend

_BLOCK = 32


class MXFP8Backend(Backend):
    """The three matmuls in MXFP8, all operands e4m3 and scales rounded up, which are torchao's choices for training."""

    name = "mxfp8"

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(x_MK, weight_NK)

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        return _product(grad_MN, weight_NK.t())

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        return _product(grad_MN.t(), x_MK.t())

    def refuses_device(self, device: torch.device) -> str | None:
        if device.type in ("cpu", "cuda"):
            return None
        return f"{self.name} has no kernel for {device.type}: train on cpu or cuda"

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        # On a CPU any size may be tried out. On a GPU padding a weight at each call would cost what float8 saves.
        if device_type != "cpu":
            for name, size in (("in_features", in_features), ("out_features", out_features)):
                if size % _BLOCK:
                    return f"{name}={size}; {self.name} needs a multiple of {_BLOCK}"
        return None


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (10, 0)


def _product(left_RS: Tensor, right_CS: Tensor) -> Tensor:
    """left @ right.T of the cast operands, (R, C), in the dtype of `left_RS`; S is what it sums over."""
    cast = _cast_for_kernel if _has_kernels(left_RS.device) else _cast_to_emulate
    return torch.mm(cast(left_RS), cast(right_CS).t()).to(left_RS.dtype)


def _cast_to_emulate(operand_RS: Tensor) -> Any:
    # The rounded values come out in the dtype that goes in, and a product of bf16 values is slow on most CPUs.
    return _cast(operand_RS.float(), KernelPreference.EMULATED)


def _cast_for_kernel(operand_RS: Tensor) -> Any:
    # torchao's Triton cast takes bf16 only; float32 weights are cast by its torch code, from full precision.
    bf16 = operand_RS.dtype == torch.bfloat16
    choice = MXFP8Dim0CastKernelChoice.TRITON if bf16 else MXFP8Dim0CastKernelChoice.TORCH
    return _cast(operand_RS, KernelPreference.AUTO, mxfp8_dim0_cast_kernel_choice=choice)


def _cast(operand_RS: Tensor, kernels: KernelPreference, **kwargs: Any) -> Any:
    padded_RS = F.pad(operand_RS, (0, -operand_RS.shape[1] % _BLOCK)).contiguous()
    return MXTensor.to_mx(padded_RS, torch.float8_e4m3fn, _BLOCK, ScaleCalculationMode.RCEIL, kernels, **kwargs)
