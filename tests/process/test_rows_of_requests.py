"""Rows of the request and the attempt table, frame by frame, and ends that cross each other."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from infervisor import EndReason, ProtocolError, RestartPolicy, Stream, Supervisor
from infervisor.supervisor.events import BreakerOpened, RequestReleased
from tests.helpers.lying_worker import lying
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

USAGE = '{"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 6, "computed_tokens": 6}'


@pytest.mark.produces(
    "attempt: submitted × Began → prefill",
    "attempt: prefill × TokensArrived → decode",
    "attempt: decode × TokensArrived → decode",
    "attempt: decode × CreditSent → decode",
    "attempt: decode × TokensArrived → paused",
    "attempt: paused × CreditSent → decode",
    "attempt: decode × EndArrived → ending",
    "attempt: ending × ReleaseArrived → released",
    "request: running × Finished → ended",
    "end: stop",
)
async def test_an_attempt_that_decodes_pauses_and_goes_on(tmp_path: Path) -> None:
    script = f"""
ready()
id = hear("submit")[0]
say("started", now(), id, 0, 0, 1)
say("tokens", now(), id, 0, [[0, "a", None]])
say("tokens", now(), id, 1, [[1, "b", None]])
hear("credit")
say("tokens", now(), id, 2, [[2, "c", None], [3, "d", None], [4, "e", None], [5, "f", None]])
hear("credit")
say("ended", now(), id, "stop", "", {USAGE}, None)
say("released", now(), id, None, now())
done()
"""
    async with scripted(python=lying(tmp_path, script)) as (supervisor, _):
        # Credit is sent with every second token that is taken: after "b" while two may be computed, after "d"
        # while none may.
        async with supervisor.stream("hello", window=4) as stream:
            assert await stream.text() == "abcdef"
            report = await stream.released()
    assert report.end_reason is EndReason.STOP


@pytest.mark.produces("attempt: ending × CreditSent → ending", "end: protocol_error")
async def test_what_lies_in_the_buffer_may_be_read_when_the_end_was_nonsense(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"""
import pathlib
ready()
id = hear("submit")[0]
say("started", now(), id, 0, 0, 1)
say("tokens", now(), id, 0, [[0, "a", None]])
say("ended", now(), id, "stop", "", {{"nonsense": 1}}, None)
pathlib.Path({str(said)!r}).touch()
done()
"""
    async with scripted(python=lying(tmp_path, script)) as (supervisor, _):
        async with supervisor.stream("hello", window=2) as stream:
            # Blocked until all of it lies in the pipe, so that one look finds the token and the end.
            deadline = time.monotonic() + 20
            while not said.exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)  # noqa: ASYNC251
            assert (await anext(stream)).text == "a"
            assert stream.end_reason is None, "its credit was sent before the worker was collected"
            with pytest.raises(ProtocolError, match="nonsense"), anyio.fail_after(20):
                await anext(stream)


@pytest.mark.produces(
    "request: queued × Lost → ended",
    "request: ended × Lost → ended",
    "end: unavailable",
    "end: cancelled",
)
async def test_a_request_that_is_cancelled_while_the_queue_is_being_refused_was_cancelled() -> None:
    told = Told()
    streams: list[Stream] = []

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, RequestReleased) and len(told.of(RequestReleased)) == 1:
            streams[1].cancel()

    async with Supervisor(
        engine="scripted", options={"faults": [{"at": "load", "kind": "load_refused"}]},
        restart=RestartPolicy(cooldown_s=600), on_event=on_event, wait_until_ready=False,
    ) as supervisor:  # fmt: skip
        streams += [supervisor.stream(prompt) for prompt in ("one", "two", "three")]
        async with streams[0], streams[1], streams[2]:
            await told.wait_for(BreakerOpened)
            reasons = [stream.end_reason for stream in streams]
            assert reasons == [EndReason.UNAVAILABLE, EndReason.CANCELLED, EndReason.UNAVAILABLE]
        assert len(told.of(RequestReleased)) == 3
