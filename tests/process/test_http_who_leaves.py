"""Clients that leave, with real sockets and real workers: in every phase, in every way, from every endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from infervisor import Supervisor
from infervisor.supervisor import events
from infervisor.supervisor.http_api import create_app
from tests.helpers.certificates import both_contexts
from tests.helpers.encoder_model import build_encoder
from tests.helpers.raw_http import Client, Served, served
from tests.helpers.real_service import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    WAYS,
    asking,
    close,
    entry_when,
    get,
    reset,
    service,
)
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio

LEAVER = "leaver"
LONG = {"messages": [{"role": "user", "content": "word " * 60_000}]}
"""A minute to read."""
ENDLESS = {"prefill_tokens_per_s": 1000, "slice_s": 0.02, "pace_s": 0.002}


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


async def send(client: Client, path: str = CHAT, body: dict[str, Any] | None = None, **more: Any) -> None:
    await client.send(asking(path, body, name=LEAVER, **more))


async def in_phase(server: Served, phase: str) -> dict[str, Any]:
    return await entry_when(server, LEAVER, lambda entry: bool(entry["phase"] == phase))


async def reports_of_leaver(server: Served) -> list[dict[str, Any]]:
    """Wait until the leaver's request is over; every answer of it has ended because of the leaving."""
    entry = await entry_when(server, LEAVER, lambda entry: bool(entry["finished"]))
    reports = [choice["report"] for choice in entry["choices"]]
    assert {report["end_reason"] for report in reports} == {"client_disconnected"}
    assert all(report["time_points_ns"]["released"] is not None for report in reports)
    return reports


async def is_served(server: Served) -> None:
    """The next one gets its answer."""
    reply = await server.exchange(asking(max_tokens=3))
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "w0 w1 w2 "


async def nobody(server: Served, *, but: int = 0) -> None:
    await until(lambda: server.server.open_connections == but)


# --- while a worker is there ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("phase", "stream"),
    [
        ("prefill", True),
        ("prefill", False),
        ("decode", True),
        ("decode", False),
        # A whole answer is taken by the service, which never stops.
        ("paused", True),
    ],
)
async def test_who_leaves_frees_the_worker_in_every_phase(phase: str, stream: bool, way: str) -> None:
    async with service(ENDLESS) as (server, supervisor, told):
        async with server.connect() as client:
            if phase == "paused":
                client.writer.transport.pause_reading()
            await send(client, body=LONG if phase == "prefill" else None, stream=stream)
            await in_phase(server, phase)
            await WAYS[way](client)
            (report,) = await reports_of_leaver(server)
            assert report["stage"] == "in_band"
            assert supervisor.status().in_flight == 0
            await is_served(server)
        await nobody(server)
        assert told.of(events.WorkerExited) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_who_leaves_the_queue_never_reaches_the_worker(stream: bool, way: str) -> None:
    async with service(ENDLESS) as (server, supervisor, told), server.connect() as other:
        await other.send(asking(stream=True))
        await other.until(b'"w3 "')
        async with server.connect() as client:
            await send(client, stream=stream)
            await in_phase(server, "queued")
            await WAYS[way](client)
            (report,) = await reports_of_leaver(server)
        assert report["time_points_ns"]["submitted"] is None
        assert report["usage"]["computed_tokens"] == 0
        assert len(told.of(events.RequestStarted)) == 1
        assert supervisor.status().queue_depth == 0
        # The one before it has noticed nothing.
        for number in range(100, 103):
            await other.until(b'"w%d "' % number)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_every_endpoint_sees_who_leaves(path: str, stream: bool) -> None:
    async with service(ENDLESS) as (server, supervisor, _):
        async with server.connect() as client:
            await send(client, path, stream=stream)
            await in_phase(server, "decode")
        (report,) = await reports_of_leaver(server)
        assert report["stage"] == "in_band"
        assert supervisor.status().in_flight == 0
        await is_served(server)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("path", "body", "waiting"),
    [(CHAT, {**BODIES[CHAT], "n": 3}, 0), (COMPLETIONS, {"prompt": ["1", "2", "3", "4"]}, 1)],
    ids=["n", "prompts"],
)
async def test_who_leaves_several_answers_leaves_all_of_them(
    path: str, body: dict[str, Any], waiting: int, stream: bool
) -> None:
    async with service(ENDLESS, slots=3) as (server, supervisor, told):
        async with server.connect() as client:
            await send(client, path, body, stream=stream)
            # A chat asks for no more answers than there are slots; of several prompts the rest waits.
            phases = ["decode"] * 3 + ["queued"] * waiting
            await entry_when(
                server, LEAVER, lambda entry: sorted(each["phase"] for each in entry["choices"]) == phases
            )
        reports = await reports_of_leaver(server)
        never = [report["time_points_ns"]["submitted"] is None for report in reports]
        assert never == [False] * 3 + [True] * waiting
        assert supervisor.status().in_flight == supervisor.status().queue_depth == 0
        assert len(told.of(events.RequestStarted)) == 3
        await is_served(server)


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize(("phase", "body"), [("prefill", LONG), ("decode", None)], ids=["prefill", "decode"])
async def test_who_leaves_behind_tls_is_seen_as_well(
    phase: str, body: dict[str, Any] | None, way: str, tmp_path: Path
) -> None:
    tls = await asyncio.to_thread(both_contexts, tmp_path)
    async with service(ENDLESS, server={"tls": tls}) as (server, supervisor, _):
        async with server.connect() as client:
            await send(client, body=body, stream=True)
            await in_phase(server, phase)
            await WAYS[way](client)
            (report,) = await reports_of_leaver(server)
        assert report["stage"] == "in_band"
        assert supervisor.status().in_flight == 0
        await is_served(server)


async def test_who_leaves_through_a_unix_socket_is_seen_as_well(tmp_path: Path) -> None:
    async with service(ENDLESS, server={"path": tmp_path / "socket"}) as (server, supervisor, _):
        async with server.connect() as client:
            await send(client, stream=True)
            await in_phase(server, "decode")
        await reports_of_leaver(server)
        assert supervisor.status().in_flight == 0


async def test_the_second_request_of_a_connection_is_left_like_the_first() -> None:
    async with service(ENDLESS) as (server, supervisor, _):
        async with server.connect() as client:
            await client.send(asking(max_tokens=2).replace(b"Connection: close\r\n", b""))
            await client.until(b'"w0 w1 "')
            await send(client, stream=True)
            await in_phase(server, "decode")
        await reports_of_leaver(server)
        assert supervisor.status().in_flight == 0


async def test_who_has_the_whole_answer_has_not_left() -> None:
    async with service({"text": "one two"}) as (server, _, _told):
        for stream in (True, False):
            reply = await server.exchange(asking(stream=stream))
            entry = await get(server, f"/api/requests/{reply.headers['x-request-id']}")
            assert entry["finished"]
            assert entry["choices"][0]["report"]["end_reason"] == "stop"
            assert entry["choices"][0]["report"]["stage"] is None


async def test_who_leaves_at_once_leaves_nothing() -> None:
    async with service(ENDLESS, slots=2) as (server, supervisor, told):
        raw = asking(stream=True)
        for number in range(60):
            async with server.connect() as client:
                # Also in the middle of the head, and of the body.
                await client.send(raw[: (20, len(raw) - 10, len(raw))[number % 3]])
                await (close, reset)[number % 2](client)
        await nobody(server)
        await until(lambda: supervisor.status().in_flight == supervisor.status().queue_depth == 0)
        listed = (await get(server, "/api/requests"))["requests"]
        assert len(listed) <= 20, "what isn't whole asks for nothing"
        for entry in listed:
            assert entry["finished"]
            assert entry["choices"][0]["report"]["end_reason"] == "client_disconnected"
        await is_served(server)
        assert told.of(events.WorkerExited) == []


# --- while no worker is there --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"stream": True}),
        (CHAT, {"stream": False}),
        (COMPLETIONS, {"stream": True}),
        (RESPONSES, {"stream": False}),
        (EMBEDDINGS, {}),
    ],
)
async def test_who_leaves_while_the_model_loads_never_reaches_it(
    path: str, more: dict[str, Any], tmp_path: Path
) -> None:
    # The load never ends by itself, so that no request can be in time.
    loads = tmp_path / "loads"
    faults = [{"at": "load", "kind": "hang", "once_file": str(loads)}]
    async with service({"faults": faults}, wait_until_ready=False) as (server, supervisor, told):
        async with server.connect() as client:
            await send(client, path, **more)
            await in_phase(server, "queued")
        (report,) = await reports_of_leaver(server)
        assert report["time_points_ns"]["submitted"] is None
        assert supervisor.status().queue_depth == 0
        assert told.of(events.WorkerBecameReady) == []
        await until(loads.exists)
        os.kill(supervisor.status().workers[0].pid, signal.SIGKILL)
        await is_served(server)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("came", ["before", "afterwards"])
async def test_who_leaves_while_the_worker_is_dead_and_the_next_one_starts(
    came: str, stream: bool, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    options = {**ENDLESS, "faults": [{"at": "load", "kind": "hang", "armed_file": str(armed)}]}
    async with service(options, on_crash="resume") as (server, supervisor, told):
        async with server.connect() as client:
            if came == "before":
                await send(client, stream=stream)
                await in_phase(server, "decode")
            armed.touch()
            os.kill(supervisor.status().workers[0].pid, signal.SIGKILL)
            await told.wait_for(events.WorkerExited)
            # The next one hangs while it loads.
            await until(lambda: not armed.exists())
            if came == "afterwards":
                await send(client, stream=stream)
            await in_phase(server, "queued")
        (report,) = await reports_of_leaver(server)
        assert (report["time_points_ns"]["submitted"] is not None) == (came == "before")
        assert len(told.of(events.RequestStarted)) == (came == "before")
        assert supervisor.status().queue_depth == supervisor.status().in_flight == 0
        os.kill(supervisor.status().workers[0].pid, signal.SIGKILL)
        await is_served(server)


# --- vectors -------------------------------------------------------------------------------------------


async def test_who_leaves_while_vectors_are_made_frees_the_worker(tmp_path: Path) -> None:
    model = await asyncio.to_thread(build_encoder, tmp_path / "encoder.gguf")
    async with Supervisor(model, options={"threads": 1}) as supervisor:
        async with served(create_app(supervisor)) as server:
            async with server.connect() as client:
                await send(client, EMBEDDINGS, {"input": ["a b c d e f g " * 60] * 2000})
                await in_phase(server, "prefill")
                worker = psutil.Process(supervisor.status().workers[0].pid)
                # It stands still, so that it can't be done before the client has left.
                worker.suspend()
                assert (await in_phase(server, "prefill"))["choices"][0]["report"]["end_reason"] is None
            await entry_when(
                server,
                LEAVER,
                lambda entry: entry["choices"][0]["report"]["end_reason"] == "client_disconnected",
            )
            worker.resume()
            (report,) = await reports_of_leaver(server)
            assert report["stage"] == "in_band"
            assert supervisor.status().in_flight == 0
            reply = await server.exchange(asking(EMBEDDINGS, {"input": "a b"}))
            assert reply.status == 200
            assert len(json.loads(reply.body)["data"]) == 1
