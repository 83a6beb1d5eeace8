"""When snapshots are taken: never for more than their share, soon where it matters."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infervisor.worker.snapshots import LONGEST_S, TOKENS_APART, Costs, Pacing

STEP_S = 0.01


def taken_at(pacing: Pacing, tokens: range, cost_s: float, *, reading: bool = False) -> list[int]:
    """Step token by token; return where snapshots were taken, each for exactly `cost_s`."""
    taken: list[int] = []
    for count in tokens:
        pacing.worked(STEP_S)
        if pacing.is_due(count, cost_s, reading=reading):
            pacing.saved(count, cost_s)
            taken.append(count)
    return taken


def test_while_decoding_one_comes_as_soon_as_its_share_has_been_worked() -> None:
    # 3 ms at 1 % are 30 steps of 10 ms.
    taken = taken_at(Pacing(0.01, is_at_end=True), range(1, 121), 0.003)
    assert [later - earlier for earlier, later in zip([0, *taken], taken, strict=False)] == pytest.approx(
        [30] * len(taken), abs=1
    )
    assert len(taken) in (3, 4)


def test_cheap_ones_are_some_tokens_apart() -> None:
    taken = taken_at(Pacing(1.0), range(1, 50), 1e-9)
    assert taken == list(range(TOKENS_APART, 50, TOKENS_APART))


def test_while_reading_half_is_kept_for_the_snapshot_at_the_end() -> None:
    pacing = Pacing(0.01)
    assert taken_at(pacing, range(1, 60), 0.003, reading=True) == []
    assert taken_at(pacing, range(60, 61), 0.003, reading=True) == [60]
    assert pacing.is_due(70, 0.003, reading=False), "the reading is over, and it is there"


def test_the_one_of_the_whole_prompt_is_not_waited_for_but_paid_later() -> None:
    pacing = Pacing(0.01)
    assert not pacing.is_due(100, 0.003, reading=True)
    assert pacing.is_due(100, 0.003, reading=False)
    pacing.saved(100, 0.003)
    assert taken_at(pacing, range(101, 200), 0.003)[0] == pytest.approx(160, abs=1), "3 ms of debt and 3 ms"


def test_pages_that_were_made_ready_are_paid_from_the_same_share() -> None:
    pacing = Pacing(0.01, purse_s=0.01, is_at_end=True)
    pacing.spent(0.008)
    assert not pacing.is_due(100, 0.003, reading=False)


def test_a_long_one_is_never_due() -> None:
    pacing = Pacing(1.0, purse_s=100.0)
    assert pacing.is_due(100, LONGEST_S, reading=False)
    assert not pacing.is_due(100, LONGEST_S * 1.01, reading=False)


def test_what_cost_more_than_expected_is_paid_before_the_next() -> None:
    pacing = Pacing(0.01)
    pacing.purse_s = 0.003
    pacing.saved(10, 0.009)
    assert taken_at(pacing, range(11, 120), 0.003)[0] == pytest.approx(100, abs=1), "6 ms of debt and 3 ms"


def test_what_was_saved_up_pays_for_one_more_at_most() -> None:
    pacing = Pacing(0.01, purse_s=1.0)
    assert taken_at(pacing, range(1, 40), 0.003)[:3] == [8, 16, 39]


def test_after_a_restore_the_first_of_each_buffer_is_free_once_the_reading_is_over() -> None:
    pacing = Pacing(0.01)
    pacing.restored(100)
    assert not pacing.is_due(100 + TOKENS_APART, 0.2, reading=True), "nobody who waits is kept waiting for it"
    assert not pacing.is_due(100 + TOKENS_APART - 1, 0.2, reading=False)
    for number in (1, 2):
        tokens = 100 + number * TOKENS_APART
        assert pacing.is_due(tokens, 0.2, reading=False)
        pacing.saved(tokens, 0.2)
        assert pacing.purse_s == pytest.approx(0), "it was free"
    assert not pacing.is_due(200, 0.001, reading=False)


def test_nothing_is_due_when_memory_was_lost() -> None:
    pacing = Pacing(1.0, saved_tokens=100, purse_s=1.0)
    assert not pacing.is_due(50, 1e-6, reading=False)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.floats(1e-4, 1.0),
    st.lists(st.tuples(st.floats(0, 0.3), st.floats(1e-5, 0.2), st.booleans()), min_size=1, max_size=200),
)
def test_snapshots_never_take_more_than_their_share(
    share: float, steps: list[tuple[float, float, bool]]
) -> None:
    pacing = Pacing(share, is_at_end=True)
    worked_s = spent_s = 0.0
    for index, (seconds, cost_s, reading) in enumerate(steps):
        pacing.worked(seconds)
        worked_s += seconds
        if pacing.is_due(TOKENS_APART * (index + 1), cost_s, reading=reading):
            pacing.saved(TOKENS_APART * (index + 1), cost_s)
            spent_s += cost_s
        assert spent_s <= worked_s * share + 1e-9


def test_costs_are_learned_for_pages_in_use_and_for_new_ones() -> None:
    costs = Costs()
    size = 10_000_000
    for _ in range(20):
        costs.learn(size, size, 0.040)
        costs.learn(size, 0, 0.005)
    assert costs.expected_s(size, size) == pytest.approx(0.040, rel=0.1)
    assert costs.expected_s(size, 0) == pytest.approx(0.005, rel=0.1)
    assert costs.expected_s(2 * size, 0) == pytest.approx(0.010, rel=0.1)


def test_new_pages_that_cost_nothing_are_learned_too() -> None:
    costs = Costs()
    for _ in range(20):
        costs.learn(10_000_000, 10_000_000, 0.0)
    assert costs.cold_byte_s == pytest.approx(0, abs=1e-12)
    assert costs.warm_byte_s > 0
