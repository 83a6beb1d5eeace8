"""Standard streams that are closed, and text that may not reach a terminal as it is. Light: the help needs it."""

from __future__ import annotations

import io
import os
import sys
import unicodedata

_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def for_terminal(text: str) -> str:
    r"""Return `text` with control characters as escapes, but for \n and \t.

    A model, or the name of a file, can hold sequences that would move the cursor, change the title or worse.
    """
    if text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _escape(character) for character in text)


def _is_harmless(character: str) -> bool:
    if character in "\n\t":
        return True
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _BIDI_CONTROLS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def repair_standard_streams() -> bool:
    """Let closed standard streams lead to /dev/null, and text streams take any character.

    Otherwise the next file that is opened gets number 0, 1 or 2, and what is printed ends up in it. Returns
    whether standard input was open.
    """
    has_input = sys.stdin is not None
    # In this order: open() takes the lowest free number.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return has_input
