"""The low-precision families a linear layer can run in, and the registry the dispatch op looks them up in.

A backend is three matrix products, written on 2-D operands, below autograd, and a rule for the shapes that its
kernels take. It holds no state: the same backend object serves every layer of a recipe. The dispatch op knows a
backend by its `name` only, since a compiled graph can carry a string but not an object.

Legend: M = rows (batch * sequence), K = in_features, N = out_features.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

__all__ = ["RECIPES", "Backend", "compiled", "get", "register", "resolve"]


class Backend:
    """Three matmuls of one linear layer in low precision.

    A subclass gives `output`, `grad_input` and `grad_weight`; it may override `grads` where both gradients share work.
    Operands come in the compute dtype (`x_MK`, `grad_MN`) and in the parameter's own dtype (`weight_NK`); results go
    out in the dtype of the first operand. M is never 0.
    """

    name: str
    """What the user calls the recipe, and the key of the registry."""

    compiles: bool = False
    """Whether its products are compiled where the model is: see `compiled`."""

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
_COMPILED: dict[str, _Compiled] = {}

RECIPES = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_blockwise", "mxfp8", "int8")
"""The recipes that have a name; `recipe` also takes "auto", "fake(...)", a torchao config object or a `Backend`."""


def register(backend: Backend) -> Backend:
    """Makes `backend` known to the dispatch op; a later backend of the same name takes its place."""
    _REGISTRY[backend.name] = backend
    return backend


def get(name: str) -> Backend:
    """The registered backend called `name`."""
    return _REGISTRY[name]


def compiled(name: str) -> Backend:
    """The registered backend called `name`, its products compiled if it says that it `compiles`.

    A compiled model's layers take theirs from here. A cast is a dozen small kernels, which inductor makes one or two;
    without this, the opaque op would keep it from them. Whoever does not compile the model gets torchao's eager casts,
    to the bit, and waits for no compiler.
    """
    backend = _REGISTRY[name]
    if not backend.compiles:
        return backend
    if name not in _COMPILED or _COMPILED[name].eager is not backend:
        _COMPILED[name] = _Compiled(backend)
    return _COMPILED[name]


class _Compiled(Backend):
    """A backend with its products compiled: a graph for each size of weight, a tenth faster than one, for any rows."""

    def __init__(self, eager: Backend) -> None:
        self.eager, self.name, self.takes_rows = eager, eager.name, eager.takes_rows  # type: ignore[method-assign]
        self._outputs: dict[torch.Size, Callable[..., Tensor]] = {}
        self._grads: dict[tuple[torch.Size, bool, bool], Callable[..., tuple[Tensor | None, Tensor | None]]] = {}

    def output(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        size = weight_NK.shape
        if size not in self._outputs:
            self._outputs[size] = _compile(self.eager.output)
        return self._outputs[size](x_MK, weight_NK)

    def grads(
        self, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        key = weight_NK.shape, need_input, need_weight
        if key not in self._grads:
            self._grads[key] = _compile(partial(self.eager.grads, need_input=need_input, need_weight=need_weight))
        return self._grads[key](grad_MN, x_MK, weight_NK)


def _compile(product: Callable[..., Any]) -> Callable[..., Any]:
    """`product` compiled, its intermediate results rounded as in eager mode; itself where it cannot be compiled.

    Its last operand is the weight. A size of 1 stays eager: inductor refuses the float8 matmul of one row or column.
    """

    def call(*operands: Tensor) -> Any:
        return product(*operands)

    # A code object of its own has a cache of its own: dynamo keeps 8 graphs of one, and runs what is above in eager.
    call.__code__ = call.__code__.replace(co_name=f"{call.__name__}_{next(_NUMBERS)}")
    compiled_call: Callable[..., Any] = torch.compile(call, options={"emulate_precision_casts": True})

    def call_or_give_up(*operands: Tensor) -> Any:
        nonlocal compiled_call
        if any(1 in operand.shape for operand in operands):
            return product(*operands)
        with _below_autograd():
            *with_rows, weight_NK = operands
            operands = *map(_any_rows, with_rows), weight_NK.detach()
            try:
                return compiled_call(*operands)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = str(error).splitlines()[0]
                rank_zero_warn(f"a low-precision cast could not be compiled and runs eager, slower: {reason}")
                compiled_call = product
                return product(*operands)

    return call_or_give_up


_NUMBERS = itertools.count()


def _any_rows(operand_MK: Tensor) -> Tensor:
    """Without autograd, its number of rows marked as one that changes: a ragged batch has the graph of the others."""
    operand_MK = operand_MK.detach()
    torch._dynamo.maybe_mark_dynamic(operand_MK, 0)
    return operand_MK


@contextmanager
def _below_autograd() -> Iterator[None]:
    """The op has its own backward; inductor would make others, for each combination of tensors that require grad."""
    # A graph's first run happens inside of its compilation, with this key off; with it, dynamo makes another graph.
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(key):
        yield


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
