"""Windows and waits that are given in seconds."""

from __future__ import annotations

import pytest

from infervisor.protocol.credit import MAX_WINDOW_TOKENS
from infervisor.protocol.timeline import NS_PER_S, Timeline
from infervisor.supervisor.rates import Rates


def released(tokens: int, decode_s: float, total_s: float) -> Timeline:
    """Return the timeline of a request that was submitted at 1 s."""
    return Timeline(
        queued_ns=0,
        submitted_ns=NS_PER_S,
        first_token_ns=2 * NS_PER_S,
        last_token_ns=2 * NS_PER_S + int(decode_s * NS_PER_S),
        released_ns=NS_PER_S + int(total_s * NS_PER_S),
        tokens=tokens,
    )


def test_nothing_is_known_before_the_first_request() -> None:
    assert Rates().window_tokens(1.0, otherwise=7) == 7
    assert Rates().wait_s(100, 1) is None


def test_a_window_is_that_many_seconds_of_tokens() -> None:
    rates = Rates()
    rates.learn(released(101, decode_s=2.0, total_s=3.0))
    assert rates.window_tokens(0.5, otherwise=7) == 25
    assert rates.window_tokens(1e-6, otherwise=7) == 1
    assert rates.window_tokens(1e9, otherwise=7) == MAX_WINDOW_TOKENS


def test_a_wait_counts_who_is_ahead_and_how_many_are_served_at_once() -> None:
    rates = Rates()
    rates.learn(released(101, decode_s=2.0, total_s=3.0))
    assert rates.wait_s(0, 1) == pytest.approx(3.0)
    assert rates.wait_s(3, 2) == pytest.approx(6.0)


def test_averages_follow_and_requests_without_a_figure_change_nothing() -> None:
    rates = Rates()
    rates.learn(released(101, decode_s=2.0, total_s=3.0))
    rates.learn(Timeline(queued_ns=0, ended_ns=5, released_ns=5))
    assert (rates.tokens_per_s, rates.request_s) == (pytest.approx(50), pytest.approx(3))
    rates.learn(released(101, decode_s=1.0, total_s=13.0))
    assert (rates.tokens_per_s, rates.request_s) == (pytest.approx(65), pytest.approx(6))
