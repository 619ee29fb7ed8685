"""GNMRPrecision: the Lightning plugin that trains linear layers in 8 bits and moves units to bf16 and back.

Lightning calls `convert_module` once the model stands where it will be trained (after FSDP2's `fully_shard`, before
DDP wraps it) and `teardown` when the run ends; between the two the linear layers are `RecoverableLinear`s. The base
precision is Lightning's own plugin, held as a part and asked for its contexts: only what happens inside the converted
layers, and around the optimizer step, is new.

The plugin owns the control state, not the callback: Lightning restores a plugin's state after conversion and before
the first step, also where nobody put a `GNMRCallback` into the Trainer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Linear, Module
from torch.optim import LBFGS, Optimizer

from . import backends
from .backends import Backend
from .controller import Decision, GNMRConfig, GNMRController
from .linear import RecoverableLinear, make_recoverable, restore_plain
from .signal import Signal, UnitNorms, scale_gradients
from .units import Granularity, RecoverableUnit, Skipped, check_patterns, cut, first_match

Base = Literal["bf16-mixed", "bf16-true"]
OnNonfinite = Literal["skip", "raise", "ignore"]
EvalPrecision = Literal["bf16", "low"]

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class GNMRPrecision(Precision):
    """Trains with torchao FP8 or INT8 linear layers, and recovers the units in trouble to bf16.

    Args:
        recipe: "auto" (rowwise float8 from SM90, tensorwise float8 on SM89, else int8), "float8_tensorwise",
            "float8_rowwise", "float8_rowwise_with_gw_hp", "float8_blockwise", "mxfp8", "int8", a study's
            "fake(a=4, w=8, g=8)", a torchao `Float8LinearConfig` or `Int8MixedPrecisionTrainingConfig`, or a `Backend`
            of your own. Or a dict of these by fnmatch pattern on names of layers, {"*.mlp.*": "float8_rowwise",
            "*.attn.*": "int8"}: a layer's first match is its recipe, and a layer without a match stays as it is.
        base: what everything else runs in: "bf16-mixed" (fp32 weights under autocast) or "bf16-true".
        granularity: "linear", each layer is a unit; "block", each element of a repeated ModuleList is.
        include: fnmatch patterns on fully qualified names of layers to convert; None takes all but the output head.
        exclude: fnmatch patterns of layers to leave in the base precision.
        skip_small: leave out the layers that are too small to profit from float8 by torchao's rule, made on an H100.
        control: the policy that decides which units are recovered, when and for how long.
        on_nonfinite: what to do in a step with a gradient that is not finite: "skip" leaves weights and optimizer
            state as they are, "raise" stops the run, "ignore" steps all the same.
        eval_precision: what the converted layers run in validation, test and prediction steps, whatever is locked:
            "bf16", since the run leaves a plain model behind, and this is how that model does; `val_loss` is then
            comparable with a bf16 run's and no lock moves it. "low" if the model will be served in 8 bits, or if
            evaluation has to be fast. Locks stay as they are.

    Raises:
        ValueError: an argument that is not one of the above; the sentence says what to write instead.
    """

    def __init__(
        self,
        recipe: Any = "auto",
        base: Base = "bf16-mixed",
        *,
        granularity: Granularity = "linear",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        skip_small: bool = False,
        control: GNMRConfig | None = None,
        on_nonfinite: OnNonfinite = "skip",
        eval_precision: EvalPrecision = "bf16",
    ) -> None:
        for name, value, choices in (
            ("base", base, get_args(Base)),
            ("granularity", granularity, get_args(Granularity)),
            ("on_nonfinite", on_nonfinite, get_args(OnNonfinite)),
            ("eval_precision", eval_precision, get_args(EvalPrecision)),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known: write {' or '.join(map(repr, choices))}")
        if control is not None and not isinstance(control, GNMRConfig):
            raise ValueError(f"control={control!r} is no policy: write control=GNMRConfig(...)")
        check_patterns(include, exclude)
        self._by_pattern = isinstance(recipe, Mapping)
        # By pattern in their order; None for "auto" until the device is known.
        self._backends = {p: _resolve(r) for p, r in (_checked(recipe) if self._by_pattern else {"*": recipe}).items()}
        self._auto = [pattern for pattern, backend in self._backends.items() if backend is None]
        self.precision: Base = base
        self.granularity = granularity
        self.include = include
        self.exclude = tuple(exclude)
        self.skip_small = skip_small
        self.control = control or GNMRConfig()
        self.on_nonfinite = on_nonfinite
        self.eval_precision = eval_precision
        self.units: list[RecoverableUnit] = []
        self.skipped: list[Skipped] = []
        # Without a device yet; `convert_module` gives bf16-mixed the device that autocast needs.
        mixed = base == "bf16-mixed"
        self._base: Precision = MixedPrecision("bf16-mixed", "cpu") if mixed else HalfPrecision("bf16-true")
        self._module: weakref.ref[Module] | None = None
        self._controller: GNMRController | None = None
        self._norms: UnitNorms | None = None
        # What the layers of each unit read: whether they run bf16, and whether they are probed (views of one tensor).
        self._switches: list[Tensor] = []
        self._probed_U = torch.zeros(0, dtype=torch.bool, device="cpu")
        self._signal: Signal | None = None

    def __repr__(self) -> str:
        units = f", {len(self.units)} units, {len(self.skipped)} linears skipped" if self.units else ""
        return f"GNMRPrecision(recipe={self.recipe!r}, base={self.precision!r}{units})"

    # -- what the run is made of -------------------------------------------------------------------------------------

    @property
    def recipe(self) -> str:
        """The recipe's name; where there are several, each with its pattern."""
        names = {p: "auto" if backend is None else backend.name for p, backend in self._backends.items()}
        return ", ".join(f"{name} for {p}" for p, name in names.items()) if self._by_pattern else names["*"]

    @property
    def backend(self) -> Backend:
        """The low-precision backend; with recipe="auto", known once the module is converted."""
        backend, *others = self._backends.values()
        if others:
            raise RuntimeError(f"the run has several recipes ({self.recipe}): a layer's is its attribute `backend`")
        if backend is None:
            raise RuntimeError("recipe='auto' is chosen by the device: read it once the Trainer has started")
        return backend

    @property
    def controller(self) -> GNMRController:
        """The controller, which exists once the module is converted."""
        if self._controller is None:
            raise RuntimeError("GNMRPrecision has no controller before the Trainer has started")
        return self._controller

    @property
    def norms(self) -> UnitNorms:
        """Measures the units' gradient norms."""
        if self._norms is None:
            raise RuntimeError("GNMRPrecision has no units before the Trainer has started")
        return self._norms

    def work(self) -> Tensor:
        """Work of this process so far, (U, 3), float64, CPU: matmul FLOPs in low precision, in bf16, fallback calls."""
        flops = [[ln.flops for ln in u.linears.values() if isinstance(ln, RecoverableLinear)] for u in self.units]
        return torch.stack([torch.stack(of_unit).sum(0) for of_unit in flops])

    # -- conversion --------------------------------------------------------------------------------------------------

    def convert_module(self, module: Module) -> Module:
        """Converts the module's linear layers in place; converting a converted module again changes nothing.

        Raises:
            ValueError: no layer to convert, a pattern that matches nothing, or a device that cannot run the recipe.
            TypeError: a strategy that would not train what was converted.
        """
        trainer = module._trainer if isinstance(module, pl.LightningModule) else None
        device = torch.device("cpu")
        if trainer is not None:
            _check_strategy(trainer.strategy)
            device = trainer.strategy.root_device
        elif (parameter := next(module.parameters(), None)) is not None:
            device = parameter.device
        for pattern in self._auto:
            self._backends[pattern] = backends.resolve(backends.auto_recipe(device))
        for backend in self._backends.values():
            assert backend is not None
            if (refusal := backend.refuses_device(device)) is not None:
                raise ValueError(refusal)
            if self.skip_small and type(backend).too_small is Backend.too_small:
                rank_zero_warn(f"skip_small=True leaves out no layer of {backend.name}: torchao has no rule for it")
        if self.precision == "bf16-mixed":
            self._base = MixedPrecision("bf16-mixed", device.type)
        module = self._base.convert_module(module)

        for left_over in module.modules():  # a run that was killed may have converted what this one leaves out
            if isinstance(left_over, RecoverableLinear):
                restore_plain(left_over)
        names_before = [unit.name for unit in self.units]
        self.units, self.skipped = cut(
            module,
            granularity=self.granularity,
            include=self.include,
            exclude=self.exclude,
            recipes=tuple(self._backends) if self._by_pattern else None,
            refuses_layer=lambda fqn, linear: self._refuses_layer(fqn, linear, device.type),
        )
        self._norms = UnitNorms(self.units, distributed=trainer is not None and trainer.world_size > 1)
        same_model = self._module is not None and self._module() is module
        if self._controller is None or not same_model or names_before != [unit.name for unit in self.units]:
            # Other units, another history; the same ones (fit, then test or fit again) go on with their own.
            self._controller = GNMRController(self.control, len(self.units))
            self._module = weakref.ref(module)
        probing = self.control.method == "product_error"
        self._switches = [torch.zeros((), dtype=torch.bool, device="cpu") for _ in self.units]
        self._probed_U = torch.zeros(len(self.units), dtype=torch.bool, device="cpu")
        for unit, switch, probed in zip(self.units, self._switches, self._probed_U, strict=True):
            for fqn, linear in unit.linears.items():
                recipe = self._backend_of(fqn).name
                make_recoverable(linear, switch, probed, recipe, probing=probing, device=device)
        self._follow(self._controller.locked, self._controller.probed)
        if trainer is not None:
            _attach_callback(trainer)
        self._say_what_was_converted()
        return module

    def teardown(self) -> None:
        """Gives the layers their plain classes back. The control state stays, for a further fit of the same model."""
        for unit in self.units:
            for linear in unit.linears.values():
                if isinstance(linear, RecoverableLinear):
                    restore_plain(linear)
        self._switches = []
        self._signal = None
        self._base.teardown()

    def _backend_of(self, fqn: str) -> Backend:
        pattern = first_match(self._backends, fqn)
        backend = None if pattern is None else self._backends[pattern]
        assert backend is not None  # `cut` takes no layer without a match, and the device has decided what "auto" is
        return backend

    def _refuses_layer(self, fqn: str, linear: Linear, device_type: str) -> str | None:
        sizes = linear.in_features, linear.out_features
        refusal = self._backend_of(fqn).refuses_layer(*sizes, device_type)
        if refusal is None and self.skip_small:
            refusal = self._backend_of(fqn).too_small(*sizes)
        return refusal

    def _say_what_was_converted(self) -> None:
        layers = sum(len(unit.linears) for unit in self.units)
        names_of: dict[str, list[str]] = {}
        for skipped in self.skipped:
            names_of.setdefault(skipped.reason, []).append(skipped.fqn)
        left_out = "; ".join(
            f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} ({reason})"
            for reason, names in names_of.items()
        )
        rank_zero_info(
            f"GNMRPrecision: {layers} linear layers in {len(self.units)} units train in {self.recipe}, "
            f"at most {self.controller.budget} at once in bf16" + (f"; left out: {left_out}" if left_out else "")
        )

    # -- switching ---------------------------------------------------------------------------------------------------

    def switch(self, decision: Decision) -> None:
        """Makes exactly the units that `decision` locks run bf16, from the next forward on, and probes as it says."""
        self._follow(decision.locked, decision.probed)

    def _follow(self, locked_U: Tensor, probed_U: Tensor) -> None:
        self._apply(locked_U)
        self._probed_U.copy_(probed_U)

    def _apply(self, locked_U: Tensor) -> None:
        # Only what changes is written: a write is what autograd checks a live graph for.
        for index in (torch.stack(self._switches) != locked_U).nonzero().flatten().tolist():
            self._switches[index].fill_(locked_U[index])

    @contextmanager
    def _eval_step_context(self) -> Generator[None, None, None]:
        """The base precision, and around it every unit in `eval_precision`; each as it was when the step is over."""
        before = [bool(switch.item()) for switch in self._switches]
        during = self.eval_precision == "bf16"
        changed = [(switch, was) for switch, was in zip(self._switches, before, strict=True) if was != during]
        # Through .data, which autograd does not see: a graph that outlives the step finds its switches as they were.
        for switch, _ in changed:
            switch.data.fill_(during)
        try:
            with self.forward_context():
                yield
        finally:
            for switch, was in changed:
                switch.data.fill_(was)

    val_step_context = test_step_context = predict_step_context = _eval_step_context

    # -- around the optimizer step -----------------------------------------------------------------------------------

    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "LBFGS runs forward and backward several times in one step, so there is no one gradient to decide "
                    "on: use another optimizer, or another precision plugin"
                )
        return model, optimizers, lr_schedulers

    def measure(self, optimizer: Optimizer) -> Signal:
        """The optimizer's gradient norms before clipping; measured once, then held until the step is done."""
        if self._signal is None or not self._signal.is_current(optimizer):
            self._signal = self.norms.measure(optimizer)
        return self._signal

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # The closure runs before the step and not inside of it, as with a GradScaler: a step can then be skipped.
        result = closure()
        self._after_closure(model, optimizer)
        signal, self._signal = self._signal, None  # not kept: it holds the gradients
        if self.on_nonfinite != "ignore" and not (signal or self.norms.measure(optimizer)).finite:
            if self.on_nonfinite == "raise":
                raise FloatingPointError(
                    "a gradient is not finite, and on_nonfinite='raise' stops the run before the optimizer step: "
                    "on_nonfinite='skip' would leave this step out and go on"
                )
            return result
        return optimizer.step(**kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As `torch.nn.utils.clip_grad_norm_`, from norms that are measured already; sharded gradients included."""
        signal = self.measure(optimizer)
        if signal.total_norm <= clip_val or (self.on_nonfinite == "skip" and not signal.finite):
            return
        scale_gradients(signal, clip_val / (signal.total_norm + 1e-6))
        # Manual optimization clips before it steps. The norms stay those before clipping.
        signal.versions[:] = [gradient._version for gradient in signal.gradients]

    # -- control state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The control state and the names of the units it is about: tensors and plain values."""
        if self._controller is None:
            return {}
        return {"units": [unit.name for unit in self.units], "controller": self._controller.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = [unit.name for unit in self.units]
        if state_dict["units"] != names:
            saved, now = set(state_dict["units"]), set(names)
            there, here = (", ".join(sorted(only)[:5]) or "none" for only in (saved - now, now - saved))
            raise ValueError(
                "the checkpoint's control state is about other units than this run's (only there: "
                f"{there}; only here: {here}): resume with "
                "the same granularity, include and exclude, or load the weights alone"
            )
        self.controller.load_state_dict(state_dict["controller"])
        if self._switches:
            self._follow(self.controller.locked, self.controller.probed)

    # -- the base precision's own part -------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager:
        return self._base.forward_context()

    def tensor_init_context(self) -> AbstractContextManager:
        return self._base.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager:
        return self._base.module_init_context()

    def convert_input(self, data: Any) -> Any:
        return self._base.convert_input(data)


def _checked(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Recipes by pattern, of which there must be one at least."""
    wrong = [pattern for pattern in recipe if not isinstance(pattern, str)]
    if wrong or not recipe:
        what = f"has the key {wrong[0]!r}, which is no pattern" if wrong else "has no pattern"
        raise ValueError(f"recipe={dict(recipe)!r} {what}: write it as in {{'*.mlp.*': 'int8'}}")
    return recipe


def _resolve(recipe: Any) -> Backend | None:
    """The recipe's backend; None for "auto", which the device decides."""
    return None if isinstance(recipe, str) and recipe == "auto" else backends.resolve(recipe)


def _check_strategy(strategy: Strategy) -> None:
    """Refuses a strategy that would ignore the plugin or that it was not made for."""
    if not isinstance(strategy, _STRATEGIES):
        raise TypeError(
            f"{type(strategy).__name__} does not train what GNMRPrecision converts: use a single device, DDPStrategy, "
            "or ModelParallelStrategy (FSDP2)"
        )


def _attach_callback(trainer: pl.Trainer) -> None:
    """Gives a Trainer without a GNMRCallback a default one, before the checkpoint callbacks, which come last."""
    from .callback import GNMRCallback  # the callback asks the plugin, so its module imports this one

    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, GNMRCallback) for callback in callbacks):
        index = next((i for i, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)), len(callbacks))
        callbacks.insert(index, GNMRCallback())
