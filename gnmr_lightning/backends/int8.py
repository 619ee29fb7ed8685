"""INT8 mixed-precision training through torchao: rows of both operands are quantised right before each matmul.

torchao's dynamic int8 matmul does the work. Its layer classes are not used: they fail on transposed 3-D input and
ignore autocast on CPU, and both go away once the layer hands 2-D operands in the compute dtype to the matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._triton import has_triton
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
from torchao.prototype.quantized_training.int8_mixed_precision import _dynamic_int8_mm

from . import Backend

_ALIGNMENT = 8  # torch._int_mm on CUDA takes inner and output sizes in multiples of this, ...
_MIN_ROWS = 17  # ... and at least this many rows; torchao's Triton kernel, used where Triton is there, takes any


class Int8Backend(Backend):
    """The three matmuls of a torchao `Int8MixedPrecisionTrainingConfig`; one that is switched off runs in bf16."""

    compiles = True

    def __init__(self, config: Int8MixedPrecisionTrainingConfig) -> None:
        self.config = config
        off = [name for name in ("output", "grad_input", "grad_weight") if not getattr(config, name)]
        self.name = "int8" + "".join(f"_hp_{name}" for name in off)

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        weight_KN = weight_NK.to(x_MK.dtype).t()
        return _int8_mm(x_MK, weight_KN) if self.config.output else x_MK @ weight_KN

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        weight_NK = weight_NK.to(grad_MN.dtype)
        return _int8_mm(grad_MN, weight_NK) if self.config.grad_input else grad_MN @ weight_NK

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        if self.config.grad_weight:
            return _int8_mm(x_MK.t(), grad_MN).t()
        return grad_MN.t() @ x_MK

    def refuses_device(self, device: torch.device) -> str | None:
        if device.type in ("cpu", "cuda"):
            return None
        return f"int8 has no kernel for {device.type}: train on cpu or cuda"

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        if device_type == "cpu" or _triton():
            return None
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % _ALIGNMENT or size < _MIN_ROWS:
                return f"{name}={size}; int8 needs a multiple of {_ALIGNMENT} above 16 where Triton is missing"
        return None

    def takes_rows(self, rows: int, device_type: str) -> bool:
        return device_type == "cpu" or _triton() or (rows % _ALIGNMENT == 0 and rows >= _MIN_ROWS)


@torch.compiler.assume_constant_result
def _triton() -> bool:
    return has_triton()  # asked late: it initialises CUDA, which a process that forks must not have done


def _int8_mm(left: Tensor, right: Tensor) -> Tensor:
    # An outer product sums nothing; torch._int_mm returns garbage for it on CPUs with VNNI (torch 2.13).
    if left.shape[1] == 1:
        return left @ right
    # torchao takes right.T. Of an operand of torch.cond, dynamo would make that one more operand, which then aliases.
    return _dynamic_int8_mm(left, right.t().t())
