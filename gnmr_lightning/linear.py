"""The recoverable linear layer: one layer, two paths, and a switch that recompiles nothing.

A layer becomes recoverable by changing its class, not by being replaced: hooks, tied weights, wrappers and optimizers
hold the module object and its parameters, and all of these stay the same objects. Its forward reads the switch, a bool
tensor on the CPU, when it runs. To a compiled graph the switch is an input like any other, so flipping it invalidates
no graph; to a GPU it costs no synchronisation, since it never leaves the host.

Three ways to run it, equal to the bit but for what a compiler fuses: `_EagerLinear` without a compiler; `_GraphLinear`
in a compiled graph that has both paths as branches; and there, for what no graph can have, one opaque custom op.

The backward also counts the work done on each path into `flops`: the cost of recovery is then known without a hook, and
a layer that nobody calls shows.

In the steps in which the layer is probed, each low-precision product is compared with the exact one on a few of its
entries. The difference is all that recovery can remove, so it says who is sick where gradient norms only say that
somebody is. It is the product that is compared and not the casts, so it is the same for every backend, a user's own
included. See `_probe`. A recovered layer then tries low precision on a few rows beside its bf16 work, so that it is
known whether it is still sick. See `_tried`.

Legend: M = rows (batch * sequence), K = in_features, N = out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import backends
from .backends import Backend

LOW, BF16, FALLBACK_CALLS = 0, 1, 2
"""Slots of a layer's `flops` tensor: matmul FLOPs in low precision, in bf16, and calls whose shape forced bf16."""


class RecoverableLinear(nn.Linear):
    """An `nn.Linear` that runs in low precision, or in bf16 while its unit is recovered.

    Never constructed: `make_recoverable` turns an existing layer into one, `restore_plain` turns it back. Copies and
    pickles of it are plain layers, so a model taken out of the run carries nothing of this package.
    """

    plain_class: type[nn.Linear] = nn.Linear
    recovered: Tensor  # (), bool, CPU: the unit's switch, shared by its layers
    probed: Tensor  # (), bool, CPU: whether the unit is probed in this step, shared alike
    flops: Tensor  # (3,), float64, CPU: see LOW, BF16, FALLBACK_CALLS
    probes: Tensor  # (3, 4), float32, on the layer's device: sums of `_probe` for output, grad_input, grad_weight, or
    # (0, 4) where nobody asks
    backend: str  # key of backends.get

    def forward(self, input: Tensor) -> Tensor:
        # What autocast does for F.linear; the weight is cast (or quantised, from full precision) inside the op.
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        x_MK = input.reshape(-1, input.shape[-1])
        run = _EagerLinear.apply
        if torch.compiler.is_compiling():
            fits = _fits_a_graph(x_MK, self.weight, backends.get(self.backend))
            run = _GraphLinear.apply if fits else _ops.linear
        probes = self.probes if torch.is_grad_enabled() else self.probes[:0]
        y_MN, probe = run(x_MK, self.weight, self.bias, self.recovered, self.probed, self.flops, probes, self.backend)
        if len(probes) and not y_MN.requires_grad:  # frozen, behind a frozen input: no backward will come and take it
            probes[0].add_(probe)
        return y_MN.view(*input.shape[:-1], y_MN.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.backend}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {k: v for k, v in self.__dict__.items() if k not in _ATTRIBUTES}
        return _new_plain, (self.plain_class,), state


def _new_plain(cls: type[nn.Linear]) -> nn.Linear:
    return cls.__new__(cls)


def _plain_copy(linear: RecoverableLinear, memo: dict[int, Any]) -> nn.Linear:
    copy = linear.plain_class.__deepcopy__(linear, memo)  # type: ignore[attr-defined]
    restore_plain(copy)
    return copy


_ATTRIBUTES = ("recovered", "probed", "flops", "probes", "backend")
_CLASSES: dict[type[nn.Linear], type[RecoverableLinear]] = {nn.Linear: RecoverableLinear}


def make_recoverable(
    linear: nn.Linear,
    recovered: Tensor,
    probed: Tensor,
    backend: str,
    *,
    probing: bool = True,
    device: torch.device | None = None,
) -> None:
    """Turns `linear` into a `RecoverableLinear` in place; one that is recoverable already gets a new switch and recipe.

    Args:
        linear: a layer whose class has `nn.Linear`'s own forward.
        recovered: the switch, a bool CPU tensor of shape (), shared with the other layers of its unit.
        probed: whether products are compared with exact ones, a bool CPU tensor of shape (), shared alike.
        backend: name of a registered backend.
        probing: whether anybody will ask for that.
        device: where the layer will run; None where its weight is now.
    """
    # FSDP2 gives a sharded layer a class of its own; the new class derives from it, so that it stays sharded.
    cls = type(linear)
    if not issubclass(cls, RecoverableLinear):
        if cls not in _CLASSES:
            members: dict[str, Any] = {"plain_class": cls}
            if hasattr(cls, "__deepcopy__"):  # of a parametrization, for instance spectral_norm's; it copies the class
                members["__deepcopy__"] = _plain_copy
            _CLASSES[cls] = type(f"Recoverable{cls.__name__}", (RecoverableLinear, cls), members)
        linear.__class__ = _CLASSES[cls]
    flops = torch.zeros(3, dtype=torch.float64, device="cpu")
    probes = torch.zeros(3 if probing else 0, 4, dtype=torch.float32, device=device or linear.weight.device)
    for name, value in zip(_ATTRIBUTES, (recovered, probed, flops, probes, backend), strict=True):
        linear.__dict__[name] = value


def restore_plain(linear: nn.Linear) -> None:
    """Gives a recoverable layer its plain class back, in place."""
    assert isinstance(linear, RecoverableLinear)
    linear.__class__ = linear.plain_class  # type: ignore[assignment]
    for name in _ATTRIBUTES:
        del linear.__dict__[name]


def _takes(x_MK: Tensor, backend: Backend) -> bool:
    rows = x_MK.shape[0]
    return rows > 0 and backend.takes_rows(rows, x_MK.device.type)


def _no_autocast(x_MK: Tensor) -> AbstractContextManager:
    """Backends choose their dtypes; autocast would round the products inside the CPU's scaled matmul once more."""
    device_type = x_MK.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


_PROBE_ROWS, _PROBE_COLUMNS = 16, 32


def _probe(product_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """What sampled entries of a low-precision product left @ right say about its error, (4,), float32.

    Squared error and squared norm of the sampled entries against their product in float32; then two squared norms that
    tell where a value stopped being finite: of one column of the product, and of one column of the left operand. One
    column will do: an operand's bad entry spoils its whole row.
    """
    rows = slice(None, None, max(1, product_MN.shape[0] // _PROBE_ROWS) | 1)  # odd: in step with no period of the data
    columns = slice(None, None, max(1, product_MN.shape[1] // _PROBE_COLUMNS) | 1)
    exact = left_MK[rows].float() @ right_KN[:, columns].float()
    sampled = [product_MN[rows, columns] - exact, exact, product_MN[:, 0], left_MK[:, 0]]
    return torch.stack(torch._foreach_norm(sampled, 2, torch.float32)).square_()


def _asks(probes: Tensor, probed: Tensor) -> bool:
    return len(probes) > 0 and bool(probed.item())


_TRIED_ROWS = 32  # kernels take multiples of 16 rows, and int8 more than 16


def _tried(operand_MK: Tensor) -> Tensor:
    """The rows on which a recovered layer tries low precision, evenly spread."""
    return operand_MK[:: max(1, operand_MK.shape[0] // _TRIED_ROWS)][:_TRIED_ROWS].contiguous()


def _probe_output(product_MN: Tensor | None, x_MK: Tensor, weight_NK: Tensor, probed: Tensor, name: str) -> Tensor:
    """What probing the output shows, (4,): of the low-precision product, or, without one, of one that is tried."""
    if probed.item():
        backend = backends.get(name)
        with _no_autocast(x_MK):
            if product_MN is not None:
                return _probe(product_MN, x_MK, weight_NK.t())
            if _takes(tried_MK := _tried(x_MK), backend):
                return _probe(backend.output(tried_MK, weight_NK), tried_MK, weight_NK.t())
    return x_MK.new_zeros(4, dtype=torch.float32)


def _note(
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_MN: Tensor,
    x_MK: Tensor,
    weight_NK: Tensor,
    recovered: Tensor,
    probed: Tensor,
    flops: Tensor,
    probes: Tensor,
    probe: Tensor,
    name: str,
) -> None:
    """Adds a backward's work to `flops`, and what probing its gradients shows to `probes`, with the forward's `probe`.

    The gradients are as the backward made them, None for one that nobody needs.
    """
    backend = backends.get(name)
    low = not recovered.item() and _takes(x_MK, backend)
    needed = [grad_input is not None, grad_weight is not None]
    matmuls = 1 + sum(needed)  # the forward one is counted here too: see the module's docstring
    flops[LOW if low else BF16].add_(2.0 * grad_MN.shape[0] * weight_NK.numel() * matmuls)
    if not low and not recovered.item() and x_MK.shape[0] > 0:
        flops[FALLBACK_CALLS].add_(1)
    if not _asks(probes, probed):
        return
    with _no_autocast(x_MK):
        if not low:
            if not recovered.item() or not _takes(x_MK := _tried(x_MK), backend):
                return
            grad_MN = _tried(grad_MN)
            grad_input, grad_weight = backend.grads(
                grad_MN, x_MK, weight_NK, need_input=needed[0], need_weight=needed[1]
            )
        probes[0].add_(probe)
        if grad_input is not None:
            probes[1].add_(_probe(grad_input, grad_MN, weight_NK))
        if grad_weight is not None:
            probes[2].add_(_probe(grad_weight, grad_MN.t(), x_MK))


def _bf16_grads(
    grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, need_input: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        grad_MN @ weight_NK.to(grad_MN.dtype) if need_input else None,
        grad_MN.t() @ x_MK if need_weight else None,
    )


def _forward_kernel(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    recovered: Tensor,
    probed: Tensor,
    flops: Tensor,
    probes: Tensor,
    name: str,
) -> tuple[Tensor, Tensor]:
    backend, product_MN = backends.get(name), None
    bias_N = None if bias_N is None else bias_N.to(x_MK.dtype)
    if not recovered.item() and _takes(x_MK, backend):
        with _no_autocast(x_MK):
            product_MN = backend.output(x_MK, weight_NK)
        y_MN = product_MN if bias_N is None else product_MN + bias_N
    else:
        y_MN = F.linear(x_MK, weight_NK.to(x_MK.dtype), bias_N)
    if _asks(probes, probed) and (product_MN is not None or recovered.item()):
        return y_MN, _probe_output(product_MN, x_MK, weight_NK, probed, name)
    return y_MN, probes.new_zeros(4)


def _backward_kernel(
    grad_MN: Tensor,
    x_MK: Tensor,
    weight_NK: Tensor,
    recovered: Tensor,
    probed: Tensor,
    flops: Tensor,
    probes: Tensor,
    probe: Tensor,
    name: str,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    backend = backends.get(name)
    low = not recovered.item() and _takes(x_MK, backend)
    with _no_autocast(x_MK):
        product = backend.grads if low else _bf16_grads
        grads = product(grad_MN, x_MK, weight_NK, need_input=need_input, need_weight=need_weight)
    # In the layout that the op's fake promises to the compiler; and probes of the same layouts are equal to the bit.
    grad_input, grad_weight = (grad if grad is None else grad.contiguous() for grad in grads)
    _note(grad_input, grad_weight, grad_MN, x_MK, weight_NK, recovered, probed, flops, probes, probe, name)
    nothing = grad_MN.new_empty(0)  # an op must return tensors
    return nothing if grad_input is None else grad_input, nothing if grad_weight is None else grad_weight


# In a compiled graph. They read the host's switches, which no replay of a CUDA graph would do: it must leave them out.
# Not torch.library.custom_op, whose wrapper costs a layer 0.08 ms more a step.
for _name, _operands, _kernel in (
    (
        "gnmr_lightning::linear",
        "Tensor x_MK, Tensor weight_NK, Tensor? bias_N, Tensor recovered, Tensor probed, Tensor flops, Tensor probes, "
        "str name) -> (Tensor, Tensor",
        _forward_kernel,
    ),
    (
        "gnmr_lightning::linear_backward",
        "Tensor grad_MN, Tensor x_MK, Tensor weight_NK, Tensor recovered, Tensor probed, Tensor(a!) flops, "
        "Tensor(b!) probes, Tensor probe, str name, bool need_input, bool need_weight) -> (Tensor, Tensor",
        _backward_kernel,
    ),
    (
        "gnmr_lightning::probe_output",
        "Tensor? product_MN, Tensor x_MK, Tensor weight_NK, Tensor probed, str name) -> (Tensor",
        _probe_output,
    ),
    (
        "gnmr_lightning::note",
        "Tensor? grad_input, Tensor? grad_weight, Tensor grad_MN, Tensor x_MK, Tensor weight_NK, Tensor recovered, "
        "Tensor probed, Tensor(a!) flops, Tensor(b!) probes, Tensor probe, str name) -> (",
        _note,
    ),
):
    torch.library.define(_name, f"({_operands})", tags=[torch.Tag.cudagraph_unsafe])
    torch.library.impl(_name, "default", _kernel)
_ops = torch.ops.gnmr_lightning


@torch.library.register_fake("gnmr_lightning::linear")
def _(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Any, recovered: Any, probed: Any, flops: Any, probes: Tensor, name: Any
) -> tuple[Tensor, Tensor]:
    return x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]), probes.new_empty(4)


@torch.library.register_fake("gnmr_lightning::linear_backward")
def _(
    grad_MN: Tensor,
    x_MK: Tensor,
    weight_NK: Tensor,
    recovered: Any,
    probed: Any,
    flops: Any,
    probes: Any,
    probe: Any,
    name: Any,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        grad_MN.new_empty(x_MK.shape if need_input else 0),
        grad_MN.new_empty(weight_NK.shape if need_weight else 0),
    )


@torch.library.register_fake("gnmr_lightning::probe_output")
def _(product_MN: Any, x_MK: Tensor, weight_NK: Any, probed: Any, name: Any) -> Tensor:
    return x_MK.new_empty(4, dtype=torch.float32)


@torch.library.register_fake("gnmr_lightning::note")
def _(*operands: Any) -> None:
    pass


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_MK, weight_NK, _, recovered, probed, flops, probes, name = inputs
    # The switch is saved too: a flip between forward and backward is then autograd's usual error, not a wrong gradient.
    ctx.save_for_backward(x_MK, weight_NK, recovered, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.probed, ctx.flops, ctx.probes, ctx.name = probed, flops, probes, name


def _backward(
    kernel: Callable[..., tuple[Tensor, Tensor]], ctx: Any, grad_MN: Tensor, _: Any
) -> tuple[Tensor | None, ...]:
    x_MK, weight_NK, recovered, probe = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_input, grad_weight = kernel(
        grad_MN,
        x_MK,
        weight_NK,
        recovered,
        ctx.probed,
        ctx.flops,
        ctx.probes,
        probe,
        ctx.name,
        need_input,
        need_weight,
    )
    return (
        grad_input if need_input else None,
        grad_weight if need_weight else None,
        grad_MN.sum(0) if need_bias else None,
        *(None,) * 5,
    )


torch.library.register_autograd(
    "gnmr_lightning::linear", partial(_backward, _ops.linear_backward), setup_context=_setup_context
)


class _EagerLinear(torch.autograd.Function):
    """The same two kernels without the op around them, whose dispatch costs an eager run about 0.1 ms a layer.

    Its forward takes the context: with a `setup_context` of its own, torch binds each call's arguments by the
    signature, which costs about as much again.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward_kernel(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(partial(_backward, _backward_kernel))


_HAS_COND = torch.__version__ >= "2.13"
"""Whether torch.cond can be a branch of an autograd function in a compiled graph: not tried with an older torch."""


@torch.compiler.assume_constant_result
def _all_dynamic() -> bool:
    """torch.compile(dynamic=True) makes even torchao's float constants symbols, which no two branches can share."""
    return not torch._dynamo.config.assume_static_by_default


def _fits_a_graph(x_MK: Tensor, weight_NK: Tensor, backend: Backend) -> bool:
    """Whether both paths can be part of a compiled graph; inductor refuses the float8 matmul of one row or column."""
    if not (_HAS_COND and backend.compiles) or _all_dynamic():
        return False
    return 1 not in (*x_MK.shape, *weight_NK.shape) and _takes(x_MK, backend)


class _GraphLinear(torch.autograd.Function):
    """Both paths as branches of the compiled graph, where the compiler sees, and fuses, the casts.

    `torch.cond` reads the switch when it runs. Counting and probing stay ops, opaque and eager. Autocast is left as it
    is: operands have the dtype that it would give them, and switched off here, it was off behind the layer, too (2.13).
    """

    @staticmethod
    def forward(
        x_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        recovered: Tensor,
        probed: Tensor,
        flops: Tensor,
        probes: Tensor,
        name: str,
    ) -> tuple[Tensor, Tensor]:
        backend, probing = backends.get(name), len(probes) > 0

        def low(x_MK: Tensor, weight_NK: Tensor) -> tuple[Tensor, ...]:
            product_MN = backend.output(x_MK, weight_NK)
            y_MN = (product_MN if bias_N is None else product_MN + bias_N.to(x_MK.dtype)).contiguous()
            return (y_MN, _ops.probe_output(product_MN, x_MK, weight_NK, probed, name)) if probing else (y_MN,)

        def bf16(x_MK: Tensor, weight_NK: Tensor) -> tuple[Tensor, ...]:
            y_MN = F.linear(x_MK, weight_NK.to(x_MK.dtype), None if bias_N is None else bias_N.to(x_MK.dtype))
            return (y_MN, _ops.probe_output(None, x_MK, weight_NK, probed, name)) if probing else (y_MN,)

        y_MN, *rest = torch.cond(recovered, bf16, low, (x_MK, weight_NK))
        return y_MN, rest[0] if probing else probes.new_zeros(4)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK, recovered, probe = ctx.saved_tensors
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        backend, need = backends.get(ctx.name), {"need_input": need_input, "need_weight": need_weight}

        def low(*operands: Tensor) -> tuple[Tensor, ...]:
            return tuple(grad.contiguous() for grad in backend.grads(*operands, **need) if grad is not None)

        def bf16(*operands: Tensor) -> tuple[Tensor, ...]:
            return tuple(grad.contiguous() for grad in _bf16_grads(*operands, **need) if grad is not None)

        grads = iter(())
        if need_input or need_weight:
            grads = iter(torch.cond(recovered, bf16, low, (grad_MN.contiguous(), x_MK, weight_NK)))
        grad_input, grad_weight = (next(grads) if needed else None for needed in need.values())
        _ops.note(
            grad_input,
            grad_weight,
            grad_MN,
            x_MK,
            weight_NK,
            recovered,
            ctx.probed,
            ctx.flops,
            ctx.probes,
            probe,
            ctx.name,
        )
        return grad_input, grad_weight, grad_MN.sum(0) if need_bias else None, *(None,) * 5
