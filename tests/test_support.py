"""The support matrix, as much of it as `make test` has time for, and that its page says what was measured."""

import itertools
import logging
import re
from pathlib import Path

import pytest

from benchmarks import support
from benchmarks.families import FAMILIES, Family
from benchmarks.support import BASES, NOT_IN_STOCK, NOT_RUN, WORKS, Cell
from gnmr_lightning import backends

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
CELLS = support.pairwise()
QUICK = next(iter(FAMILIES))


def page() -> dict[Cell, str]:
    """What the page says of each cell."""
    said = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        base, *lines = section.splitlines()
        if base in BASES:
            header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|")
            for (family, *marks), recipe in itertools.product(rows, header[1:]):
                both = marks[header.index(recipe) - 1].split(" / ")
                said |= {Cell(recipe, family, base, compiled): both[compiled] for compiled in (False, True)}
    return said


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.recipe}-{c.family}-{c.base}-{c.compiled}")
@pytest.mark.filterwarnings("ignore")
def test_the_cell_works_where_stock_does(cell, caplog):
    caplog.set_level(logging.WARNING)
    # Compiled, a ragged batch is a second graph: one of the models has it here, all have it in the full run.
    result = support.check(cell, ragged=not cell.compiled or cell.family == QUICK)
    assert result == (NOT_IN_STOCK if cell.compiled and cell.family == "mixture of experts" else WORKS)
    assert page()[cell] == {WORKS: "yes", NOT_IN_STOCK: "stock"}[result]


def test_any_two_values_of_two_axes_meet():
    values = [set(map(getattr, CELLS, itertools.repeat(axis))) for axis in ("recipe", "family", "base", "compiled")]
    assert values == [set(backends.RECIPES), set(FAMILIES), set(BASES), {False, True}]
    rows = [(c.recipe, c.family, c.base, c.compiled) for c in CELLS]
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(values[i], values[j]))


def test_the_page_is_about_the_recipes_and_models_that_there_are():
    """If not: python -m benchmarks.support --write docs/support.md"""
    said = page()
    missing = {"Llama (transformers)"} - set(FAMILIES)  # where transformers is not installed
    assert {cell for cell in said if cell.family not in missing} == set(support.cells())
    assert set(said.values()) <= {"yes", "stock", "-"}


class Broken(backends.Backend):
    """Exact products, but for `factor`."""

    name = "broken"
    factor: float | None = 1.0
    rows = True

    def output(self, x_MK, weight_NK):
        if self.factor is None:
            raise RuntimeError("no kernel\nfor this")
        return x_MK @ weight_NK.to(x_MK.dtype).t() * self.factor

    def grad_input(self, grad_MN, weight_NK):
        return grad_MN @ weight_NK.to(grad_MN.dtype)

    def grad_weight(self, grad_MN, x_MK):
        return grad_MN.t() @ x_MK

    def takes_rows(self, rows, device_type):
        return self.rows


@pytest.mark.parametrize(
    ("factor", "rows", "says"),
    [
        (1.0, True, WORKS),
        (3.0, True, r"losses differ by \d+% from those in bf16"),
        (float("nan"), True, "losses differ by nan% from those in bf16"),
        (None, True, "RuntimeError: no kernel"),
        (1.0, False, r"FLOPs in low precision 0, in bf16 \d.*: one path did nothing"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_matrix_sees_what_does_not_work(factor, rows, says):
    backend = Broken()
    backend.factor, backend.rows = factor, rows
    result = support.check(Cell(backend, "teacher and student", "bf16-mixed", False))
    assert re.fullmatch(says, result), result


def test_the_page_claims_nothing_that_was_not_run():
    first, second, third, fourth = (Cell(r, QUICK, "bf16-true", False) for r in backends.RECIPES[:4])
    results = {**dict.fromkeys(support.cells(), NOT_RUN), first: WORKS, second: "boom", third: "boom", fourth: "bang"}
    text = support.render(results, "aot_eager", "a CPU")
    others = "".join(" - / - |" for _ in backends.RECIPES[4:])
    assert f"| {QUICK} | yes / - | no [1] / - | no [1] / - | no [2] / - |{others}\n" in text
    assert "[1] boom\n" in text
    assert "[2] bang\n" in text
    assert text.count("yes /") == 1


def test_every_model_of_the_matrix_is_described_and_ends_with_a_batch_of_7():
    for name, build in FAMILIES.items():
        model = build(32)
        assert model.__doc__ != Family.__doc__, name
        assert [len(batch[0]) for batch in model.data(32)] == [12, 12, 7], name
