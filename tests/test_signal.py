"""The norms per unit, against a slow oracle, and when they count as current."""

import math

import pytest
import torch
from torch import nn

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
    # bf16 gradients are summed up in fp32: a bf16 norm would be off by up to 0.4%
    torch.testing.assert_close(signal.norms, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert signal.total_norm == pytest.approx(oracle(*(p.grad for p in model.parameters())), rel=1e-6)
    assert signal.norms.dtype == torch.float64
    assert signal.stepping.tolist() == signal.present.tolist() == [True, True]
    assert signal.finite


def test_the_total_is_what_clip_grad_norm_returns(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = unit_norms(model).measure(optimizer).total_norm
    assert total == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), rel=1e-6)


def test_a_missing_gradient_is_absent_and_a_frozen_parameter_uncounted(model):
    model["b"].weight.grad = None
    model["a"].bias.requires_grad_(False)
    model["a"].bias.grad = None
    signal = unit_norms(model).measure(torch.optim.SGD(model.parameters(), 0.1))
    assert signal.present.tolist() == [True, False]
    assert signal.stepping.tolist() == [True, True]
    assert signal.norms.tolist() == pytest.approx([oracle(model["a"].weight.grad), 0.0])


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
    check(lambda: model["a"].weight.grad.mul_(2), False)
    check(lambda: setattr(model["a"].weight, "grad", torch.randn(6, 8)), False)
    check(lambda: setattr(model["a"].weight, "grad", None), False)


def test_scaling_is_in_place(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.grad.clone() for p in model.parameters()]
    scale_gradients(unit_norms(model).measure(optimizer), 0.25)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad * 0.25)


def test_sparse_gradients_are_measured():
    embedding = nn.Embedding(10, 4, sparse=True)
    linear = nn.Linear(4, 4)
    linear(embedding(torch.tensor([1, 3]))).sum().backward()
    norms = UnitNorms([RecoverableUnit("linear", {"linear": linear})])
    optimizer = torch.optim.SGD([*embedding.parameters(), *linear.parameters()], 0.1)
    total = oracle(embedding.weight.grad.to_dense(), linear.weight.grad, linear.bias.grad)
    assert norms.measure(optimizer).total_norm == pytest.approx(total, rel=1e-6)
