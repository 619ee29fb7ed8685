"""The low-precision families a linear layer can run in, and the registry the dispatch op looks them up in.

A backend is three matrix products, written on 2-D operands, below autograd, and a rule for the shapes that its
kernels take. It holds no state: the same backend object serves every layer of a recipe. The dispatch op knows a
backend by its `name` only, since a compiled graph can carry a string but not an object.

Legend: M = rows (batch * sequence), K = in_features, N = out_features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

__all__ = ["RECIPES", "Backend", "get", "register", "resolve"]


class Backend:
    """Three matmuls of one linear layer in low precision.

    A subclass gives `output`, `grad_input` and `grad_weight`; it may override `grads` where both gradients share work.
    Operands come in the compute dtype (`x_MK`, `grad_MN`) and in the parameter's own dtype (`weight_NK`); results go
    out in the dtype of the first operand. M is never 0.
    """

    name: str
    """What the user calls the recipe, and the key of the registry."""

    compiles: bool = False
    """Whether dynamo can trace its products: a compiled model then has them, with their casts, in its graph."""

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        """The forward product x @ weight.T, shape (M, N)."""
        raise NotImplementedError

    def grad_input(self, grad_MN: Tensor, weight_NK: Tensor) -> Tensor:
        """The backward product grad_output @ weight, shape (M, K)."""
        raise NotImplementedError

    def grad_weight(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """The backward product grad_output.T @ x, shape (N, K)."""
        raise NotImplementedError

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both backward products; None for one that nobody needs."""
        return (
            self.grad_input(grad_MN, weight_NK) if need_input else None,
            self.grad_weight(grad_MN, x_MK) if need_weight else None,
        )

    def refuses_device(self, device: torch.device) -> str | None:
        """Why this recipe cannot run on `device`, as the rest of a sentence; None if it can."""
        return None

    def refuses_layer(self, in_features: int, out_features: int, device_type: str) -> str | None:
        """Why no call of a layer of this size can run in low precision; None if some can."""
        return None

    def too_small(self, in_features: int, out_features: int) -> str | None:
        """Why a layer of this size would not profit, by torchao's rule (`skip_small=True`); None if it would.

        A recipe that torchao has no rule for leaves this method as it is.
        """
        return None

    def takes_rows(self, rows: int, device_type: str) -> bool:
        """Whether a call with `rows` = M > 0 rows runs in low precision (the layer's sizes are fine)."""
        return True


_REGISTRY: dict[str, Backend] = {}

RECIPES = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_blockwise", "mxfp8", "int8")
"""The recipes that have a name; `recipe` also takes "auto", "fake(...)", a torchao config object or a `Backend`."""


def register(backend: Backend) -> Backend:
    """Makes `backend` known to the dispatch op; a later backend of the same name takes its place."""
    _REGISTRY[backend.name] = backend
    return backend


def get(name: str) -> Backend:
    """The registered backend called `name`."""
    return _REGISTRY[name]


def resolve(recipe: Any) -> Backend:
    """The backend for a recipe's or a registered backend's name, a torchao config or a `Backend` itself, registered.

    Raises:
        ValueError: `recipe` is none of these, or needs a newer torchao.
    """
    # Not at the top of the file: all families import torchao, which is slow and, without a GPU, noisy.
    with _quiet_on_cpu():
        from .blockwise import BlockwiseBackend
        from .fake import FakeBackend, FakeSpec
        from .float8 import Float8Backend, Float8LinearConfig
        from .int8 import Int8Backend, Int8MixedPrecisionTrainingConfig

    if isinstance(recipe, Backend):
        return register(recipe)
    if isinstance(recipe, Float8LinearConfig):
        return register(Float8Backend(recipe))
    if isinstance(recipe, Int8MixedPrecisionTrainingConfig):
        return register(Int8Backend(recipe))
    if isinstance(recipe, str) and recipe.startswith("fake"):
        return register(FakeBackend(**asdict(FakeSpec.parse(recipe))))
    if recipe == "int8":
        return register(Int8Backend(Int8MixedPrecisionTrainingConfig()))
    if recipe == "float8_blockwise":
        return register(BlockwiseBackend())
    if recipe == "mxfp8":
        return register(_mxfp8())
    if isinstance(recipe, str) and recipe in RECIPES:
        name = recipe.removeprefix("float8_")
        return register(Float8Backend(Float8LinearConfig.from_recipe_name(name), name=recipe))
    if isinstance(recipe, str) and recipe in _REGISTRY:
        return _REGISTRY[recipe]
    raise ValueError(
        f"recipe={recipe!r} is not known: write 'auto', one of {', '.join(map(repr, RECIPES))}, "
        "a study's 'fake(a=4, w=8, g=8)' or the name of a registered Backend, or give a torchao Float8LinearConfig, an "
        "Int8MixedPrecisionTrainingConfig or a Backend"
    )


def _mxfp8() -> Backend:
    """Apart from the others, since it alone needs a torchao that is newer than the oldest one that we take."""
    try:
        with _quiet_on_cpu():
            from .mxfp8 import MXFP8Backend
    except ImportError as error:
        raise ValueError(f"recipe='mxfp8' needs a newer torchao, {error}: pip install -U torchao") from error
    return MXFP8Backend()


@contextmanager
def _quiet_on_cpu() -> Iterator[None]:
    """Hides the warnings about CUDA extensions and enums that importing torchao prints on a machine without a GPU."""
    noisy = () if torch.cuda.is_available() else ("torchao", "torch.utils._pytree")
    found = [logging.getLogger(name) for name in noisy]
    levels = [logger.level for logger in found]
    try:
        for logger in found:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)


def auto_recipe(device: torch.device) -> str:
    """The recipe that suits `device`: rowwise float8 from SM90, tensorwise float8 on SM89, int8 anywhere else."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (9, 0):
            return "float8_rowwise"
        if capability >= (8, 9):
            return "float8_tensorwise"
    return "int8"
