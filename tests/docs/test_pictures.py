"""The pictures of the life cycles belong to the tables, and no picture needs anything from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from infervisor.protocol.machines import attempt, process, request, slot
from infervisor.protocol.machines.table import Table
from tests.docs.markdown import ROOT

PICTURES = ROOT / "docs/pictures"
STATES = ROOT / "docs/states.md"
TABLES: list[Table[Any]] = [request.REQUEST, attempt.ATTEMPT, process.PROCESS, slot.SLOT]


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("diagrams", PICTURES / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


diagrams = _script()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_state_diagram_was_drawn_from_its_table_as_it_is_now(table: Table[Any]) -> None:
    svg = (PICTURES / f"{table.name}.svg").read_text()
    assert diagrams.embedded_source(svg) == diagrams.state_diagram(table), f"draw it anew: {diagrams.COMMAND}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_state_diagram_shows_every_phase_and_every_event_of_its_table(table: Table[Any]) -> None:
    root = ElementTree.parse(PICTURES / f"{table.name}.svg").getroot()
    shown = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    words = set(re.findall(r"\w+", shown))
    assert {str(phase) for phase, _ in table.rows} | {
        str(to) for row in table.rows.values() for to in row.to
    } <= words
    assert {event.__name__ for _, event in table.rows} <= words


def test_every_life_cycle_is_on_the_page_of_states() -> None:
    text = STATES.read_text()
    assert {table.name for table in diagrams.TABLES} == {table.name for table in TABLES}
    for table in TABLES:
        assert f"](pictures/{table.name}.svg)" in text


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_whole_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert not re.search(r"""(href|src)\s*=\s*["'](?!#)|url\(["']?(?!#)|@import|<script""", text)


def test_a_changed_row_is_noticed() -> None:
    rows = {key: row for key, row in request.REQUEST.rows.items() if key[1] is not request.Lost}
    assert diagrams.state_diagram(Table("request", rows)) != diagrams.state_diagram(request.REQUEST)
