"""The bar that shows on standard error how far the model is loaded. In the loop's thread; never blocks."""

from __future__ import annotations

from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.terminal import for_terminal
from infervisor.supervisor.events import LoadProgress

CELLS = 24
_CLEAR_LINE = b"\r\x1b[K"


class LoadBar:
    """One line that is drawn over. quiet: nothing is drawn; nor is it where a line can't be drawn over."""

    def __init__(self, stderr: Output, *, quiet: bool) -> None:
        self._stderr = stderr
        self._draws = stderr.draws and not quiet
        self._shown = False

    def show(self, event: LoadProgress) -> None:
        """Draw it."""
        if not self._draws:
            return
        done = round(event.fraction * CELLS)
        bar = "█" * done + "░" * (CELLS - done)
        text = f"loading {bar} {event.fraction:4.0%} {for_terminal(event.phase)}"
        self._stderr.post(_CLEAR_LINE + text.encode())
        self._shown = True

    def clear(self) -> None:
        """Wipe it."""
        if self._shown:
            self._stderr.post(_CLEAR_LINE)
            self._shown = False
