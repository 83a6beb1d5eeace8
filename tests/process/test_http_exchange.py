"""One request over HTTP: leaving is cancelling in every phase, one terminal, errors with a status of their own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette

from infervisor import Deadlines, Supervisor
from infervisor.supervisor import events
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.asgi_call import Call, ask, calling
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ENDLESS = {"pace_s": 0.002}
FORGED = "a\u2028b\u2029c\u0085 data: [DONE]\r\n\r\ndata: x\n\nevent: error\n: \x00 \ud7ff\U0001f999"


@asynccontextmanager
async def service(
    options: dict[str, Any] | None = None, http: HttpSettings | None = None, **settings: Any
) -> AsyncIterator[tuple[Starlette, Supervisor, Told]]:
    async with scripted(options, **settings) as (supervisor, told):
        yield create_app(supervisor, settings=http), supervisor, told


def last_report(app: Starlette) -> dict[str, Any]:
    entry = app.state.context.ledger.entries()[0].to_dict()
    assert entry["finished"]
    report: dict[str, Any] = entry["choices"][0]["report"]
    assert report["time_points_ns"]["released"] is not None
    return report


async def until_phase(app: Starlette, phase: str) -> None:
    with anyio.fail_after(20):
        while not any(entry.phase() == phase for entry in app.state.context.ledger.live()):  # noqa: ASYNC110
            await anyio.sleep(0.002)


def assert_failed(call: Call, code: str) -> None:
    """The stream ended with exactly one terminal, an error, and never looked like a success."""
    assert next(event for event in call.events if "error" in event)["error"]["code"] == code
    assert call.events[-1]["error"]["code"] == code
    assert "[DONE]" not in call.events
    reasons = [choice["finish_reason"] for event in call.events[:-1] for choice in event["choices"]]
    assert set(reasons) == {None}
    assert not call.messages[-1].get("more_body", False)


# --- success -----------------------------------------------------------------------------------------


async def test_a_whole_answer_carries_its_report_and_id() -> None:
    async with service({"text": "one two three"}) as (app, _, _told):
        call = await ask(app, CHAT, HI)
        assert call.status == 200
        assert call.json["choices"][0]["message"]["content"] == "one two three"
        assert call.json["choices"][0]["finish_reason"] == "stop"
        assert call.json["usage"]["completion_tokens"] == 3
        (report,) = call.json["x_infervisor"]
        assert report["end_reason"] == "stop"
        assert report["figures"]["release_s"] is not None
        assert call.headers["x-request-id"].removeprefix("req-") == call.json["id"].removeprefix("chatcmpl-")
        assert app.state.context.ledger.get(call.headers["x-request-id"]).is_finished


async def test_a_streamed_answer_ends_with_its_report_and_one_terminal() -> None:
    async with service({"text": "one two three"}) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True, "stream_options": {"include_usage": True}})
        assert call.said == "one two three"
        assert call.events[-1] == "[DONE]"
        assert call.events.count("[DONE]") == 1
        assert call.events[-2]["usage"]["completion_tokens"] == 3
        assert call.events[-2]["choices"] == []
        assert call.events[-3]["choices"][0]["finish_reason"] == "stop"
        assert call.events[-3]["x_infervisor"][0]["end_reason"] == "stop"
        assert call.events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_no_text_forges_an_event() -> None:
    async with service({"text": FORGED, "split": "characters"}) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True})
        assert call.said == FORGED
        assert call.text.isascii()
        # Clients part lines in several ways: each of them finds the same ones.
        assert call.text.splitlines() == call.text.split("\n")[:-1]
        assert all(line == "" or line.startswith("data: ") for line in call.text.split("\n"))


async def test_several_answers_come_side_by_side_and_each_has_its_end() -> None:
    async with service({"text": "one two"}, slots=3) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True, "n": 3})
        ends = [
            (choice["index"], choice["finish_reason"])
            for event in call.events[:-1]
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(ends) == [(0, "stop"), (1, "stop"), (2, "stop")]
        whole = await ask(app, CHAT, {**HI, "n": 3})
        assert [choice["message"]["content"] for choice in whole.json["choices"]] == ["one two"] * 3
        assert len(whole.json["x_infervisor"]) == 3


async def test_the_report_goes_where_the_client_wants_it() -> None:
    async with service({"text": "one"}) as (app, _, _told):
        call = await ask(app, CHAT, HI, {"X-Infervisor-Report": "header"})
        assert "x_infervisor" not in call.json
        assert json.loads(call.headers["x-infervisor-report"])[0]["end_reason"] == "stop"
        call = await ask(app, CHAT, {**HI, "stream": True}, {"X-Infervisor-Report": "off"})
        assert "x_infervisor" not in call.text
        call = await ask(app, CHAT, HI, {"X-Infervisor-Report": "somewhere"})
        assert call.status == 400
        assert call.json["error"]["param"] == "header.x-infervisor-report"


# --- leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_who_leaves_while_it_is_computed_frees_the_worker(phase: str, stream: bool) -> None:
    options = {"prefill_s": 30.0} if phase == "prefill" else ENDLESS
    async with service(options) as (app, supervisor, _told):
        async with calling(app, CHAT, {**HI, "stream": stream}) as call:
            await until_phase(app, phase)
            call.leave()
            await call.over()
        report = last_report(app)
        assert report["end_reason"] == "client_disconnected"
        assert report["stage"] == "in_band"
        assert supervisor.status().in_flight == 0
        assert not any(message.get("status", 200) != 200 for message in call.messages)


async def test_who_leaves_the_queue_never_reaches_the_worker() -> None:
    async with service(ENDLESS, slots=1) as (app, supervisor, told):
        async with calling(app, CHAT, {**HI, "stream": True}) as first:
            await first.until("w3")
            async with calling(app, CHAT, HI) as second:
                await until_phase(app, "queued")
                second.leave()
                await second.over()
            report = last_report(app)
            assert report["end_reason"] == "client_disconnected"
            assert report["time_points_ns"]["submitted"] is None
            assert len(told.of(events.RequestStarted)) == 1
            assert supervisor.status().queue_depth == 0


async def test_who_leaves_with_several_answers_leaves_all_of_them() -> None:
    async with service(ENDLESS, slots=2) as (app, supervisor, _told):
        async with calling(app, CHAT, {**HI, "stream": True, "n": 2}) as call:
            await call.until("w3")
            call.leave()
            await call.over()
        entry = app.state.context.ledger.entries()[0].to_dict()
        assert [c["report"]["end_reason"] for c in entry["choices"]] == ["client_disconnected"] * 2
        assert supervisor.status().in_flight == 0


async def test_a_client_that_does_not_read_pauses_the_worker_and_loses_nothing() -> None:
    async with service(window=8) as (app, _, _told):
        async with calling(app, CHAT, {**HI, "stream": True, "max_tokens": 3000}) as call:
            await call.until("w3")
            call.stop_reading()
            await until_phase(app, "paused")
            seen = app.state.context.ledger.live()[0].reports()[0].timeline.tokens
            await anyio.sleep(0.2)
            assert app.state.context.ledger.live()[0].reports()[0].timeline.tokens <= seen + 8
            call.go_on_reading()
            await call.over()
        assert call.said.split() == [f"w{number}" for number in range(3000)]
        assert call.events[-1] == "[DONE]"


async def test_who_never_reads_is_cut_off_after_the_consumer_deadline() -> None:
    async with service(window=8) as (app, supervisor, _told):
        aborted = anyio.Event()
        headers = {"X-Infervisor-Consumer-Timeout": "0.2"}
        async with calling(app, CHAT, {**HI, "stream": True}, headers, abort=aborted.set) as call:
            await call.until("w3")
            call.stop_reading()
            await until_phase(app, "released")
            assert supervisor.status().in_flight == 0
        assert last_report(app)["end_reason"] == "consumer_timeout"


# --- failing -----------------------------------------------------------------------------------------


async def test_what_fails_before_the_first_chunk_has_a_status() -> None:
    async with service({"prefill_s": 30.0}) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True}, {"X-Infervisor-First-Token-Timeout": "0.1"})
        assert call.status == 504
        assert call.json["error"]["code"] == "first_token_timeout"
        assert call.json["x_infervisor"][0]["end_reason"] == "first_token_timeout"
        assert call.headers["x-should-retry"] == "true"


async def test_a_stream_that_breaks_has_one_terminal_that_is_an_error() -> None:
    async with service({"pace_s": 0.01}) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True}, {"X-Infervisor-Total-Timeout": "0.3"})
        assert call.status == 200
        assert_failed(call, "total_timeout")


async def test_a_crash_is_survived_unless_the_client_would_rather_fail(tmp_path: Path) -> None:
    words = "one two three four five six seven"

    def crash(name: str) -> dict[str, Any]:
        fault = {"at": "decode", "kind": "exit", "after": 3, "once_file": str(tmp_path / name)}
        return {"faults": [fault], "text": words}

    async with service(crash("fails")) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True}, {"X-Infervisor-On-Crash": "fail"})
        assert_failed(call, "worker_crashed")
    async with service(crash("resumes"), on_crash="resume") as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True})
        assert call.said == words
        assert call.events[-1] == "[DONE]"
        assert len(last_report(app)["resumes"]) == 1


async def test_a_cancel_by_id_ends_the_stream_as_cancelled() -> None:
    async with service(ENDLESS) as (app, _, _told):
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("w3")
            (entry,) = app.state.context.ledger.live()
            assert app.state.context.ledger.cancel(entry.id)
            await call.over()
            assert_failed(call, "cancelled")
        assert not app.state.context.ledger.cancel(entry.id)
        assert last_report(app)["end_reason"] == "cancelled"


async def test_closing_the_supervisor_gives_open_streams_their_terminal() -> None:
    async with service(ENDLESS) as (app, supervisor, _told):
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("w3")
            await supervisor.stop()
            await call.over()
            assert_failed(call, "shutting_down")


async def test_too_many_waiting_are_told_when_to_try_again() -> None:
    async with service(ENDLESS, slots=1, max_queue=0) as (app, _, _told):
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("w1")
            second = await ask(app, CHAT, HI)
            assert second.status == 429
            assert second.json["error"]["code"] == "overloaded"
            assert int(second.headers["retry-after"]) >= 1


async def test_a_service_that_drains_takes_nothing_new_and_finishes_what_it_has() -> None:
    async with service({"text": "one two three", "pace_s": 0.05}) as (app, _, _told):
        ledger = app.state.context.ledger
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("one")
            ledger.begin_drain()
            refused = await ask(app, CHAT, HI)
            assert refused.status == 503
            assert refused.json["error"]["code"] == "shutting_down"
            with anyio.fail_after(20):
                await ledger.wait_idle()
            await call.over()
            assert call.events[-1] == "[DONE]"


async def test_silence_is_broken_by_comments_once_the_status_is_told() -> None:
    http = HttpSettings(header_after_s=0.05, heartbeat_s=0.05)
    async with service({"prefill_s": 0.6, "text": "one"}, http) as (app, _, _told):
        call = await ask(app, CHAT, {**HI, "stream": True})
        assert call.text.count(": prefill\n\n") >= 2
        assert call.said == "one"
        assert call.events[-1] == "[DONE]"


async def test_headers_win_over_the_deadlines_of_the_supervisor() -> None:
    deadlines = replace(Deadlines(), total_s=0.2)
    async with service({"pace_s": 0.01}, deadlines=deadlines) as (app, _, _told):
        assert (await ask(app, CHAT, HI)).json["error"]["code"] == "total_timeout"
        call = await ask(app, CHAT, {**HI, "max_tokens": 40}, {"X-Infervisor-Total-Timeout": "none"})
        assert call.status == 200
        for wrong in ("-1", "0", "nan", "x", "inf", "1e99"):
            call = await ask(app, CHAT, HI, {"X-Infervisor-Stall-Timeout": wrong})
            assert call.status == 400, wrong
