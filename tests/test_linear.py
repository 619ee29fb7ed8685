"""The recoverable linear: stock torchao in low precision, nn.Linear in bf16, and the same object throughout."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from gnmr_lightning import backends
from gnmr_lightning.linear import FALLBACK_CALLS, LOW, RecoverableLinear, make_recoverable, restore_plain

# The recipes that stock torchao has as layers too, for any size and on a CPU.
STOCK = ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "int8"]
BF16_MIXED = torch.autocast("cpu", dtype=torch.bfloat16)


def recoverable(linear: nn.Linear, recipe: str, recovered: bool = False) -> nn.Linear:
    make_recoverable(linear, torch.tensor(recovered), torch.tensor(True), backends.resolve(recipe).name)
    return linear


def stock(linear: nn.Linear, recipe: str) -> nn.Module:
    """torchao's own conversion. int8 as a module swap: its weight subclass does not quantise under torch 2.13."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    model = nn.Sequential(copy.deepcopy(linear))
    if recipe == "int8":
        quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    else:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe.removeprefix("float8_")))
    return model[0]


def run(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", STOCK)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 64), (4, 8, 64), (2, 2, 8, 64)])
def test_low_precision_equals_stock_torchao_to_the_bit(recipe, bias, dtype, shape):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype)
    x, grad = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 48, dtype=dtype)
    expected = run(stock(linear, recipe), x, grad)
    assert_equal(run(recoverable(linear, recipe), x, grad), expected)


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise"])
def test_autocast_equals_stock_torchao_given_the_cast_input(recipe):
    """fp32 weights are quantised as they are, activations come in bf16: what torchao does under CUDA autocast."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    reference = stock(linear, recipe)
    x_cast = x.clone().requires_grad_()
    y = reference(x_cast.bfloat16())
    y.backward(grad.bfloat16())
    with BF16_MIXED:
        ours = run(recoverable(linear, recipe), x, grad)
    assert_equal(ours, [y.detach(), x_cast.grad, *(p.grad for p in reference.parameters())])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (3, 7, 64), (64,), (0, 64), (2, 0, 64)])
@pytest.mark.parametrize("mixed", [True, False])
def test_recovered_equals_plain_linear_to_the_bit(bias, shape, mixed):
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=bias)
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 48)
    if not mixed:
        plain, x, grad = plain.bfloat16(), x.bfloat16(), grad.bfloat16()
    ours = recoverable(copy.deepcopy(plain), "float8_rowwise", recovered=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        assert_equal(run(ours, x, grad), run(plain, x, grad))


AWKWARD = {
    "7 rows": lambda: torch.randn(7, 64),
    "one vector": lambda: torch.randn(64),
    "transposed 3-D": lambda: torch.randn(8, 4, 64).transpose(0, 1),
    "non-contiguous columns": lambda: torch.randn(32, 128)[:, ::2],
    "zero rows": lambda: torch.randn(32, 64) * (torch.arange(32) % 2)[:, None],
    "zero columns": lambda: torch.randn(32, 64) * (torch.arange(64) % 2),
    "all zero": lambda: torch.zeros(32, 64),
    "tiny": lambda: torch.full((32, 64), 1e-30),
}


@pytest.mark.parametrize("recipe", backends.RECIPES)
@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("mixed", [True, False])
def test_awkward_input_gives_what_a_plain_linear_gives_but_for_rounding(recipe, case, mixed):
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    x = AWKWARD[case]()
    grad = torch.randn(*x.shape[:-1], 48)
    if not mixed:
        plain, x, grad = plain.bfloat16(), x.bfloat16(), grad.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        expected = run(copy.deepcopy(plain), x, grad)
        ours = run(recoverable(plain, recipe), x, grad)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.isfinite().all()
        # 8 bits keep a matmul of random operands within a few per cent of its norm
        assert (a - b).float().norm() <= 0.15 * b.float().norm() + 1e-6


@pytest.mark.parametrize("recipe", backends.RECIPES)
@pytest.mark.parametrize("shape", [(60, 10), (64, 10), (60, 16)])
def test_odd_sizes_train_on_cpu(recipe, shape):
    torch.manual_seed(0)
    plain = nn.Linear(*shape)
    x, grad = torch.randn(9, shape[0]), torch.randn(9, shape[1])
    with BF16_MIXED:
        expected = run(copy.deepcopy(plain), x, grad)
        for a, b in zip(run(recoverable(plain, recipe), x, grad), expected, strict=True):
            assert (a - b).norm() <= 0.15 * b.norm()


@pytest.mark.parametrize("recipe", backends.RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty_batch_gives_empty_output_and_zero_gradients(recipe, shape):
    layer = recoverable(nn.Linear(64, 48), recipe)
    with BF16_MIXED:
        y, grad_input, grad_weight, grad_bias = run(layer, torch.randn(shape), torch.randn(*shape[:-1], 48))
    assert y.shape == (*shape[:-1], 48)
    assert y.dtype == torch.bfloat16
    assert grad_input.shape == shape
    assert not grad_weight.any()
    assert not grad_bias.any()
    assert layer.flops[FALLBACK_CALLS] == 0


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_inference_mode_equals_training_output(recipe):
    layer = recoverable(nn.Linear(64, 48), recipe)
    x = torch.randn(32, 64)
    with BF16_MIXED:
        expected = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), expected)
        with torch.no_grad():
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(("need_input", "need_weight"), [(True, False), (False, True)])
@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_gradients_that_nobody_needs_are_not_made(recipe, need_input, need_weight):
    torch.manual_seed(0)
    layer = recoverable(nn.Linear(64, 48, bias=False), recipe)
    x = torch.randn(32, 64)
    full = run(layer, x, torch.ones(32, 48))
    layer.zero_grad()
    layer.flops.zero_()
    layer.weight.requires_grad_(need_weight)
    x = x.requires_grad_(need_input)
    layer(x).backward(torch.ones(32, 48))
    assert (x.grad is not None) == need_input
    assert (layer.weight.grad is not None) == need_weight
    assert torch.equal(x.grad if need_input else layer.weight.grad, full[1] if need_input else full[2])
    assert layer.flops[LOW] == 2 * 2 * 32 * 64 * 48  # forward and one backward product


def test_flops_are_counted_on_the_path_that_ran():
    layer = recoverable(nn.Linear(64, 48), "int8")
    matmuls = 3 * 2.0 * 32 * 64 * 48
    run(layer, torch.randn(32, 64), torch.randn(32, 48))
    assert layer.flops.tolist() == [matmuls, 0.0, 0.0]
    layer.recovered.fill_(True)
    run(layer, torch.randn(32, 64), torch.randn(32, 48))
    assert layer.flops.tolist() == [matmuls, matmuls, 0.0]


class SixteenRows(backends.Backend):
    """A backend that counts its calls and refuses rows that are no multiple of 16, as float8 does on CUDA."""

    name = "sixteen_rows"

    def output(self, x_MK, weight_NK):
        return x_MK @ weight_NK.t() + 1  # a mark that shows which path ran

    def grad_input(self, grad_MN, weight_NK):
        return grad_MN @ weight_NK + 1

    def grad_weight(self, grad_MN, x_MK):
        return grad_MN.t() @ x_MK + 1

    def takes_rows(self, rows, device_type):
        return rows % 16 == 0


def test_a_call_whose_rows_do_not_fit_runs_plain_and_is_counted():
    plain = nn.Linear(64, 48, bias=False)
    ours = copy.deepcopy(plain)
    make_recoverable(ours, torch.tensor(False), torch.tensor(True), backends.resolve(SixteenRows()).name)
    x, grad = torch.randn(7, 64), torch.randn(7, 48)
    assert_equal(run(ours, x, grad), run(plain, x, grad))
    assert ours.flops.tolist() == [0.0, 3 * 2 * 7 * 64 * 48, 1.0]
    x, grad = torch.randn(16, 64), torch.randn(16, 48)
    for a, b in zip(run(ours, x, grad), run(plain, x, grad), strict=True):
        torch.testing.assert_close(a, b + 1)
    assert ours.flops[FALLBACK_CALLS] == 1


def test_a_flip_between_forward_and_backward_is_an_error_not_a_wrong_gradient():
    layer = recoverable(nn.Linear(64, 48), "int8")
    y = layer(torch.randn(32, 64))
    layer.recovered.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_compiled_equals_eager_and_no_flip_recompiles(recipe):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    layers = [recoverable(m, recipe) for m in model if isinstance(m, nn.Linear)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(32, 64), torch.randn(32, 64)
    torch._dynamo.utils.counters.clear()
    graphs = torch._dynamo.utils.counters["stats"]
    with BF16_MIXED:
        run(compiled, x, grad)
        before = graphs["unique_graphs"]
        for flags in range(8):
            for index, layer in enumerate(layers):
                layer.recovered.fill_(bool(flags >> index & 1))
            assert_equal(run(compiled, x, grad), run(model, x, grad))
    assert graphs["unique_graphs"] == before == 1


def test_conversion_keeps_the_object_and_restore_gives_the_class_back():
    class Mine(nn.Linear):
        pass

    for linear in (nn.Linear(8, 8), Mine(8, 8)):
        cls, weight, keys = type(linear), linear.weight, list(linear.state_dict())
        calls = []
        linear.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        recoverable(linear, "int8")
        assert isinstance(linear, RecoverableLinear)
        assert isinstance(linear, cls)
        assert linear.weight is weight
        assert list(linear.state_dict()) == keys
        assert "recipe=int8" in repr(linear)
        linear(torch.randn(2, 8))
        assert calls == [1]
        restore_plain(linear)
        assert type(linear) is cls
        assert linear.weight is weight
        assert not {"recovered", "flops", "backend"} & set(vars(linear))


def test_copies_and_pickles_are_plain_layers():
    linear = recoverable(nn.Linear(8, 8), "int8")
    copies = [copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))]
    buffer = io.BytesIO()
    torch.save(linear, buffer)
    buffer.seek(0)
    copies.append(torch.load(buffer, weights_only=False))
    for other in copies:
        assert type(other) is nn.Linear
        assert torch.equal(other.weight, linear.weight)
        assert other.weight is not linear.weight
        assert "recovered" not in vars(other)


def test_the_switch_and_the_counts_stay_on_the_cpu_and_out_of_the_state_dict():
    linear = recoverable(nn.Linear(8, 8), "int8")
    linear.to("meta")
    assert linear.weight.is_meta
    assert linear.recovered.device.type == "cpu"
    assert linear.flops.device.type == "cpu"
    assert list(linear.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_activation_checkpointing_gives_equal_gradients(recipe):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = recoverable(nn.Linear(64, 48), recipe)
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    expected = run(layer, x, grad)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    assert_equal(run(Checkpointed(), x, grad), expected)


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_a_layer_used_twice_in_one_step(recipe):
    torch.manual_seed(0)
    layer = recoverable(nn.Linear(64, 64), recipe)
    x = torch.randn(32, 64)
    y = layer(x)
    (layer(y).sum() + y.sum()).backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.flops[LOW] == (2 * 2 + 3 * 2) * 32 * 64 * 64  # the first call needs no gradient of its input


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recovered", [False, True])
def test_a_frozen_layer_without_a_backward_is_probed_in_its_forward(compiled, recovered):
    """As the first block's projections are under LoRA: nothing behind them is trained."""
    torch.manual_seed(0)
    x = torch.randn(64, 32)  # a recovered layer tries low precision on every other row
    trained, frozen = (recoverable(nn.Linear(32, 32), "float8_rowwise", recovered) for _ in range(2))
    frozen.load_state_dict(trained.state_dict())
    frozen.requires_grad_(False)
    call = torch.compile(frozen, fullgraph=True, backend="aot_eager") if compiled else frozen
    with torch.no_grad():
        call(x)
    assert not frozen.probes.any()  # as in evaluation, or for a teacher
    call(x)
    trained(x).sum().backward()
    assert frozen.probes[0, 1] > 0
    assert torch.equal(frozen.probes[0], trained.probes[0])
    assert not frozen.probes[1:].any()
