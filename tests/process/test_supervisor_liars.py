"""Workers that speak the protocol and lie in it: named, replaced, and nobody else is harmed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from infervisor import EndReason, InfervisorError, Liveness, RestartPolicy, Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import RequestReleased, RequestStarted, WorkerExited
from infervisor.supervisor.watchdog import MAX_STEP_NS
from tests.helpers.lying_worker import lying
from tests.helpers.supervised import Told
from tests.helpers.waiting import is_gone

pytestmark = pytest.mark.anyio

NESTED = "x = []\nfor _ in range(1000): x = [x]\n"
USAGE = '{"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 0, "computed_tokens": 0}'
ONCE = RestartPolicy(max_restarts=1, max_failed_starts=1, backoff_initial_s=0.01, cooldown_s=600)


async def fails(directory: Path, script: str, told: Told) -> InfervisorError:
    """Return what a request to such a worker ends with."""
    with pytest.raises(InfervisorError) as caught:
        async with Supervisor(
            engine="lies", python=lying(directory, script), restart=ONCE, on_event=told, on_crash="fail"
        ) as supervisor:
            await supervisor.generate("hello")
    return caught.value


async def test_values_nested_without_end_are_a_protocol_error(tmp_path: Path) -> None:
    told = Told()
    script = NESTED + 'greet()\nhear("load")\n'
    script += 'say("ready", now(), "print", {"slots": x, "context_tokens": 5})\ndone()\n'
    await fails(tmp_path, script, told)
    assert {event.cause for event in told.of(WorkerExited)} == {DeathCause.PROTOCOL_ERROR}
    assert all("ready.facts" in event.message for event in told.of(WorkerExited))


async def test_an_error_nested_without_end_is_a_protocol_error(tmp_path: Path) -> None:
    told = Told()
    script = NESTED + 'ready()\nid = hear("submit")[0]\nsay("started", now(), id, 0, 0, 1)\n'
    script += f'say("ended", now(), id, "engine_error", "", {USAGE}, {{"code": x}})\ndone()\n'
    error = await fails(tmp_path, script, told)
    assert error.code == EndReason.PROTOCOL_ERROR


async def test_a_failure_told_after_ready_is_a_protocol_error_and_not_believed(tmp_path: Path) -> None:
    told = Told()
    script = 'ready()\nhear("submit")\nsay("failed", now(), "x", "boo", "", True)\ndone()\n'
    error = await fails(tmp_path, script, told)
    assert error.code == EndReason.PROTOCOL_ERROR
    assert "boo" not in str(error)
    assert "failed can't happen while ready" in str(error)


async def test_a_worker_that_needs_no_time_to_load_may_say_nothing_of_it_and_impossible_stamps_are_moved(
    tmp_path: Path,
) -> None:
    told = Told()
    script = 'ready()\nid = hear("submit")[0]\nsay("started", 0, id, 0, 0, 1)\n'
    script += 'say("tokens", 2**64 - 1, id, 0, [[1, "hi", None]])\n'
    script += f'say("ended", 0, id, "stop", "", {USAGE}, None)\nsay("released", 0, id, None, 0)\ndone()\n'
    async with Supervisor(engine="lies", python=lying(tmp_path, script), on_event=told) as supervisor:
        answer = await supervisor.generate("hello")
    points = answer.report.timeline
    assert answer.text == "hi"
    assert points.submitted_ns is not None
    assert points.released_ns is not None
    assert points.worker_first_token_ns is not None
    assert points.submitted_ns <= points.worker_first_token_ns <= points.released_ns


async def test_a_step_that_claims_to_have_taken_for_ever_doesnt_stretch_the_graces_for_ever(
    tmp_path: Path,
) -> None:
    script = 'ready()\nid = hear("submit")[0]\nsay("started", now(), id, 0, 0, 1)\n'
    script += 'say("beat", now(), 1, {"decode": 2**64 - 1}, 1, 0)\n'
    script += 'say("tokens", now(), id, 0, [[1, "a", None]])\ndone()\n'
    async with Supervisor(engine="lies", python=lying(tmp_path, script)) as supervisor:
        async with supervisor.stream("hello") as stream:
            await anext(stream)
            dispatcher = supervisor._dispatcher
            assert dispatcher is not None
            assert dispatcher.escalator.bound_ns(stream._request) == 10 * MAX_STEP_NS
            stream.kill()


async def test_a_hung_worker_that_cannot_dump_its_stacks_is_still_called_unresponsive(tmp_path: Path) -> None:
    told = Told()
    script = 'import time\nready()\nhear("submit")\ntime.sleep(600)\n'
    liveness = Liveness(hang_after_s=0.3, unmeasured_s=0.3, dump_s=0.2)
    with pytest.raises(InfervisorError) as caught:
        async with Supervisor(
            engine="lies",
            python=lying(tmp_path, script),
            restart=ONCE,
            liveness=liveness,
            on_event=told,
            on_crash="fail",
        ) as supervisor:
            await supervisor.generate("hello")
    assert caught.value.code == EndReason.WORKER_UNRESPONSIVE
    assert told.of(WorkerExited)[0].cause is DeathCause.UNRESPONSIVE


async def test_a_request_that_ended_before_it_started_never_starts(tmp_path: Path) -> None:
    told = Told()
    script = 'ready()\nid = hear("submit")[0]\nhear("cancel")\nsay("started", now(), id, 0, 0, 1)\n'
    script += f'say("ended", now(), id, "cancelled", "", {USAGE}, None)\n'
    script += 'say("released", now(), id, now(), now())\ndone()\n'
    async with Supervisor(engine="lies", python=lying(tmp_path, script), on_event=told) as supervisor:
        async with supervisor.stream("hello") as stream:
            stream.cancel()
        assert stream.report.timeline.started_ns is None
        assert stream.report.is_released
    assert told.of(RequestStarted) == []
    assert len(told.of(RequestReleased)) == 1


async def test_a_worker_that_is_gone_before_it_was_asked_leaves_no_trace(tmp_path: Path) -> None:
    told = Told()
    script = f"import os\nready()\nos.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    async with Supervisor(
        engine="lies", python=lying(tmp_path, script), restart=ONCE, on_event=told, wait_until_ready=False
    ) as supervisor:
        with pytest.raises(InfervisorError):
            await supervisor.generate("hello")
        assert supervisor.status().in_flight == 0
    assert all(is_gone(event.pid) for event in told.of(WorkerExited))
