"""The page of results says what the committed results say."""

import pytest

from benchmarks import figures


def test_the_pages_tables_are_those_of_the_committed_results():
    """After a new run of a benchmark: `make figures`."""
    page = figures.PAGE.read_text(encoding="utf-8")
    assert figures.filled(page) == page
    for picture in ("detection.svg", "quality.svg"):
        assert f"pictures/{picture}" in page
        assert (figures.PICTURES / picture).exists()


def test_a_table_without_its_place_is_one_sentence():
    with pytest.raises(ValueError, match=r"not have the marks of the table .machine. once each: write <!-- machine"):
        figures.filled("<!-- machine -->\n")
