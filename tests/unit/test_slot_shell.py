"""The slot's shell: it starts, replaces and gives up as the table decides; here with workers of paper."""

from __future__ import annotations

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
        self.retired = 0

    async def run(self) -> None:
        raise AssertionError

    def stop(self) -> None:
        self.stopped += 1

    def retire(self) -> None:
        self.retired += 1


class Place:
    """A slot and all that it told and started."""

    def __init__(self, fails: int = 0) -> None:
        self.told: list[object] = []
        self.workers: list[PaperWorker] = []
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._fails = fails
        self.slot = Slot(RULES, self._make, self.tasks.append, self, Timers(lambda late_ns: None))

    def _make(self) -> Worker:
        if self._fails:
            self._fails -= 1
            raise WorkerSpawnError("no such interpreter")
        self.workers.append(PaperWorker())
        return cast(Worker, self.workers[-1])

    def slot_spawned(self, worker: Worker) -> None:
        self.told.append("spawned")

    def slot_backs_off(self, delay_s: float, restarts: int) -> None:
        self.told.append((delay_s, restarts))

    def slot_opened(self, reason: str) -> None:
        self.told.append(reason)

    def dies(self, cause: DeathCause = DeathCause.CRASHED, failed: Failed | None = None) -> None:
        status = ExitStatus(signal_number=11)
        self.slot.worker_exited(ExitReport(1, cause, status, ProcessPhase.READY, "", "python", failed))


@pytest.fixture
def place() -> Place:
    place = Place()
    place.slot.start()
    return place


def test_a_start_makes_one_worker_and_one_task(place: Place) -> None:
    assert place.told == ["spawned"]
    assert place.slot.worker is cast(Worker, place.workers[0])
    assert len(place.tasks) == 1


def test_a_death_is_followed_by_a_delay_and_a_new_worker(place: Place) -> None:
    place.slot.apply(s.WorkerReady())
    place.dies()
    assert place.slot.worker is None
    assert place.told == ["spawned", (1e-6, 1)]
    place.slot.apply(s.BackoffOver())
    assert len(place.workers) == 2
    assert place.slot.restarts == {"crashed": 1}


def test_our_own_kill_is_followed_at_once_without_a_count(place: Place) -> None:
    for _ in range(5):
        place.slot.apply(s.WorkerReady())
        place.dies(DeathCause.CANCEL_KILL)
    assert place.told == ["spawned"] * 6
    assert place.slot.state.restarts_ns == ()
    assert place.slot.restarts == {"cancel_kill": 5}


def test_a_permanent_failure_opens_and_its_error_is_kept(place: Place) -> None:
    place.dies(DeathCause.LOAD_FAILED, Failed(1, "bad_magic", "not a model", "", True))
    assert place.told == ["spawned", "not a model"]
    assert place.slot.is_open
    assert place.slot.restarts == {}
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


def test_a_spawn_that_fails_opens_at_once_and_a_request_tries_again() -> None:
    place = Place(fails=2)
    place.slot.start()
    assert place.told == ["no such interpreter"]
    assert place.slot.is_open
    place.slot.apply(s.WorkerWanted())
    assert place.told == ["no such interpreter"] * 2
    place.slot.apply(s.WorkerWanted())
    assert place.told[-1] == "spawned"
    assert place.slot.state.phase is s.SlotPhase.HALF_OPEN


def test_replacing_retires_the_worker_that_is_there_and_closes_an_open_breaker(place: Place) -> None:
    place.slot.replace()
    assert (place.workers[0].retired, place.workers[0].stopped) == (1, 0)
    place.dies(DeathCause.STOPPED)
    assert len(place.workers) == 2
    place.dies(DeathCause.LOAD_FAILED, Failed(1, "bad_magic", "not a model", "", True))
    place.slot.replace()
    assert len(place.workers) == 3
    assert not place.slot.is_open


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
    assert place.slot.restarts == {}
