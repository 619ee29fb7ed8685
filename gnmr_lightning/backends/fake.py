"""Fake quantisation for studies: any width from 2 to 8 bits, or a float8 format, for each kind of operand on its own.

Nothing is faster here. An operand is rounded to the values that its format has, and the product of the rounded
operands is taken in float32: what hardware of that format would return, on any device. Fewer bits than hardware has
make a run sick in a natural way, which is what a study of recovery needs.

Scales and codes are torchao's quantisation primitives. Stochastic rounding, which they lack, comes before them: it
moves each value to one of its two neighbours on the grid, where rounding to nearest then leaves it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from . import Backend

Format = int | str | None
Operand = Literal["a", "w", "g"]
Rounding = Literal["nearest", "stochastic"]
Granularity = Literal["tensorwise", "rowwise"]

_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SMALLEST = torch.finfo(torch.float32).smallest_normal  # no scale is below it, so that a row of zeros has one
_PATTERN = re.compile(r"fake\((.*)\)", re.DOTALL)
_OPTION = re.compile(r"\s*(\w+)\s*=\s*[\"']?(\w+)[\"']?\s*")


@dataclass(frozen=True, kw_only=True)
class FakeSpec:
    """What is rounded to which format, and how.

    Raises:
        ValueError: a value that is not one of those below, or nothing to quantise.
    """

    a: Format = None
    """Activations: 2 to 8 for a signed integer of that many bits, "e4m3", "e5m2", or None: not quantised, so bf16."""
    w: Format = None
    """Weights, likewise."""
    g: Format = None
    """Gradients of the layer's output, likewise."""
    rounding: Rounding = "nearest"
    """"stochastic" rounds up with the probability that makes the expectation exact, by torch's global generator."""
    granularity: Granularity = "tensorwise"
    """One scale for an operand, or one for each of its rows (of what is summed over, in each of the three products)."""

    def __post_init__(self) -> None:
        for name in get_args(Operand):
            value = getattr(self, name)
            is_width = isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= 8
            is_format = value is None or (isinstance(value, str) and value in _FLOATS)
            if not (is_width or is_format):
                raise ValueError(f"fake: {name}={value!r} is no format: write 2 to 8 (bits), 'e4m3', 'e5m2' or None")
        for name, choices in (("rounding", get_args(Rounding)), ("granularity", get_args(Granularity))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"fake: {name}={getattr(self, name)!r} is not known: write {' or '.join(map(repr, choices))}"
                )
        if self.a is None and self.w is None and self.g is None:
            raise ValueError(
                "fake: no operand is quantised: give one of a, w and g a format, as in 'fake(a=8, w=8, g=8)'"
            )

    @classmethod
    def parse(cls, recipe: str) -> FakeSpec:
        """The spec that a recipe such as "fake(a=4, w=8, g=e5m2, rounding=stochastic)" writes out.

        Raises:
            ValueError: it is not written so, or a value is out of range.
        """
        outer = _PATTERN.fullmatch(recipe.strip())
        if outer is None:
            raise ValueError(f"recipe={recipe!r} is no fake recipe: write it as in 'fake(a=4, w=8, g=8)'")
        options: dict[str, Format] = {}
        for part in filter(str.strip, outer[1].split(",")):
            option = _OPTION.fullmatch(part)
            name = option[1] if option else part.strip()
            if option is None or name not in cls.__dataclass_fields__ or name in options:
                what = "is there twice" if name in options else "is not known"
                raise ValueError(
                    f"recipe={recipe!r}: {part.strip()!r} {what}: write NAME=VALUE, each of "
                    f"{', '.join(cls.__dataclass_fields__)} once at most"
                )
            value = option[2]
            options[name] = int(value) if value.isdigit() else None if value in ("None", "none", "null") else value
        return cls(**options)  # type: ignore[arg-type]

    def __str__(self) -> str:
        fields = [f"{name}={value}" for name in get_args(Operand) if (value := getattr(self, name)) is not None]
        fields += [f"rounding={self.rounding}"] if self.rounding != "nearest" else []
        fields += [f"granularity={self.granularity}"] if self.granularity != "tensorwise" else []
        return f"fake({', '.join(fields)})"


class FakeBackend(Backend):
    """Three float32 products of operands rounded to the formats of a `FakeSpec`.

    A subclass may override `cast`, to put in a fault or another format; it then needs a `name` of its own.

    Args:
        a: format of activations; see `FakeSpec` for this one and those below.
        w: format of weights.
        g: format of gradients of the output.
        rounding: "nearest" or "stochastic".
        granularity: "tensorwise" or "rowwise".
        name: key of the registry; by default the recipe's string.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        a: Format = None,
        w: Format = None,
        g: Format = None,
        rounding: Rounding = "nearest",
        granularity: Granularity = "tensorwise",
        name: str | None = None,
    ) -> None:
        self.spec = FakeSpec(a=a, w=w, g=g, rounding=rounding, granularity=granularity)
        self.name = name or str(self.spec)

    def cast(self, operand_RS: Tensor, kind: Operand) -> Tensor:
        """One operand rounded to its format, in float32.

        Args:
            operand_RS: float32, contiguous; S is what the product sums over, so a rowwise scale belongs to a row.
            kind: "a", an activation; "w", a weight; "g", a gradient of the output.
        """
        target: Format = getattr(self.spec, kind)
        if target is None:
            return operand_RS
        columns = operand_RS.shape[1]
        if columns == 1:  # torchao's primitives take a block of one value for the whole tensor
            operand_RS = F.pad(operand_RS, (0, 1))
        block = [1 if self.spec.granularity == "rowwise" else operand_RS.shape[0], operand_RS.shape[1]]
        stochastic = self.spec.rounding == "stochastic"
        if isinstance(target, int):
            rounded_RS = _round_integer(operand_RS, block, 2 ** (target - 1) - 1, stochastic)
        else:
            rounded_RS = _round_float(operand_RS, block, _FLOATS[target], stochastic)
        return rounded_RS[:, :columns]

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return self._product(x_MK, "a", weight_NK, "w", x_MK.dtype)

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        return self._product(grad_MN, "g", weight_NK.t(), "w", grad_MN.dtype)

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        return self._product(grad_MN.t(), "g", x_MK.t(), "a", grad_MN.dtype)

    def _product(self, left_RS: Tensor, left: Operand, right_CS: Tensor, right: Operand, dtype: torch.dtype) -> Tensor:
        """left @ right.T of the rounded operands, (R, C), summed in float32 and returned in `dtype`."""
        sides = []
        for operand, kind in ((left_RS, left), (right_CS, right)):
            # Not quantised means as bf16 would have it; a quantised weight is rounded once, from full precision.
            exact = operand if getattr(self.spec, kind) is not None else operand.to(dtype)
            sides.append(self.cast(exact.float().contiguous(), kind))
        return (sides[0] @ sides[1].t()).to(dtype)

    def refuses_device(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda") and any(isinstance(getattr(self.spec, k), str) for k in ("a", "w", "g")):
            return f"{self.name} has no float8 cast on {device.type}: use widths in bits, or train on cpu or cuda"
        return None


def _round_integer(operand_RS: Tensor, block: list[int], largest: int, stochastic: bool) -> Tensor:
    """Symmetric: the codes are -largest .. largest, for each `block` of the operand with one scale."""
    limits = -largest, largest
    scale, zero = choose_qparams_affine(
        operand_RS, MappingType.SYMMETRIC, tuple(block), torch.int8, *limits, eps=_SMALLEST, scale_dtype=torch.float32
    )
    if stochastic:
        scale_R1 = scale.view(-1, 1)
        operand_RS = _move_to_neighbour(operand_RS / scale_R1, torch.ones_like(scale_R1)) * scale_R1
    codes = quantize_affine(operand_RS, tuple(block), scale, zero, torch.int8, *limits)
    return dequantize_affine(codes, tuple(block), scale, zero, torch.int8, *limits, output_dtype=torch.float32)


def _round_float(operand_RS: Tensor, block: list[int], dtype: torch.dtype, stochastic: bool) -> Tensor:
    """The values of a float8 format, stretched to each `block` of the operand by one scale."""
    info = torch.finfo(dtype)
    scale = _choose_scale_float8(operand_RS, block, dtype, hp_value_lb=_SMALLEST * info.max)
    if stochastic:
        scaled = operand_RS / scale
        exponent = torch.frexp(scaled).exponent - 1  # of two, as in 1.xxx * 2 ** exponent
        spacing = torch.ldexp(torch.ones_like(scaled), exponent).clamp(min=info.smallest_normal) * info.eps
        operand_RS = _move_to_neighbour(scaled, spacing) * scale
    return _dequantize_affine_float8(_quantize_affine_float8(operand_RS, scale, dtype), scale, torch.float32)


def _move_to_neighbour(values: Tensor, spacing: Tensor) -> Tensor:
    """Each value down or up to a multiple of `spacing`, the nearer one the more likely; a multiple stays."""
    return torch.floor(values / spacing + torch.rand_like(values)) * spacing
