"""The last of what a worker wrote to its standard output and error, bounded and safe to print."""

from __future__ import annotations

from collections import deque

from infervisor.protocol.quoting import printable

MAX_LINES = 200
MAX_LINE_BYTES = 4096
TAIL_LINES = 60
"""What reports carry: the stacks of a crash take about thirty lines, and what led to it stands before them."""


class OutputRing:
    """Keeps the last lines; a line that is too long is clipped, an unfinished one counts."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._open = bytearray()
        self._clipped = False
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take any piece of the stream."""
        self.total_bytes += len(data)
        *finished, rest = data.rsplit(b"\n", MAX_LINES)
        if len(finished) == MAX_LINES:
            # What is pushed out at once isn't looked at: a flood of empty lines would take a second of every turn.
            _, newline, finished[0] = finished[0].rpartition(b"\n")
            if newline:
                self._open.clear()
                self._clipped = False
        for line in finished:
            self._extend(line)
            self._lines.append(bytes(self._open) + (b" [clipped]" if self._clipped else b""))
            self._open.clear()
            self._clipped = False
        self._extend(rest)

    def _extend(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._open)
        self._open += piece[:room]
        self._clipped = self._clipped or len(piece) > room

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines, oldest first, escaped."""
        kept = [*self._lines, *([bytes(self._open)] if self._open else [])][-lines:]
        return "\n".join(printable(line.rstrip(b"\r").decode(errors="backslashreplace")) for line in kept)
