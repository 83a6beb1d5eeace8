"""How a foreign value is shown in an error message: briefly, and without a second error."""

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
