"""Dynamic float8 through torchao: every operand of the three matmuls is cast right before it is used.

The casts and the scaled matmul are torchao's own; only the order in which `Float8Linear` calls them is written
again here, for two reasons. The dispatch op runs below autograd, where torchao's autograd function fails (it reshapes
a rowwise-scaled tensor). And where the config casts an operand in the same way for both backward products, one cast
serves both; torchao's eager code casts it twice.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe
from torchao.float8.float8_ops import float8_mm
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
)

from . import Backend

_ALIGNMENT = 16  # torch._scaled_mm on CUDA takes contraction and output sizes in multiples of this


class Float8Backend(Backend):
    """The three matmuls of a torchao `Float8LinearConfig`.

    Args:
        config: torchao's config. float8 all-gather is refused: a recovered unit would still compute with the rounded
            weights that the all-gather delivers.
        name: key of the registry; by default made from the config, so that equal configs share a backend.

    Raises:
        ValueError: float8 all-gather is on.
    """

    compiles = True

    def __init__(self, config: Float8LinearConfig, name: str | None = None) -> None:
        if config.enable_fsdp_float8_all_gather:
            raise ValueError(
                "Float8LinearConfig(enable_fsdp_float8_all_gather=True) sends rounded weights to every rank, so a unit "
                "recovered to bf16 would still compute with them: set it to False"
            )
        self.config = config
        self.name = name or f"float8_{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}"
        self._mm_config = LinearMMConfig(
            *(
                ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim)
                for gemm in (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
            )
        )
        grad_output, for_weight = config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight
        tensorwise = grad_output.scaling_granularity is ScalingGranularity.TENSORWISE
        self._one_grad_cast = tensorwise and grad_output == for_weight

    def _cast(self, operand: Tensor, cast: CastConfig | None, role: GemmInputRole, dim: int) -> Tensor:
        """`operand` in float8, scaled per tensor or along `dim`; unchanged where the config disables the cast."""
        assert cast is not None
        assert cast.target_dtype is not None  # Float8LinearConfig fills both in
        if cast.scaling_type is ScalingType.DISABLED:
            return operand
        return hp_tensor_to_float8_dynamic(
            operand,
            cast.target_dtype,
            self._mm_config,
            gemm_input_role=role,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        c = self.config
        x = self._cast(x_MK, c.cast_config_input, GemmInputRole.INPUT, -1)
        weight_t = self._cast(weight_NK.t(), c.cast_config_weight, GemmInputRole.WEIGHT, 0)
        return _mm(x, weight_t)

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        return self._grad_input(self._grad_for_input(grad_MN), weight_NK)

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        return self._grad_weight(self._grad_for_weight(grad_MN), x_MK)

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        for_input = self._grad_for_input(grad_MN) if need_input or self._one_grad_cast else None
        if not need_weight:
            for_weight = None
        else:
            for_weight = for_input if self._one_grad_cast else self._grad_for_weight(grad_MN)
        return (
            self._grad_input(for_input, weight_NK) if need_input and for_input is not None else None,
            self._grad_weight(for_weight, x_MK) if for_weight is not None else None,
        )

    def _grad_for_input(self, grad_MN: Tensor) -> Tensor:
        return self._cast(grad_MN, self.config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1)

    def _grad_for_weight(self, grad_MN: Tensor) -> Tensor:
        cast = self.config.cast_config_grad_output_for_grad_weight
        return self._cast(grad_MN, cast, GemmInputRole.GRAD_OUTPUT, 0)

    def _grad_input(self, grad: Tensor, weight_NK: Tensor) -> Tensor:
        cast = self.config.cast_config_weight_for_grad_input
        return _mm(grad, self._cast(weight_NK.t(), cast, GemmInputRole.WEIGHT, -1).t())

    def _grad_weight(self, grad: Tensor, x_MK: Tensor) -> Tensor:
        cast = self.config.cast_config_input_for_grad_weight
        return _mm(grad.t(), self._cast(x_MK, cast, GemmInputRole.INPUT, 0))

    @property
    def _axiswise(self) -> bool:
        return self.config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE

    @property
    def _any_size(self) -> bool:
        return self.config.emulate or self.config.pad_inner_dim

    def refuses_device(self, device: torch.device) -> str | None:
        if device.type == "cpu" or self.config.emulate:
            return None
        if device.type != "cuda":
            return f"float8 has no kernel for {device.type}: use recipe='int8' or Float8LinearConfig(emulate=True)"
        capability = torch.cuda.get_device_capability(device)
        needed = (9, 0) if self._axiswise else (8, 9)
        if torch.version.hip or capability >= needed:
            return None
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]} and "
            f"{self.name} needs {needed[0]}.{needed[1]}: use recipe='auto'"
        )

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        if device_type == "cpu" or self._any_size:
            return None
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % _ALIGNMENT:
                return f"{name}={size}; float8 needs a multiple of {_ALIGNMENT}"
        return None

    def too_small(self, in_features: int, out_features: int) -> str | None:
        # torchao has a rule for two of its three recipes. The third is rowwise but for grad_weight, which stays in high
        # precision: what does not profit from rowwise does not profit from it.
        rule = "rowwise" if self._axiswise else "tensorwise"
        if _auto_filter_for_recipe(rule, [])(torch.nn.Linear(in_features, out_features, device="meta"), ""):
            return None
        return f"in_features={in_features}, out_features={out_features}; too small to profit from {rule} float8"

    def takes_rows(self, rows: int, device_type: str) -> bool:
        # Only grad_weight contracts over the rows, so a recipe that keeps it in high precision takes any number.
        if device_type == "cpu" or self._any_size or rows % _ALIGNMENT == 0:
            return True
        for_weight = self.config.cast_config_grad_output_for_grad_weight
        return for_weight is not None and for_weight.scaling_type is ScalingType.DISABLED


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype that `a` had before its cast, for two float8 operands or two in high precision."""
    if isinstance(a, Float8TrainingTensor):
        # Not torch.mm: under autocast that would convert an operand cast from fp32 weights first, and fail.
        return float8_mm(torch.ops.aten.mm.default, (a, b))
    return torch.mm(a, b.to(a.dtype))
