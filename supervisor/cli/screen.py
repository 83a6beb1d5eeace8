"""Lines at the end of a terminal that are drawn over again and again. Pure: returns what is to be written.

The cursor rests below the lines, so that a process that is killed leaves a usable terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
"""Around a frame: terminals that know it show the frame whole, the others ignore it."""
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""A line that the terminal shows wider than it was counted must not become two."""
_ERASE_BELOW = "\x1b[J"
_ERASE_LINE = "\x1b[2K"
_CLEAR = "\x1b[H\x1b[2J"
_NEXT_LINE = "\r\n"


def at_column(column: int) -> str:
    """Return what moves the cursor to a column of its line, counted from 1."""
    return f"\x1b[{column}G"


class Screen:
    """What is drawn now."""

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._size: tuple[int, int] | None = None

    def frame(self, lines: Sequence[str], size: tuple[int, int], above: Sequence[str] = ()) -> bytes:
        """Return what draws these lines over those before. size: of the terminal; above: lines that stay there."""
        parts = [_BEGIN_UPDATE]
        if self._size is not None and size != self._size:
            # Nobody knows where the lines went when the terminal got another size.
            parts.append(_CLEAR)
            self._drawn = []
        self._size = size
        if self._drawn:
            parts.append(f"\x1b[{len(self._drawn)}A\r")
        if above:
            parts.append(_ERASE_BELOW + "".join(f"{text}\n".replace("\n", _NEXT_LINE) for text in above))
            self._drawn = []
        parts.append(_NO_WRAP)
        for number, line in enumerate(lines):
            if number >= len(self._drawn) or self._drawn[number] != line:
                parts.append(_ERASE_LINE + line)
            parts.append(_NEXT_LINE)
        if len(lines) < len(self._drawn):
            parts.append(_ERASE_BELOW)
        self._drawn = list(lines)
        return "".join([*parts, _WRAP, _END_UPDATE]).encode()
