"""The signal: gradient norms and product errors of the units, one of each per optimizer step, from one pass.

The pass covers every parameter of the optimizer, not only the units': gradient clipping by norm and the check for
non-finite gradients then need no pass of their own. It costs one foreach kernel, one collective per sharded mesh, and
one host synchronisation, which brings the squared norms of all parameters (8 bytes each) to the CPU; the sums per unit
are made there, in a fixed order and in float64, so that every rank decides on the same numbers.

Where layers probe their low-precision products (see `linear._probe`), the sums of the step travel in that same copy,
48 bytes a layer, and are set to zero. With several ranks they are added up over all of them first, one collective:
what is then compared is the error of the whole batch's products, as the gradient is the whole batch's.

Legend: P = parameters of the optimizer that have a gradient, L = layers that probe, U = units.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .linear import RecoverableLinear
from .units import RecoverableUnit


@dataclass(frozen=True)
class Signal:
    """What was measured in one optimizer step."""

    norms: Tensor
    """(U,), float64, CPU: L2 norm of the gradients of each unit's observed parameters; 0 where there are none."""
    stepping: Tensor
    """(U,), bool: the units that the optimizer owns a parameter of, and those that the run leaves frozen."""
    present: Tensor
    """(U,), bool: the units that have a gradient in this step."""
    total_norm: float
    """L2 norm of all gradients of the optimizer, over all ranks; inf or nan where one of them is not finite."""
    errors: Tensor
    """(U, 3), float64, CPU: relative error of the unit's low-precision products for output, grad_input and grad_weight
    (root of the sampled squared error over the sampled squared norm; of several layers the largest); nan where the
    unit ran none, inf where it is not finite."""
    began: Tensor
    """(U,), bool: a value stopped being finite inside one of the unit's low-precision products."""
    gradients: list[Tensor]
    """The measured gradients, P of them, local shards where they are sharded, coalesced where they are sparse."""
    versions: list[int]
    """Their autograd versions when they were measured: unequal now means that somebody changed one since."""

    @property
    def finite(self) -> bool:
        """Whether every gradient of the optimizer is finite."""
        return math.isfinite(self.total_norm)

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether these are still the optimizer's gradients, unchanged since they were measured."""
        now = _gradients(optimizer)
        return len(now) == len(self.gradients) and all(
            a is b and a._version == v for (_, a), b, v in zip(now, self.gradients, self.versions, strict=True)
        )


class UnitNorms:
    """Measures the gradient norm of each unit.

    Args:
        units: the units; each is measured through the parameters of its layers and of their adapters that the optimizer
            owns. One without any to train still has products: its errors are taken by each optimizer that steps.
        distributed: whether other ranks train the same model, so that product errors are those of all ranks.
    """

    def __init__(self, units: Sequence[RecoverableUnit], *, distributed: bool = False) -> None:
        self._units = units
        self._distributed = distributed
        # Of the whole run: Lightning's toggle_optimizer freezes what the other optimizers own, for a step.
        self._frozen = [i for i, unit in enumerate(units) if not _trains(unit)]
        self._plans: weakref.WeakKeyDictionary[Optimizer, _Plan] = weakref.WeakKeyDictionary()

    def measure(self, optimizer: Optimizer) -> Signal:
        """The signal of this optimizer's complete, unscaled gradients. Takes the product errors: they begin anew."""
        plan = self._plan(optimizer)
        rest = len(self._units)  # parameters outside of all units are summed behind the last one
        found = _gradients(optimizer)
        gradients = [gradient for _, gradient in found]
        on_device = [*_squared_norms([p for p, _ in found], gradients), *_take_probes(plan.layers, self._distributed)]
        # From here on numpy: on arrays this small, torch's calls cost several times as much.
        measured = torch.cat([part.flatten() for part in on_device]).cpu().numpy() if on_device else np.zeros(0)
        squares_P, probes = measured[: len(found)], measured[len(found) :].reshape(-1, 3, 4)
        errors, began = _errors(probes, plan.unit_L, rest)
        unit_P = np.fromiter((plan.unit_of.get(id(p), rest) for p, _ in found), dtype=np.intp, count=len(found))
        with np.errstate(over="ignore"):
            squares = np.bincount(unit_P, weights=squares_P, minlength=rest + 1)
            total = squares_P.sum()
        return Signal(
            norms=torch.from_numpy(np.sqrt(squares[:rest])),
            stepping=plan.stepping_U,
            present=torch.from_numpy(np.bincount(unit_P, minlength=rest + 1)[:rest] > 0),
            total_norm=math.sqrt(total),
            errors=torch.from_numpy(errors),
            began=torch.from_numpy(began),
            gradients=gradients,
            versions=[gradient._version for gradient in gradients],
        )

    def _plan(self, optimizer: Optimizer) -> _Plan:
        """What of the units belongs to this optimizer; made again when parameters were added."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if (plan := self._plans.get(optimizer)) is None or plan.count != count:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unit_of: dict[int, int] = {}
            for index, unit in enumerate(self._units):
                for parameter in unit.observed:
                    if id(parameter) in owned:  # one shared by two units is measured with the first
                        unit_of.setdefault(id(parameter), index)
            stepping = torch.zeros(len(self._units), dtype=torch.bool, device="cpu")
            frozen = [i for i in self._frozen if not _trains(self._units[i])]  # a finetuning callback may thaw some
            stepping[[*set(unit_of.values()), *frozen]] = True
            layers: list[RecoverableLinear] = []
            indices: list[int] = []
            for index in stepping.nonzero().flatten().tolist():
                for linear in self._units[index].linears.values():
                    if isinstance(linear, RecoverableLinear) and len(linear.probes):
                        layers.append(linear)
                        indices.append(index)
            plan = _Plan(count, unit_of, stepping, layers, np.array(indices, dtype=np.intp))
            self._plans[optimizer] = plan
        return plan


@dataclass(frozen=True)
class _Plan:
    """Which of the units' parameters and layers are one optimizer's."""

    count: int
    unit_of: dict[int, int]  # by id of the parameter
    stepping_U: Tensor
    layers: list[RecoverableLinear]  # those that probe
    unit_L: NDArray[np.intp]


def _trains(unit: RecoverableUnit) -> bool:
    return any(parameter.requires_grad for parameter in unit.observed)


def scale_gradients(signal: Signal, factor: float) -> None:
    """Multiplies the measured gradients by `factor`, in place."""
    if signal.gradients:
        torch._foreach_mul_(_dense(signal.gradients), factor)


def _gradients(optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
    """The optimizer's parameters that have a gradient, with their gradient's local values."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                if isinstance(gradient, DTensor):
                    gradient = gradient._local_tensor
                elif gradient.is_sparse and not gradient.is_coalesced():
                    # A row that was looked up twice is there twice, and has no norm before the two are added.
                    gradient = parameter.grad = gradient.coalesce()
                found.append((parameter, gradient))
    return found


def _dense(gradients: list[Tensor]) -> list[Tensor]:
    """The values of each gradient, sharing its memory; those of the rows that are there where it is sparse."""
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


def _take_probes(layers: list[RecoverableLinear], distributed: bool) -> list[Tensor]:
    """What the layers' products have shown since the last time, [(L, 3, 4)] or nothing; they begin anew."""
    if not layers:
        return []
    probes = [linear.probes for linear in layers]
    taken = torch.stack([probe.to(probes[0].device) for probe in probes])
    torch._foreach_zero_(probes)
    if distributed:
        dist.all_reduce(taken)
    return [taken.double()]


def _errors(probes: NDArray, unit_L: NDArray, n_units: int) -> tuple[NDArray, NDArray]:
    """`Signal.errors` and `Signal.began` from the layers' probes (L, 3, 4)."""
    errors = np.full((n_units, 3), math.nan)
    began = np.zeros(n_units, dtype=bool)
    if len(probes):
        error, exact, product, operand = probes.transpose(2, 0, 1)
        with np.errstate(all="ignore"):
            relative = np.sqrt(error / exact)
        relative[np.isnan(relative)] = math.inf
        # No product, or one without a finite operand, says nothing about the layer.
        relative[~((exact > 0) & (exact < math.inf))] = math.nan
        np.fmax.at(errors, unit_L, relative)
        began[unit_L[((relative == math.inf) | (np.isfinite(operand) & ~np.isfinite(product))).any(1)]] = True
    return errors, began


def _squared_norms(parameters: list[nn.Parameter], gradients: list[Tensor]) -> list[Tensor]:
    """Squared L2 norm of each gradient over all of its shards, [(P,)] in float64 on the device, or nothing."""
    if not gradients:
        return []
    device = gradients[0].device
    double = any(gradient.dtype is torch.float64 for gradient in gradients)
    norms = _norms(_dense(gradients), torch.float64 if double else torch.float32)
    squares_P = torch.stack([norm.to(device) for norm in norms]).double().square()
    meshes: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            meshes.setdefault(_sharding_groups(parameter), []).append(index)
    for groups, indices in meshes.items():
        part = squares_P[indices]
        for group in groups:
            dist.all_reduce(part, group=group)
        squares_P[indices] = part
    return [squares_P]


_PIECE = 2**17  # elements


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """L2 norm of each gradient.

    A CPU first copies a gradient of another dtype into `dtype`, all of it: in pieces that stays small, and in cache.
    """
    pieces = [
        gradient.reshape(-1).split(_PIECE)
        if gradient.device.type == "cpu" and gradient.dtype is not dtype and gradient.numel() > _PIECE
        else (gradient,)
        for gradient in gradients
    ]
    norms = iter(torch._foreach_norm([piece for of_one in pieces for piece in of_one], 2, dtype=dtype))
    return [
        torch.linalg.vector_norm(torch.stack([next(norms) for _ in of_one])) if len(of_one) > 1 else next(norms)
        for of_one in pieces
    ]


def _sharding_groups(parameter: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which the parameter's values are spread; replicas hold them all."""
    return tuple(
        parameter.device_mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if place.is_shard()
    )
