"""Clients of a real server that leave, stop reading, and come in crowds: nothing is left of them, none is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from starlette.applications import Starlette

from infervisor import Deadlines, EndReason, Supervisor
from infervisor.supervisor.events import RequestReleased
from infervisor.supervisor.http_api import create_app
from tests.helpers.encoder_model import build_encoder
from tests.helpers.raw_http import Served, served
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
STORM_S = float(os.environ.get("INFERVISOR_STORM_S", "6"))
"""How long the crowd comes and goes; a minute shows more."""


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


@asynccontextmanager
async def service(
    options: dict[str, Any] | None = None, path: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[Starlette, Served, Told]]:
    async with scripted(options, **settings) as (supervisor, told):
        app = create_app({"m": supervisor})
        async with served(app, path=path) as server:
            yield app, server, told


def body(**more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def send(
    server: Served, raw: bytes, path: str = CHAT
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if server.path is not None:
        reader, writer = await asyncio.open_unix_connection(str(server.path), limit=1 << 14)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 14)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await writer.drain()
    return reader, writer


async def until_phase(app: Starlette, phase: str) -> None:
    with anyio.fail_after(20):
        while not any(entry.phase() == phase for entry in app.state.context.ledger.live()):  # noqa: ASYNC110
            await anyio.sleep(0.002)


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    plain: socket.socket = writer.get_extra_info("socket")
    if how == "reset":
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        writer.write_eof()
    else:
        writer.transport.abort()


# --- leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "paused"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_is_seen_in_every_phase(phase: str, how: str, stream: bool) -> None:
    if phase == "paused" and not stream:
        pytest.skip("a whole answer is read by the service itself: it never pauses")
    options = {"prefill_s": 60.0} if phase == "prefill" else {"pace_s": 0.0 if phase == "paused" else 0.005}
    async with service(options, slots=1, window=8) as (app, server, told):
        first = None
        if phase == "queued":
            first = (await send(server, body(stream=True)))[1]
            await until_phase(app, "decode")
        _, writer = await send(server, body(stream=stream))
        await until_phase(app, phase)
        leave(writer, how)
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
        if phase == "queued":
            assert event.report.timeline.submitted_ns is None
        writer.close()
        if first is not None:
            leave(first, "close")
            first.close()
            await told.wait_for(RequestReleased, count=2)
        # The next one is served at once.
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
            if phase != "prefill":
                answer = await client.post(CHAT, content=body(max_tokens=2), headers=JSON)
                assert answer.json()["choices"][0]["finish_reason"] == "length"
        with anyio.fail_after(20):
            await app.state.context.ledger.wait_idle()


async def test_who_leaves_while_a_worker_loads_or_is_gone_is_forgotten() -> None:
    async with service({"load_s": 0.6}, wait_until_ready=False) as (app, server, told):
        _, writer = await send(server, body())
        await until_phase(app, "queued")
        leave(writer, "close")
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
        assert event.report.timeline.submitted_ns is None
        writer.close()


async def test_who_leaves_texts_that_are_being_embedded_frees_the_worker(tmp_path: Path) -> None:
    told = Told()
    model = build_encoder(tmp_path / "bert.gguf")
    async with Supervisor(model, on_event=told) as supervisor:
        async with served(create_app({"m": supervisor})) as server:
            texts = ["abc xyz " * 100] * 2000
            raw = json.dumps({"input": texts}).encode()
            _, writer = await send(server, raw, "/v1/embeddings")
            with anyio.fail_after(20):
                while not supervisor.status().in_flight:  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            leave(writer, "close")
            event = await told.wait_for(RequestReleased)
            assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
            writer.close()
            assert len((await supervisor.embed("a")).vectors) == 1


# --- reading slowly ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_reader_that_stops_pauses_the_worker_and_loses_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "socket" if kind == "unix" else None
    async with service({"step_tokens": 1}, path=path, window=16) as (app, server, told):
        reader, writer = await send(server, body(stream=True, max_tokens=20_000))
        for _ in range(20):
            await reader.readline()
        (entry,) = app.state.context.ledger.live()
        worker = psutil.Process(entry.reports()[0].worker_pid)
        ahead = -1
        with anyio.fail_after(20):
            # It pauses now and then while the buffers fill, and for good when they are full.
            while ahead != entry.tokens():
                ahead = entry.tokens()
                await anyio.sleep(0.3)
        assert entry.phase() == "paused"
        before = sum(worker.cpu_times()[:2])
        await anyio.sleep(1.0)
        # Buffers of this size hold so many events; without their limits it would be tens of thousands.
        assert entry.tokens() <= ahead + 16
        assert ahead < 4000
        assert sum(worker.cpu_times()[:2]) - before < 0.3
        words: list[str] = []
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if b'"content":"w' in line:
                words.append(line.split(b'"content":"')[1].split(b'"')[0].decode().strip())
        numbers = [int(word[1:]) for text in words for word in text.split()]
        assert numbers == list(range(numbers[0], 20_000))
        assert numbers[0] < 20
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.LENGTH
        assert event.report.timeline.paused_ns > 0.9e9
        writer.close()


async def test_a_reader_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    deadlines = Deadlines(consumer_s=0.5)
    async with service(window=16, deadlines=deadlines) as (app, server, told):
        _, writer = await send(server, body(stream=True))
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CONSUMER_TIMEOUT
        writer.transport.abort()
        writer.close()
        with anyio.fail_after(20):
            await app.state.context.ledger.wait_idle()


# --- crowds ------------------------------------------------------------------------------------------


async def _client(server: Served, chance: random.Random, until_s: float, seen: Counter[str]) -> None:
    """Ask again and again, in several ways, and leave in several ways."""
    while anyio.current_time() < until_s:
        writer = None
        try:
            kind = chance.choice(
                ("whole", "whole", "stream", "leave", "leave", "leave_at_once", "half_a_body")
            )
            is_stream = kind != "whole" or chance.random() < 0.3
            raw = body(stream=is_stream, max_tokens=chance.randrange(1, 40))
            if kind == "half_a_body":
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                writer.write(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw[:20])
            else:
                seen["asked"] += 1
                reader, writer = await send(server, raw)
            if kind in ("whole", "stream"):
                seen[await _status(reader)] += 1
            elif kind == "leave":
                await asyncio.sleep(chance.random() * 0.2)
        except ConnectionError:
            seen["connection"] += 1
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(chance.random() * 0.1)


async def _status(reader: asyncio.StreamReader) -> str:
    """Read a whole answer, and return its status."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if length:
            await reader.readexactly(int(length[1]))
        else:
            while int(size := await reader.readline(), 16):
                await reader.readexactly(int(size, 16) + 2)
    return head[9:12].decode()


async def test_a_crowd_that_comes_and_goes_is_accounted_for() -> None:
    finished: list[Any] = []
    slowest_s = 0.0
    async with scripted({"pace_s": 0.002, "prefill_s": 0.005}, slots=8, max_queue=64) as (supervisor, told):
        app = create_app({"m": supervisor}, on_finished=lambda entry: finished.append(entry.to_dict()))
        async with served(app) as server:
            pid = supervisor.status().worker_pid
            me = psutil.Process()
            seen: Counter[str] = Counter()
            until_s = anyio.current_time() + STORM_S
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
                await client.get("/health/live")
                descriptors, tasks = me.num_fds(), len(asyncio.all_tasks())
                async with anyio.create_task_group() as crowd:
                    for number in range(200):
                        crowd.start_soon(_client, server, random.Random(number), until_s, seen)
                    while anyio.current_time() < until_s:
                        for path in ("/health/live", "/health/ready"):
                            began = anyio.current_time()
                            assert (await client.get(path)).status_code == 200
                            slowest_s = max(slowest_s, anyio.current_time() - began)
                        await anyio.sleep(0.05)
                with anyio.fail_after(30):
                    await app.state.context.ledger.wait_idle()
                    while supervisor.status().in_flight or supervisor.status().queue_depth:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    assert set(seen) <= {"asked", "200", "429", "connection"}, seen
                    # Connections that were just closed are on their way out.
                    while me.num_fds() > descriptors + 2 or len(asyncio.all_tasks()) > tasks + 2:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
            assert slowest_s < 1
            assert supervisor.status().worker_pid == pid
            assert supervisor.status().restarts == {}
    # Each request that the service took has one end, an allowed one, and is released.
    assert len({entry["id"] for entry in finished}) == len(finished)
    assert 0 < len(finished) <= seen["asked"]
    reasons = Counter(choice["report"]["end_reason"] for entry in finished for choice in entry["choices"])
    assert set(reasons) <= {"length", "client_disconnected", "overloaded"}, reasons
    assert seen["200"] <= reasons["length"]
    assert reasons["client_disconnected"] > 0
    released = {event.report.request_id for event in told.of(RequestReleased)}
    told_reports = [choice["report"] for entry in finished for choice in entry["choices"]]
    assert all(report["time_points_ns"]["released"] is not None for report in told_reports)
    assert {report["request_id"] for report in told_reports} == released
