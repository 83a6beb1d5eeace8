"""`worker.engines.llama.prefix`: which slot serves a prompt best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.worker.engines.llama.prefix import LEAST_COPY_TOKENS, Choice, Held, choose, common

SYSTEM = list(range(1000, 1100))
CHAT = [*SYSTEM, *range(2000, 2300)]


def empty(slot: int) -> Held:
    return Held(slot, (), 0, 0, True)


def left(slot: int, tokens: list[int], since: int = 0) -> Held:
    """Return a free slot that holds all of `tokens`."""
    return Held(slot, tokens, len(tokens), len(tokens), True, since)


def busy(slot: int, tokens: list[int], read: int, coming: int | None = None) -> Held:
    """Return a slot with a sequence of which so many tokens are read."""
    return Held(slot, tokens, read, read if coming is None else coming, False)


def chosen(prompt: list[int], *slots: Held, unit: int = 1) -> Choice:
    return choose(slots, prompt, len(prompt) - 1, unit)


def test_the_next_turn_of_a_chat_takes_its_slot() -> None:
    turn = [*CHAT, 7, 8, 9]
    assert chosen(turn, empty(0), left(1, CHAT), left(2, [5, 6, 7])) == Choice(1, keep=len(CHAT))


def test_the_last_token_is_always_read() -> None:
    assert chosen(CHAT, left(0, CHAT)) == Choice(0, keep=len(CHAT) - 1)


def test_without_anything_in_common_an_empty_slot_is_taken_first() -> None:
    assert chosen([1, 2, 3], left(0, CHAT), empty(1)) == Choice(1)


def test_without_an_empty_slot_the_one_left_first_goes() -> None:
    assert chosen([1, 2, 3], left(0, CHAT, since=5), left(1, SYSTEM, since=2)) == Choice(1)


def test_a_shared_system_prompt_is_copied_and_the_other_history_stays() -> None:
    other = [*SYSTEM, 1, 2, 3]
    assert chosen(other, left(0, CHAT), empty(1)) == Choice(1, source=0, copy=len(SYSTEM))


def test_the_only_free_slot_is_taken_over_whatever_it_loses() -> None:
    other = [*SYSTEM, 1, 2, 3]
    assert chosen(other, left(0, CHAT)) == Choice(0, keep=len(SYSTEM))


def test_a_few_tokens_in_common_don_t_cost_a_long_history() -> None:
    prompt = [*SYSTEM[: LEAST_COPY_TOKENS - 1], 1, 2, 3]
    assert chosen(prompt, left(0, CHAT), empty(1)) == Choice(1)


def test_a_short_history_that_goes_on_is_taken_over() -> None:
    assert chosen([1, 2, 3, 4], left(0, [1, 2, 3]), empty(1)) == Choice(0, keep=3)


def test_a_chat_keeps_its_turns_though_half_of_them_is_shared_while_a_slot_is_empty() -> None:
    # Both begin with the same system prompt; what the first has of its own is worth keeping.
    first = [*SYSTEM, *range(3000, 3080)]
    assert chosen([*SYSTEM, 1, 2, 3], left(0, first), empty(1)) == Choice(1, source=0, copy=len(SYSTEM))
    assert chosen([*SYSTEM, 1, 2], left(0, first, since=4), left(1, CHAT, since=2)) == Choice(
        1, source=0, copy=len(SYSTEM)
    )


def test_an_answer_that_is_asked_for_again_takes_its_slot_unless_one_is_empty() -> None:
    prompt = CHAT[:200]
    assert chosen(prompt, left(0, CHAT, since=5), left(1, SYSTEM, since=2)) == Choice(0, keep=199)
    assert chosen(prompt, left(0, CHAT, since=5), empty(1)) == Choice(1, source=0, copy=199)


def test_what_a_busy_slot_has_read_is_copied() -> None:
    other = [*SYSTEM, 1, 2, 3]
    assert chosen(other, busy(0, CHAT, 300), empty(1)) == Choice(1, source=0, copy=len(SYSTEM))


def test_what_a_busy_slot_is_reading_is_waited_for() -> None:
    choice = chosen([*CHAT], busy(0, CHAT, 60, len(CHAT) - 1), empty(1))
    assert choice == Choice(1, source=0, copy=len(CHAT) - 1, waits=True)


def test_nobody_waits_for_what_a_free_slot_has_already() -> None:
    choice = chosen([*CHAT], busy(0, CHAT, 60, len(CHAT) - 1), left(1, CHAT))
    assert choice == Choice(1, keep=len(CHAT) - 1)


def test_only_whole_slices_are_kept_where_that_matters() -> None:
    assert chosen([*CHAT], left(0, CHAT[:333]), unit=32) == Choice(0, keep=320)
    assert chosen([*SYSTEM[:31], 1], left(0, CHAT), unit=32) == Choice(0)


TOKENS = st.lists(st.integers(0, 2), max_size=150)


@given(first=TOKENS, second=TOKENS, shared=TOKENS)
def test_common_counts_what_is_equal(first: list[int], second: list[int], shared: list[int]) -> None:
    one, other = [*shared, *first], [*shared, *second]
    count = common(one, other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


SLOTS = st.lists(
    st.tuples(TOKENS, st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 50)),
    min_size=1,
    max_size=6,
)


@given(slots=SLOTS, prompt=TOKENS.filter(bool), unit=st.sampled_from([1, 8]))
def test_what_is_taken_over_is_what_the_prompt_begins_with(
    slots: list[tuple[list[int], float, float, bool, int]], prompt: list[int], unit: int
) -> None:
    held = [
        Held(
            slot,
            tokens,
            int(len(tokens) * read),
            max(int(len(tokens) * read), int(len(tokens) * coming)),
            is_free or slot == 0,
            since if tokens else -1,
        )
        for slot, (tokens, read, coming, is_free, since) in enumerate(slots)
    ]
    choice = choose(held, prompt, len(prompt) - 1, unit)
    target = held[choice.slot]
    assert target.is_free
    assert choice.keep <= min(target.in_memory, len(prompt) - 1)
    assert choice.keep % unit == 0 == choice.copy % unit
    assert target.tokens[: choice.keep] == prompt[: choice.keep]
    if choice.source is not None:
        source = held[choice.source]
        assert choice.keep == 0
        assert choice.source != choice.slot
        assert LEAST_COPY_TOKENS <= choice.copy <= len(prompt) - 1
        assert source.tokens[: choice.copy] == prompt[: choice.copy]
        assert choice.waits == (source.in_memory // unit * unit < choice.copy)
        assert not choice.waits or not source.is_free


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 4096])
def test_common_of_equal_sequences_is_all(length: int) -> None:
    tokens = list(range(length))
    assert common(tokens, list(tokens)) == length
