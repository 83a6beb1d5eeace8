"""How what others wrote is shown: values in error messages briefly, text without control characters."""

from __future__ import annotations


def quoted(value: object, characters: int = 60) -> str:
    """Return the first `characters` of `repr(value)`, or a phrase where Python refuses to write it out.

    It refuses whole numbers of more than 4300 digits and values nested as deep as its stack; either would
    turn the refusal of a bad value into an error that nobody expects.
    """
    try:
        return repr(value)[:characters]
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"


def printable(text: str) -> str:
    """Return one line of `text` in which no control character can reach a terminal; tabs are kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with its lines kept and every other control character escaped."""
    return "\n".join(printable(line) for line in text.split("\n"))
