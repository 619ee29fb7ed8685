"""How a model is cut into recoverable units, and why a linear layer is left out.

A unit is what recovery moves: one linear layer, or all linear layers of one repeated block. Only a layer that is
really called as an `nn.Linear` can be moved, so every layer that is not, or that nobody wants in 8 bits, is listed as
skipped with its reason. Nothing is left out silently.

A layer that PEFT has wrapped is watched through its wrapper: its own weight is frozen and has no gradient, but a fault
in its products reaches the gradients of the adapters around it. The adapters themselves stay in the base precision:
one of their sizes is the rank, mostly too small for 8 bits to pay, and they are all that is trained.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from .linear import RecoverableLinear

Granularity = Literal["linear", "block"]

_HEAD_NAMES = ("lm_head", "head", "output", "classifier", "score", "embed_out", "fc_out", "output_projection")


@dataclass(frozen=True)
class RecoverableUnit:
    """One unit: what is measured, ranked and moved as a whole."""

    name: str
    """The layer's fully qualified name, or the block's."""
    linears: dict[str, nn.Linear] = field(repr=False)
    """Its layers by fully qualified name."""
    wrappers: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    """PEFT's wrappers around these layers, by the layer's name; they hold the adapters, and the layer itself."""

    @property
    def fqns(self) -> list[str]:
        """The fully qualified names of its layers."""
        return list(self.linears)

    @property
    def observed(self) -> list[nn.Parameter]:
        """The parameters whose gradients it is watched by, where they have one: its layers', and their adapters'."""
        modules = [self.wrappers.get(fqn, linear) for fqn, linear in self.linears.items()]
        return [parameter for module in modules for parameter in module.parameters()]


@dataclass(frozen=True)
class Skipped:
    """A linear layer (or a Conv1D of transformers, which is one) that stays as it is, and why."""

    fqn: str
    reason: str


def cut(
    model: nn.Module,
    *,
    granularity: Granularity = "linear",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    recipes: Sequence[str] | None = None,
    refuses_layer: Callable[[str, nn.Linear], str | None] = lambda fqn, linear: None,
) -> tuple[list[RecoverableUnit], list[Skipped]]:
    """Cuts `model` into recoverable units, in the order in which the model registers its layers.

    Args:
        model: any module; it is not changed.
        granularity: "linear", a unit per layer; or "block", a unit per element of each repeated `nn.ModuleList`, and a
            unit per layer outside of these.
        include: fnmatch patterns on fully qualified names. None takes every layer but the output head; given patterns
            take exactly what they match, the head too.
        exclude: fnmatch patterns of layers to leave out.
        recipes: where recipes are given by pattern, the fnmatch patterns in their order; as for `include`, only layers
            that match one are taken, the head too.
        refuses_layer: the backends' rule: (name, layer) -> why no call of this layer can run in low precision, or None.

    Returns:
        The units and the linear layers that belong to none.

    Raises:
        ValueError: an unknown granularity, a pattern that matches no linear layer, a recipe's pattern that is never the
            first to match, or no unit at all.
    """
    if granularity not in get_args(Granularity):
        raise ValueError(f"granularity={granularity!r} is not known: write 'linear' or 'block'")
    check_patterns(include, exclude)
    modules = dict(model.named_modules())
    linears = {fqn: module for fqn, module in modules.items() if isinstance(module, nn.Linear)}
    names = [fqn for fqn, module in modules.items() if fqn in linears or _is_conv1d(module)]
    for pattern in (*(include or ()), *exclude, *(recipes or ())):
        if not any(fnmatchcase(fqn, pattern) for fqn in names):
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3) or names[:5]
            raise ValueError(
                f"the pattern {pattern!r} matches no linear layer; the nearest names are {', '.join(near) or 'none'}"
            )

    recipe_of = {fqn: first_match(recipes or (), fqn) for fqn in names}
    for pattern in recipes or ():
        if pattern not in recipe_of.values():
            raise ValueError(
                f"the recipe of {pattern!r} is for no layer: the first match wins, and those before it match all that "
                "it matches, so put it before them"
            )

    never_called = {
        f"{fqn}.out_proj" if fqn else "out_proj"
        for fqn, module in modules.items()
        if isinstance(module, nn.MultiheadAttention)
    }
    of_peft = {fqn: module for fqn, module in modules.items() if _is_of_peft(module)}
    wrappers = {fqn: module for fqn, module in of_peft.items() if hasattr(module, "base_layer")}
    peft = {fqn: why for fqn in names if (why := _left_to_peft(fqn, of_peft)) is not None}
    by_name = include is not None or recipes is not None
    heads = {} if by_name else _heads(model, {fqn: linear for fqn, linear in linears.items() if fqn not in peft})
    taken: dict[str, nn.Linear] = {}
    skipped = []
    for fqn in names:
        if any(fnmatchcase(fqn, pattern) for pattern in exclude):
            reason: str | None = "matches exclude"
        elif include is not None and not any(fnmatchcase(fqn, pattern) for pattern in include):
            reason = "matches no include pattern"
        elif recipes is not None and recipe_of[fqn] is None:
            reason = "matches no recipe's pattern"
        elif fqn in never_called:
            reason = "nn.MultiheadAttention reads its weight and never calls it"
        elif fqn in peft:
            reason = peft[fqn]
        elif fqn not in linears:
            reason = "a Conv1D of transformers, no nn.Linear: its weight is transposed"
        elif fqn in heads:
            reason = heads[fqn]
        else:
            reason = _not_plain(linears[fqn]) or refuses_layer(fqn, linears[fqn])
        if reason is None:
            taken[fqn] = linears[fqn]
        else:
            skipped.append(Skipped(fqn, reason))
    if not taken:
        reasons = "; ".join(f"{s.fqn}: {s.reason}" for s in skipped[:20]) or "the model has no nn.Linear"
        raise ValueError(f"no linear layer is left to train in low precision ({reasons}): name some in include")

    blocks = list(_blocks(model)) if granularity == "block" else []
    grouped: dict[str, dict[str, nn.Linear]] = {}
    for fqn, linear in taken.items():
        name = next((block for block in blocks if fqn.startswith(f"{block}.")), fqn)
        grouped.setdefault(name, {})[fqn] = linear
    around = {fqn: wrapper for fqn in taken if (wrapper := _outermost_wrapper(fqn, wrappers)) is not None}
    units = [
        RecoverableUnit(name, members, {fqn: around[fqn] for fqn in members if fqn in around})
        for name, members in grouped.items()
    ]
    return units, skipped


def first_match(patterns: Iterable[str], fqn: str) -> str | None:
    """The first of the fnmatch patterns that `fqn` matches; None if there is none."""
    return next((pattern for pattern in patterns if fnmatchcase(fqn, pattern)), None)


def check_patterns(include: Sequence[str] | None, exclude: Sequence[str]) -> None:
    """Refuses a string where a list of patterns is meant: its letters would be taken for patterns.

    Raises:
        ValueError: it is one.
    """
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise ValueError(f"{argument}={patterns!r} is one string: write a list of patterns, [{patterns!r}]")


def _not_plain(linear: nn.Linear) -> str | None:
    """Why `linear` is not called as a plain nn.Linear; None if it is."""
    if isinstance(linear, RecoverableLinear):
        return None
    if type(linear).forward is not nn.Linear.forward or "forward" in linear.__dict__:
        return f"{type(linear).__name__} has a forward of its own"
    if any(is_lazy(parameter) for parameter in linear.parameters()):
        return "a lazy layer whose sizes are not known yet: run one batch through the model first"
    # torchao's converted weights and other wrappers compute in their own way; DTensor is how FSDP2 shards.
    kind = type(linear.weight.data).__name__
    if kind not in ("Tensor", "DTensor"):
        return f"its weight is a {kind}, which computes in its own way"
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the layer that GPT-2 is made of; `transformers` may not be installed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _is_of_peft(module: nn.Module) -> bool:
    """Whether PEFT put it around a layer; `peft` may not be installed."""
    wraps = hasattr(module, "base_layer") or hasattr(module, "original_module")
    return wraps and any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def _outermost_wrapper(fqn: str, wrappers: dict[str, nn.Module]) -> nn.Module | None:
    """The wrapper that `fqn` is the base layer of, and around any others that are."""
    found = None
    while fqn.endswith(".base_layer"):
        fqn = fqn.removesuffix(".base_layer")
        found = wrappers.get(fqn, found)
    return found


def _left_to_peft(fqn: str, of_peft: dict[str, nn.Module]) -> str | None:
    """Why the layer called `fqn` stays as it is for what it is to the module of PEFT around it; None if it does not."""
    parts = fqn.split(".")
    for depth, part in enumerate(parts[1:], 1):
        module = of_peft.get(".".join(parts[:depth]))
        if module is None:
            continue
        if part == "original_module":
            return "PEFT trains a copy of it instead"
        if hasattr(module, "base_layer") and part != "base_layer":
            return "an adapter of PEFT, left in the base precision"
    return None


def _unwrapped(fqn: str) -> str:
    """The name that a layer had before PEFT wrapped it or made a copy of it to train."""
    return re.sub(r"(\.base_layer|\.modules_to_save\.[^.]+)+$", "", fqn)


def _heads(model: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, str]:
    """The output heads with the reason each is taken for one; by position where neither name nor tying tells."""
    # Kept, not only their ids: a parametrized weight is made at each access, and the next one may get its id.
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    embeddings = {id(weight) for weight in weights}
    # Hugging Face models say which layer it is.
    getters = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    said_so = [getter() for getter in getters if callable(getter)]
    said = {id(part) for head in said_so if isinstance(head, nn.Module) for part in head.modules()}
    # A model that says so needs no guess inside its blocks, whose last layer may have such a name: GPT-J's "fc_out".
    blocks = tuple(f"{block}." for block in _blocks(model)) if said else ()
    heads = {}
    for fqn, linear in linears.items():
        named = _unwrapped(fqn).rpartition(".")[2] in _HEAD_NAMES and not fqn.startswith(blocks)
        if id(linear) in said or named:
            heads[fqn] = "the output head"
        elif id(linear.weight) in embeddings:
            heads[fqn] = "tied to an embedding, so the output head"
    if not heads and linears:
        heads[list(linears)[-1]] = "the last linear layer, taken for the output head: include=['*'] takes it too"
    return heads


def _blocks(model: nn.Module) -> Iterator[str]:
    """Names of the elements of the outermost repeated ModuleLists that hold linear layers."""
    seen: list[str] = []
    for fqn, module in model.named_modules():
        repeated = isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(m) for m in module}) == 1
        if not repeated or any(fqn.startswith(f"{outer}.") for outer in seen):
            continue
        if any(isinstance(m, nn.Linear) for m in module.modules()) and not isinstance(module[0], nn.Linear):
            seen.append(fqn)
            yield from (f"{fqn}.{index}" for index in range(len(module)))
