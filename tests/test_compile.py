"""Compiled training: the products that are compiled inside of the op, long runs, and the compiler's modes."""

import lightning.pytorch as pl
import pytest
import torch
from conftest import D, Net, batches, trainer
from torch import nn

from gnmr_lightning import GNMRConfig, GNMRPrecision, backends
from gnmr_lightning.backends import Backend


class Normed(Net):
    """RMSNorm before each linear."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D), nn.SiLU()) for _ in range(3)))
        self.net.append(nn.Linear(D, 4))


class Losses(pl.Callback):
    def __init__(self, flip=False):
        self.losses, self.flip = [], flip

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.flip:
            plugin = trainer.precision_plugin
            generator = torch.Generator().manual_seed(batch_idx)
            plugin._apply(torch.rand(len(plugin.units), generator=generator) < 0.3)

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.losses.append(outputs["loss"].item())


def losses(recipe, n=8, flip=True, **how):
    torch._dynamo.reset()
    model, seen = Normed(), Losses(flip)
    if how:
        model.net.compile(fullgraph=True, **how)
    plugin = GNMRPrecision(recipe, control=GNMRConfig(warmup_steps=10**9))
    trainer(plugin, callbacks=[seen]).fit(model, batches(n))
    return torch.tensor(seen.losses)


def test_rowwise_with_rmsnorm_compiled_stays_finite_for_200_steps():
    """Case 6."""
    seen = losses("float8_rowwise", n=200, backend="inductor")
    assert len(seen) == 200
    assert seen.isfinite().all()
    assert seen[-20:].mean() < 0.6 * seen[:5].mean()


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_modes_of_the_compiler_train_as_eager_does(mode):
    torch.testing.assert_close(losses("float8_rowwise", mode=mode), losses("float8_rowwise"), rtol=1e-2, atol=1e-2)


def test_a_cuda_graph_leaves_the_ops_out():
    """A replay would never read the switch again. Inductor keeps ops with this tag out of what it captures."""
    for name in ("linear", "linear_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.gnmr_lightning, name).default.tags


class Counting(Backend):
    """int8, and how often python was there."""

    def __init__(self, compiles):
        self.name, self.compiles, self.calls = f"counting_{compiles}", compiles, 0
        self.healthy = backends.resolve("int8")

    def output(self, x_MK, weight_NK):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.healthy.output(x_MK, weight_NK)

    def grads(self, *args, **kwargs):
        return self.healthy.grads(*args, **kwargs)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_backend_says_whether_it_is_compiled_where_the_model_is(compiles):
    eager, compiled = Counting(compiles), Counting(compiles)
    a = losses(eager, flip=False)
    b = losses(compiled, flip=False, backend="aot_eager")
    assert eager.calls == 8 * 3
    # Compiled, python is there while dynamo looks at it, and never again.
    assert compiled.calls == (0 if compiles else 8 * 3)
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "int8"])
def test_compiled_products_are_the_eager_ones_to_the_bit_for_any_number_of_rows(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = backends.resolve(recipe)
    compiled = backends.compiled(eager.name)
    weight = nn.Parameter(torch.randn(32, 64))
    for rows in (32, 16, 7, 64, 1, 2):  # a single row is one that inductor refuses
        x, grad = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 32).bfloat16()
        ours = [b.output(x, weight).detach() for b in (compiled, eager)]
        assert torch.equal(*ours)
        both = [b.grads(grad, x, weight, need_input=True, need_weight=True) for b in (compiled, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_product_that_cannot_be_compiled_runs_eager_and_says_so(monkeypatch):
    def refuse(*args, **kwargs):
        def call(*operands):
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    eager = backends.register(Counting(True))
    compiled = backends.compiled(eager.name)
    x, weight = torch.randn(32, 64), torch.randn(32, 64)
    with pytest.warns(UserWarning, match="could not be compiled and runs eager, slower: no compiler here"):
        first = compiled.output(x, weight)
    assert torch.equal(first, compiled.output(x, weight))
    assert eager.calls == 2


def test_a_backend_that_takes_the_name_of_another_is_compiled_anew():
    first = backends.register(Counting(True))
    compiled = backends.compiled(first.name)
    assert backends.compiled(first.name) is compiled
    second = backends.register(Counting(True))
    assert backends.compiled(first.name) is not compiled
    assert backends.compiled(first.name).eager is second
    blockwise = backends.resolve("float8_blockwise")
    assert backends.compiled(blockwise.name) is blockwise
