"""The process's table: every phase against every event, and every stop ends in an exit or a kill."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.machines.process import (
    PROCESS,
    AnnounceReady,
    ArmGrace,
    Connected,
    DeathCause,
    Drained,
    Exited,
    FailedArrived,
    Grace,
    GraceOver,
    HelloArrived,
    Kill,
    KillAsked,
    ProcessPhase,
    ProcessState,
    ReadyArrived,
    SendDrain,
    SendLoad,
    SendShutdown,
    StopAsked,
    Terminate,
)
from infervisor.protocol.machines.table import NoSuchRow

SPAWNED, HANDSHAKE, LOADING = ProcessPhase.SPAWNED, ProcessPhase.HANDSHAKE, ProcessPhase.LOADING
READY, DRAINING, TERMINATING = ProcessPhase.READY, ProcessPhase.DRAINING, ProcessPhase.TERMINATING
KILLING, EXITED = ProcessPhase.KILLING, ProcessPhase.EXITED

EVENTS = (
    Connected(),
    HelloArrived(),
    ReadyArrived(),
    FailedArrived(),
    StopAsked(),
    Drained(),
    GraceOver(),
    KillAsked(DeathCause.UNRESPONSIVE),
    Exited(),
)
# Rows are events, columns phases: the phase that the event leads to, "=" for no change, "-" for an error.
GRID = """
                spawned      handshake    loading      ready     draining     terminating  killing  exited
Connected       handshake    -            -            -         -            =            =        -
HelloArrived    -            loading      -            -         -            =            =        -
ReadyArrived    -            -            ready        -         -            =            =        -
FailedArrived   -            -            terminating  -         -            =            =        -
StopAsked       terminating  terminating  terminating  draining  -            =            =        =
Drained         -            -            -            -         terminating  -            -        -
GraceOver       -            -            -            -         terminating  *            =        -
KillAsked       killing      killing      killing      killing   killing      killing      =        =
Exited          -            exited       exited       exited    exited       exited       exited   -
"""
LINES = [line.split() for line in GRID.strip().splitlines()]
CELL = {
    (ProcessPhase(phase), line[0]): cell
    for line in LINES[1:]
    for phase, cell in zip(LINES[0], line[1:], strict=True)
}


# Nothing is signalled before terminating.
PLACES = [(phase, False) for phase in ProcessPhase] + [(p, True) for p in (TERMINATING, KILLING, EXITED)]


@pytest.mark.parametrize(("place", "event"), list(itertools.product(PLACES, EVENTS)))
def test_every_event_in_every_phase(place: tuple[ProcessPhase, bool], event: Any) -> None:
    phase, signalled = place
    state = ProcessState(phase, DeathCause.CANCEL_KILL, signalled)
    cell = CELL[phase, type(event).__name__]
    if cell == "-":
        with pytest.raises(NoSuchRow, match=f"process: {type(event).__name__} can't happen while {phase}"):
            PROCESS.step(state, event, 0)
        return
    after, effects = PROCESS.step(state, event, 0)
    assert after.cause is DeathCause.CANCEL_KILL, "the first cause wins"
    if cell == "=":
        assert (after, effects) == (state, ())
    elif cell == "*":  # the terminate signal comes before the kill
        assert after.phase is (KILLING if signalled else TERMINATING)
    else:
        assert after.phase is ProcessPhase(cell)


def test_the_table_has_no_other_rows() -> None:
    assert len(CELL) == len(ProcessPhase) * len(EVENTS)
    assert {(phase, kind.__name__) for phase, kind in PROCESS.rows} == {
        k for k, c in CELL.items() if c != "-"
    }


def walk(*events: object) -> tuple[ProcessState, list[object]]:
    """Return where the events lead from the start, and all effects in their order."""
    state = ProcessState()
    effects: list[object] = []
    for event in events:
        state, more = PROCESS.step(state, event, 0)
        effects += more
    return state, effects


TO_READY = (Connected(), HelloArrived(), ReadyArrived())


def test_a_quiet_life() -> None:
    state, effects = walk(*TO_READY, StopAsked(), Drained(), Exited())
    assert state == ProcessState(EXITED, DeathCause.STOPPED)
    assert effects == [
        SendLoad(),
        AnnounceReady(),
        ArmGrace(Grace.DRAIN),
        SendDrain(),
        SendShutdown(),
        ArmGrace(Grace.EXIT),
    ]


def test_an_empty_worker_that_is_drained_within_the_telling_keeps_the_grace_of_its_exit() -> None:
    state, armed = walk(*TO_READY)[0], []

    def apply(event: object) -> None:
        nonlocal state
        state, effects = PROCESS.step(state, event, 0)
        for effect in effects:
            if isinstance(effect, ArmGrace):
                armed.append(effect.grace)
            elif effect == SendDrain():
                apply(Drained())

    apply(StopAsked())
    assert state.phase is TERMINATING
    assert armed == [Grace.DRAIN, Grace.EXIT]


def test_a_stubborn_life() -> None:
    state, effects = walk(*TO_READY, StopAsked(), GraceOver(), GraceOver())
    assert state.phase is KILLING
    assert effects[4:] == [Terminate(), ArmGrace(Grace.TERMINATE), Kill()]


def test_a_worker_that_drains_but_does_not_exit_is_signalled_before_it_is_killed() -> None:
    state, effects = walk(*TO_READY, StopAsked(), Drained(), GraceOver(), GraceOver())
    assert state.phase is KILLING
    assert effects[4:] == [
        SendShutdown(),
        ArmGrace(Grace.EXIT),
        Terminate(),
        ArmGrace(Grace.TERMINATE),
        Kill(),
    ]


@pytest.mark.parametrize("events", [TO_READY[:n] for n in range(3)], ids=range(3))
def test_a_worker_that_is_not_ready_has_nothing_to_drain(events: tuple[object, ...]) -> None:
    state, effects = walk(*events, StopAsked(DeathCause.STARTUP_TIMEOUT))
    assert state == ProcessState(TERMINATING, DeathCause.STARTUP_TIMEOUT, signalled=True)
    assert effects[-2:] == [Terminate(), ArmGrace(Grace.TERMINATE)]
    assert PROCESS.step(state, GraceOver(), 0)[1] == (Kill(),)


def test_a_worker_whose_load_failed_is_given_time_to_exit() -> None:
    state, effects = walk(Connected(), HelloArrived(), FailedArrived())
    assert state == ProcessState(TERMINATING, DeathCause.LOAD_FAILED)
    assert effects == [SendLoad(), SendShutdown(), ArmGrace(Grace.EXIT)]


@pytest.mark.parametrize("event", [StopAsked(), KillAsked(DeathCause.CANCEL_KILL)])
def test_a_worker_may_be_ended_before_its_pipes_are_attended(event: object) -> None:
    state, _ = walk(event)
    assert walk(event, Connected(), Exited())[0].phase is EXITED
    assert PROCESS.step(state, Connected(), 0) == (state, ())


def test_an_exit_that_nobody_asked_for_is_a_crash() -> None:
    for events in (TO_READY[:n] for n in range(1, 4)):
        assert walk(*events, Exited())[0] == ProcessState(EXITED, DeathCause.CRASHED)


EVENT = (
    st.sampled_from([event for event in EVENTS if not isinstance(event, (StopAsked, KillAsked))])
    | st.builds(StopAsked, st.sampled_from(DeathCause))
    | st.builds(KillAsked, st.sampled_from(DeathCause))
)


@settings(max_examples=120, deadline=None)
@given(events=st.lists(EVENT, max_size=20))
def test_whatever_happens_the_process_ends(events: list[Any]) -> None:
    state, kills, armed = ProcessState(), 0, False
    cause: DeathCause | None = None
    for event in events:
        if isinstance(event, GraceOver) and not armed:
            continue  # the shell posts it only for a grace that is armed
        before = state
        try:
            state, effects = PROCESS.step(state, event, 0)
        except NoSuchRow:
            assert state is before
            continue
        kills += Kill() in effects
        armed = any(isinstance(effect, ArmGrace) for effect in effects) or (
            armed and not isinstance(event, GraceOver)
        )
        if state.cause is not None and cause is None:
            cause = state.cause
        assert state.cause is cause
        if before.phase is EXITED:
            assert (state, effects) == (before, ())
        # A phase that a process could linger in has a grace that ends it.
        assert armed or state.phase not in (DRAINING, TERMINATING)
        assert kills == (state.phase is KILLING) or state.phase is EXITED
        assert kills <= 1
    if state.phase is EXITED:
        return
    if state.phase is SPAWNED:  # nobody sees its exit before its pipes are attended
        state, _ = PROCESS.step(state, Connected(), 0)
    assert PROCESS.step(state, Exited(), 0)[0].phase is EXITED
    if state.phase is not DRAINING:
        state, _ = PROCESS.step(state, StopAsked(), 0)
    for _ in range(3):
        if state.phase is not KILLING:
            state, effects = PROCESS.step(state, GraceOver(), 0)
            kills += Kill() in effects
    assert (state.phase, kills) == (KILLING, 1)


@pytest.mark.parametrize("phase", [READY, LOADING])
def test_a_worker_that_is_recycled_goes_like_one_that_is_stopped_and_says_why(phase: ProcessPhase) -> None:
    state = ProcessState(phase)
    stopped, effects = PROCESS.step(state, StopAsked(), 0)
    recycled, same_effects = PROCESS.step(state, StopAsked(DeathCause.RECYCLED), 0)
    assert (recycled.phase, same_effects) == (stopped.phase, effects)
    for event in (Drained(), Exited()) if phase is READY else (Exited(),):
        recycled, _ = PROCESS.step(recycled, event, 0)
    assert (recycled.phase, recycled.cause) == (EXITED, DeathCause.RECYCLED)


# Whether we ended a healthy worker, and what those who were in it end with.
WHOSE = {
    DeathCause.CRASHED: (False, EndReason.WORKER_CRASHED),
    DeathCause.STOPPED: (True, EndReason.WORKER_KILLED),
    DeathCause.CANCEL_KILL: (True, EndReason.WORKER_KILLED),
    DeathCause.UNRESPONSIVE: (False, EndReason.WORKER_UNRESPONSIVE),
    DeathCause.DEAF: (False, EndReason.WORKER_UNRESPONSIVE),
    DeathCause.PROTOCOL_ERROR: (False, EndReason.PROTOCOL_ERROR),
    DeathCause.STARTUP_TIMEOUT: (False, EndReason.STARTUP_TIMEOUT),
    DeathCause.LOAD_FAILED: (False, EndReason.UNAVAILABLE),
    DeathCause.MEMORY_LIMIT: (False, EndReason.WORKER_KILLED),
    DeathCause.OUT_OF_MEMORY: (False, EndReason.WORKER_CRASHED),
    DeathCause.RECYCLED: (True, EndReason.WORKER_KILLED),
}


@pytest.mark.parametrize("cause", DeathCause)
def test_every_cause_says_whose_fault_it_was(cause: DeathCause) -> None:
    assert (cause.is_ours, cause.end_reason) == WHOSE[cause]
    assert not cause.end_reason.is_natural
    assert cause.end_reason.end_class is not EndClass.CALLER
