"""A command on a terminal that nobody sees: a pty, and what its screen would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import selectors
import struct
import subprocess
import termios
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.helpers.command_line import COMMAND, environment

WITHIN_S = 60.0
FOREGROUND = 'echo begin; exec "$@"'
_PIECES = re.compile(r"\x1b\[[?\d]*[A-Za-z]|\r|\n|[^\x1b\r\n]")
_SETTINGS = ("\x1b[?2026h", "\x1b[?2026l", "\x1b[?7l", "\x1b[?7h")


class Terminal:
    """The master end of a pty, with all that was read from it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.master = master
        self.shown = bytearray()

    def read_until(self, wanted: bytes | Callable[[], bool] | None) -> bytes:
        """Read until something is shown or the case, or, with None, until all programs have left the terminal."""

        def is_there() -> bool:
            return wanted in self.shown if isinstance(wanted, bytes) else wanted is not None and wanted()

        deadline = time.monotonic() + WITHIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.master, selectors.EVENT_READ)
            while not is_there():
                assert selector.select(max(0.0, deadline - time.monotonic())), bytes(self.shown)
                try:
                    piece = os.read(self.master, 1 << 16)
                except OSError:  # EIO: nobody has the other end open any more
                    piece = b""
                if not piece:
                    assert wanted is None, f"never saw {wanted!r}: {bytes(self.shown)!r}"
                    break
                self.shown += piece
        return bytes(self.shown)

    def finish(self) -> int:
        """Read the rest and return the exit code."""
        self.read_until(None)
        return self.process.wait(WITHIN_S)

    def screen(self) -> list[str]:
        """Return the lines that it would show, if it were endlessly high."""
        return screen_of(bytes(self.shown).decode())


@contextmanager
def terminal(
    script: str, *arguments: str, size: tuple[int, int] | None = None, **variables: str
) -> Iterator[Terminal]:
    """Run a shell script with the command as its arguments, in a session whose terminal is a new pty.

    size: columns and lines; unknown to the programs otherwise.
    """
    master, slave = pty.openpty()
    if size is not None:
        resize(master, size)
    # A session leader that opens a terminal gets it as its controlling one.
    wrapped = f'exec <"$0" >"$0" 2>&1; {script}'
    process = subprocess.Popen(
        ["sh", "-c", wrapped, os.ttyname(slave), *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**variables),
        start_new_session=True,
    )
    shown = Terminal(process, master)
    try:
        # The script's shell opens the terminal by name: until it has, this end keeps it alive.
        shown.read_until(b"begin")
        os.close(slave)
        slave = -1
        yield shown
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WITHIN_S)
        for fd in (master, slave):
            if fd >= 0:
                os.close(fd)


def resize(fd: int, size: tuple[int, int]) -> None:
    """Give a terminal so many columns and lines."""
    columns, lines = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def screen_of(text: str) -> list[str]:
    """Return what a terminal shows that is endlessly high and wide. Fails for a sequence that isn't known here.

    A cell that the right half of a wide character takes is an empty string among the cells.
    """
    lines: list[list[str]] = [[]]
    row = column = 0
    for piece in _PIECES.findall(text):
        argument = piece[2:-1] if piece.startswith("\x1b") else ""
        match piece[-1] if argument or piece.startswith("\x1b") else "text":
            case "A":
                row -= int(argument)
                assert row >= 0, "moved above the screen"
            case "G":
                column = int(argument) - 1
            case "K":
                assert argument in ("", "2")
                lines[row] = [] if argument else lines[row][:column]
            case "J" if not argument:
                assert column == 0
                lines[row:] = [[]]
            case "J":
                lines = [[]]
            case "H":
                row = column = 0
            case "m":
                pass
            case "text" if piece == "\n":
                row += 1
                lines += [[]] * (row + 1 - len(lines))
                lines[row] = lines[row].copy()
            case "text" if piece == "\r":
                column = 0
            case "text":
                column = _put(lines[row], column, piece)
            case _:
                assert piece in _SETTINGS, f"unknown sequence {piece!r}"
    return ["".join(cells).rstrip() for cells in lines]


def _put(line: list[str], column: int, character: str) -> int:
    if unicodedata.combining(character):
        line[column - 1] += character
        return column
    width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
    line += [" "] * (column + width - len(line))
    line[column] = character
    line[column + 1 : column + width] = [""] * (width - 1)
    return column + width
