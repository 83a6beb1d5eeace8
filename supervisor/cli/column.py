"""One answer as lines of a fixed width, wrapped while it grows. Pure.

Widths are cells of a terminal: a Chinese character or an emoji takes two, a combining mark none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

TAB = "    "
_WORDS = re.compile(r"\s*\S+|\s+")


def wrap(text: str, width: int) -> list[str]:
    """Return a text without line ends as lines of at most `width` cells: at least one, cut at blanks if it can be.

    Blanks that begin the text stay; those at which a line is cut go. width: at least 2 cells.
    """
    lines: list[str] = []
    line, used = "", 0
    for word in _WORDS.findall(text):
        if word.isspace():
            line += word  # at the end of the text: it takes no place of its own
            break
        cells = cell_len(word)
        if used + cells > width and line:
            lines.append(line.rstrip())
            line, used = "", 0
            word = word.lstrip()
            cells = cell_len(word)
        if cells > width:
            *whole, word = chop_cells(word, width) or [""]
            lines += whole
            cells = cell_len(word)
        line, used = line + word, used + cells
    return [*lines, line]


class Column:
    """A text that grows, as lines of `width` cells."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._pieces: list[str] = []
        self._lines: list[str] = []
        self._open = ""

    def add(self, text: str) -> None:
        """Add a piece of text; it must be harmless to a terminal already."""
        self._pieces.append(text)
        self._flow(text)

    @property
    def is_within_line(self) -> bool:
        """Whether what is added next goes on in the last line."""
        return bool(self._open)

    def resize(self, width: int) -> None:
        """Wrap all of it anew, if the width is another one."""
        if width != self._width:
            self._width = width
            self._lines, self._open = [], ""
            self._pieces = ["".join(self._pieces)]
            self._flow(self._pieces[0])

    def _flow(self, text: str) -> None:
        # What a later piece can change is the last line alone: a word that has moved to the next line stays there.
        first, *others = text.replace("\t", TAB).split("\n")
        self._wrap_open(first)
        for paragraph in others:
            self._lines.append(self._open.rstrip())
            self._open = ""
            self._wrap_open(paragraph)

    def _wrap_open(self, more: str) -> None:
        *done, self._open = wrap(self._open + more, self._width)
        self._lines += done

    def last(self, lines: int | None) -> Sequence[str]:
        """Return the last `lines` lines, at least one, or all of them. An empty line at the end is none."""
        shown = [*self._lines[-lines:], self._open.rstrip()] if lines else [*self._lines, self._open.rstrip()]
        if not shown[-1]:
            shown.pop()
        return shown if lines is None else shown[-lines:]
