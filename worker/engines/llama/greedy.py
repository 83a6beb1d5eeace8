"""Rows of logits as numpy sees them, and the most probable tokens straight from one.

A native greedy chain first copies the whole vocabulary into candidates, which takes longer than looking through it.
numpy comes with llama-cpp-python; without it the chain does the work. Runs in the work loop's thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

MOST_ROWS = 256
_BLOCK = 64


class Rows:
    """The output rows of the last decode. What is returned is memory of the context: valid until its next decode.

    size: tokens of the vocabulary, which is the length of a row. numpy: the module, or None where it is missing.
    """

    def __init__(self, llama_cpp: Any, vocabulary_tokens: int) -> None:
        self._logits = llama_cpp.llama_get_logits_ith
        self._views: dict[int, Any] = {}
        """By address: making one takes longer than searching it."""
        self.size = vocabulary_tokens
        try:
            import numpy
        except ImportError:
            self.numpy: Any = None
        else:
            self.numpy = numpy

    def row(self, context: Any, output: int) -> Any:
        """Return the row as an array of 32-bit floats, or None without numpy or without such an output."""
        if self.numpy is None:
            return None
        pointer = self._logits(context, output)
        if not pointer:
            return None
        address = ctypes.addressof(pointer.contents)
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= MOST_ROWS:
                self._views.clear()
            view = self._views[address] = self.numpy.ctypeslib.as_array(pointer, shape=(self.size,))
        return view


class Argmax:
    """Finds the largest logit of an output row, the first of equals, as llama.cpp's greedy sampler does."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def token(self, context: Any, output: int) -> int | None:
        """Return the token of the largest logit, or None if that must be left to the chain."""
        row = self._rows.row(context, output)
        if row is None:
            return None
        token = int(row.argmax())
        # numpy takes what isn't a number for the largest, llama.cpp doesn't.
        return token if row[token] == row[token] else None


def largest(numpy: Any, values: Any, count: int) -> Any:
    """Return the indices of the `count` largest of an array, the largest first, of equals the lower index first.

    `values` must hold numbers only, or infinities. Ten times as fast as a partition of a whole vocabulary.
    """
    count, blocks = min(count, len(values)), len(values) // _BLOCK
    if count <= 0:
        return numpy.arange(0)
    if count <= blocks:
        # So many blocks have a maximum of at least `bound`: no smaller value is among the largest.
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        bound = numpy.partition(maxima, blocks - count)[blocks - count]
        found = numpy.flatnonzero(values >= bound)
    else:
        found = numpy.arange(len(values))
    return found[numpy.lexsort((found, -values[found]))[:count]]
