"""The request's table: every phase against every event; the first reason wins and is told once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.endings import EndReason
from infervisor.protocol.machines.request import (
    REQUEST,
    Abandoned,
    BeginCancel,
    Dequeue,
    Finished,
    Interrupted,
    Lost,
    RequestPhase,
    RequestState,
    Submitted,
    TellEnd,
)
from infervisor.protocol.machines.table import NoSuchRow

EVENTS: tuple[type[Any], ...] = (Submitted, Interrupted, Finished, Abandoned, Lost)
WITHOUT_REASON = (Submitted, Interrupted)
WANTS_NO_MORE = (EndReason.CANCELLED, EndReason.CLIENT_DISCONNECTED)
PHASES = {
    RequestPhase.QUEUED: RequestState(),
    RequestPhase.RUNNING: RequestState(RequestPhase.RUNNING),
    RequestPhase.ENDED: RequestState(RequestPhase.ENDED, EndReason.STOP),
}
# Every pair that may happen, and the phase that it leads to; any other pair is an error.
LEADS_TO = {
    (RequestPhase.QUEUED, Submitted): RequestPhase.RUNNING,
    (RequestPhase.QUEUED, Abandoned): RequestPhase.ENDED,
    (RequestPhase.QUEUED, Lost): RequestPhase.ENDED,
    (RequestPhase.RUNNING, Interrupted): RequestPhase.QUEUED,
    (RequestPhase.RUNNING, Finished): RequestPhase.ENDED,
    (RequestPhase.RUNNING, Abandoned): RequestPhase.ENDED,
    (RequestPhase.RUNNING, Lost): RequestPhase.ENDED,
    (RequestPhase.ENDED, Abandoned): RequestPhase.ENDED,
    (RequestPhase.ENDED, Lost): RequestPhase.ENDED,
}


def event_of(kind: type[Any], reason: EndReason) -> Any:
    return kind() if kind in WITHOUT_REASON else kind(reason)


@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(RequestPhase, EVENTS)))
def test_every_event_in_every_phase(phase: RequestPhase, kind: type[Any]) -> None:
    state, event = PHASES[phase], event_of(kind, EndReason.LENGTH)
    if (phase, kind) not in LEADS_TO:
        with pytest.raises(NoSuchRow, match=f"request: {kind.__name__} can't happen while {phase}"):
            REQUEST.step(state, event, 0)
        return
    after, _ = REQUEST.step(state, event, 0)
    assert after.phase is LEADS_TO[phase, kind]
    assert (after.reason is None) == (after.phase is not RequestPhase.ENDED)


def test_the_table_has_no_other_rows() -> None:
    assert set(REQUEST.rows) == set(LEADS_TO)


@pytest.mark.parametrize("reason", EndReason)
@pytest.mark.parametrize("kind", [Abandoned, Lost])
def test_leaving_the_queue_is_the_release(kind: type[Any], reason: EndReason) -> None:
    after, effects = REQUEST.step(RequestState(), kind(reason), 0)
    assert after == RequestState(RequestPhase.ENDED, reason)
    assert effects == (Dequeue(), TellEnd(reason, keep_buffer=reason not in WANTS_NO_MORE))


@pytest.mark.parametrize("reason", EndReason)
def test_an_end_that_arrived_is_told_with_all_that_came_before(reason: EndReason) -> None:
    for kind in (Finished, Lost):
        after, effects = REQUEST.step(PHASES[RequestPhase.RUNNING], kind(reason), 0)
        assert after == RequestState(RequestPhase.ENDED, reason)
        assert effects == (TellEnd(reason, keep_buffer=True),)


@pytest.mark.parametrize("reason", EndReason)
def test_abandoning_a_running_request_begins_its_cancel(reason: EndReason) -> None:
    after, effects = REQUEST.step(PHASES[RequestPhase.RUNNING], Abandoned(reason), 0)
    assert after == RequestState(RequestPhase.ENDED, reason)
    assert effects == (BeginCancel(), TellEnd(reason, keep_buffer=reason not in WANTS_NO_MORE))


EVENT = st.builds(event_of, st.sampled_from(EVENTS), st.sampled_from(EndReason))


@settings(max_examples=100, deadline=None)
@given(events=st.lists(EVENT, max_size=8))
def test_the_first_reason_wins_and_is_told_once(events: list[Any]) -> None:
    state, told, cancels, dequeues = RequestState(), [], 0, 0
    first: EndReason | None = None
    was_running, ended_in = False, RequestPhase.QUEUED
    for event in events:
        before = state
        try:
            state, effects = REQUEST.step(state, event, 0)
        except NoSuchRow:
            assert state is before
            continue
        if first is None and not isinstance(event, WITHOUT_REASON):
            first = event.reason
        if before.phase is RequestPhase.ENDED:
            assert state == before
            assert effects == ()
        was_running |= state.phase is RequestPhase.RUNNING
        if before.phase is not RequestPhase.ENDED:
            ended_in = before.phase
        told += [effect for effect in effects if isinstance(effect, TellEnd)]
        cancels += BeginCancel() in effects
        dequeues += Dequeue() in effects
        assert state.reason is first
        assert (state.phase is RequestPhase.ENDED) == (first is not None)
    assert [effect.reason for effect in told] == ([] if first is None else [first])
    assert cancels <= was_running
    assert dequeues == (first is not None and ended_in is RequestPhase.QUEUED)
