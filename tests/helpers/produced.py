"""What real tests make happen: rows of the four tables, and end reasons.

A test promises with `@pytest.mark.produces("slot: open × WorkerWanted → half_open", "end: unavailable")`; while it
runs, everything that the tables step and every end that is told is recorded, and it fails if something promised
didn't happen (tests/conftest.py). `python -m tests.helpers.produced` writes the page that lists who produces what.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infervisor import EndReason
from infervisor.protocol.machines.attempt import ATTEMPT
from infervisor.protocol.machines.process import PROCESS
from infervisor.protocol.machines.request import REQUEST
from infervisor.protocol.machines.slot import SLOT
from infervisor.protocol.machines.table import Table
from infervisor.supervisor import events
from infervisor.supervisor.dispatcher import Dispatcher

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/proofs.md"
TABLES: tuple[Table[Any], ...] = (REQUEST, ATTEMPT, PROCESS, SLOT)

NOT_YET: Mapping[str, str] = {}
"""What nothing can produce yet, and why. Whoever produces one of these takes it off here."""


def _row(table: Table[Any], phase: object, event: type[Any], to: object) -> str:
    return f"{table.name}: {phase} × {event.__name__} → {to}"


def _end(reason: EndReason) -> str:
    return f"end: {reason}"


ROWS: Mapping[str, tuple[str, ...]] = {
    table.name: tuple(
        _row(table, phase, event, to) for (phase, event), row in table.rows.items() for to in row.to
    )
    for table in TABLES
}
"""Every way that a row can take, by table: a row that leads to two phases counts twice."""
ENDS = tuple(_end(reason) for reason in EndReason)
ALL = frozenset([row for rows in ROWS.values() for row in rows] + list(ENDS))


# --- while a test runs ---------------------------------------------------------------------------


@contextmanager
def recording() -> Iterator[set[str]]:
    """Yield a set that grows with every row that is taken and every end that is told in this process."""
    seen: set[str] = set()
    step, emit = Table.step, Dispatcher.emit

    def record_step(table: Table[Any], state: Any, event: object, now: int) -> tuple[Any, tuple[Any, ...]]:
        after, effects = step(table, state, event, now)
        seen.add(_row(table, state.phase, type(event), after.phase))
        return after, effects

    def record_emit(dispatcher: Dispatcher, event: events.Event) -> None:
        if isinstance(event, events.RequestReleased) and event.report.end_reason is not None:
            seen.add(_end(event.report.end_reason))
        emit(dispatcher, event)

    Table.step, Dispatcher.emit = record_step, record_emit  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Table.step, Dispatcher.emit = step, emit  # type: ignore[method-assign]


def check(promised: Iterable[str], seen: set[str]) -> None:
    """Fail if something promised didn't happen, or something happened that is said to be impossible yet."""
    missing = sorted(set(promised) - seen)
    assert not missing, f"promised, but it didn't happen: {missing}"
    early = sorted(seen & NOT_YET.keys())
    assert not early, f"this can happen now: {early}; mark the test and take it off NOT_YET in {__file__}"


# --- who promises what ---------------------------------------------------------------------------


def promises() -> dict[str, list[tuple[Path, str]]]:
    """Return for each promised thing the tests that promise it, as (file, name), in the order of the files."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        if "pytest.mark.produces(" not in path.read_text():
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, function in vars(module).items():
            if name.startswith("test_"):
                for thing in dict.fromkeys(_promised_by(function)):
                    found.setdefault(thing, []).append((path, name))
    return found


def _promised_by(function: Callable[..., Any]) -> Iterator[str]:
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "produces":
            yield from mark.args
        elif mark.name == "parametrize":
            for values in mark.args[1]:
                for inner in getattr(values, "marks", ()):
                    if inner.name == "produces":
                        yield from inner.args


# --- the page ------------------------------------------------------------------------------------

_HEAD = """\
# Which test produces what

Generated from the marks of the tests by `python -m tests.helpers.produced`; a test fails if it is out of date.

Every row of the [four tables](../ARCHITECTURE.md#where-decisions-are) and every end reason, but for those marked
*nothing yet*, happens in a test with real worker processes. Each of these tests is watched while it runs, and fails
if what it stands for here didn't happen. A row that leads to several phases is listed once for each.
"""


def page() -> str:
    """Return the page as it should be."""
    found = promises()
    lines = [_HEAD]
    for table in TABLES:
        lines += [f"## {table.name}", "", "| phase | event | leads to | produced by |", "|---|---|---|---|"]
        for (phase, event), row in table.rows.items():
            for to in row.to:
                tests = _cell(_row(table, phase, event, to), found)
                lines.append(f"| `{phase}` | `{event.__name__}` | `{to}` | {tests} |")
        lines.append("")
    lines += ["## end reasons", "", "| class | reason | produced by |", "|---|---|---|"]
    lines += [f"| {reason.end_class} | `{reason}` | {_cell(_end(reason), found)} |" for reason in EndReason]
    return "\n".join(lines) + "\n"


def _cell(thing: str, found: Mapping[str, list[tuple[Path, str]]]) -> str:
    if thing in NOT_YET:
        return f"nothing yet: {NOT_YET[thing]}"
    return "<br>".join(
        f"[{path.stem.removeprefix('test_')}](../{path.relative_to(ROOT)}): "
        f"{name.removeprefix('test_').replace('_', ' ')}"
        for path, name in found.get(thing, [])
    )


if __name__ == "__main__":
    PAGE.write_text(page())
