"""Every cell of the chaos table, with real workers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cells import CellRun
from tests.chaos.faults import FAULTS
from tests.chaos.table import ABOUT_ENDS, ABOUT_PHASES, TABLE, End, Expected, NotHere, Phase, cells
from tests.helpers.leaks import no_leftovers

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each cell."""
    with no_leftovers():
        yield


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "phase", "expected"), [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}") for cell in cells()]
)
async def test_a_cell(name: str, phase: Phase, expected: Expected, tmp_path: Path) -> None:
    await CellRun(name, phase, expected, tmp_path).run()


def test_every_fault_has_a_row_and_every_row_a_cell_for_each_phase() -> None:
    assert list(TABLE) == list(FAULTS)
    assert {name: [phase for phase in Phase if phase not in row] for name, row in TABLE.items()} == {
        name: [] for name in FAULTS
    }
    assert set(ABOUT_PHASES) == set(Phase)
    assert set(ABOUT_ENDS) == set(End)


def test_what_is_proved_elsewhere_is_proved_there() -> None:
    elsewhere = {
        cell.test
        for row in TABLE.values()
        for cell in row.values()
        if isinstance(cell, NotHere) and cell.test is not None
    }
    assert elsewhere
    for path, name in elsewhere:
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{path} has no {name}"


def test_no_row_is_empty_and_no_reason_is() -> None:
    for name, row in TABLE.items():
        here = [cell for cell in row.values() if isinstance(cell, Expected)]
        assert here or all(isinstance(cell, NotHere) and cell.test for cell in row.values()), name
        assert all(cell.why for cell in row.values() if isinstance(cell, NotHere)), name
