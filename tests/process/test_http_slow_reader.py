"""Readers that stop, read slowly or never: the worker waits for them, nothing piles up, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from infervisor import Supervisor
from infervisor.supervisor import events
from infervisor.supervisor.http_api import exchange
from tests.helpers.certificates import both_contexts
from tests.helpers.raw_http import WITHIN_S, Client, Served
from tests.helpers.real_service import CHAT, COMPLETIONS, asking, entry_of, entry_when, service
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio

READER = "reader"
WINDOW = 16
STOP_S = 2.0
TOKENS = 12_000
MOST_ON_THE_WAY = 4000
"""Events that the sockets of both ends hold, with much room: how large they are is the system's choice."""


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


async def server_options(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "tls":
        return {"tls": await asyncio.to_thread(both_contexts, folder)}
    return {"path": folder / "socket"} if kind == "unix" else {}


@asynccontextmanager
async def reading(server: Served) -> AsyncIterator[Client]:
    """Yield a connection that ends with the block also if nobody reads from it: TLS would wait for an answer."""
    async with server.connect() as client:
        try:
            yield client
        finally:
            client.writer.transport.abort()


async def tokens_at_the_service(server: Served) -> int:
    """Return how many tokens the reader's request has got from the worker."""
    entry = await entry_of(server, READER)
    assert entry is not None
    return sum(choice["report"]["tokens"] for choice in entry["choices"])


async def stalled(server: Served) -> int:
    """Return how many tokens have come when no more do: the same number in many looks."""
    before, same = -1, 0
    async with asyncio.timeout(WITHIN_S):
        while same < 20:
            await asyncio.sleep(0.01)
            now = await tokens_at_the_service(server)
            same = same + 1 if now == before > 0 else 0
            before = now
    return before


def cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def data_of(raw: bytes) -> list[Any]:
    """Return the data of all whole events; what frames them is no event."""
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def said(events_: list[Any], index: int = 0) -> str:
    choices = [one for event in events_ if event != "[DONE]" for one in event.get("choices", ())]
    return "".join(one["delta"].get("content") or "" for one in choices if one["index"] == index)


def stop_reading(client: Client) -> None:
    client.writer.transport.pause_reading()


def go_on_reading(client: Client) -> None:
    client.writer.transport.resume_reading()


def worker_of(supervisor: Supervisor) -> int:
    return supervisor.status().workers[0].pid


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
async def test_who_stops_reading_stops_the_worker_and_gets_every_token_later(
    kind: str, tmp_path: Path
) -> None:
    options = await server_options(kind, tmp_path)
    async with service(server=options, window=WINDOW) as (server, supervisor, told):
        async with reading(server) as client:
            await client.send(asking(name=READER, stream=True, max_tokens=TOKENS))
            head = await client.until(b'"w4 "')
            stop_reading(client)
            before = await stalled(server)
            assert before < MOST_ON_THE_WAY
            entry = await entry_of(server, READER)
            assert entry is not None
            assert entry["phase"] == "paused"
            spent_s, began = cpu_s(worker_of(supervisor)), time.monotonic()
            await asyncio.sleep(STOP_S)
            share = (cpu_s(worker_of(supervisor)) - spent_s) / (time.monotonic() - began)
            assert await tokens_at_the_service(server) == before, "somebody went on"
            # An engine that isn't held back says some thousand tokens in that time, with all of a core.
            assert share < 0.3
            go_on_reading(client)
            got = data_of(head + await client.rest())
        assert said(got) == "".join(f"w{number} " for number in range(TOKENS))
        assert got[-1] == "[DONE]"
        report = got[-2]["x_infervisor"][0]
        assert report["end_reason"] == "length"
        assert report["figures"]["paused_s"] >= STOP_S
        assert told.of(events.WorkerExited) == []


async def test_the_engine_computes_no_more_than_is_read_and_fits_on_the_way() -> None:
    async with service(window=WINDOW) as (server, supervisor, told):
        async with reading(server) as client:
            await client.send(asking(name=READER, stream=True))
            await client.until(b'"w4 "')
            stop_reading(client)
            at_the_service = await stalled(server)
        report = (await told.wait_for(events.RequestReleased)).report
        # What the engine itself counted, not what came through the pipe.
        assert at_the_service <= report.usage.computed_tokens <= at_the_service + WINDOW
        assert supervisor.status().in_flight == 0


async def test_who_reads_beside_a_stopped_reader_is_not_held_up() -> None:
    async with service(window=WINDOW, slots=2) as (server, _, _told), reading(server) as client:
        await client.send(asking(name=READER, stream=True))
        await client.until(b'"w4 "')
        stop_reading(client)
        before = await stalled(server)
        reply = await server.exchange(asking(stream=True, max_tokens=3000))
        assert said(data_of(reply.body)) == "".join(f"w{number} " for number in range(3000))
        assert await tokens_at_the_service(server) == before


async def test_of_several_answers_the_stopped_reader_loses_none() -> None:
    async with service(window=WINDOW, slots=3) as (server, _, _told), reading(server) as client:
        await client.send(asking(name=READER, stream=True, n=3, max_tokens=3000))
        head = await client.until(b'"w4 "')
        stop_reading(client)
        assert await stalled(server) < MOST_ON_THE_WAY
        go_on_reading(client)
        got = data_of(head + await client.rest())
        for index in range(3):
            assert said(got, index) == "".join(f"w{number} " for number in range(3000))
        assert got.count("[DONE]") == 1


async def test_a_whole_answer_is_computed_to_its_end_whoever_reads_it() -> None:
    async with service(window=WINDOW) as (server, supervisor, _), reading(server) as client:
        stop_reading(client)
        await client.send(asking(name=READER, max_tokens=5000))
        entry = await entry_when(server, READER, lambda entry: bool(entry["finished"]))
        assert entry["choices"][0]["report"]["end_reason"] == "length"
        assert supervisor.status().in_flight == 0
        go_on_reading(client)
        assert b'"finish_reason":"length"' in await client.rest()


@pytest.mark.parametrize(
    ("kind", "path", "choices"),
    [("tcp", CHAT, 1), ("tcp", CHAT, 2), ("tcp", COMPLETIONS, 1), ("unix", CHAT, 1), ("tls", CHAT, 1)],
)
async def test_who_never_reads_is_cut_off_and_the_worker_is_free(
    kind: str, path: str, choices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LAST_WORDS_S", 0.2)
    options = await server_options(kind, tmp_path)
    async with service(server=options, window=WINDOW, slots=2) as (server, supervisor, told):
        async with reading(server) as client:
            stop_reading(client)
            raw = asking(path, name=READER, stream=True, n=choices, max_tokens=1_000_000)
            await client.send(raw.replace(b"\r\n\r\n", b"\r\nX-Infervisor-Consumer-Timeout: 0.5\r\n\r\n", 1))
            await told.wait_for(events.RequestReleased, count=choices)
            assert supervisor.status().in_flight == 0
            # The connection doesn't stay for a client that takes nothing.
            await until(lambda: server.server.open_connections == 0)
            entry = await entry_when(server, READER, lambda entry: bool(entry["finished"]))
            reasons = {choice["report"]["end_reason"] for choice in entry["choices"]}
            # One that isn't read ends the whole; the other one can be stopped by that.
            assert "consumer_timeout" in reasons
            go_on_reading(client)
            assert b"[DONE]" not in await client.rest()
        assert told.of(events.WorkerExited) == []
        assert (await server.exchange(asking(max_tokens=2))).status == 200
