"""Cancels against running steps, with real threads where races are the point."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infervisor.worker.abort import EARLY_CANCELS, Abort

PATIENCE_S = 20.0


class Flag:
    """An engine's abort flag."""

    def __init__(self) -> None:
        self.raised = False

    def interrupt(self) -> None:
        self.raised = True

    def clear_interrupt(self) -> None:
        self.raised = False


@pytest.fixture
def flag() -> Flag:
    return Flag()


@pytest.fixture
def abort(flag: Flag) -> Abort:
    abort = Abort()
    abort.attach(flag)
    for attempt_id in (1, 2, 3):
        assert abort.admit(attempt_id)
    return abort


def test_a_cancel_interrupts_the_step_that_its_attempt_is_in(abort: Abort, flag: Flag) -> None:
    assert abort.begin_step([1, 2]) == [1, 2]
    abort.cancel(2)
    assert flag.raised
    abort.end_step()
    assert not flag.raised
    assert abort.begin_step([1, 2]) == [1]


def test_a_cancel_leaves_the_step_of_others_alone(abort: Abort, flag: Flag) -> None:
    abort.begin_step([1, 2])
    abort.cancel(3)
    assert not flag.raised


def test_a_cancel_between_steps_interrupts_nothing(abort: Abort, flag: Flag) -> None:
    abort.cancel(1)
    assert not flag.raised
    assert abort.begin_step([1, 2]) == [2]
    assert not flag.raised


def test_an_interrupt_that_came_after_the_last_node_is_forgotten(abort: Abort, flag: Flag) -> None:
    flag.interrupt()
    abort.begin_step([1])
    assert not flag.raised


def test_cancelling_twice_keeps_the_first_time(abort: Abort) -> None:
    first = abort.cancel(1)
    assert abort.cancel(1) == first == abort.noticed_ns(1) == abort.forget(1)


def test_a_cancel_that_overtakes_its_submit_applies_to_it(abort: Abort) -> None:
    noticed_ns = abort.cancel(9)
    assert abort.noticed_ns(9) is None
    assert abort.admit(9)
    assert abort.noticed_ns(9) == noticed_ns
    assert abort.begin_step([9]) == []


def test_cancels_of_unknown_ids_are_bounded(abort: Abort) -> None:
    for attempt_id in range(100, 100 + EARLY_CANCELS + 1):
        abort.cancel(attempt_id)
    assert abort.admit(100)
    assert abort.noticed_ns(100) is None, "the oldest one is forgotten"
    assert abort.admit(101)
    assert abort.noticed_ns(101) is not None


def test_an_id_is_admitted_once_while_it_lives(abort: Abort) -> None:
    assert not abort.admit(1)
    abort.forget(1)
    assert abort.admit(1)


def test_a_cancel_is_not_forgotten_with_another_one(abort: Abort) -> None:
    abort.admit(1)
    abort.admit(2)
    assert not abort.any_cancelled
    abort.cancel(1)
    abort.cancel(2)
    abort.forget(1)
    assert abort.any_cancelled
    assert abort.begin_step([2]) == []
    abort.end_step()
    abort.forget(2)
    assert not abort.any_cancelled


def test_stopping_cuts_the_step_and_lets_no_other_begin(abort: Abort, flag: Flag) -> None:
    abort.begin_step([1])
    abort.stop_all()
    assert flag.raised
    abort.end_step()
    assert abort.begin_step([1, 2]) == []
    abort.end_step()


def test_steps_and_cancels_from_threads_never_interrupt_an_innocent_step() -> None:
    class Engine(Flag):
        def interrupt(self) -> None:
            assert self.running is not None
            assert 1 in self.running, "the step of others was interrupted"
            self.raised = True

        running: frozenset[int] | None = None

    engine = Engine()
    abort = Abort()
    abort.attach(engine)
    abort.admit(2)
    done = threading.Event()
    failures: list[BaseException] = []

    def cancel_often() -> None:
        try:
            while not done.is_set():
                abort.cancel(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=cancel_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            abort.admit(1)
            # What the engine knows is set before the members are public, and cleared after they aren't.
            engine.running = frozenset({1, 2})
            wanted = abort.begin_step([1, 2])
            assert 2 in wanted
            abort.end_step()
            engine.running = None
            abort.forget(1)
            engine.running = frozenset({2})
            assert abort.begin_step([2]) == [2]
            assert not engine.raised
            abort.end_step()
            engine.running = None
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert failures == []


class AbortMachine(RuleBasedStateMachine):
    """Any order of calls: the flag is up exactly if a member of the running step was cancelled in it."""

    ids = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.flag = Flag()
        self.abort = Abort()
        self.abort.attach(self.flag)
        self.live: dict[int, bool] = {}
        self.early: set[int] = set()
        self.members: set[int] | None = None
        self.hit = False

    @rule(attempt_id=ids)
    def admit(self, attempt_id: int) -> None:
        assert self.abort.admit(attempt_id) == (attempt_id not in self.live)
        if attempt_id not in self.live:
            self.live[attempt_id] = attempt_id in self.early
            self.early.discard(attempt_id)

    @rule(attempt_id=ids)
    def cancel(self, attempt_id: int) -> None:
        self.abort.cancel(attempt_id)
        if attempt_id in self.live:
            self.live[attempt_id] = True
            self.hit |= self.members is not None and attempt_id in self.members
        else:
            self.early.add(attempt_id)

    @precondition(lambda self: self.members is None)
    @rule(attempt_id=ids)
    def forget(self, attempt_id: int) -> None:
        assert (self.abort.forget(attempt_id) is not None) == self.live.pop(attempt_id, False)

    @precondition(lambda self: self.members is None)
    @rule()
    def begin(self) -> None:
        wanted = self.abort.begin_step(self.live)
        assert wanted == [attempt_id for attempt_id, cancelled in self.live.items() if not cancelled]
        self.members = set(wanted)

    @precondition(lambda self: self.members is not None)
    @rule()
    def end(self) -> None:
        self.abort.end_step()
        self.members = None
        self.hit = False

    @invariant()
    def flag_is_up_only_for_a_member(self) -> None:
        assert self.flag.raised == self.hit


TestAbortMachine = AbortMachine.TestCase
TestAbortMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
