"""Where an attempt ends, what it counts, and when it may compute."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infervisor.protocol.errors import InvalidRequest, LocalProtocolError
from infervisor.protocol.generation import Limits
from infervisor.worker.attempt import Attempt
from infervisor.worker.engine import Embedded, Opened, Prefilled, Sampled
from infervisor.worker.scheduler import Want
from tests.helpers.raw_worker import submit


def attempt(context_tokens: int = 100, prompt_tokens: int = 3, credit: int = 50, **limits: Any) -> Attempt:
    made = Attempt.arrived(submit(1, limits=Limits(**limits), credit=credit))
    made.check()
    made.opened(Opened(0, prompt_tokens), context_tokens, None)
    return made


def say(made: Attempt, *pieces: str) -> list[str | None]:
    whys = []
    for piece in pieces:
        taken = made.take(Sampled(7, piece.encode()))
        assert taken is not None
        whys.append(taken.why)
    return whys


def test_max_tokens_is_exact() -> None:
    made = attempt(max_tokens=3)
    assert say(made, "a", "b", "c") == [None, None, "length"]
    assert made.usage()["completion_tokens"] == 3


def test_a_full_context_ends_it_after_the_last_token_that_fits() -> None:
    assert say(attempt(context_tokens=256, prompt_tokens=255), "a") == ["context_full"]
    assert say(attempt(context_tokens=256, prompt_tokens=254), "a", "b") == [None, "context_full"]


@pytest.mark.parametrize(
    ("limits", "context_tokens", "why"),
    [
        ({"stop": ("b",), "max_tokens": 2}, 5, "stop_sequence"),
        ({"max_tokens": 2}, 5, "length"),
        ({}, 5, "context_full"),
        ({}, 6, None),
    ],
)
def test_several_ends_on_one_token_have_an_order(
    limits: dict[str, Any], context_tokens: int, why: str | None
) -> None:
    assert say(attempt(context_tokens=context_tokens, **limits), "a", "b") == [None, why]


def test_the_end_token_is_not_delivered_and_costs_no_completion_token() -> None:
    made = attempt(max_tokens=3)
    say(made, "a")
    taken = made.take(Sampled(2, b"", end=True))
    assert taken is not None
    assert (taken.tokens, taken.why) == ([], "stop")
    usage = made.usage()
    assert (usage["completion_tokens"], usage["computed_tokens"]) == (1, 2)


def test_ignoring_the_end_token_delivers_it_and_goes_on() -> None:
    made = attempt(ignore_eos=True)
    taken = made.take(Sampled(2, b"", end=True))
    assert taken is not None
    assert (taken.index, taken.tokens, taken.why) == (0, [[2, "", None]], None)


def test_without_credit_it_sits_out_but_its_prompt_is_read() -> None:
    made = attempt(credit=1)
    assert made.runnable
    made.take(Prefilled(3, 3))
    assert made.runnable
    say(made, "a")
    assert not made.runnable
    made.grant.raise_to(2)
    assert made.runnable
    assert attempt(credit=0).runnable, "reading the prompt needs no credit"


def test_a_prompt_that_is_all_in_memory_needs_credit_once_that_is_told() -> None:
    made = Attempt.arrived(submit(1, credit=0))
    made.check()
    made.opened(Opened(0, 3, cached_tokens=3), 100, None)
    assert made.want == Want(1, True, 1)
    made.take(Prefilled(3, 3))
    assert not made.runnable


def test_what_it_wants_is_what_is_left_to_read_and_then_what_it_may_compute() -> None:
    made = Attempt.arrived(submit(1, credit=4, delivered=(7,), priority=3))
    made.check()
    made.opened(Opened(0, 100, cached_tokens=60), 200, None)
    assert made.want == Want(1, True, 41, 3)
    made.take(Prefilled(90, 101))
    assert made.want == Want(1, True, 11, 3)
    made.take(Prefilled(101, 101))
    assert made.want == Want(1, False, 3)


def test_it_waits_for_another_one_that_reads_the_same_beginning() -> None:
    leader = attempt(prompt_tokens=100)
    leader.take(Prefilled(10, 100))
    made = Attempt.arrived(submit(2))
    made.check()
    made.opened(Opened(1, 100, after=(0, 80)), 200, leader)
    assert not made.runnable
    leader.take(Prefilled(79, 100))
    assert not made.runnable
    leader.take(Prefilled(80, 100))
    assert made.runnable
    made.take(Prefilled(90, 100, copied_tokens=80))
    assert made.usage()["cached_tokens"] == 80


def test_it_waits_no_more_when_the_other_one_is_released() -> None:
    leader = attempt(prompt_tokens=100)
    made = Attempt.arrived(submit(2))
    made.check()
    made.opened(Opened(1, 100, after=(0, 80)), 200, leader)
    assert not made.runnable
    leader.is_open = False
    assert made.runnable
    # Race "its slot is opened again": that is another one, which it never waits for.
    leader.is_open = True
    assert made.runnable


def test_vectors_count_against_credit_and_not_as_tokens() -> None:
    made = Attempt.arrived(submit(1, prompt=None, texts=("a", "b", "c"), credit=3))
    made.check()
    made.opened(Opened(0, 12), 100, None)
    first = made.take(Embedded(8, 12, (b"1234", b"5678"), False))
    assert first is not None
    assert (first.index, first.vectors, first.why) == (0, (b"1234", b"5678"), None)
    assert made.want == Want(1, True, 4)
    last = made.take(Embedded(12, 12, (b"abcd",), True))
    assert last is not None
    assert (last.index, last.why) == (2, "stop")
    assert made.usage()["completion_tokens"] == 0
    with pytest.raises(LocalProtocolError):
        made.take(Embedded(12, 12, (b"abcd",), True))


def test_a_token_beyond_credit_is_an_error() -> None:
    made = attempt(credit=1)
    say(made, "a")
    with pytest.raises(LocalProtocolError):
        say(made, "b")


def test_delivered_tokens_count_towards_index_limits_and_usage() -> None:
    made = Attempt.arrived(submit(1, limits=Limits(max_tokens=4), delivered=(5, 6, 7)))
    made.check()
    made.opened(Opened(0, 3), 100, None)
    taken = made.take(Sampled(8, b"d"))
    assert taken is not None
    assert (taken.index, taken.why) == (3, "length")
    assert made.usage() == {
        "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "computed_tokens": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"limits": {"max_tokens": 0}}, "max_tokens"),
        ({"limits": {"stop": [""]}}, "stop"),
        ({"limits": {"tokens": 1}}, "tokens"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"seed": 1 << 32}, "seed"),
    ],
)
def test_what_the_parent_should_have_refused_is_refused_here(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Attempt.arrived(submit(1, **bad)).check()
    assert caught.value.field == field


def test_several_tokens_of_one_step_are_sent_together_up_to_the_one_that_ends_it() -> None:
    made = attempt(stop=("cd",), max_tokens=10)
    taken = made.take([Sampled(i, piece.encode()) for i, piece in enumerate(["a", "b", "c", "d", "e"])])
    assert taken is not None
    assert (taken.index, taken.why) == (0, "stop_sequence")
    assert taken.tokens == [[0, "a", None], [1, "b", None], [2, "", None], [3, "", None]]
    assert made.usage()["completion_tokens"] == 4
    assert made.usage()["computed_tokens"] == 5, "what was computed for nothing is counted, too"


def test_an_end_token_among_several_ends_it_after_those_before_it() -> None:
    made = attempt()
    taken = made.take([Sampled(0, b"a"), Sampled(2, b"", end=True)])
    assert taken is not None
    assert (taken.tokens, taken.why) == ([[0, "a", None]], "stop")


def test_a_step_may_give_as_much_as_credit_max_tokens_and_context_allow() -> None:
    assert attempt(credit=4).allowance == 4
    assert attempt(credit=50, max_tokens=3).allowance == 3
    assert attempt(context_tokens=10, prompt_tokens=3).allowance == 7
    assert attempt(context_tokens=10, prompt_tokens=3, max_tokens=40).allowance == 7
    made = attempt(credit=4)
    say(made, "a", "b")
    assert made.allowance == 2


def test_more_than_was_granted_is_the_engines_error() -> None:
    with pytest.raises(LocalProtocolError, match="beyond the limit"):
        attempt(credit=2).take([Sampled(0, b"a")] * 3)


def test_a_step_that_gave_nothing_is_the_engines_error() -> None:
    with pytest.raises(LocalProtocolError, match="neither prompt nor token"):
        attempt().take([])


# --- going on where another worker was -----------------------------------------------------------------

Said = tuple[list[str], str, str]
"""The texts that were sent, token by token, what the end brought with it, and the end."""


def finish(made: Attempt, sent: list[str], why: str) -> Said:
    text = made.text.finish()
    return sent, text, "stop_sequence" if made.text.stopped else why


def go_on(pieces: list[bytes], cut: int, limits: Limits, context_tokens: int, step_tokens: int) -> Said:
    """Resume after `cut` delivered tokens and say the rest of `pieces`, then the end token."""
    made = Attempt.arrived(submit(1, limits=limits, delivered=tuple(range(cut))))
    made.check()
    made.opened(Opened(0, 3, delivered_data=pieces[:cut]), context_tokens, None)
    if made.already_ended is not None:
        return finish(made, [], made.already_ended)
    sent: list[str] = []
    rest = [Sampled(index, data) for index, data in enumerate(pieces)][cut:]
    sampled = [*rest, Sampled(99, b"", end=True)]
    while True:
        size = min(step_tokens, made.allowance)
        taken = made.take(sampled[:size])
        del sampled[:size]
        assert taken is not None
        sent += [text for _, text, _ in taken.tokens]
        if taken.why is not None:
            return finish(made, sent, taken.why)


LETTERS = "ab\N{LATIN SMALL LETTER E WITH ACUTE}\N{LLAMA}"


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], Limits, int, int]:
    """An answer cut into tokens anywhere, even inside a character, and limits that may end it."""
    data = draw(st.text(LETTERS, max_size=24)).encode() + draw(st.sampled_from([b"", b"\xf0\x9f", b"\xff"]))
    pieces: list[bytes] = []
    for size in draw(st.lists(st.integers(0, 5), max_size=20)):
        pieces.append(data[:size])
        data = data[size:]
    pieces.append(data)
    stops = draw(st.lists(st.text(LETTERS + "\N{REPLACEMENT CHARACTER}", min_size=1, max_size=5), max_size=3))
    limits = Limits(max_tokens=draw(st.none() | st.integers(1, 30)), stop=tuple(stops))
    return pieces, limits, draw(st.integers(5, 40)), draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(streams())
def test_cut_at_any_token_the_rest_is_as_if_nothing_had_happened(
    stream: tuple[list[bytes], Limits, int, int],
) -> None:
    pieces, limits, context_tokens, step_tokens = stream
    sent, held, why = go_on(pieces, 0, limits, context_tokens, step_tokens)
    for cut in range(1, len(sent) + 1):
        rest = go_on(pieces, cut, limits, context_tokens, step_tokens)
        assert rest == (sent[cut:], held, why), f"cut after {cut} tokens"


@pytest.mark.parametrize(
    ("limits", "context_tokens", "why"),
    [
        ({"max_tokens": 2}, 100, "length"),
        ({"stop": ("b",), "max_tokens": 2}, 100, "stop_sequence"),
        ({}, 5, "context_full"),
        ({}, 6, None),
        ({"max_tokens": 3, "stop": ("bc",)}, 100, None),
    ],
)
def test_an_end_on_the_last_delivered_token_is_known_at_once(
    limits: dict[str, Any], context_tokens: int, why: str | None
) -> None:
    made = Attempt.arrived(submit(1, limits=Limits(**limits), delivered=(5, 6)))
    made.check()
    made.opened(Opened(0, 3, delivered_data=[b"a", b"b"]), context_tokens, None)
    assert made.already_ended == why
    assert made.usage()["computed_tokens"] == 0


def test_an_attempt_without_delivered_tokens_has_not_ended() -> None:
    assert attempt(context_tokens=3, prompt_tokens=3).already_ended is None


def test_restored_tokens_are_counted_as_cached_and_what_follows_them_is_read_without_credit() -> None:
    made = Attempt.arrived(submit(1, credit=0, delivered=(5, 6, 7)))
    made.check()
    made.opened(Opened(0, 3, delivered_data=[b"a", b"b", b"c"]), 100, None)
    made.in_memory(5)
    assert made.usage()["cached_tokens"] == 5
    assert made.runnable, "a delivered token has to be read again, and that needs no credit"
    made.take(Prefilled(6, 6))
    assert not made.runnable
