"""Long rows of numbers as bytes on the wire: token ids and vectors, little-endian, 32 bits each.

A frame's array may have few entries, since each takes memory before it is seen; bytes take what they are. Pure.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

NUMBER_BYTES = 4
_IS_BIG_ENDIAN = sys.byteorder == "big"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return token ids as bytes. Raises `OverflowError` for one that doesn't fit 32 bits."""
    return _packed(array("i", ids))


def unpack_ids(data: bytes) -> array[int]:
    """Return the token ids in `data`. Raises `ValueError` if its length is no multiple of 4."""
    ids = array("i")
    _fill(ids, data)
    return ids


def pack_floats(values: Iterable[float]) -> bytes:
    """Return numbers as bytes, each rounded to 32 bits."""
    return _packed(array("f", values))


def unpack_floats(data: bytes) -> array[float]:
    """Return the numbers in `data`. Raises `ValueError` if its length is no multiple of 4."""
    floats = array("f")
    _fill(floats, data)
    return floats


def _packed(numbers: array[int] | array[float]) -> bytes:
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _fill(numbers: array[int] | array[float], data: bytes) -> None:
    numbers.frombytes(data)
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
