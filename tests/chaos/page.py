"""Writes docs/faults.md, "What can go wrong, and what you'll see", from the chaos table.

`python -m tests.chaos.page`. Reads nothing else and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from infervisor.protocol.machines.process import DeathCause
from tests.chaos.faults import FAULTS
from tests.chaos.table import ABOUT_ENDS, ABOUT_PHASES, TABLE, Cell, End, Expected, NotHere, Phase

PAGE = Path(__file__).parents[2] / "docs/faults.md"

_HEAD = """\
# What can go wrong, and what you'll see

Generated from [the chaos table](../tests/chaos/table.py) by `python -m tests.chaos.page`; a test fails if it is out
of date. Every cell below that isn't a dash is [made to happen](../tests/chaos/cells.py) by
[a test](../tests/chaos/test_chaos.py) with real workers, on asyncio and on trio: the whole exact text, the reason,
the cause, the counts, and nothing left over. `make soak` lets all of it happen at random, thousands of times.
"""

_ENDS_HEAD = """\
## What becomes of your requests

By default a request goes on in the next worker when its own dies (`on_crash="resume"`).

| in the tables | what it means |
|---|---|
"""

_FAULTS_HEAD = """\
## Fault by fault

*While serving* is what a running request sees. `resumes` is `report.resumes`, which also tells how long the pause
was.

| what goes wrong | what happens | your stream, while serving | what is told | what you can do |
|---|---|---|---|---|
"""

_PHASES_HEAD = """\
## At which moment

What the worker is at when it happens:

| phase | the worker |
|---|---|
"""

_NOT_HERE_HEAD = """\
## Where there is nothing to see

| why there is nothing | what goes wrong, and when |
|---|---|
"""


def page() -> str:
    """Return the page as it should be."""
    lines = [_HEAD]
    lines += [_ENDS_HEAD + "\n".join(f"| {end} | {ABOUT_ENDS[end]} |" for end in End if _is_used(end)), ""]
    lines += [_FAULTS_HEAD + "\n".join(map(_fault_row, FAULTS)), ""]
    lines += [_PHASES_HEAD + "\n".join(f"| {phase} | {ABOUT_PHASES[phase]} |" for phase in Phase), ""]
    lines += ["| what goes wrong | " + " | ".join(Phase) + " |", "|---" * (len(Phase) + 1) + "|"]
    lines += [
        f"| {FAULTS[name].title} | " + " | ".join(_word(row[phase]) for phase in Phase) + " |"
        for name, row in TABLE.items()
    ]
    lines += ["", _NOT_HERE_HEAD + "\n".join(_not_here_rows())]
    return "\n".join(lines) + "\n"


def _is_used(end: End) -> bool:
    return any(
        isinstance(cell, Expected) and cell.end is end for row in TABLE.values() for cell in row.values()
    )


def _word(cell: Cell) -> str:
    return str(cell.end) if isinstance(cell, Expected) else "–"


def _serving(name: str) -> Expected | None:
    """Return the cell that says most of what a running request sees."""
    order = (Phase.DECODE, Phase.PREFILL, Phase.CANCELLING, Phase.CLOSING, Phase.LOAD, Phase.HANDSHAKE)
    cells = (TABLE[name][phase] for phase in order)
    return next((cell for cell in cells if isinstance(cell, Expected)), None)


def _fault_row(name: str) -> str:
    fault, cell = FAULTS[name], _serving(name)
    if cell is None:
        sees, told = "nobody is left to see it", "nothing: the worker ends by itself, within two seconds"
    else:
        sees, told = f"**{cell.end}**", _told(cell)
    return f"| {fault.title} | {fault.happens} | {sees} | {told} | {fault.advice} |"


def _told(cell: Expected) -> str:
    parts: list[str] = []
    if cell.end in (End.RESUMED, End.ENDED, End.CANCELLED) and cell.cause is not None:
        parts.append(f"`resumes` with cause `{cell.cause}`, or the end `{cell.cause.end_reason}`")
    if cell.end is End.CANCELLED:
        parts.insert(0, "the end `cancelled`, stage `kill`; for its neighbours:")
    if cell.reason is not None:
        parts.append(f"the end `{cell.reason}`")
    if cell.end is End.CLOSED:
        parts.append("the end `shutting_down`")
    if cell.cause is not None and cell.cause is not DeathCause.STOPPED:
        parts.append(f"`WorkerExited` with cause `{cell.cause}`")
    return _joined(parts) or "nothing"


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(parts).replace(":;", ":")


def _not_here_rows() -> list[str]:
    """Return a row for each reason, with the faults and phases that have it."""
    titles: dict[NotHere, dict[tuple[Phase, ...], list[str]]] = {}
    for name, row in TABLE.items():
        phases: dict[NotHere, list[Phase]] = {}
        for phase, cell in row.items():
            if isinstance(cell, NotHere):
                phases.setdefault(cell, []).append(phase)
        for cell, when in phases.items():
            titles.setdefault(cell, {}).setdefault(tuple(when), []).append(FAULTS[name].title)
    return [
        f"| {cell.why}{_proof(cell)} | "
        + "<br>".join(f"*{_when(phases)}*: {'; '.join(names)}" for phases, names in found.items())
        + " |"
        for cell, found in titles.items()
    ]


def _when(phases: tuple[Phase, ...]) -> str:
    return "always" if len(phases) == len(Phase) else ", ".join(phases)


def _proof(cell: NotHere) -> str:
    return "" if cell.test is None else f" ([{Path(cell.test[0]).name}](../{cell.test[0]}))"


if __name__ == "__main__":
    PAGE.write_text(page())
