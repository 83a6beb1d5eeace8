"""Health, metrics, and the lists of requests and workers, against what really happened."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from infervisor import Supervisor
from infervisor.supervisor import events
from infervisor.supervisor.http_api import create_app
from tests.helpers.asgi_call import Call, ask, calling
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def service(
    options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Starlette, Supervisor, Told]]:
    async with scripted(options, **settings) as (supervisor, told):
        yield create_app({"model": supervisor}), supervisor, told


async def get(app: Starlette, path: str) -> Call:
    return await ask(app, path, b"", {"Content-Length": "0"}, method="GET")


async def metrics(app: Starlette) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    call = await get(app, "/metrics")
    assert call.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(call.text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"model": "model", **labels}.items())


async def test_ready_says_what_loads_and_then_that_all_is_ready() -> None:
    async with service({"load_s": 0.5}, wait_until_ready=False) as (app, supervisor, told):
        await told.wait_for(events.LoadProgress)
        call = await get(app, "/health/ready")
        assert call.status == 503
        assert call.json["models"]["model"]["reason"] in call.json["reason"]
        assert "%" in call.json["reason"]
        assert "retry-after" in call.headers
        assert (await get(app, "/health/live")).status == 200
        await supervisor.wait_ready()
        call = await get(app, "/health/ready")
        assert (call.status, call.json["status"], call.json["reason"]) == (200, "ready", None)
        app.state.context.ledger.begin_drain()
        call = await get(app, "/health/ready")
        assert call.status == 503
        assert "shutting down" in call.json["reason"]


async def test_ready_says_why_the_breaker_is_open() -> None:
    async with service({"nonsense": 1}, wait_until_ready=False) as (app, _, told):
        await told.wait_for(events.BreakerOpened)
        call = await get(app, "/health/ready")
        assert call.status == 503
        assert call.json["models"]["model"]["state"] == "open"
        assert "nonsense" in call.json["reason"]
        refused = await ask(app, CHAT, HI)
        assert refused.status == 503
        assert refused.json["error"]["code"] == "unavailable"
        # It can't heal by itself: no client should try again and again.
        assert refused.headers["x-should-retry"] == "false"


async def test_nobody_is_told_that_a_worker_loads_when_it_has_died_of_that() -> None:
    faults = [{"at": "load", "kind": "raise"}]
    async with service({"load_s": 0.05, "faults": faults}, wait_until_ready=False) as (app, _, told):
        await told.wait_for(events.BreakerOpened)
        assert told.of(events.LoadProgress)
        reason = (await get(app, "/health/ready")).json["reason"]
        assert "the scripted fault" in reason
        assert "%" not in reason
        (model,) = (await get(app, "/api/worker")).json["models"]
        assert (model["state"], model["loading"], model["workers"]) == ("open", None, [])
        assert "the scripted fault" in model["problem"]
        seen = await metrics(app)
        assert seen[key("infervisor_breaker_open")] == 1
        assert seen[key("infervisor_ready")] == 0
        failed = len(told.of(events.WorkerExited))
        assert seen[key("infervisor_worker_exits_total", cause="load_failed")] == failed >= 1


async def test_metrics_count_what_the_reports_tell() -> None:
    async with service({"pace_s": 0.001}, slots=1) as (app, supervisor, told):
        await ask(app, CHAT, {**HI, "max_tokens": 7})
        await supervisor.generate("one two three", max_tokens=5)
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("w5")
            call.leave()
            await call.over()
        seen = await metrics(app)
        reports = [event.report for event in told.of(events.RequestReleased)]
        assert len(reports) == 3
        assert seen[key("infervisor_requests_total", end_reason="length")] == 2
        assert seen[key("infervisor_requests_total", end_reason="client_disconnected")] == 1
        assert seen[key("infervisor_tokens_total", kind="prompt")] == sum(
            r.usage.prompt_tokens for r in reports
        )
        completion = sum(max(r.usage.completion_tokens, r.timeline.tokens) for r in reports)
        assert seen[key("infervisor_tokens_total", kind="completion")] == completion
        assert seen[key("infervisor_time_to_first_token_seconds_count")] == 3
        ttft = sum(r.timeline.ttft_s or 0 for r in reports)
        assert seen[key("infervisor_time_to_first_token_seconds_sum")] == pytest.approx(ttft)
        assert seen[key("infervisor_request_release_seconds_count", stage="in_band")] == 1
        assert seen[key("infervisor_ready")] == 1
        assert seen[key("infervisor_requests_in_flight")] == 0
        assert seen[("infervisor_http_requests", frozenset())] == 0


async def test_sums_are_those_of_the_reports_after_a_kill_a_leave_and_a_pause() -> None:
    async with service({"pace_s": 0.002}, slots=1, on_crash="resume") as (app, supervisor, told):
        async with calling(app, CHAT, {**HI, "stream": True}) as call:
            await call.until("w5")
            pid = supervisor.status().worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await told.wait_for(events.RequestResumed)
            call.leave()
            await call.over()
        async with supervisor.stream("one two", max_tokens=12, window=2) as stream:
            await stream.__anext__()
            with anyio.fail_after(20):
                while stream.phase != "paused":  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            await stream.text()
        await told.wait_for(events.RequestReleased, count=2)
        seen = await metrics(app)
        reports = [event.report for event in told.of(events.RequestReleased)]
        left, paused = reports
        assert (left.end_reason, paused.end_reason) == ("client_disconnected", "length")
        assert paused.timeline.paused_ns > 0
        assert seen[key("infervisor_paused_seconds_total")] == pytest.approx(
            sum(report.timeline.paused_ns for report in reports) / 1e9
        )
        assert seen[key("infervisor_resumes_total")] == len(left.resumes) == 1
        assert seen[key("infervisor_worker_exits_total", cause="crashed")] == 1
        assert seen[key("infervisor_tokens_total", kind="prompt_cached")] == sum(
            report.usage.cached_tokens for report in reports
        )
        for name, figure in (
            ("request_queue", "queue_s"),
            ("time_to_first_token", "ttft_s"),
            ("time_per_output_token", "tpot_s"),
        ):
            figures = [getattr(report.timeline, figure) for report in reports]
            assert seen[key(f"infervisor_{name}_seconds_sum")] == pytest.approx(sum(figures)), name
            assert seen[key(f"infervisor_{name}_seconds_count")] == 2, name
        for report in reports:
            total = seen[key("infervisor_request_duration_seconds_sum", end_reason=str(report.end_reason))]
            assert total == pytest.approx(report.timeline.total_s)
            release = seen[key("infervisor_request_release_seconds_sum", stage=str(report.stage or "none"))]
            assert release == pytest.approx(report.timeline.release_s)


async def test_open_metrics_for_those_who_ask_and_the_same_numbers() -> None:
    async with service() as (app, supervisor, _told):
        await ask(app, CHAT, {**HI, "max_tokens": 7})
        with anyio.fail_after(20):
            # From then on there are figures of the worker, in both.
            while supervisor.status().sample is None:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        accept = {"Content-Length": "0", "Accept": "application/openmetrics-text; version=1.0.0"}
        call = await ask(app, "/metrics", b"", accept, method="GET")
        assert call.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert call.text.endswith("# EOF\n")
        families = list(open_metrics_families(call.text))
        for family in families:
            assert family.name.startswith("infervisor_")
            assert family.documentation.endswith("."), family.name
            assert family.type in ("counter", "gauge", "histogram"), family.name
        told = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        assert told[key("infervisor_requests_total", end_reason="length")] == 1
        plain = await metrics(app)
        assert {name for name, _ in plain} == {name for name, _ in told}


async def test_metrics_tell_of_a_killed_worker() -> None:
    async with service() as (app, supervisor, told):
        pid = supervisor.status().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await told.wait_for(events.WorkerBecameReady, count=2)
        seen = await metrics(app)
        exits = [value for (name, _), value in seen.items() if name == "infervisor_worker_exits_total"]
        assert exits == [1]
        restarts = [value for (name, _), value in seen.items() if name == "infervisor_restarts_total"]
        assert sum(restarts) == 1
        assert seen[key("infervisor_worker_startup_seconds_count")] >= 1


async def test_counters_go_with_their_application() -> None:
    async with scripted() as (supervisor, _):
        app = create_app(supervisor)
        assert len(supervisor._listeners) == 2
        del app
        gc.collect()
        await supervisor.generate("one", max_tokens=1)
        assert len(supervisor._listeners) == 1


async def test_requests_are_listed_while_they_run_and_afterwards() -> None:
    async with service({"pace_s": 0.001}) as (app, _, _told):
        async with calling(app, CHAT, {**HI, "stream": True}, {"X-Client-Request-Id": "mine-1"}) as call:
            await call.until("w5")
            listed = (await get(app, "/api/requests")).json
            (entry,) = listed["requests"]
            assert entry["id"] == call.headers["x-request-id"]
            assert (entry["phase"], entry["finished"], entry["status"]) == ("decode", False, 200)
            assert (entry["client_request_id"], entry["stream"]) == ("mine-1", True)
            points = entry["choices"][0]["report"]["time_points_ns"]
            assert points["queued"] < points["first_token"] <= listed["now_ns"]
            cancelled = await ask(app, f"/api/requests/{entry['id']}/cancel", {})
            assert (cancelled.status, cancelled.json) == (202, {"id": entry["id"], "cancelled": True})
            await call.over()
        one = (await get(app, f"/api/requests/{entry['id']}")).json
        assert (one["finished"], one["phase"]) == (True, "released")
        assert one["choices"][0]["report"]["end_reason"] == "cancelled"
        again = await ask(app, f"/api/requests/{entry['id']}/cancel", {})
        assert again.json["cancelled"] is False
        assert (await get(app, "/api/requests?limit=1")).json["requests"] == [one]
        for wrong in ("0", "-1", "x", "1.5", "9999999", ""):
            assert (await get(app, f"/api/requests?limit={wrong}")).status == 400, wrong
        missing = await get(app, "/api/requests/req-nothing")
        assert missing.json["error"]["code"] == "request_not_found"


async def test_the_worker_is_told_restarted_and_recycled() -> None:
    async with service({"text": "one two"}) as (app, supervisor, told):
        await ask(app, CHAT, HI)
        (model,) = (await get(app, "/api/worker")).json["models"]
        assert model["model"] == "model"
        assert model["tokens_total"] == 2
        (worker,) = model["workers"]
        assert (worker["role"], worker["phase"], worker["submits"]) == ("serving", "ready", 1)
        assert worker["pid"] == supervisor.status().worker_pid
        assert (await ask(app, "/api/worker/restart", {})).json == {"restarting": ["model"]}
        await told.wait_for(events.WorkerBecameReady, count=2)
        assert (await ask(app, "/api/worker/recycle", {"model": "model", "grace_s": 1})).status == 202
        await told.wait_for(events.WorkerBecameReady, count=3)
        with anyio.fail_after(20):
            while len(supervisor.status().workers) != 1:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        for path, body in (
            ("restart", {"model": "x"}),
            ("recycle", {"grace_s": -1}),
            ("recycle", {"grace": 1}),
        ):
            refused = await ask(app, f"/api/worker/{path}", body)
            assert refused.status in (400, 404), body
        assert supervisor.status().worker_pid != worker["pid"]
    for path in ("restart", "recycle"):
        refused = await ask(app, f"/api/worker/{path}", {})
        assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down"), path
