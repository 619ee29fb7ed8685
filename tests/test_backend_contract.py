"""What every backend owes to the layer that calls it, ours, a user's and a study's alike (docs/backends.md)."""

import pytest
import torch

from examples.custom_backend import PowersOfTwo
from gnmr_lightning import backends

# Each with the largest relative error of a product of random operands that its format may make.
EIGHT_BITS = 0.06
BACKENDS = {
    **dict.fromkeys(backends.RECIPES, EIGHT_BITS),
    "fake(a=8, w=8, g=8)": EIGHT_BITS,
    "fake(a=8, w=8, g=8, rounding=stochastic)": EIGHT_BITS,
    "fake(a=e4m3, w=e4m3, g=e5m2, rounding=stochastic, granularity=rowwise)": 0.12,
    "fake(a=4, w=5, g=8, granularity=rowwise)": 0.25,
    "fake(w=4)": 0.25,
    "powers_of_two": 0.3,
}
PRODUCTS = ("output", "grad_input", "grad_weight")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=BACKENDS)
def backend(request):
    return backends.resolve(PowersOfTwo() if request.param == PowersOfTwo.name else request.param)


def operands(m=32, k=64, n=48, dtype=BF16, weight_dtype=FP32):
    torch.manual_seed(0)
    x, grad, weight = torch.randn(m, k), torch.randn(m, n), torch.randn(n, k)
    return {"x": x.to(dtype), "grad": grad.to(dtype), "weight": weight.to(weight_dtype)}


def run(backend, x, grad, weight):
    """The three products, with the same numbers drawn at each call where a backend draws any."""
    torch.manual_seed(1)
    with torch.no_grad():
        return backend.output(x, weight), *backend.grads(grad, x, weight, need_input=True, need_weight=True)


def exact(x, grad, weight):
    x, grad, weight = x.double(), grad.double(), weight.double()
    return x @ weight.T, grad @ weight, grad.T @ x


def test_it_is_in_the_registry_and_answers_what_it_is_asked(backend):
    assert backends.get(backend.name) is backend
    assert isinstance(backend.name, str)
    assert backend.refuses_device(torch.device("cpu")) is None
    assert backend.refuses_layer(64, 48, "cpu") is None
    assert all(backend.takes_rows(rows, "cpu") for rows in (1, 7, 32))
    assert backend.too_small(2**15, 2**15) is None


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
@pytest.mark.parametrize("m", [1, 7, 32, 130])
def test_products_have_the_shapes_the_dtypes_and_about_the_values_of_exact_ones(backend, m, dtype, weight_dtype):
    given = operands(m, dtype=dtype, weight_dtype=weight_dtype)
    before = {name: operand.clone() for name, operand in given.items()}
    for name, ours, expected in zip(PRODUCTS, run(backend, **given), exact(**given), strict=True):
        assert ours.shape == expected.shape, name
        assert ours.dtype == dtype, name
        assert ours.device.type == "cpu", name
        assert (ours - expected).norm() <= BACKENDS[backend.name] * expected.norm(), name
    for name, operand in given.items():
        assert torch.equal(operand, before[name]), f"{name} was written to"


def test_the_layout_of_operands_changes_nothing(backend):
    given = operands()
    expected = run(backend, **given)
    layouts = {
        "transposed": lambda t: t.t().contiguous().t(),
        "every second column": lambda t: torch.stack([t, t], 2).flatten(1)[:, ::2],
        "every second row": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
        "shifted": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }
    for layout, change in layouts.items():
        changed = {name: change(operand) for name, operand in given.items()}
        for name, ours, theirs in zip(PRODUCTS, run(backend, **changed), expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=f"{name} of operands {layout}")


def test_a_sum_that_is_expanded_is_a_gradient_too(backend):
    """`y.sum().backward()` gives a gradient of stride 0."""
    given = operands()
    given["grad"] = torch.ones((), dtype=BF16).expand(32, 48)
    for ours, expected in zip(run(backend, **given), exact(**given), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).norm() <= BACKENDS[backend.name] * expected.norm()


@pytest.mark.parametrize("zero", ["x", "grad", "weight"])
@pytest.mark.parametrize("where", ["all", "rows", "columns"])
def test_zeros_are_finite_and_stay_zeros(backend, zero, where):
    given = operands()
    part = {"all": slice(None), "rows": slice(None, None, 3), "columns": (slice(None), slice(None, None, 3))}[where]
    given[zero][part] = 0.0
    for name, ours, expected in zip(PRODUCTS, run(backend, **given), exact(**given), strict=True):
        assert ours.isfinite().all(), name
        empty = (expected == 0).all(1)
        assert (ours[empty] == 0).all(), name
        assert (ours.T[(expected == 0).all(0)] == 0).all(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spoilt", ["x", "grad", "weight"])
def test_what_is_not_finite_shows_in_each_product_it_is_part_of(backend, spoilt, value):
    """A gradient that is not finite must not come out as a harmless number: the step would be taken with it."""
    given = operands()
    given[spoilt][5, 6] = value
    parts = {"output": ("x", "weight"), "grad_input": ("grad", "weight"), "grad_weight": ("grad", "x")}
    for name, ours in zip(PRODUCTS, run(backend, **given), strict=True):
        assert ours.isfinite().all() == (spoilt not in parts[name]), name


def test_gradients_together_are_those_one_by_one_and_none_where_nobody_needs_one(backend):
    given = operands()
    x, grad, weight = given["x"], given["grad"], given["weight"]
    for need_input, need_weight in ((True, True), (True, False), (False, True), (False, False)):
        torch.manual_seed(1)
        both = backend.grads(grad, x, weight, need_input=need_input, need_weight=need_weight)
        torch.manual_seed(1)
        single = (
            backend.grad_input(grad, weight) if need_input else None,
            backend.grad_weight(grad, x) if need_weight else None,
        )
        for ours, expected in zip(both, single, strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.equal(ours, expected)
