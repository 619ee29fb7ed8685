"""The norms per unit, against a slow oracle, and when they count as current."""

import math

import pytest
import torch
from torch import nn

from gnmr_lightning.linear import make_recoverable
from gnmr_lightning.signal import UnitNorms, scale_gradients
from gnmr_lightning.units import RecoverableUnit


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 6), "b": nn.Linear(6, 4, bias=False), "rest": nn.LayerNorm(4)})
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def unit_norms(model):
    return UnitNorms([RecoverableUnit(name, {name: model[name]}) for name in ("a", "b")])


def oracle(*tensors) -> float:
    return math.sqrt(sum(x.double().square().sum().item() for x in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_equal_a_slow_sum_of_squares(model, dtype):
    model.to(dtype)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 100
    signal = unit_norms(model).measure(torch.optim.SGD(model.parameters(), 0.1))
    expected = [oracle(model["a"].weight.grad, model["a"].bias.grad), oracle(model["b"].weight.grad)]
    # bf16 gradients are summed up in fp32: a bf16 norm would be off by up to 0.4%; `rest` is in the total, in no unit
    torch.testing.assert_close(signal.norms, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert signal.total_norm == pytest.approx(oracle(*(p.grad for p in model.parameters())), rel=1e-6)
    assert signal.norms.dtype == torch.float64
    assert signal.stepping.tolist() == signal.present.tolist() == [True, True]
    assert signal.finite


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_measured_in_pieces(transposed):
    linear = nn.Linear(700, 501, bias=False).bfloat16()  # 2 pieces and a rest
    grad = torch.randn(700, 501).bfloat16().t() if transposed else torch.randn(501, 700).bfloat16()
    linear.weight.grad = grad
    assert linear.weight.grad.stride() == grad.stride()
    norms, optimizer = UnitNorms([RecoverableUnit("a", {"a": linear})]), torch.optim.SGD(linear.parameters(), 0.1)
    assert norms.measure(optimizer).norms.tolist() == pytest.approx([oracle(grad)], rel=1e-5)
    grad[-1, -1] = math.inf
    assert norms.measure(optimizer).norms.tolist() == [math.inf]


def test_the_total_is_what_clip_grad_norm_returns(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = unit_norms(model).measure(optimizer).total_norm
    assert total == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), rel=1e-6)
    only_units = oracle(*(p.grad for name in "ab" for p in model[name].parameters()))
    assert total > only_units * 1.01


def test_a_missing_gradient_is_absent_and_a_frozen_parameter_uncounted(model):
    model["b"].weight.grad = None
    model["a"].bias.requires_grad_(False)
    model["a"].bias.grad = None
    signal = unit_norms(model).measure(torch.optim.SGD(model.parameters(), 0.1))
    assert signal.present.tolist() == [True, False]
    assert signal.stepping.tolist() == [True, True]
    assert signal.norms.tolist() == pytest.approx([oracle(model["a"].weight.grad), 0.0])
    rest = (p.grad for p in model["rest"].parameters())
    assert signal.total_norm == pytest.approx(oracle(model["a"].weight.grad, *rest))


def test_a_unit_of_several_layers_and_one_shared_by_two_units(model):
    model["c"] = nn.Linear(8, 6)
    model["c"].weight = model["a"].weight
    model["c"].bias.grad = torch.randn(6)
    norms = UnitNorms(
        [RecoverableUnit("ab", {name: model[name] for name in "ab"}), RecoverableUnit("c", {"c": model["c"]})]
    )
    signal = norms.measure(torch.optim.SGD(model.parameters(), 0.1))
    ab = oracle(*(p.grad for name in "ab" for p in model[name].parameters()))
    assert signal.norms.tolist() == pytest.approx([ab, oracle(model["c"].bias.grad)])  # shared: with the first


def test_the_users_default_device_is_not_ours(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = unit_norms(model).measure(optimizer)
    with torch.device("meta"):
        signal = unit_norms(model).measure(optimizer)
        nothing = unit_norms(model).measure(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert torch.equal(signal.norms, expected.norms)
    assert signal.stepping.tolist() == signal.present.tolist() == [True, True]
    assert nothing.norms.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("probe", "error", "began"),  # a probe: squares of the error, of the exact product, of a product's column, of x's
    [
        ((0.04, 1.0, 1.0, 1.0), 0.2, False),
        ((math.inf, 1.0, 1.0, 1.0), math.inf, True),
        ((math.nan, 1.0, 1.0, 1.0), math.inf, True),
        ((0.04, 1.0, math.inf, 1.0), 0.2, True),
        ((0.04, 1.0, math.nan, math.nan), 0.2, False),  # it came in with x
        ((math.nan, math.nan, math.nan, math.nan), math.nan, False),
        ((0.0, 0.0, 0.0, 0.0), math.nan, False),  # not probed
    ],
)
def test_what_a_probe_says(model, probe, error, began):
    for name in "ab":
        make_recoverable(model[name], torch.tensor(False), torch.tensor(True), "int8")
    model["b"].probes[1] = torch.tensor(probe)
    norms, optimizer = unit_norms(model), torch.optim.SGD(model.parameters(), 0.1)
    signal = norms.measure(optimizer)
    assert signal.errors.dtype == torch.float64
    expected = torch.full((2, 3), math.nan, dtype=torch.float64)
    expected[1, 1] = error
    torch.testing.assert_close(signal.errors, expected, equal_nan=True)
    assert signal.began.tolist() == [False, began]
    assert norms.measure(optimizer).errors.isnan().all()  # taken: they begin anew


def test_an_empty_gradient_counts_as_zero():
    """As rank 1 holds of a parameter with one row under FSDP2."""
    parameters = [nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(4))]
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert UnitNorms([]).measure(torch.optim.SGD(parameters, 0.1)).total_norm == 2


def test_each_optimizer_steps_its_own_units(model):
    norms = unit_norms(model)
    first = torch.optim.SGD(model["a"].parameters(), 0.1)
    second = torch.optim.SGD(model["rest"].parameters(), 0.1)
    assert norms.measure(first).stepping.tolist() == [True, False]
    assert norms.measure(second).stepping.tolist() == [False, False]
    assert norms.measure(second).total_norm == pytest.approx(oracle(*(p.grad for p in model["rest"].parameters())))
    first.add_param_group({"params": list(model["b"].parameters())})  # as a finetuning callback does
    assert norms.measure(first).stepping.tolist() == [True, True]
    assert norms.measure(first).norms[1].item() == pytest.approx(oracle(model["b"].weight.grad))


def test_a_unit_that_the_run_leaves_frozen_steps_with_every_optimizer(model):
    """It has no norm, but its products have errors; LoRA leaves most layers so."""
    model["b"].requires_grad_(False)
    model["b"].weight.grad = None
    norms = unit_norms(model)
    optimizers = [torch.optim.SGD(model[name].parameters(), 0.1) for name in ("a", "rest")]
    signals = [norms.measure(optimizer) for optimizer in optimizers]
    assert [s.stepping.tolist() for s in signals] == [[True, True], [False, True]]
    assert [s.present.tolist() for s in signals] == [[True, False], [False, False]]
    # thawed by a finetuning callback, it is its optimizer's alone
    model["b"].requires_grad_(True)
    optimizers[0].add_param_group({"params": list(model["b"].parameters())})
    assert norms.measure(optimizers[0]).stepping.tolist() == [True, True]
    assert norms.measure(torch.optim.SGD(model["rest"].parameters(), 0.1)).stepping.tolist() == [False, False]


def test_what_is_frozen_for_a_step_alone_is_not_frozen(model):
    """As Lightning's toggle_optimizer freezes what the other optimizers own; the plan is made in such a step."""
    norms = unit_norms(model)
    optimizers = [torch.optim.SGD(model[name].parameters(), 0.1) for name in ("a", "b")]
    model["b"].requires_grad_(False)
    assert norms.measure(optimizers[0]).stepping.tolist() == [True, False]
    assert norms.measure(optimizers[1]).stepping.tolist() == [False, True]


def test_no_gradient_at_all(model):
    model.zero_grad()
    signal = unit_norms(model).measure(torch.optim.SGD(model.parameters(), 0.1))
    assert signal.total_norm == 0
    assert signal.norms.tolist() == [0, 0]
    assert signal.present.tolist() == [False, False]
    scale_gradients(signal, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["a", "rest"])
def test_one_value_that_is_not_finite_shows(model, value, where):
    model[where].weight.grad.view(-1)[1] = value
    signal = unit_norms(model).measure(torch.optim.SGD(model.parameters(), 0.1))
    assert not signal.finite
    assert signal.norms.isfinite().tolist() == [where != "a", True]


def test_it_is_current_until_a_gradient_changes(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = unit_norms(model)

    def check(change, current):
        signal = norms.measure(optimizer)
        assert signal.is_current(optimizer)
        change()
        assert signal.is_current(optimizer) == current

    check(lambda: None, True)
    check(optimizer.step, True)
    first, last = model["a"].weight, model["rest"].bias
    check(lambda: setattr(first, "grad", first.grad.clone()), False)  # another object, of equal value and version
    check(lambda: first.grad.mul_(2), False)
    check(lambda: setattr(first, "grad", None), False)
    check(lambda: setattr(last, "grad", None), False)
    check(lambda: setattr(last, "grad", torch.ones(4)), False)


def test_scaling_is_in_place(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.grad.clone() for p in model.parameters()]
    scale_gradients(unit_norms(model).measure(optimizer), 0.25)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad * 0.25)


@pytest.mark.parametrize("rows", [[1, 3], [1, 1, 3, 1]])
def test_sparse_gradients_are_measured_scaled_and_followed(rows):
    embedding = nn.Embedding(10, 4, sparse=True)
    linear = nn.Linear(4, 4)
    linear(embedding(torch.tensor(rows))).sum().backward()
    dense = embedding.weight.grad.to_dense()
    norms = UnitNorms([RecoverableUnit("linear", {"linear": linear})])
    optimizer = torch.optim.SGD([*embedding.parameters(), *linear.parameters()], 0.1)
    signal = norms.measure(optimizer)
    # a row that was looked up several times counts once, with the sum of its gradients
    assert signal.total_norm == pytest.approx(oracle(dense, linear.weight.grad, linear.bias.grad), rel=1e-6)
    assert signal.norms.tolist() == pytest.approx([oracle(linear.weight.grad, linear.bias.grad)])
    assert signal.is_current(optimizer)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), dense)

    scale_gradients(signal, 0.25)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), dense * 0.25)
    signal = norms.measure(optimizer)
    assert signal.total_norm == pytest.approx(oracle(*(p.grad.to_dense() for p in linear.parameters()), dense / 4))
    embedding.weight.grad.mul_(2)
    assert not signal.is_current(optimizer)
