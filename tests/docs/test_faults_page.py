"""The page on faults is what the chaos table says."""

from __future__ import annotations

from tests.chaos.faults import FAULTS
from tests.chaos.page import PAGE, page
from tests.chaos.table import Phase
from tests.docs.markdown import table


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.chaos.page"


def test_every_fault_has_its_row_with_everything_that_a_person_wants_to_know() -> None:
    titles = [fault.title for fault in FAULTS.values()]
    rows = [row for row in table(PAGE, "what goes wrong") if len(row) == 5]
    assert [row[0] for row in rows] == titles
    assert all(cell for row in rows for cell in row)
    matrix = [row for row in table(PAGE, "what goes wrong") if len(row) == 1 + len(Phase)]
    assert [row[0] for row in matrix] == titles
