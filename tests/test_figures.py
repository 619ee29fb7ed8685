"""The pages of results say what the committed results say."""

import pytest

from benchmarks import figures


@pytest.mark.parametrize("name", figures.TABLES)
def test_the_pages_tables_are_those_of_the_committed_results(name):
    """After a new run of a benchmark: `make figures`."""
    page = (figures.DOCS / name).read_text(encoding="utf-8")
    assert figures.filled(name) == page


def test_the_pictures_are_there():
    page = (figures.DOCS / "results.md").read_text(encoding="utf-8")
    for picture in ("detection.svg", "quality.svg"):
        assert f"pictures/{picture}" in page
        assert (figures.PICTURES / picture).exists()


def test_a_table_without_its_place_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "results.md").write_text("<!-- machine -->\n", encoding="utf-8")
    monkeypatch.setattr(figures, "DOCS", tmp_path)
    with pytest.raises(ValueError, match=r"not have the marks of the table .machine. once each: write <!-- machine"):
        figures.filled("results.md")
