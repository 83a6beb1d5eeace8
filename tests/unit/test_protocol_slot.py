"""The slot's table: every phase against every event, restarts that are counted, one worker at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infervisor.protocol.machines.slot import (
    SLOT,
    ArmBackoff,
    BackoffOver,
    BreakerOpened,
    CauseGone,
    ResetAsked,
    RestartRules,
    SlotPhase,
    SlotState,
    SlotStopAsked,
    Spawn,
    WorkerDied,
    WorkerReady,
    WorkerWanted,
    backoff_ns,
)
from infervisor.protocol.machines.table import NoSuchRow

STARTING, RUNNING, BACKOFF = SlotPhase.STARTING, SlotPhase.RUNNING, SlotPhase.BACKOFF
OPEN, HALF_OPEN, STOPPED = SlotPhase.OPEN, SlotPhase.HALF_OPEN, SlotPhase.STOPPED
RULES = RestartRules(
    max_restarts=3,
    period_ns=1000,
    max_failed_starts=2,
    backoff_initial_ns=10,
    backoff_max_ns=300,
    jitter=0.0,
    cooldown_ns=500,
)
CRASH = WorkerDied(ours=False, permanent=False, luck=0.5)
OUR_KILL = WorkerDied(ours=True, permanent=False, luck=0.5)
PERMANENT = WorkerDied(ours=False, permanent=True, luck=0.5)
PERMANENT_WHILE_STOPPING = WorkerDied(ours=True, permanent=True, luck=0.5)

EVENTS = (
    ("ready", WorkerReady()),
    ("crash", CRASH),
    ("our_kill", OUR_KILL),
    ("permanent", PERMANENT),
    ("permanent2", PERMANENT_WHILE_STOPPING),
    ("backoff_over", BackoffOver()),
    ("wanted", WorkerWanted()),
    ("reset", ResetAsked()),
    ("gone", CauseGone()),
    ("stop", SlotStopAsked()),
)
# Rows are events, columns phases: the phase that the event leads to, "!" if a worker is spawned for it,
# "=" for no change, "-" for an error. `wanted` comes after the cool-down here.
GRID = """
              starting   running    backoff    open        half_open   stopped
ready         running    -          -          -           running     -
crash         backoff    backoff    -          -           open        =
our_kill      starting!  starting!  -          -           half_open!  =
permanent     open       open       -          -           open        =
permanent2    open       open       -          -           open        =
backoff_over  =          =          starting!  =           =           -
wanted        =          =          =          half_open!  =           -
reset         =          -          starting!  starting!   =           =
gone          -          -          -          starting!   -           -
stop          stopped    stopped    stopped    stopped     stopped     -
"""
LINES = [line.split() for line in GRID.strip().splitlines()]
CELL = {
    (SlotPhase(phase), line[0]): cell
    for line in LINES[1:]
    for phase, cell in zip(LINES[0], line[1:], strict=True)
}


@pytest.mark.parametrize(("phase", "named"), list(itertools.product(SlotPhase, EVENTS)))
def test_every_event_in_every_phase(phase: SlotPhase, named: tuple[str, Any]) -> None:
    name, event = named
    state = SlotState(RULES, phase, restarts_ns=(5,), failed_starts=1, closes_ns=100)
    cell = CELL[phase, name]
    if cell == "-":
        with pytest.raises(NoSuchRow, match=f"slot: {type(event).__name__} can't happen while {phase}"):
            SLOT.step(state, event, 100)
        return
    after, effects = SLOT.step(state, event, 100)
    if cell == "=":
        assert (after, effects) == (state, ())
        return
    assert after.phase is SlotPhase(cell.rstrip("!"))
    assert after.rules is RULES
    assert effects.count(Spawn()) == cell.endswith("!")
    assert (BreakerOpened() in effects) == (after.phase is OPEN)
    assert any(isinstance(effect, ArmBackoff) for effect in effects) == (after.phase is BACKOFF)
    assert len(effects) <= 1


def test_the_table_has_no_other_rows() -> None:
    kinds = {name: type(event) for name, event in EVENTS}
    assert len(CELL) == len(SlotPhase) * len(EVENTS)
    assert set(SLOT.rows) == {(phase, kinds[name]) for (phase, name), cell in CELL.items() if cell != "-"}


# --- counting ------------------------------------------------------------------------------------


def step(state: SlotState, event: object, now: int) -> tuple[SlotState, object]:
    """Step with exactly one effect, and return it."""
    state, effects = SLOT.step(state, event, now)
    [effect] = effects
    return state, effect


def crash_when_ready(state: SlotState, now: int) -> tuple[SlotState, object]:
    """Bring a starting or waiting worker to ready and let it crash."""
    if state.phase is BACKOFF:
        state, _ = SLOT.step(state, BackoffOver(), now)
    state, _ = SLOT.step(state, WorkerReady(), now)
    return step(state, CRASH, now)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_one_restart_more_than_allowed_opens_the_breaker(max_restarts: int) -> None:
    rules = RestartRules(max_restarts, 1000, 99, 10, 300, 0.0, 500)
    state = SlotState(rules)
    for restart in range(max_restarts):
        state, effect = crash_when_ready(state, 0)
        assert effect == ArmBackoff(10 * 2**restart)
    state, effect = crash_when_ready(state, 999)
    assert (state.phase, effect) == (OPEN, BreakerOpened())
    assert state.closes_ns == 999 + 500


def test_restarts_older_than_the_period_are_forgotten() -> None:
    state = SlotState(RULES)
    for now in (0, 1, 2):
        state, _ = crash_when_ready(state, now)
    assert crash_when_ready(state, 999)[1] == BreakerOpened()
    state, effect = crash_when_ready(state, 1000)  # the first one is a whole period ago
    assert effect == ArmBackoff(40)
    assert state.restarts_ns == (1, 2, 1000)


@pytest.mark.parametrize("max_failed_starts", [0, 1, 2])
def test_one_death_before_ready_more_than_allowed_opens_the_breaker(max_failed_starts: int) -> None:
    rules = RestartRules(99, 1000, max_failed_starts, 10, 300, 0.0, 500)
    state = SlotState(rules)
    for _ in range(max_failed_starts):
        state, effect = step(state, CRASH, 0)
        assert isinstance(effect, ArmBackoff)
        state, _ = SLOT.step(state, BackoffOver(), 0)
    state, effect = step(state, CRASH, 0)
    assert (state.phase, effect, state.failed_starts) == (OPEN, BreakerOpened(), 0)


def test_a_worker_that_gets_ready_ends_the_row_of_failed_starts() -> None:
    rules = RestartRules(99, 1000, 1, 10, 300, 0.0, 500)
    state = SlotState(rules)
    for _ in range(3):
        state, effect = step(state, CRASH, 0)
        assert isinstance(effect, ArmBackoff)
        state, _ = SLOT.step(state, BackoffOver(), 0)
        state, _ = SLOT.step(state, WorkerReady(), 0)
        state, _ = step(state, CRASH, 0)
        state, _ = SLOT.step(state, BackoffOver(), 0)
    assert state.failed_starts == 0


def test_our_own_kills_are_not_counted() -> None:
    state = SlotState(RULES)
    for _ in range(50):
        state, effect = step(state, OUR_KILL, 0)
        assert effect == Spawn()
    assert (state.restarts_ns, state.failed_starts) == ((), 0)


def test_a_failure_that_cannot_heal_opens_the_breaker_at_once() -> None:
    state, effect = step(SlotState(RULES), PERMANENT, 7)
    assert (state.phase, effect, state.closes_ns) == (OPEN, BreakerOpened(), 507)


@pytest.mark.parametrize("event", [ResetAsked(), CauseGone()])
def test_what_cannot_heal_stays_open_until_its_cause_is_gone_or_somebody_asks(event: object) -> None:
    state = SlotState(RULES)
    for _ in range(2):
        state, _ = crash_when_ready(state, 0)
    state, _ = SLOT.step(state, BackoffOver(), 0)
    state, _ = step(state, PERMANENT, 0)
    assert state.is_permanent
    for now in (499, 500, 10**12):
        assert SLOT.step(state, WorkerWanted(), now) == (state, ()), "waiting heals nothing"
    assert step(state, event, 0) == (SlotState(RULES), Spawn()), "all counts are forgotten"


def test_a_failed_try_says_anew_whether_waiting_helps() -> None:
    tried = SlotState(RULES, HALF_OPEN)
    assert step(tried, PERMANENT, 0)[0].is_permanent
    opened, _ = step(tried, CRASH, 0)
    assert not opened.is_permanent
    assert step(opened, WorkerWanted(), 500)[1] == Spawn()


def test_after_the_cooldown_one_request_tries_one_start() -> None:
    state, _ = step(SlotState(RestartRules(0, 1000, 0, 10, 300, 0.0, 500)), CRASH, 0)
    assert SLOT.step(state, WorkerWanted(), 499) == (state, ())
    trial, effect = step(state, WorkerWanted(), 500)
    assert (trial.phase, effect) == (HALF_OPEN, Spawn())
    assert SLOT.step(trial, WorkerWanted(), 501) == (trial, ())
    reopened, effect = step(trial, CRASH, 600)
    assert (reopened.phase, effect, reopened.closes_ns) == (OPEN, BreakerOpened(), 1100)
    closed, effects = SLOT.step(trial, WorkerReady(), 600)
    assert (closed.phase, effects, closed.restarts_ns, closed.failed_starts) == (RUNNING, (), (), 0)


def test_a_reset_forgets_the_count_and_starts() -> None:
    state = SlotState(RULES)
    for _ in range(3):
        state, _ = crash_when_ready(state, 0)
    state, effect = step(state, ResetAsked(), 0)
    assert (state.phase, effect, state.restarts_ns, state.failed_starts) == (STARTING, Spawn(), (), 0)


@settings(max_examples=60, deadline=None)
@given(
    rules=st.builds(
        RestartRules,
        max_restarts=st.just(3),
        period_ns=st.integers(1, 10**11),
        max_failed_starts=st.just(3),
        backoff_initial_ns=st.integers(0, 10**10),
        backoff_max_ns=st.integers(0, 10**12),
        jitter=st.floats(0, 1),
        cooldown_ns=st.just(0),
    ),
    restarts=st.integers(0, 200),
    luck=st.floats(0, 1),
)
def test_a_delay_never_outgrows_the_period(rules: RestartRules, restarts: int, luck: float) -> None:
    delay_ns = backoff_ns(rules, restarts, luck)
    assert 0 <= delay_ns <= rules.period_ns
    assert delay_ns <= rules.backoff_max_ns * (1 + rules.jitter)


@pytest.mark.parametrize(
    ("restarts", "luck", "delay_ns"),
    [
        (0, 0.5, 100),
        (1, 0.5, 100),
        (2, 0.5, 200),
        (4, 0.5, 800),
        (5, 0.5, 1000),
        (2, 0.0, 150),
        (2, 1.0, 250),
    ],
)
def test_delays_double_and_are_jittered_both_ways(restarts: int, luck: float, delay_ns: int) -> None:
    rules = RestartRules(9, 10**6, 9, 100, 1000, 0.25, 0)
    assert backoff_ns(rules, restarts, luck) == delay_ns


# --- any life ------------------------------------------------------------------------------------


class AnyLife(RuleBasedStateMachine):
    """A slot in a world where workers exist only if spawned, and timers fire only if armed, even late."""

    @initialize(max_restarts=st.integers(0, 3), max_failed_starts=st.integers(0, 3), jitter=st.floats(0, 1))
    def begin(self, max_restarts: int, max_failed_starts: int, jitter: float) -> None:
        rules = RestartRules(max_restarts, 100, max_failed_starts, 8, 60, jitter, 40)
        self.state = SlotState(rules)
        self.now = 0
        self.workers = 1  # the shell starts the first one with the slot
        self.ready = False
        self.timers = 0
        self.crashes: list[int] = []  # since the breaker was closed last
        self.failed = 0

    def post(self, event: object) -> tuple[Any, ...]:
        before = self.state
        self.state, effects = SLOT.step(self.state, event, self.now)
        if before.phase is STOPPED:
            assert self.state == before
            assert effects == ()
        for effect in effects:
            if isinstance(effect, Spawn):
                self.workers += 1
                self.ready = False
            elif isinstance(effect, ArmBackoff):
                assert 0 <= effect.delay_ns <= self.state.rules.period_ns
                self.timers += 1
        if self.state.phase is OPEN and before.phase is not OPEN:
            assert effects == (BreakerOpened(),)
            self.crashes.clear()
            self.failed = 0
        return effects

    @rule(ns=st.integers(0, 120))
    def let_time_pass(self, ns: int) -> None:
        self.now += ns

    @precondition(lambda self: self.workers and not self.ready and self.state.phase is not STOPPED)
    @rule()
    def get_ready(self) -> None:
        self.ready = True
        self.failed = 0
        self.post(WorkerReady())

    @precondition(lambda self: self.workers)
    @rule(luck=st.floats(0, 1))
    def crash(self, luck: float) -> None:
        phase, rules = self.state.phase, self.state.rules
        self.workers -= 1
        self.crashes = [at for at in self.crashes if self.now - at < rules.period_ns] + [self.now]
        self.failed += not self.ready
        too_often = len(self.crashes) > rules.max_restarts or self.failed > rules.max_failed_starts
        self.post(WorkerDied(ours=False, permanent=False, luck=luck))
        if phase is STOPPED:
            assert self.state.phase is STOPPED
        else:
            assert self.state.phase is (OPEN if too_often or phase is HALF_OPEN else BACKOFF)

    @precondition(lambda self: self.workers)
    @rule()
    def be_killed_by_us(self) -> None:
        self.workers -= 1
        self.post(OUR_KILL)
        assert self.state.phase in (STARTING, HALF_OPEN, STOPPED)

    @precondition(lambda self: self.workers)
    @rule()
    def fail_for_good(self) -> None:
        self.workers -= 1
        self.post(PERMANENT)
        assert self.state.phase in (OPEN, STOPPED)
        assert self.state.is_permanent == (self.state.phase is OPEN)

    @precondition(lambda self: self.timers)
    @rule()
    def fire_a_timer(self) -> None:
        self.timers -= 1
        self.post(BackoffOver())

    @precondition(lambda self: self.state.phase is not STOPPED)
    @rule()
    def want_a_worker(self) -> None:
        before = self.state
        self.post(WorkerWanted())
        if before.phase is OPEN:
            waits = before.is_permanent or self.now < before.closes_ns
            assert self.state.phase is (OPEN if waits else HALF_OPEN)
        else:
            assert self.state == before

    @precondition(lambda self: self.state.phase is not RUNNING)
    @rule()
    def reset(self) -> None:
        if self.state.phase in (BACKOFF, OPEN):
            self.crashes.clear()
            self.failed = 0
        self.post(ResetAsked())

    @precondition(lambda self: self.state.phase is OPEN and self.state.is_permanent)
    @rule()
    def change_the_model_file(self) -> None:
        self.crashes.clear()
        self.failed = 0
        self.post(CauseGone())
        assert self.state == SlotState(self.state.rules)

    @precondition(lambda self: self.now > 200 and self.state.phase is not STOPPED)
    @rule()
    def stop(self) -> None:
        self.post(SlotStopAsked())
        self.timers = 0  # the shell disarms them
        assert self.state.phase is STOPPED

    @invariant()
    def there_is_one_worker_exactly_where_the_phase_says_so(self) -> None:
        phase = self.state.phase
        assert self.workers in (0, 1)
        if phase is not STOPPED:
            assert self.workers == (phase in (STARTING, RUNNING, HALF_OPEN))
            assert not self.workers or self.ready == (phase is RUNNING)

    @invariant()
    def only_an_open_breaker_may_be_open_for_good(self) -> None:
        assert self.state.phase in (OPEN, STOPPED) or not self.state.is_permanent

    @invariant()
    def a_slot_that_waits_has_a_timer_that_ends_it(self) -> None:
        assert self.state.phase is not BACKOFF or self.timers


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=40, stateful_step_count=35, deadline=None)
