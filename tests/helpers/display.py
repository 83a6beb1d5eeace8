"""A screen that nobody sees, and a mouse and keyboard for it: for tests that use a window as a person does.

Needs Xvfb and xdotool (Debian and Ubuntu: the packages of these names) and a Python with tkinter (python3-tk).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

PATIENCE_S = 30


def missing() -> str | None:
    """Return what this machine lacks, or None."""
    for program in ("Xvfb", "xdotool"):
        if shutil.which(program) is None:
            return f"there is no {program}: install xvfb and xdotool"
    try:
        import tkinter  # noqa: F401 (only whether it is there)
    except ImportError:
        return "this Python has no tkinter: install python3-tk, or Tk's headers before building Python"
    return None


@contextlib.contextmanager
def screen() -> Iterator[str]:
    """Yield the name of a display of its own. Skips without one, unless REQUIRE_DISPLAY is set: then it fails."""
    lack = missing()
    if lack is not None:
        (pytest.fail if os.environ.get("REQUIRE_DISPLAY") else pytest.skip)(lack)
    reads, writes = os.pipe()
    # The server picks a free number and tells it when it is ready.
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writes), "-screen", "0", "900x500x24", "-nolisten", "tcp"],
        pass_fds=[writes],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    os.close(writes)
    try:
        with open(reads) as told:
            number = told.readline().strip()
        assert number, server.communicate()[1]
        yield f":{number}"
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_S)


def click(display: str, place: str) -> None:
    """Click at "x y"."""
    _xdotool(display, "mousemove", *place.split(), "click", "1")


def type_text(display: str, text: str) -> None:
    """Type into what was clicked last."""
    _xdotool(display, "type", "--delay", "1", text)


def press(display: str, key: str) -> None:
    """Press a key, by its name."""
    _xdotool(display, "key", key)


def _xdotool(display: str, *words: str) -> None:
    subprocess.run(
        ["xdotool", *words], env={**os.environ, "DISPLAY": display}, check=True, timeout=PATIENCE_S
    )
