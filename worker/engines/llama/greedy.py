"""The most probable token straight from the logits: what a greedy chain chooses, in half the time.

A native chain first copies the whole vocabulary into candidates, which takes longer than looking through it. numpy
comes with llama-cpp-python; without it the chain does the work.
"""

from __future__ import annotations

import ctypes
from typing import Any

MOST_ROWS = 256


class Argmax:
    """Finds the largest logit of an output row, the first of equals, as llama.cpp's greedy sampler does."""

    def __init__(self, llama_cpp: Any, vocabulary_tokens: int) -> None:
        self._logits = llama_cpp.llama_get_logits_ith
        self._size = vocabulary_tokens
        self._rows: dict[int, Any] = {}
        """Views of rows by their address: making one takes longer than searching it."""
        try:
            import numpy
        except ImportError:
            self._numpy: Any = None
        else:
            self._numpy = numpy

    def token(self, context: Any, output: int) -> int | None:
        """Return the token of the largest logit, or None if that must be left to the chain."""
        if self._numpy is None:
            return None
        pointer = self._logits(context, output)
        if not pointer:
            return None
        address = ctypes.addressof(pointer.contents)
        row = self._rows.get(address)
        if row is None:
            if len(self._rows) >= MOST_ROWS:
                self._rows.clear()
            row = self._rows[address] = self._numpy.ctypeslib.as_array(pointer, shape=(self._size,))
        token = int(row.argmax())
        # numpy takes what isn't a number for the largest, llama.cpp doesn't.
        return token if row[token] == row[token] else None
