"""What a field of a message may hold: one function for each kind. Pure, and quick: some run for every token."""

from __future__ import annotations

import math
from collections.abc import Mapping

U64 = 1 << 64
MAX_DEPTH = 40
"""How deep maps and arrays in a field may be nested."""


def is_text(value: object) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_text_or_none(value: object) -> bool:
    """Whether it is text or None."""
    return value is None or isinstance(value, str)


def is_u64(value: object) -> bool:
    """Whether it is a whole number from 0 to 2**64 − 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < U64


def is_u64_or_none(value: object) -> bool:
    """Whether it is such a number or None."""
    return value is None or is_u64(value)


def is_fraction(value: object) -> bool:
    """Whether it is a number from 0 to 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def is_number_or_none(value: object) -> bool:
    """Whether it is a finite number or None."""
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_flag(value: object) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_map(value: object) -> bool:
    """Whether it is a map with text keys, not nested too deep."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and is_shallow(value)


def is_shallow(value: object) -> bool:
    """Whether maps and arrays in it are nested at most `MAX_DEPTH` deep."""
    # What is nested deeper than any message needs would exhaust the stack of whoever shows or copies it. Level by
    # level: a frame can hold a million empty arrays, and a call for each would take a second.
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for entry in level:
            if type(entry) is list:
                below += entry
            elif type(entry) is dict:
                below += entry.values()
        if not below:
            return True
        level = below
    return False


def is_map_or_none(value: object) -> bool:
    """Whether it is such a map or None."""
    return value is None or is_map(value)


def is_counts(value: object) -> bool:
    """Whether it is a map of names to counts."""
    return is_map(value) and all(is_u64(count) for count in value.values())  # type: ignore[attr-defined]


def is_ids(value: object) -> bool:
    """Whether it is an array of ids."""
    return isinstance(value, (list, tuple)) and all(is_u64(entry) for entry in value)


def is_int(value: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_texts_or_none(value: object) -> bool:
    """Whether it is an array of texts, or None."""
    return value is None or (
        isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
    )


def is_vectors(value: object) -> bool:
    """Whether it is an array of vectors: little-endian 32-bit floats as bytes."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(entry, bytes) and entry and len(entry) % 4 == 0 for entry in value)
    )


def is_answer(value: object) -> bool:
    """Whether it can be the answer to a query: bytes, a count or None."""
    return value is None or isinstance(value, bytes) or is_u64(value)


def is_area_or_none(value: object) -> bool:
    """Whether it is [offset, bytes] or None."""
    return value is None or (is_ids(value) and len(value) == 2)  # type: ignore[arg-type]


def is_share_or_none(value: object) -> bool:
    """Whether it is a fraction or None."""
    return value is None or is_fraction(value)


def is_messages_or_none(value: object) -> bool:
    """Whether it is an array of maps, or None."""
    return value is None or (isinstance(value, (list, tuple)) and all(is_map(entry) for entry in value))


def is_tokens(value: object) -> bool:
    """Whether it is an array of tokens: [id, text, logprobs or None] each."""
    # A token is [id, text, logprobs]; written out, since it runs once for every token of every stream.
    if not isinstance(value, (list, tuple)) or not value:
        return False
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            return False
        token, text, logprobs = entry
        if type(token) is not int or token < 0 or type(text) is not str:
            return False
        if logprobs is not None and not (isinstance(logprobs, list) and is_shallow(logprobs)):
            return False
    return True
