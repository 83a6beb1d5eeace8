"""Plain data that a caller passes (what JSON can hold): copied and bounded before it goes anywhere.

Owns the limits. Knows no messages, tools or schemas; whoever asks names the part. Runs in the caller's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import check_text
from infervisor.protocol.quoting import quoted

MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Values in all of one field together: checking them takes time, in which the event loop stands still."""


class PlainValues:
    """Copies plain data, at most `MAX_VALUES` values of it. field: what is refused if there are more."""

    def __init__(self, field: str, max_depth: int = MAX_DEPTH) -> None:
        self._field = field
        self._max_depth = max_depth
        self._values = 0

    def count(self) -> None:
        """Count one value. Raises `InvalidRequest` if there are too many."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise InvalidRequest(f"there are more than {MAX_VALUES} values in {self._field}", self._field)

    def copy(self, name: str, value: object, depth: int = 0) -> Any:
        """Return a copy, mappings in their order. Raises `InvalidRequest` naming what isn't plain data."""
        self.count()
        if depth > self._max_depth:
            raise InvalidRequest(f"{name} is nested more than {self._max_depth} levels deep", name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return check_text(name, value)
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {
                check_text(name, key): self.copy(f"{name}.{key:.40}", entry, depth + 1)
                for key, entry in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.copy(f"{name}[{index}]", entry, depth + 1) for index, entry in enumerate(value)]
        raise InvalidRequest(f"{name} must be plain data, not {quoted(value, 80)}", name)


def size_of(value: object) -> int:
    """Return at least the bytes that plain data takes on the wire: a header before each value, at most 9."""
    if isinstance(value, str):
        return len(value.encode()) + 5
    if isinstance(value, Mapping):
        return 5 + sum(size_of(k) + size_of(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return 5 + sum(size_of(entry) for entry in value)
    return 9
