"""Figures from time points: what is missing stays missing, and nothing is negative."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.timeline import Timeline, seconds_between

S = 1_000_000_000
FIGURES = ("queue_s", "ttft_s", "total_s", "tpot_s", "longest_gap_s", "tokens_per_s", "release_s")


def test_a_request_that_has_only_been_queued_has_no_figures() -> None:
    assert {getattr(Timeline(5), figure) for figure in FIGURES} == {None}


def test_the_figures_of_a_whole_life() -> None:
    times = Timeline(10 * S, submitted_ns=11 * S, started_ns=12 * S)
    times.receive_tokens(1, 14 * S, 13 * S)
    times.receive_tokens(2, 15 * S, 14 * S)
    times.receive_tokens(1, 20 * S, 19 * S)
    times.ended_ns, times.released_ns = 21 * S, 21 * S + S // 4
    assert (times.first_token_ns, times.last_token_ns) == (14 * S, 20 * S)
    assert (times.worker_first_token_ns, times.worker_last_token_ns) == (13 * S, 19 * S)
    assert times.tokens == 4
    assert times.queue_s == 1
    assert times.ttft_s == 4
    assert times.total_s == 11
    assert times.tpot_s == 2  # six seconds, three tokens after the first
    assert times.tokens_per_s == 0.5
    assert times.longest_gap_s == 5
    assert times.release_s == 0.25


def test_zero_is_a_time_like_any_other() -> None:
    times = Timeline(0, submitted_ns=0, ended_ns=7 * S)
    assert times.queue_s == 0
    assert seconds_between(0, 0) == 0
    assert seconds_between(None, 0) is None
    assert seconds_between(0, None) is None


def test_a_request_that_ended_in_the_queue_waited_until_its_end() -> None:
    times = Timeline(S, ended_ns=4 * S, released_ns=4 * S)
    assert times.queue_s == 3
    assert times.release_s == 0
    assert times.ttft_s is None


@pytest.mark.parametrize(
    ("count", "tpot_s", "tokens_per_s", "gap_s"), [(1, None, None, None), (3, 0, None, 0)]
)
def test_tokens_that_came_together_have_no_rate(
    count: int, tpot_s: float | None, tokens_per_s: float | None, gap_s: float | None
) -> None:
    times = Timeline(0)
    times.receive_tokens(count, S, S)
    assert (times.tpot_s, times.tokens_per_s, times.longest_gap_s) == (tpot_s, tokens_per_s, gap_s)


def test_release_counts_from_the_cancel_if_there_was_one() -> None:
    times = Timeline(0, cancel_requested_ns=2 * S, ended_ns=3 * S, released_ns=5 * S)
    assert times.release_s == 3


@pytest.mark.parametrize(("cancelled_ns", "ended_ns"), [(None, 3 * S), (3 * S, 3 * S)])
def test_a_release_stamped_before_the_parent_knew_of_the_end_took_no_time(
    cancelled_ns: int | None, ended_ns: int
) -> None:
    times = Timeline(0, cancel_requested_ns=cancelled_ns, ended_ns=ended_ns, released_ns=2 * S)
    assert times.release_s == 0


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5 * S)), min_size=1, max_size=8))
def test_the_longest_gap_and_the_mean_agree_with_the_arrivals(steps: list[tuple[int, int]]) -> None:
    times, now, arrivals = Timeline(0), 0, []
    for count, gap_ns in steps:
        now += gap_ns
        times.receive_tokens(count, now, now)
        arrivals.append(now)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert times.tokens == sum(count for count, _ in steps)
    assert times.longest_gap_ns == max(gaps, default=0)
    if times.tokens > 1:
        assert times.tpot_s == pytest.approx((arrivals[-1] - arrivals[0]) / S / (times.tokens - 1))


def test_pauses_add_up_and_a_running_one_is_told_apart() -> None:
    timeline = Timeline(queued_ns=0)
    timeline.pause(100)
    assert (timeline.paused_ns, timeline.pause_began_ns) == (0, 100)
    timeline.go_on(150)
    timeline.go_on(900)
    timeline.pause(1000)
    timeline.go_on(1007)
    assert (timeline.paused_ns, timeline.pause_began_ns) == (57, None)
