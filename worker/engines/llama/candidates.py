"""The array of candidates that native samplers narrow and reorder, as numpy sees it.

Owns the memory; knows nothing of chains or grammars. One for each engine is enough, since the work loop's thread
samples one sequence after the other.
"""

from __future__ import annotations

import ctypes
from typing import Any


class Candidates:
    """Room for every token of a vocabulary, laid out as `llama_token_data`."""

    def __init__(self, llama_cpp: Any, numpy: Any, size: int) -> None:
        self._apply = llama_cpp.llama_sampler_apply
        self._ids = numpy.arange(size, dtype=numpy.int32)
        # The fields and their order are llama_token_data's.
        self._data = numpy.zeros(size, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        self._pointer = ctypes.cast(self._data.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
        self._array = llama_cpp.llama_token_data_array(self._pointer, size, -1, False)
        self._reference = ctypes.byref(self._array)

    def fill(self, row: Any) -> None:
        """Take every token, with its logit from `row`."""
        self.take(self._ids, row)

    def take(self, tokens: Any, logits: Any) -> None:
        """Take the given tokens with these logits, which is an array as long, or one number for all."""
        count = len(tokens)
        self._data["id"][:count] = tokens
        self._data["logit"][:count] = logits
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._pointer, count, -1, False

    def apply(self, sampler: Any) -> None:
        """Let a native sampler work on them."""
        self._apply(sampler, self._reference)

    @property
    def logits(self) -> Any:
        """The logits in the order in which the candidates lie now. Not a copy."""
        return self._data["logit"][: self._array.size]

    @property
    def chosen(self) -> int | None:
        """The token that the last sampler selected, or None."""
        selected = self._array.selected
        return int(self._data["id"][selected]) if 0 <= selected < self._array.size else None
