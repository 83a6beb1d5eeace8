"""The figures in the documents are those of the last run of the benchmarks."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.__main__ import NAMES
from benchmarks.company import Gap, gaps
from benchmarks.figures import Figure, percentile, ratio, take_turns
from benchmarks.publish import BLOCKS, DOCUMENTS, MARKED, RESULTS, ROOT, WHOLE, figures, published
from benchmarks.streams import in_turn, rate_of


def _script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


curves = _script(ROOT / "docs/pictures/curves.py")
POINTS = [
    {"step_budget_ms": None, "gap": 5.5, "prefill": 1.3},
    {"step_budget_ms": 250, "gap": 30.0, "prefill": 1.05},
    {"step_budget_ms": 50, "gap": 5.1, "prefill": 1.4},
]


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


def test_a_block_of_whole_benchmarks_names_benchmarks_that_exist() -> None:
    assert {name for names in WHOLE.values() for name in names} <= set(NAMES)


def test_the_curve_was_drawn_from_the_last_run() -> None:
    drawn = curves.picture(*curves.curve(json.loads(RESULTS.read_text())))
    assert curves.PICTURE.read_text() == drawn, f"draw it anew: {curves.COMMAND}"


def test_a_curve_leads_from_the_smallest_budget_to_the_largest_and_the_default_stands_apart() -> None:
    svg = curves.picture(POINTS, (7.0, 1.5))
    scale = curves.Scale([5.5, 30.0, 5.1, 7.0], [1.3, 1.05, 1.4, 1.5])
    way = " ".join(
        f"{scale.x(gap):.1f},{scale.y(prefill):.1f}" for gap, prefill in ((5.1, 1.4), (30.0, 1.05))
    )
    assert f'points="{way}"' in svg
    assert svg.count("<circle") == len(POINTS)
    for label in ("default", "50 ms", "250 ms"):
        assert f">{label}</text>" in svg


def test_results_without_a_curve_are_said_to_have_none() -> None:
    with pytest.raises(SystemExit, match="make bench BENCH=company"):
        curves.curve({"prefix": {"figures": [{"name": "second_turn"}]}})


def test_a_chunk_of_several_tokens_is_so_many_equal_gaps() -> None:
    found = gaps([(0, 1), (10, 1), (40, 3), (45, 1)])
    assert found == [Gap(0, 10), Gap(10, 20), Gap(20, 30), Gap(30, 40), Gap(40, 45)]
    assert [gap for gap in found if gap.touches(12, 21)] == [Gap(10, 20), Gap(20, 30)]


def test_a_rate_is_of_all_answers_until_the_last_one_is_whole() -> None:
    answered: list[str] = []

    async def read(prompt: str) -> int:
        answered.append(prompt)
        # What the last reader says counts, not who returned last.
        return 2_000_000_000 + begun_ns if prompt == "slow" else 1_000_000_000 + begun_ns

    async def measured() -> float:
        return await rate_of(read, ["slow", "fast"], 50)

    begun_ns = time.monotonic_ns()
    assert anyio.run(measured) == pytest.approx(50.0, rel=0.2)
    assert answered == ["slow", "fast"]


def test_sides_in_an_event_loop_take_turns_as_others_do() -> None:
    asked: list[str] = []

    def side(name: str, value: float) -> Any:
        async def measured() -> float:
            asked.append(name)
            return value

        return measured

    async def main() -> list[tuple[float, ...]]:
        return await in_turn([side("a", 4.0), side("b", 2.0)], 2)

    assert anyio.run(main) == [(4.0, 2.0), (4.0, 2.0)]
    assert asked == ["a", "b", "a", "b", "b", "a"]


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
