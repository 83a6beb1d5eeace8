"""What a worker claims of a token's probability: values for the caller, or its own fault."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.supervisor.logprobs import TokenLogprob, TopLogprob, read_logprobs


def token(told: Any, token_id: int = 7) -> list[Any]:
    return [token_id, "text", told]


def test_a_token_and_those_beside_it() -> None:
    told = [-0.5, [[7, b"a", -0.5], [9, b"\xc3", -1]], b"a"]
    assert read_logprobs([token(told)], 2) == [
        TokenLogprob(7, b"a", -0.5, (TopLogprob(7, b"a", -0.5), TopLogprob(9, b"\xc3", -1.0)))
    ]


def test_bytes_are_shown_as_text_even_if_they_are_no_character() -> None:
    assert TopLogprob(1, "ü".encode(), -1.0).text == "ü"
    assert TopLogprob(1, b"\xc3", -1.0).text == "\ufffd"
    assert TokenLogprob(1, b"", -1.0).text == ""


def test_what_rounding_lifts_above_certainty_is_certain_and_nothing_else_is() -> None:
    (read,) = read_logprobs([token([1e-6, [], b"a"])], 0)
    assert read.logprob == 0.0
    assert read_logprobs([token([-math.inf, [], b""])], 0)[0].logprob == -math.inf
    with pytest.raises(RemoteProtocolError, match="log-probability"):
        read_logprobs([token([0.1, [], b"a"])], 0)


@pytest.mark.parametrize(
    "told",
    [
        None, [], 5, {}, "x", [-1.0], [-1.0, [], b"a", 1], (-1.0, [], b"a"),
        [-1.0, None, b"a"], [-1.0, {}, b"a"], [-1.0, [], "a"], [-1.0, [], None], [None, [], b"a"],
        [True, [], b"a"], ["-1", [], b"a"], [math.nan, [], b"a"], [math.inf, [], b"a"], [1, [], b"a"],
        [-1.0, [5], b"a"], [-1.0, [[]], b"a"], [-1.0, [[1, b"x"]], b"a"], [-1.0, [[1, "x", -1.0]], b"a"],
        [-1.0, [[1, b"x", None]], b"a"], [-1.0, [["1", b"x", -1.0]], b"a"], [-1.0, [[-1, b"x", -1.0]], b"a"],
        [-1.0, [[True, b"x", -1.0]], b"a"], [-1.0, [[1, b"x", math.nan]], b"a"],
        [-1.0, [[1, b"x", -1.0]] * 3, b"a"],
    ],
)  # fmt: skip
def test_anything_else_is_the_workers_fault(told: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^tokens: "):
        read_logprobs([token([-1.0, [], b"a"]), token(told)], 2)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(plain)
def test_whatever_a_frame_can_hold_is_read_or_refused(told: Any) -> None:
    arrived = msgpack.unpackb(msgpack.packb(token(told)))
    try:
        (read,) = read_logprobs([arrived], 3)
    except RemoteProtocolError:
        return
    assert read.logprob <= 0
    assert len(read.top) <= 3
    assert all(entry.logprob <= 0 and isinstance(entry.text, str) for entry in (read, *read.top))
