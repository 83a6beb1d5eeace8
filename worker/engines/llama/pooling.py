"""How a model makes one vector of a text's tokens, and the arithmetic of it. Pure but for reading metadata.

Numbers are added in 64 bits: the mean of a long text must not depend on the slices in which it was read.
"""

from __future__ import annotations

import ctypes
import enum
import math
from dataclasses import dataclass
from typing import Any

VALUE_BYTES = 64


class Pooling(enum.Enum):
    """llama.cpp's names and numbers of the kinds that give one vector a text."""

    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4
    """A ranking model: it gives a score for a pair of texts, and no vector."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What kind of embeddings a model gives. is_causal: a token sees those before it alone.

    A causal model can read a text in slices; another one needs the whole text in one.
    """

    pooling: Pooling
    is_causal: bool
    dimensions: int


def kind_of(llama: Any, model: Any) -> Kind:
    """Return what the model's metadata say. One that names no pooling gets the mean, as most do."""
    architecture = _metadata(llama, model, "general.architecture")
    named = _metadata(llama, model, f"{architecture}.pooling_type")
    pooling = Pooling.MEAN
    if named.isdecimal() and int(named) in {one.value for one in Pooling}:
        pooling = Pooling(int(named))
    causal = _metadata(llama, model, f"{architecture}.attention.causal") != "false"
    return Kind(pooling, causal, int(llama.llama_model_n_embd_out(model)))


def _metadata(llama: Any, model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(VALUE_BYTES)
    found = llama.llama_model_meta_val_str(model, key.encode(), buffer, VALUE_BYTES)
    return buffer.value.decode("utf-8", "replace") if found >= 0 else ""


class Pool:
    """The vector of one text, while its tokens' rows come in. rows: arrays of (tokens, dimensions)."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._count = 0
        self._value: Any = None

    def add(self, rows: Any) -> None:
        """Take the rows of the next tokens; at least one."""
        self._count += len(rows)
        match self._pooling:
            case Pooling.LAST:
                self._value = rows[-1].astype("f8")
            case Pooling.CLS:
                self._value = rows[0].astype("f8") if self._value is None else self._value
            case _:
                added = rows.sum(axis=0, dtype="f8")
                self._value = added if self._value is None else self._value + added

    def vector(self) -> Any:
        """Return the vector of all rows so far, as an array of 64-bit floats."""
        return self._value / self._count if self._pooling is Pooling.MEAN else self._value


def packed(vector: Any, normalise: bool) -> bytes:
    """Return a vector as little-endian 32-bit floats; normalise: of length 1, unless it is all zeros.

    Raises `ValueError` for one that holds what is no number.
    """
    vector = vector.astype("f8")
    length = math.sqrt(float(vector.dot(vector)))
    if not math.isfinite(length):
        raise ValueError("the model's embedding of a text holds what is no number")
    if normalise and length > 0:
        vector = vector / length
    packed_vector: bytes = vector.astype("<f4").tobytes()
    return packed_vector
