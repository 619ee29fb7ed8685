"""Compiled training: both paths in one graph, what no graph takes, long runs, and the compiler's modes."""

import lightning.pytorch as pl
import pytest
import torch
from conftest import D, Net, batches, trainer
from test_linear import assert_equal, recoverable, run
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
    for name in ("linear", "linear_backward", "probe_output", "note"):
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


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "int8", "float8_blockwise"])
def test_compiled_is_eager_to_the_bit_for_any_number_of_rows_on_both_paths(recipe, dynamic):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, compiled = (nn.Linear(64, 32), nn.Linear(64, 32))
    compiled.load_state_dict(eager.state_dict())
    for layer in (eager, compiled):
        recoverable(layer, recipe)
    compiled.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (32, 16, 7, 64, 1, 2):
        x, grad = torch.randn(rows, 64), torch.randn(rows, 32)
        for recovered in (False, True):
            for probed in (False, True):
                for layer in (eager, compiled):
                    layer.recovered.fill_(recovered)
                    layer.probed.fill_(probed)
                assert_equal(run(compiled, x, grad), run(eager, x, grad))
                assert torch.equal(eager.flops, compiled.flops)
                assert torch.equal(eager.probes, compiled.probes)
    assert eager.probes.any()


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "int8"])
def test_the_compiler_sees_the_casts(recipe):
    """They are nodes of the graph, which it may fuse; a backend that cannot be traced is one opaque op."""
    torch._dynamo.reset()
    seen = []

    def look(graph, example_inputs):
        seen.append(graph.print_readable(print_output=False))
        return graph

    layer = recoverable(nn.Linear(64, 32), recipe)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=look)(torch.randn(16, 64))
    assert "cond" in seen[0]
    assert "amax" in seen[0]
    assert "gnmr_lightning.linear" not in seen[0]


def test_a_backend_that_takes_the_name_of_another_is_traced_anew():
    class Plus(Backend):
        name, compiles = "plus", True

        def __init__(self, what):
            self.what = what

        def output(self, x_MK, weight_NK):
            return x_MK @ weight_NK.t() + self.what

    torch._dynamo.reset()
    backends.register(Plus(1.0))
    layer = recoverable(nn.Linear(64, 32, bias=False), "plus")
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.randn(16, 64)
    with torch.no_grad():
        first = compiled(x)
        backends.register(Plus(2.0))
        torch.testing.assert_close(compiled(x), first + 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        heads = self.project(x).view(2, 8, 4, 8).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            rotated = (heads.float() * 2).to(heads.dtype)
        y = nn.functional.scaled_dot_product_attention(rotated, rotated, heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 8, 32))


@pytest.mark.parametrize("recovered", [False, True])
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "int8"])
def test_autocast_is_the_same_behind_a_compiled_layer(recipe, recovered):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, grad = Attention(), torch.randn(2, 8, 32), torch.randn(2, 8, 32).bfloat16()
    for layer in (model.project, model.out):
        recoverable(layer, recipe, recovered)
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(model, x, grad)
        compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), x, grad)
    assert_equal(compiled, eager)


def test_whether_triton_is_there_breaks_no_graph():
    """int8 asks for it on CUDA, while dynamo traces."""
    int8 = backends.resolve("int8")

    def rows(x):
        return x + 1 if int8.takes_rows(x.shape[0], "cuda") else x + 2

    x = torch.zeros(32, 4)
    assert torch.equal(torch.compile(rows, fullgraph=True, backend="eager")(x), rows(x))
