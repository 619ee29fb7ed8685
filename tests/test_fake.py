"""Fake quantisation: what a recipe's string means, the grid of each format, and the three products of an oracle."""

import pytest
import torch
from conftest import Net, Paths, batches, trainer

from gnmr_lightning import GNMRPrecision, backends
from gnmr_lightning.backends.fake import FakeBackend, FakeSpec

FORMATS = [2, 3, 4, 8, "e4m3", "e5m2"]


@pytest.mark.parametrize(
    ("recipe", "spec", "name"),
    [
        ("fake(a=4, w=8, g=8)", FakeSpec(a=4, w=8, g=8), "fake(a=4, w=8, g=8)"),
        ("fake(g=5)", FakeSpec(g=5), "fake(g=5)"),
        ("fake( w='e4m3',g=\"e5m2\",a=None )", FakeSpec(w="e4m3", g="e5m2"), "fake(w=e4m3, g=e5m2)"),
        (
            "fake(granularity=rowwise, a=2, rounding=stochastic)",
            FakeSpec(a=2, rounding="stochastic", granularity="rowwise"),
            "fake(a=2, rounding=stochastic, granularity=rowwise)",
        ),
    ],
)
def test_a_recipe_is_its_spec_and_its_name_is_a_recipe(recipe, spec, name):
    backend = backends.resolve(recipe)
    assert backend.spec == spec
    assert backend.name == name
    assert backends.get(name) is backend
    assert backends.resolve(name).spec == spec


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fake", r"recipe='fake' is no fake recipe: write it as in 'fake\(a=4, w=8, g=8\)'"),
        ("fake(a=4", r"is no fake recipe"),
        ("fake()", r"no operand is quantised"),
        ("fake(a=None)", r"no operand is quantised"),
        ("fake(a=1)", r"a=1 is no format: write 2 to 8 \(bits\), 'e4m3', 'e5m2' or None"),
        ("fake(w=16)", r"w=16 is no format"),
        ("fake(g=e3m4)", r"g='e3m4' is no format"),
        ("fake(a=4, b=4)", r"'b=4' is not known: write NAME=VALUE, each of a, w, g, rounding, granularity once"),
        ("fake(4, 8)", r"'4' is not known"),
        ("fake(a=4, a=8)", r"'a=8' is there twice"),
        ("fake(a=4, rounding=down)", r"rounding='down' is not known: write 'nearest' or 'stochastic'"),
        ("fake(a=4, granularity=column)", r"granularity='column' is not known: write 'tensorwise' or 'rowwise'"),
    ],
)
def test_a_bad_recipe_names_the_value_the_rule_and_the_way_out(recipe, message):
    with pytest.raises(ValueError, match=message):
        backends.resolve(recipe)


@pytest.mark.parametrize("value", [True, 4.0, 9, 0, -4])
def test_a_width_is_an_integer_from_2_to_8(value):
    with pytest.raises(ValueError, match="is no format"):
        FakeBackend(a=value)


def test_integers_are_symmetric_and_a_row_or_the_whole_has_a_scale():
    operand = torch.tensor([[7.0, 3.4, -0.6, 0.4], [-0.7, 0.26, 0.0, 0.04]])
    per_row = torch.tensor([[7.0, 3.0, -1.0, 0.0], [-0.7, 0.3, 0.0, 0.0]])
    per_tensor = torch.tensor([[7.0, 3.0, -1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(FakeBackend(a=4, granularity="rowwise").cast(operand, "a"), per_row)
    torch.testing.assert_close(FakeBackend(a=4).cast(operand, "a"), per_tensor)
    torch.testing.assert_close(FakeBackend(a=2).cast(operand, "a"), torch.tensor([[7.0, 0, 0, 0], [0, 0, 0, 0]]))
    assert FakeBackend(a=4).cast(operand, "w") is operand


def oracle_cast(operand, target, rowwise):
    """Rounds to nearest by looking the nearest value up in the list of all that the format has."""
    if target is None:
        return operand.double()
    if isinstance(target, int):
        grid = torch.arange(-(2 ** (target - 1)) + 1, 2 ** (target - 1), dtype=torch.float64)
    else:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[target]
        grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        grid = grid[grid.isfinite()].unique()
    amax = operand.double().abs().amax(1, keepdim=True) if rowwise else operand.double().abs().amax()
    scale = amax.clamp(min=1e-300) / grid.max()
    return grid[(operand.double()[..., None] / scale[..., None] - grid).abs().argmin(-1)] * scale


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("a", "w", "g"), [(4, 8, 8), (2, 3, 5), ("e4m3", "e4m3", "e5m2"), (None, 6, None), (8, None, "e5m2")]
)
def test_the_three_products_are_those_of_rounded_operands(a, w, g, granularity):
    torch.manual_seed(0)
    backend = FakeBackend(a=a, w=w, g=g, granularity=granularity)
    # float32 all through: bf16 values often lie halfway between two codes, where the oracle may choose the other one.
    x, grad, weight = torch.randn(24, 32), torch.randn(24, 20), torch.randn(20, 32)

    def product(left, left_format, right, right_format):
        rowwise = granularity == "rowwise"
        return oracle_cast(left, left_format, rowwise) @ oracle_cast(right, right_format, rowwise).T

    for ours, expected in (
        (backend.output(x, weight), product(x, a, weight, w)),
        (backend.grad_input(grad, weight), product(grad, g, weight.T, w)),
        (backend.grad_weight(grad, x), product(grad.T, g, x.T, a)),
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_results_come_in_the_compute_dtype_and_a_weight_is_rounded_once_from_full_precision():
    torch.manual_seed(0)
    x, weight = torch.randn(24, 32).bfloat16(), torch.randn(20, 32)
    for w, exact in ((8, oracle_cast(weight, 8, False)), (None, weight.bfloat16().double())):
        ours = FakeBackend(g=8, w=w).output(x, weight)
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), x.double() @ exact.T, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("target", FORMATS)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(target):
    torch.manual_seed(0)
    operand = torch.cat([torch.tensor([1.0, 0.0]), torch.rand(62) * 2 - 1])[None]
    backend = FakeBackend(a=target, rounding="stochastic")
    n = 1000
    drawn = torch.cat([backend.cast(operand, "a") for _ in range(n)]).double()

    assert (drawn[:, 0] == drawn[0, 0]).all(), "the largest value is a code"
    assert drawn[0, 0] == pytest.approx(1.0, rel=1e-6)
    assert (drawn[:, 1] == 0).all()
    codes = [column.unique() for column in drawn[:, 2:].T]
    assert max(len(c) for c in codes) == 2
    for value, neighbours in zip(operand[0, 2:].double(), codes, strict=True):
        assert neighbours.min() - 1e-6 <= value <= neighbours.max() + 1e-6
    gap = max(float(c.max() - c.min()) for c in codes)
    # A mean of n draws from two values `gap` apart has a standard deviation of gap / 2 / sqrt(n) at most.
    assert (drawn.mean(0) - operand[0]).abs().max() < 5 * gap / 2 / n**0.5


def test_stochastic_rounding_follows_the_seed():
    backend = FakeBackend(a=3, w=3, g=3, rounding="stochastic")
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(backend.output(x, weight))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_fewer_bits_make_a_larger_error(granularity):
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    exact = x @ weight.T
    errors = []
    for width in range(8, 1, -1):
        backend = FakeBackend(a=width, w=width, granularity=granularity)
        errors.append(float((backend.output(x, weight) - exact).norm() / exact.norm()))
    assert errors == sorted(errors)
    assert errors[0] < 0.03
    assert errors[-1] > 0.5


def test_cast_is_what_a_study_overrides():
    class WeightsAreZero(FakeBackend):
        def cast(self, operand_RS, kind):
            rounded = super().cast(operand_RS, kind)
            return torch.zeros_like(rounded) if kind == "w" else rounded

    backend = WeightsAreZero(a=8, w=8, g=8, name="fake-zero-weights")
    x, weight, grad = torch.randn(8, 16), torch.randn(4, 16), torch.randn(8, 4)
    grad_input, grad_weight = backend.grads(grad, x, weight, need_input=True, need_weight=True)
    assert backend.output(x, weight).count_nonzero() == 0
    assert grad_input.count_nonzero() == 0
    assert grad_weight.count_nonzero() > 0


@pytest.mark.parametrize(
    "recipe", ["fake(a=4, w=8, g=8)", "fake(a=e4m3, g=e5m2, rounding=stochastic, granularity=rowwise)"]
)
def test_a_trainer_takes_a_fake_recipe_by_its_string(recipe):
    run = trainer(GNMRPrecision(recipe), callbacks=[paths := Paths()], max_epochs=5)
    run.fit(Net(), batches(40))
    assert paths.bf16[:20] == [set()] * 20  # the warm-up: nothing has been recovered yet
    assert run.precision_plugin.backend.name == recipe
    assert run.callback_metrics["train_loss"] < 1.2  # from ln 4 = 1.39, what guessing costs
