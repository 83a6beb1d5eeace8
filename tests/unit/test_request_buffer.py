"""A request's buffer without a worker: chunks, what they stand for, and the clock of the reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.deadlines import Budget
from infervisor.protocol.errors import RemoteProtocolError
from infervisor.supervisor.logprobs import TokenLogprob
from infervisor.supervisor.request import MOST_SILENT_LOGPROBS, Chunk, Request
from infervisor.supervisor.request_input import check_request
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import Deadlines

CONSUMER_NS = 100


def request(window: int = 32, **options: Any) -> Request:
    """Return a request of which only the consumer's clock has a budget, of 100 ns."""
    given_input = check_request("x", None, window=window, seed=5, **options)
    return Request(7, given_input, Deadlines(startup_s=None, consumer_s=CONSUMER_NS / 1e9), OnCrash.FAIL, 0)


def take_all(of: Request) -> list[tuple[Chunk, int]]:
    taken: list[tuple[Chunk, int]] = []
    while of.has_chunk:
        taken.append(of.take(0))
    return taken


def test_a_token_with_text_is_a_chunk_and_one_without_joins_the_next() -> None:
    buffer = request()
    assert not buffer.has_chunk
    assert buffer.put([[10, "a", None]], 1) == 0
    assert buffer.put([[11, "", None], [12, "", None]], 2) == 2
    assert buffer.put([[13, "bcd", None], [14, "e", None]], 3) == 0
    assert take_all(buffer) == [
        (Chunk("a", 0, (10,), 1), 1),
        (Chunk("bcd", 1, (11, 12, 13), 3), 1),
        (Chunk("e", 4, (14,), 3), 1),
    ]


def test_leftover_text_takes_the_tokens_that_were_held_back_and_weighs_nothing() -> None:
    buffer = request()
    assert buffer.put([[10, "", None], [11, "", None]], 1) == 2
    assert not buffer.has_chunk
    buffer.put_leftover("held back", 2)
    assert take_all(buffer) == [(Chunk("held back", 0, (10, 11), 2), 0)]
    buffer.put_leftover("", 3)
    assert not buffer.has_chunk


@given(
    st.lists(st.lists(st.sampled_from(["", "a", "xyz"]), min_size=1, max_size=5), max_size=20), st.booleans()
)
def test_no_token_and_no_text_is_lost_or_doubled(frames: list[list[str]], leftover: bool) -> None:
    buffer = request()
    number = silent = 0
    for frame in frames:
        tokens = [[number + position, text, None] for position, text in enumerate(frame)]
        number += len(tokens)
        silent += buffer.put(tokens, 0)
    buffer.put_leftover("rest" if leftover else "", 0)
    taken = take_all(buffer)
    assert "".join(chunk.text for chunk, _ in taken) == "".join(map("".join, frames)) + (
        "rest" if leftover else ""
    )
    assert silent + sum(weight for _, weight in taken) == number
    ids = [token for chunk, _ in taken for token in chunk.token_ids]
    assert ids == list(range(len(ids)))
    assert [chunk.index for chunk, _ in taken] == [
        sum(len(before.token_ids) for before, _ in taken[:position]) for position in range(len(taken))
    ]
    if leftover:
        assert ids == list(range(number))


def test_the_readers_clock_runs_only_while_the_buffer_lies_untouched() -> None:
    buffer = request()
    assert buffer.clocks.next_due() is None
    buffer.put([[1, "a", None]], 10)
    assert buffer.clocks.next_due() == (10 + CONSUMER_NS, Budget.CONSUMER)
    buffer.put([[2, "b", None]], 50)
    assert buffer.clocks.next_due() == (10 + CONSUMER_NS, Budget.CONSUMER), "more text is no sign of a reader"
    buffer.take(60)
    assert buffer.clocks.next_due() == (60 + CONSUMER_NS, Budget.CONSUMER), (
        "a touch gives the whole budget again"
    )
    buffer.take(70)
    assert buffer.clocks.next_due() is None, "nothing is there to be read"
    buffer.put([[3, "", None]], 80)
    assert buffer.clocks.next_due() is None, "a token without text is nothing to read"
    buffer.put([[4, "c", None]], 90)
    assert buffer.clocks.next_due() == (90 + CONSUMER_NS, Budget.CONSUMER)


def test_a_dropped_buffer_is_empty() -> None:
    buffer = request()
    buffer.put([[1, "a", None], [2, "b", None]], 0)
    buffer.drop_buffer()
    assert not buffer.has_chunk


def test_a_chunk_is_its_text() -> None:
    assert str(Chunk("text", 0, (1,), 0)) == "text"
    with pytest.raises(AttributeError):
        Chunk("text", 0, (1,), 0).text = "other"  # type: ignore[misc]


# --- log-probabilities -----------------------------------------------------------------------------


def told(number: int, text: str) -> list[Any]:
    return [number, text, [-number / 10, [], b"%d" % number]]


def expected(*numbers: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(number, b"%d" % number, -number / 10) for number in numbers)


def test_log_probabilities_go_with_the_tokens_that_a_chunk_stands_for() -> None:
    buffer = request(logprobs=True)
    buffer.put([told(1, "a"), told(2, "")], 1)
    buffer.put([told(3, "bc"), told(4, "")], 2)
    buffer.put_leftover("d", 3)
    assert take_all(buffer) == [
        (Chunk("a", 0, (1,), 1, expected(1)), 1),
        (Chunk("bc", 1, (2, 3), 2, expected(2, 3)), 1),
        (Chunk("d", 3, (4,), 3, expected(4)), 0),
    ]


def test_what_nobody_asked_for_is_not_kept() -> None:
    buffer = request()
    buffer.put([told(1, "a")], 1)
    assert take_all(buffer) == [(Chunk("a", 0, (1,), 1), 1)]


@pytest.mark.parametrize("claim", [None, [], [0.5, [], b"a"], [-1.0, [[1, b"a", -1.0]], b"a"]])
def test_what_was_asked_for_and_is_not_told_is_the_workers_fault_and_changes_nothing(claim: Any) -> None:
    buffer = request(logprobs=True)
    with pytest.raises(RemoteProtocolError):
        buffer.put([told(1, "a"), [2, "b", claim]], 1)
    assert not buffer.has_chunk
    assert not buffer.delivered


def test_what_is_kept_of_tokens_without_text_is_bounded() -> None:
    buffer = request(logprobs=True, top_logprobs=20)
    top = [[number, b"x", -1.0] for number in range(20)]
    many = [[5, "", [-1.0, top, b"x"]]] * 1000
    # As many as are always taken, and then one frame too many.
    while (buffer.silent_tokens + 1000) * 21 <= MOST_SILENT_LOGPROBS:
        buffer.put(many, 1)
    with pytest.raises(RemoteProtocolError, match="in a row"):
        buffer.put(many, 1)
