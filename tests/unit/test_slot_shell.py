"""The slot's shell: it starts, replaces and gives up as the table decides; here with workers of paper."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from infervisor.protocol.errors import ModelLoadError, Unavailable, WorkerDied, WorkerSpawnError
from infervisor.protocol.machines import slot as s
from infervisor.protocol.machines.process import DeathCause, ProcessPhase
from infervisor.protocol.messages import Failed
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.process import ExitStatus
from infervisor.supervisor.slot import Slot
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker

RULES = s.RestartRules(
    max_restarts=2,
    period_ns=10**15,
    max_failed_starts=1,
    backoff_initial_ns=1000,
    backoff_max_ns=1000,
    jitter=0,
    cooldown_ns=0,
)


class PaperWorker:
    """Never runs; remembers that it was asked to stop or to retire."""

    def __init__(self) -> None:
        self.stopped = 0
        self.retired: list[tuple[DeathCause, int | None]] = []

    async def run(self) -> None:
        raise AssertionError

    def stop(self) -> None:
        self.stopped += 1

    def retire(self, cause: DeathCause, grace_ns: int | None = None) -> None:
        self.retired.append((cause, grace_ns))


class Place:
    """A slot and all that it told and started."""

    def __init__(self, fails: int = 0, fails_for: OSError | None = None) -> None:
        self.told: list[object] = []
        self.workers: list[PaperWorker] = []
        self.holds = False
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._fails = fails
        self._fails_for = fails_for
        self.slot = Slot(RULES, self._make, self.tasks.append, self, Timers(lambda late_ns: None))

    def _make(self) -> Worker:
        if self._fails:
            self._fails -= 1
            raise WorkerSpawnError("no such interpreter") from self._fails_for
        self.workers.append(PaperWorker())
        return cast(Worker, self.workers[-1])

    def slot_must_wait(self, slot: Slot) -> bool:
        assert slot is self.slot
        return self.holds

    def slot_spawned(self, slot: Slot, worker: Worker) -> None:
        assert slot is self.slot
        assert slot.worker is worker
        self.told.append("spawned")

    def slot_backs_off(self, slot: Slot, delay_s: float, restarts: int) -> None:
        assert slot is self.slot
        self.told.append((delay_s, restarts))

    def slot_opened(self, slot: Slot, reason: str) -> None:
        assert slot is self.slot
        assert slot.is_open
        self.told.append(reason)

    def dies(self, cause: DeathCause = DeathCause.CRASHED, failed: Failed | None = None) -> None:
        status = ExitStatus(signal_number=11)
        self.slot.worker_exited(ExitReport(1, cause, status, ProcessPhase.READY, "", "python", failed))


NOT_A_MODEL = Failed(1, "bad_magic", "not a model", "", True)


@pytest.fixture
def place() -> Place:
    place = Place()
    place.slot.start()
    return place


def test_a_start_makes_one_worker_and_one_task(place: Place) -> None:
    assert place.told == ["spawned"]
    assert place.slot.worker is cast(Worker, place.workers[0])
    assert len(place.tasks) == 1


def test_a_start_that_must_wait_is_made_later_and_once(place: Place) -> None:
    place.slot.apply(s.WorkerReady())
    place.holds = True
    place.dies(DeathCause.RECYCLED)
    assert (len(place.workers), place.slot.worker, place.slot.is_coming) == (1, None, True)
    place.slot.go_on()
    place.slot.go_on()
    assert len(place.workers) == 2


def test_a_start_that_waits_is_forgotten_when_nobody_wants_it_any_more(place: Place) -> None:
    place.slot.apply(s.WorkerReady())
    place.holds = True
    place.dies(DeathCause.RECYCLED)
    place.slot.stop()
    place.slot.go_on()
    assert len(place.workers) == 1
    assert place.slot.is_done


def test_a_death_is_followed_by_a_delay_and_a_new_worker(place: Place) -> None:
    place.slot.apply(s.WorkerReady())
    place.dies()
    assert place.slot.worker is None
    assert place.told == ["spawned", (1e-6, 1)]
    place.slot.apply(s.BackoffOver())
    assert len(place.workers) == 2


def test_our_own_kill_is_followed_at_once_without_a_count(place: Place) -> None:
    for _ in range(5):
        place.slot.apply(s.WorkerReady())
        place.dies(DeathCause.CANCEL_KILL)
    assert place.told == ["spawned"] * 6
    assert place.slot.state.restarts_ns == ()


def test_a_permanent_failure_opens_and_its_error_is_kept(place: Place) -> None:
    place.dies(DeathCause.LOAD_FAILED, NOT_A_MODEL)
    assert place.told == ["spawned", "not a model"]
    assert place.slot.is_open
    assert place.slot.last_error is not None
    assert isinstance(place.slot.last_error(), ModelLoadError)
    refusal = place.slot.refusal()
    assert isinstance(refusal, Unavailable)
    assert "no worker is available: not a model" in str(refusal)


def test_deaths_in_a_row_before_ready_open(place: Place) -> None:
    place.dies()
    place.slot.apply(s.BackoffOver())
    place.dies()
    assert place.slot.is_open
    assert place.told[-1] == "the worker died while serving: SIGSEGV(-11)"
    assert place.slot.last_error is not None
    assert isinstance(place.slot.last_error(), WorkerDied)


def test_an_open_breaker_says_when_the_next_try_can_be_made(place: Place) -> None:
    for _ in range(2):
        place.dies()
        place.slot.apply(s.BackoffOver())
    assert place.slot.is_open
    assert not place.slot.is_open_for_good
    refusal = place.slot.refusal()
    assert str(refusal).endswith("SIGSEGV(-11); the next try can be made in 0 s")
    assert refusal.retryable
    place.slot.cause_gone()
    assert place.slot.is_open, "nobody knows what made it crash"
    place.slot.apply(s.WorkerWanted())
    assert place.slot.state.phase is s.SlotPhase.HALF_OPEN


def test_what_cannot_heal_is_refused_for_good_until_its_cause_is_gone(place: Place) -> None:
    place.dies(DeathCause.LOAD_FAILED, NOT_A_MODEL)
    assert place.slot.is_open_for_good
    place.slot.apply(s.WorkerWanted())  # the cool-down of these rules is over at once
    assert len(place.workers) == 1
    refusal = place.slot.refusal()
    assert str(refusal) == (
        "no worker is available: not a model; none is started before the model's file changes "
        "or restart_worker() is called"
    )
    assert not refusal.retryable
    assert Unavailable.retryable, "of this error alone"
    place.slot.cause_gone()
    assert len(place.workers) == 2
    assert not place.slot.is_open
    place.slot.cause_gone()
    assert len(place.workers) == 2


def test_an_interpreter_that_cannot_be_started_opens_for_good_and_is_tried_when_somebody_asks() -> None:
    place = Place(fails=2, fails_for=FileNotFoundError(errno.ENOENT, "no such file"))
    place.slot.start()
    assert place.told == ["no such interpreter"]
    assert place.slot.is_open_for_good
    place.slot.apply(s.WorkerWanted())
    assert place.told == ["no such interpreter"]
    place.slot.replace()
    assert place.told == ["no such interpreter"] * 2
    place.slot.replace()
    assert place.told[-1] == "spawned"


def test_a_spawn_for_which_something_is_used_up_is_tried_again_by_itself() -> None:
    place = Place(fails=3, fails_for=BlockingIOError(errno.EAGAIN, "too many processes"))
    place.slot.start()
    assert place.told == [(1e-6, 1)]
    place.slot.apply(s.BackoffOver())
    assert place.told[1:] == ["no such interpreter"]
    assert place.slot.is_open
    assert not place.slot.is_open_for_good
    assert isinstance(place.slot.last_error and place.slot.last_error(), WorkerSpawnError)
    place.slot.apply(s.WorkerWanted())
    place.slot.apply(s.WorkerWanted())
    assert place.told[-1] == "spawned"


def test_nothing_is_started_before_the_start_and_then_once() -> None:
    place = Place()
    slot = place.slot
    slot.apply(s.WorkerWanted())
    assert (slot.is_started, slot.is_coming, slot.worker) == (False, False, None)
    slot.start()
    slot.start()
    assert (slot.is_started, slot.is_coming, len(place.workers)) == (True, True, 1)
    slot.apply(s.WorkerReady())
    assert not slot.is_coming, "it has come"
    place.dies()
    assert slot.is_coming
    assert slot.cooldown_s == 0


def test_a_slot_that_is_stopped_before_its_start_never_starts() -> None:
    place = Place()
    place.slot.stop()
    assert place.slot.is_done
    place.slot.start()
    assert (place.workers, place.told, place.slot.is_started) == ([], [], False)


def test_replacing_retires_the_worker_that_is_there_and_closes_an_open_breaker(place: Place) -> None:
    place.slot.replace()
    assert (place.workers[0].retired, place.workers[0].stopped) == ([(DeathCause.STOPPED, None)], 0)
    place.dies(DeathCause.STOPPED)
    assert len(place.workers) == 2
    place.slot.replace(DeathCause.RECYCLED, 7)
    assert place.workers[1].retired == [(DeathCause.RECYCLED, 7)]
    place.slot.apply(s.WorkerReady())
    place.dies(DeathCause.RECYCLED)
    assert len(place.workers) == 3
    place.dies(DeathCause.LOAD_FAILED, NOT_A_MODEL)
    place.slot.replace()
    assert len(place.workers) == 4
    assert not place.slot.is_open


@pytest.mark.parametrize("cause", [DeathCause.MEMORY_LIMIT, DeathCause.OUT_OF_MEMORY])
def test_deaths_for_memory_are_counted_until_the_breaker_opens(place: Place, cause: DeathCause) -> None:
    for _ in range(RULES.max_restarts):
        place.slot.apply(s.WorkerReady())
        place.dies(cause)
        assert not place.slot.is_open
        place.slot.apply(s.BackoffOver())
    place.slot.apply(s.WorkerReady())
    place.dies(cause)
    assert place.slot.is_open


@pytest.mark.parametrize("cause", [DeathCause.RECYCLED, DeathCause.CRASHED])
def test_one_that_ends_lets_its_worker_finish_and_wants_none_after_it(
    place: Place, cause: DeathCause
) -> None:
    place.slot.apply(s.WorkerReady())
    place.slot.end(DeathCause.RECYCLED, 7)
    assert (place.workers[0].retired, place.workers[0].stopped) == ([(DeathCause.RECYCLED, 7)], 0)
    assert (place.slot.is_ending, place.slot.is_done) == (True, False)
    place.dies(cause)
    assert place.slot.is_done
    assert len(place.workers) == 1
    assert place.told == ["spawned"]


def test_one_that_ends_is_stopped_when_everything_closes(place: Place) -> None:
    place.slot.end()
    place.slot.stop()
    assert place.workers[0].stopped == 1


def test_one_that_ends_during_a_delay_is_done_at_once_and_stays_so(place: Place) -> None:
    place.dies()
    place.slot.end()
    assert place.slot.is_done
    assert place.slot._backoff_alarm.due_ns is None
    assert len(place.workers) == 1


def test_replacing_during_a_delay_starts_at_once_and_only_once(place: Place) -> None:
    place.dies()
    place.slot.replace()
    place.slot.apply(s.BackoffOver())
    assert len(place.workers) == 2


def test_after_the_stop_nothing_is_started(place: Place) -> None:
    place.slot.stop()
    assert place.workers[0].stopped == 1
    place.dies(DeathCause.STOPPED)
    place.slot.replace()
    assert len(place.workers) == 1
    assert place.slot.worker is None
