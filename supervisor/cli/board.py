"""Several answers side by side on a terminal, each in a column that fills, with a line that says how it goes.

Frames are written by the one writer of standard output. While one is being written no further token is taken, so
that a slow terminal holds all answers back. In the loop's thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import anyio
from rich.cells import cell_len, set_cell_size

from infervisor import EndClass, Report, Stream
from infervisor.supervisor.cli.column import Column
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.presentation import FLUSH_S, Diagnostics
from infervisor.supervisor.cli.screen import Screen, at_column
from infervisor.supervisor.cli.several import Several
from infervisor.supervisor.cli.terminal import for_terminal

FRAME_S = 0.05
STATUS_S = 0.25
"""A frame at least so often: rates and times change by themselves."""
MIN_WIDTH = 24
LEAST_WIDTH = 16
"""Of a column with its frame, where it would have too few lines otherwise."""
MIN_HEIGHT = 4
FRAME_CELLS = 4
FRAME_LINES = 2
MOST_LINES_ABOVE = 1000
_RED, _DIM, _PLAIN = "\x1b[31m", "\x1b[2m", "\x1b[0m"


def grid(columns: int, lines: int, count: int) -> tuple[int, int, int]:
    """Return how many panels stand side by side on a terminal of this size, their width and their height."""
    beside = max(1, min(count, columns // MIN_WIDTH))
    while beside < count and _height(lines, count, beside) < MIN_HEIGHT and columns // LEAST_WIDTH > beside:
        beside += 1
    rows = -(-count // beside)
    # As few as make the same rows: five are three and two, not four and one.
    beside = -(-count // rows)
    return beside, columns // beside, max(FRAME_LINES + 1, _height(lines, count, beside))


def _height(lines: int, count: int, beside: int) -> int:
    rows = -(-count // beside)
    return (lines - 1) // rows  # one stays free, where the cursor is


def status_of(report: Report, now_ns: int) -> str:
    """Return in a few words how far a request is."""
    timeline, usage = report.timeline, report.usage
    tokens = max(usage.completion_tokens, timeline.tokens)
    rate = "" if timeline.tokens_per_s is None else f"{timeline.tokens_per_s:.1f} tokens/s"
    if report.end_reason is not None:
        return " · ".join(part for part in (str(report.end_reason), f"{tokens} tokens", rate) if part)
    if report.resumes and report.resumes[-1].resumed_ns is None:
        return f"waiting for another worker · {tokens} tokens"
    if timeline.started_ns is None:
        return f"queued {(now_ns - timeline.queued_ns) / 1e9:.1f} s"
    if timeline.first_token_ns is None:
        return f"reading {usage.prompt_tokens - usage.cached_tokens} of {usage.prompt_tokens} tokens"
    return rate or f"{tokens} tokens"


def panel(
    title: str, lines: Sequence[str], status: str, *, left: int, width: int, height: int, style: str = ""
) -> list[str]:
    """Return the lines of one framed column that begins at the cell `left`, counted from 1.

    Each edge is put where it belongs, not after what stands before it: terminals differ in how wide they show some
    emoji and scripts.
    """
    begin, end = at_column(left) + style, at_column(left + width - 1) + style
    plain = _PLAIN if style else ""

    def edge(first: str, text: str, last: str) -> str:
        shown = _cut(text, width - 6)
        line = "─" * (width - 5 - cell_len(shown))
        return f"{begin}{first}─ {shown} {line}{end}{last}{plain}"

    inside = width - FRAME_CELLS
    rows = [
        f"{begin}│{plain} {set_cell_size(line, inside)} {end}│{plain}"
        for line in [*lines, *[""] * (height - FRAME_LINES - len(lines))]
    ]
    return [edge("╭", title, "╮"), *rows, edge("╰", status, "╯")]


def _cut(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else set_cell_size(text, max(0, cells - 1)) + "…"


class Board(Several):
    """The columns. Begins with the streams and ends with all of their text, which stays on the terminal."""

    def __init__(
        self, stdout: Output, diagnostics: Diagnostics, titles: Sequence[str], *, quiet: bool
    ) -> None:
        super().__init__(stdout, diagnostics, titles, quiet=quiet)
        self._screen = Screen()
        self._columns: list[Column] = []
        self._above: list[str] = []
        self._has_colours = not os.environ.get("NO_COLOR")
        self._changed = anyio.Event()
        self._painted = anyio.Event()
        """Set when a frame is written that shows what has come so far."""

    def begin(self, streams: Sequence[Stream]) -> None:
        """Take the streams, and what would be written over the columns."""
        super().begin(streams)
        _, width, _ = grid(*self._stdout.size(), len(streams))
        self._columns = [Column(width - FRAME_CELLS) for _ in streams]
        if self._say.stderr.is_same_as(self._stdout):
            self._say.elsewhere = self._take_line

    def _take_line(self, text: str) -> None:
        if len(self._above) < MOST_LINES_ABOVE:
            self._above.append(text)
            self._changed.set()

    def _add(self, number: int, text: str, *, on_new_line: bool = False) -> None:
        column = self._columns[number]
        if on_new_line and column.is_within_line:
            text = "\n" + text
        column.add(for_terminal(text))
        self._changed.set()

    async def ended(self, number: int) -> None:
        """Return when a frame shows all of it."""
        self._changed.set()
        self._check()
        await self._painted.wait()
        self._check()

    async def draw(self) -> None:
        """Task: paint a frame when something has changed, until cancelled."""
        while self._error is None:
            # What comes from now on is in the next frame.
            painted, self._painted, self._changed = self._painted, anyio.Event(), anyio.Event()
            begun_s = time.monotonic()
            # Told to whoever has something to show.
            with contextlib.suppress(OSError):
                await self._write(self._frame())
            painted.set()
            with anyio.move_on_after(STATUS_S):
                await self._changed.wait()
            await anyio.sleep(max(0.0, begun_s + FRAME_S - time.monotonic()))
        self._painted.set()

    async def finish(self) -> None:
        """Leave all of the text on the terminal, then the report lines."""
        if self._columns and self._error is None:
            self._stdout.post(self._frame(whole=True))
            await self._stdout.flush(FLUSH_S)
        self._say.elsewhere = None
        await super().finish()

    def _frame(self, *, whole: bool = False) -> bytes:
        """Return what turns the frame before into this one."""
        size = self._stdout.size()
        beside, width, height = grid(*size, len(self._columns))
        for column in self._columns:
            column.resize(width - FRAME_CELLS)
        now_ns = time.monotonic_ns()
        lines: list[str] = []
        for first in range(0, len(self._columns), beside):
            numbers = range(first, min(first + beside, len(self._columns)))
            texts = [
                self._columns[number].last(None if whole else height - FRAME_LINES) for number in numbers
            ]
            tall = max(map(len, texts)) + FRAME_LINES if whole else height
            panels = [
                self._panel(number, text, 1 + place * width, width, tall, now_ns)
                for place, (number, text) in enumerate(zip(numbers, texts, strict=True))
            ]
            lines += ["".join(parts) for parts in zip(*panels, strict=True)]
        above, self._above = self._above, []
        # What doesn't fit on a very low terminal isn't shown before the end.
        return self._screen.frame(lines if whole else lines[: size[1] - 1], size, above)

    def _panel(
        self, number: int, lines: Sequence[str], left: int, width: int, height: int, now_ns: int
    ) -> list[str]:
        report = self._streams[number].report
        style = ""
        if self._has_colours and report.end_reason is not None:
            style = (
                _RED
                if report.end_reason.end_class in (EndClass.FAULT, EndClass.DEADLINE, EndClass.REFUSAL)
                else _DIM
            )
        title = f"{number + 1}: {self._titles[number]}"
        status = status_of(report, now_ns)
        return panel(title, lines, status, left=left, width=width, height=height, style=style)
