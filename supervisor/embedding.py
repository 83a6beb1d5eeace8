"""Texts to vectors, in the parent: checks what a caller passes and what a worker answers, and builds the result.

Pure: the request itself goes through the dispatcher like any other, with texts instead of a prompt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from infervisor.protocol.arrays import NUMBER_BYTES, unpack_floats
from infervisor.protocol.errors import InvalidRequest, RemoteProtocolError
from infervisor.protocol.generation import Limits, Sampling
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import Output, check_priority
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.report import Report
from infervisor.supervisor.request_input import MAX_PROMPT_BYTES, RequestInput, check_size

MAX_TEXTS = 2048
MAX_DIMENSIONS = 1 << 16
"""No model has as many. It bounds what a worker can make its parent keep: a quarter of a megabyte a text."""
_HEADER_BYTES = 5
"""What a text takes in a frame beyond its bytes, at most."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each text, in the order of the texts; all have the same number of dimensions.

    vectors: arrays of 32-bit floats, which `list()`, `memoryview()` and `numpy.asarray()` take as they are.
    report: usage.prompt_tokens counts the tokens of all texts.
    """

    vectors: list[array[float]]
    dimensions: int
    report: Report


def check_texts(texts: object, *, normalise: object = True, priority: object = 0) -> RequestInput:
    """Return the checked request for a text, or a list of up to 2,048. Raises `InvalidRequest` naming the text."""
    if not isinstance(normalise, bool):
        raise InvalidRequest(f"normalise must be true or false, not {quoted(normalise, 80)}", "normalise")
    checked = _texts(texts)
    return RequestInput(
        prompt=None,
        messages=None,
        texts=checked,
        # Nothing is sampled: these say nothing.
        sampling=Sampling(),
        limits=Limits(),
        seed=0,
        special=False,
        template_clock_s=0.0,
        # All at once: a vector is small, and their number is known.
        window=len(checked),
        output=Output(normalise=normalise),
        priority=check_priority(priority),
    )


def _texts(texts: object) -> tuple[str, ...]:
    if isinstance(texts, str):
        texts = (texts,)
    if isinstance(texts, (bytes, bytearray, Mapping)) or not isinstance(texts, Sequence):
        raise InvalidRequest(
            f"texts must be a string or a list of strings, not {type(texts).__name__}", "texts"
        )
    if not texts:
        raise InvalidRequest("texts is empty: there is nothing to embed", "texts")
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(
            f"{len(texts)} texts; at most {MAX_TEXTS} are taken: ask in several calls", "texts"
        )
    total = 0
    checked: list[str] = []
    for index, text in enumerate(texts):
        name = f"texts[{index}]"
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} must be a string, not {quoted(text, 80)}", name)
        if not text:
            raise InvalidRequest(f"{name} is empty: there is nothing to embed", name)
        total += check_size(name, text) + _HEADER_BYTES
        checked.append(text)
    if total > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            f"texts have {total} bytes together; at most {MAX_PROMPT_BYTES} are taken: ask in several calls",
            "texts",
        )
    return tuple(checked)


def without_embedded(submit: Submit, embedded: int) -> Submit:
    """Return a submit with only those texts that have no vector yet, and credit for all of them.

    One that embeds nothing stays as it is.
    """
    if submit.texts is None:
        return submit
    left = tuple(submit.texts[embedded:])
    return replace(submit, texts=left, credit=len(left))


def read_vectors(packed: Sequence[bytes], dimensions: int | None) -> list[array[float]]:
    """Return the vectors that a worker sent; dimensions: of those before, None for the first.

    Raises `RemoteProtocolError` for one that can't belong to the others.
    """
    wanted = len(packed[0]) // NUMBER_BYTES if dimensions is None else dimensions
    if not 0 < wanted <= MAX_DIMENSIONS:
        raise RemoteProtocolError(f"vectors: {wanted} dimensions; there may be 1 to {MAX_DIMENSIONS}")
    vectors: list[array[float]] = []
    for one in packed:
        if len(one) != wanted * NUMBER_BYTES:
            raise RemoteProtocolError(
                f"vectors: one has {len(one)} bytes beside others of {wanted} dimensions"
            )
        vector = unpack_floats(one)
        # Not finite if one of them isn't: 32-bit numbers can't overflow this sum of 64 bits.
        if not math.isfinite(sum(vector)):
            raise RemoteProtocolError("vectors: one holds what is no number")
        vectors.append(vector)
    return vectors


def embeddings_of(vectors: Sequence[array[float]], report: Report) -> Embeddings:
    """Return the result of a request that has all its vectors."""
    return Embeddings(list(vectors), len(vectors[0]), report)
