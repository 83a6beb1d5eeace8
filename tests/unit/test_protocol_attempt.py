"""The attempt's table: every phase against every event, and which clocks run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.deadlines import Budget
from infervisor.protocol.machines.attempt import (
    ATTEMPT,
    AttemptPhase,
    AttemptState,
    Began,
    CreditSent,
    EndArrived,
    FreePlace,
    ProcessGone,
    ReleaseArrived,
    RestartClock,
    StopClock,
    TokensArrived,
)
from infervisor.protocol.machines.table import NoSuchRow

SUBMITTED, PREFILL, DECODE = AttemptPhase.SUBMITTED, AttemptPhase.PREFILL, AttemptPhase.DECODE
PAUSED, ENDING, RELEASED = AttemptPhase.PAUSED, AttemptPhase.ENDING, AttemptPhase.RELEASED
LAST = TokensArrived(credit_left=False)
MORE = TokensArrived(credit_left=True)
BEGAN, FULL = Began(credit_left=True), Began(credit_left=False)
EVENTS = (BEGAN, FULL, LAST, MORE, CreditSent(), EndArrived(), ReleaseArrived(), ProcessGone())
RUN, STOP = RestartClock(Budget.STALL), StopClock(Budget.STALL)
STOP_FIRST = StopClock(Budget.FIRST_TOKEN)

# Every pair that may happen: the phase that it leads to and what is to be done; any other is an error.
ROWS: dict[tuple[AttemptPhase, object], tuple[AttemptPhase, tuple[object, ...]]] = {
    (SUBMITTED, BEGAN): (PREFILL, ()),
    (SUBMITTED, FULL): (PAUSED, (STOP_FIRST,)),
    (SUBMITTED, CreditSent()): (SUBMITTED, ()),
    (SUBMITTED, EndArrived()): (ENDING, (STOP_FIRST, STOP)),
    (SUBMITTED, ProcessGone()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
    (PREFILL, MORE): (DECODE, (STOP_FIRST, RUN)),
    (PREFILL, LAST): (PAUSED, (STOP_FIRST, STOP)),
    (PREFILL, CreditSent()): (PREFILL, ()),
    (PREFILL, EndArrived()): (ENDING, (STOP_FIRST, STOP)),
    (PREFILL, ProcessGone()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
    (DECODE, MORE): (DECODE, (RUN,)),
    (DECODE, LAST): (PAUSED, (STOP,)),
    (DECODE, CreditSent()): (DECODE, ()),
    (DECODE, EndArrived()): (ENDING, (STOP_FIRST, STOP)),
    (DECODE, ProcessGone()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
    (PAUSED, CreditSent()): (DECODE, (RUN,)),
    (PAUSED, EndArrived()): (ENDING, (STOP_FIRST, STOP)),
    (PAUSED, ProcessGone()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
    (ENDING, CreditSent()): (ENDING, ()),
    (ENDING, ReleaseArrived()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
    (ENDING, ProcessGone()): (RELEASED, (STOP_FIRST, STOP, FreePlace())),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(AttemptPhase, EVENTS)))
def test_every_event_in_every_phase(phase: AttemptPhase, event: Any) -> None:
    state = AttemptState(phase)
    if (phase, event) not in ROWS:
        with pytest.raises(NoSuchRow, match=f"attempt: {type(event).__name__} can't happen while {phase}"):
            ATTEMPT.step(state, event, 0)
        return
    to, effects = ROWS[phase, event]
    assert ATTEMPT.step(state, event, 0) == (AttemptState(to), effects)


def test_the_table_has_no_other_rows() -> None:
    assert set(ATTEMPT.rows) == {(phase, type(event)) for phase, event in ROWS}


def test_a_new_attempt_is_submitted() -> None:
    assert AttemptState().phase is SUBMITTED


@pytest.mark.parametrize("phase", AttemptPhase)
def test_the_worker_owes_a_step_only_while_it_may_compute(phase: AttemptPhase) -> None:
    assert AttemptState(phase).is_runnable == (phase in (SUBMITTED, PREFILL, DECODE))


@settings(max_examples=100, deadline=None)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=25))
def test_the_stall_clock_runs_exactly_while_decoding_and_the_place_is_freed_once(events: list[Any]) -> None:
    state, freed, stall_runs, first_runs = AttemptState(), 0, False, True
    ended = False
    for event in events:
        before = state
        try:
            state, effects = ATTEMPT.step(state, event, 0)
        except NoSuchRow:
            assert state is before
            continue
        for effect in effects:
            if isinstance(effect, FreePlace):
                freed += 1
            elif isinstance(effect, RestartClock):
                assert effect.budget is Budget.STALL
                stall_runs = True
            elif effect.budget is Budget.STALL:
                stall_runs = False
            else:
                first_runs = False
        assert stall_runs == (state.phase is DECODE)
        assert first_runs == (state.phase in (SUBMITTED, PREFILL))
        assert freed == (state.phase is RELEASED)
        # No token is believed after the end.
        ended |= isinstance(event, EndArrived)
        assert not (ended and isinstance(event, TokensArrived))
    if state.phase is not RELEASED:
        assert ATTEMPT.step(state, ProcessGone(), 0)[0].phase is RELEASED
    else:
        for event in EVENTS:
            with pytest.raises(NoSuchRow):
                ATTEMPT.step(state, event, 0)
