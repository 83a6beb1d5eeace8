"""Hypothesis strategies for scripts: proper frames, faulty ones, raw bytes, callers and time, in any order."""

from __future__ import annotations

import math
from typing import Any

import msgpack
from hypothesis import strategies as st

from infervisor.protocol.codec import MAX_FROM_WORKER_BYTES
from tests.fuzz.parent_side import KINDS
from tests.fuzz.script import Do, Step, step

BYTE = st.integers(0, 255)
FEW = st.integers(0, 3)
NUMBERS = [
    0,
    1,
    2,
    31,
    127,
    128,
    255,
    65535,
    65536,
    (1 << 32) - 1,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
ODD_BYTES = [
    b"",
    b"\xc1",
    b"\xa3\xed\xa0\x80",  # UTF-8 of a lone surrogate
    b"\xa2\xc3\x28",  # no UTF-8
    b"\x91" * 39 + b"\xc0",
    b"\x91" * 60 + b"\xc0",
    b"\x91" * 1000 + b"\xc0",
    b"\x81\xa1a" * 45 + b"\xc0",
    b"\xdc\xff\xff" * 20,  # arrays that declare more than they hold
    b"\xdf\xff\xff\xff\xff",
    b"\xd4\x01\x01",  # an extension
    b"\xd6\xff\x00\x00\x00\x01",  # a time stamp
    b"\xc7\x0c\xff" + b"\xff" * 12,  # one that no clock shows
    b"\x82\xa1k\x01\xa1k\x02",  # a key twice
    b"\x81\x01\x01",
    b"\x81\xc4\x01a\x01",
]
STRANGE_KEYS = [
    "",
    "self",
    "__class__",
    "slots",
    "context_tokens",
    "code",
    "message",
    "x" * 5000,
    "\x1b[2J",
    "é",
]

plain: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*NUMBERS, -1, -(1 << 63), 0.5, 1.5, -0.0, math.nan, math.inf, -math.inf])
    | st.sampled_from(["", "a", "stop", "engine_error", "decode", "\x1b[31m", "\u202e", "🦙", "x" * 3000])
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(STRANGE_KEYS), inner, max_size=3)
        | st.dictionaries(st.integers(-2, 2), inner, max_size=2)
    ),
    max_leaves=8,
)
tokens = st.lists(
    st.tuples(
        st.sampled_from([*NUMBERS, -1]), st.sampled_from(["", "a"]), st.none() | st.lists(plain, max_size=2)
    ),
    max_size=5,
)
vectors = st.lists(st.binary(max_size=16) | st.sampled_from([bytes(12), b"\0\0\xc0\x7f" * 3]), max_size=4)
told = st.tuples(st.sampled_from([0, 1, 2]), st.just("a"), st.lists(plain | vectors, max_size=4))
packed = (plain | tokens | vectors | st.lists(told, min_size=1, max_size=3)).map(
    lambda value: bytes(msgpack.packb(value))
) | st.sampled_from(ODD_BYTES)

kind = st.integers(0, len(KINDS) - 1)
proper = st.builds(lambda *numbers: step(Do.PROPER, *numbers), kind, FEW, BYTE)
fault = st.builds(
    lambda numbers, value: Step(Do.BUT, bytes(numbers) + value),
    st.tuples(kind, FEW, BYTE, st.integers(0, 7)),
    packed,
)
frame = st.one_of(
    st.builds(
        lambda name, fields: Step(Do.FRAME, _array(name, fields)), st.sampled_from(KINDS), st.lists(packed)
    ),
    packed.map(lambda payload: Step(Do.FRAME, payload)),
    # Forged ids, of attempts that were and that will be.
    st.builds(
        lambda name, number, index: Step(Do.FRAME, _forged(name, number, index)),
        st.sampled_from(["started", "tokens", "ended", "released", "vectors", "answered"]),
        st.integers(0, 9) | st.sampled_from(NUMBERS),
        st.integers(0, 3),
    ),
)
lengths = st.sampled_from(
    [0, 1, 5, MAX_FROM_WORKER_BYTES - 1, MAX_FROM_WORKER_BYTES, MAX_FROM_WORKER_BYTES + 1, 2**32 - 1]
)
raw = st.one_of(
    st.binary(max_size=12),
    lengths.map(lambda length: length.to_bytes(4, "big")),
    st.builds(
        lambda length, data: length.to_bytes(4, "big") + data, st.integers(0, 40), st.binary(max_size=20)
    ),
).map(lambda data: Step(Do.RAW, data))
large = st.builds(
    lambda times, name, fields: Step(Do.STRETCH, bytes([times]) + _array(name, fields)),
    FEW,
    st.sampled_from(KINDS),
    st.lists(packed, min_size=3, max_size=6),
)
others = st.builds(
    lambda do, a, b: step(do, a, b),
    st.sampled_from([do for do in Do if do > Do.STRETCH]),
    FEW | BYTE,
    FEW,
)
callers = st.builds(
    lambda do, a, b: step(do, a, b),
    st.sampled_from(
        [
            Do.OPEN,
            Do.EMBED,
            Do.ASK,
            Do.TAKE,
            Do.CANCEL,
            Do.KILL,
            Do.WAIT,
            Do.STALL,
            Do.HEAR,
            Do.JAM,
            Do.REPLACE,
            Do.EXIT,
            Do.SHUT,
        ]
    ),
    FEW | BYTE,
    FEW,
)


def _forged(name: str, number: int, index: int) -> bytes:
    rest: list[Any] = [index, 0, 1]
    if name == "vectors":
        rest = [index, [bytes(12)]]
    elif name == "answered":
        rest = [index, None] if index % 2 else [bytes(8), None]
    return bytes(msgpack.packb([name, 1, number, *rest]))


def _array(name: str, fields: list[bytes]) -> bytes:
    head: bytes = msgpack.packb(name)
    return bytes([0x90 + 1 + len(fields[:14])]) + head + b"".join(fields[:14])


def serving(window: int, slots: int, asked: int = 0) -> list[Step]:
    """Return the steps to a worker that serves one stream. asked: see `Do.OPEN`."""
    return _begun(slots, step(Do.OPEN, window, asked))


def embedding(texts: int, slots: int) -> list[Step]:
    """Return the steps to a worker that embeds so many texts, and was asked something."""
    return _begun(slots, step(Do.EMBED, texts - 1), step(Do.ASK, texts))


def _begun(slots: int, *asked: Step) -> list[Step]:
    return [
        step(Do.PROPER, KINDS.index("hello")),
        step(Do.PROPER, KINDS.index("ready"), 0, slots),
        *asked,
        step(Do.PROPER, KINDS.index("started")),
    ]


begun = st.builds(serving, st.sampled_from([0, 1, 3, 31, 255]), FEW, st.integers(0, 7)) | st.builds(
    embedding, st.integers(1, 8), FEW
)


def _scripts(*more: st.SearchStrategy[Step]) -> st.SearchStrategy[list[Step]]:
    middle = st.lists(st.one_of(*more), max_size=25)
    return st.builds(lambda start, steps: [*start, *steps], st.just([]) | begun | begun, middle)


usual = st.one_of(proper, proper, proper, fault, fault, frame, raw, others, callers)
scripts = _scripts(usual, usual, usual, usual | large)
"""Anything. What is large is rare, since one of it takes as long as a hundred others."""
proper_scripts = _scripts(proper, proper, proper, callers)
"""A worker that keeps the rules, whatever callers and the clock do; it may die at any moment."""
