"""The figures in the documents are those of the last run of the benchmarks."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import Figure, percentile, ratio, take_turns
from benchmarks.publish import BLOCKS, DOCUMENTS, MARKED, RESULTS, ROOT, figures, published


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_shows_what_was_measured(document: str) -> None:
    text = (ROOT / document).read_text()
    assert MARKED.search(text), f"{document} has no block of figures"
    results = json.loads(RESULTS.read_text())
    assert published(text, results) == text, "run `python -m benchmarks.publish`"


def test_every_block_is_shown_and_every_figure_that_a_block_names_was_measured() -> None:
    shown = {found[2] for document in DOCUMENTS for found in MARKED.finditer((ROOT / document).read_text())}
    assert shown == set(BLOCKS)
    measured = {figure["name"] for figure in figures(json.loads(RESULTS.read_text()))}
    assert {name for names in BLOCKS.values() for name in names} <= measured


def test_a_figure_knows_whether_it_is_as_wanted() -> None:
    assert Figure("a", "a", 1.0, "ratio", 1, ("≥", 1.0)).is_met is True
    assert Figure("a", "a", 1.01, "ms", 1, ("≤", 1.0)).is_met is False
    assert Figure("a", "a", 1.0, "ms", 1).is_met is None


def test_sides_take_turns_and_each_begins_once_in_a_while() -> None:
    asked: list[str] = []

    def side(name: str, value: float) -> float:
        asked.append(name)
        return value

    measured = take_turns([lambda: side("a", 4.0), lambda: side("b", 2.0)], 2)
    assert asked == ["a", "b", "a", "b", "b", "a"], "one warm-up each, then in turn"
    assert measured == [(4.0, 2.0), (4.0, 2.0)]
    figure = ratio("r", "a ÷ b", [*measured, (4.0, 1.0)], None)
    assert figure.value == 2.0
    assert figure.details["first"] == 4.0


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
