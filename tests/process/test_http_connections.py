"""Connections of the HTTP server, with real sockets: leaving, slow, greedy and half-dead clients."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.certificates import both_contexts
from tests.helpers.counting_app import App, event
from tests.helpers.raw_http import WITHIN_S, Reply, Served, request, served
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


@pytest.fixture
def app(anyio_backend: str) -> App:
    return App()


@pytest.fixture(params=["tcp", "unix", "tls"])
async def anywhere(request: pytest.FixtureRequest, app: App, tmp_path: Path) -> AsyncIterator[Served]:
    """A server for each kind of socket."""
    path = tmp_path / "s.sock" if request.param == "unix" else None
    tls = both_contexts(tmp_path) if request.param == "tls" else None
    async with served(app, path=path, tls=tls) as server:
        yield server


async def stalled(app: App) -> int:
    """Return how many events were sent when no more are: the same number in many turns of the loop."""
    before, same = -1, 0
    async with asyncio.timeout(WITHIN_S):
        while same < 20:
            await asyncio.sleep(0.01)
            same = same + 1 if app.events_sent == before else 0
            before = app.events_sent
    return before


def reader_that_waits(server: Served) -> socket.socket:
    """Return a connection that nobody reads from in the background."""
    if server.path is not None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(server.path))
        return sock
    plain = socket.create_connection(("127.0.0.1", server.port))
    return plain if server.tls is None else server.tls.wrap_socket(plain, server_hostname="localhost")


def read_bytes(sock: socket.socket, size: int) -> bytes:
    """Return at least so many bytes."""
    raw = bytearray()
    while len(raw) < size:
        data = sock.recv(1 << 16)
        assert data, "the connection ended"
        raw += data
    return bytes(raw)


async def nobody(server: Served) -> None:
    """Wait until the server has no connection left."""
    await until(lambda: not server.server.open_connections)


# --- leaving ---------------------------------------------------------------------------------------


async def test_a_client_that_leaves_while_it_waits_is_noticed(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/wait"))
        await app.until(lambda: app.calls == ["/wait"])
    await app.until(lambda: app.left == ["/wait"])


async def test_a_client_that_leaves_in_mid_stream_is_noticed(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/endless"))
        await client.until(event(0))
    await app.until(lambda: app.left == ["/endless"])


async def test_a_client_that_has_stopped_reading_is_noticed_when_it_leaves(app: App):
    async with served(app) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request("/endless"))
            await stalled(app)
        await app.until(lambda: app.left == ["/endless"])
        assert server.server.open_connections == 0


async def test_half_a_close_is_leaving_also_with_an_answer_unsent(app: App, tmp_path: Path):
    async with served(app) as tcp, served(app, path=tmp_path / "s.sock") as unix:
        for server in (tcp, unix):
            async with server.connect() as client:
                client.writer.transport.pause_reading()
                await client.send(request("/endless"))
                await stalled(app)
                client.writer.write_eof()
                await app.until(lambda: bool(app.left))
                assert app.left.pop() == "/endless"


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_noticed(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/body", b"x" * 100)[:-50])
        await app.until(lambda: app.calls == ["/body"])
    await app.until(lambda: app.left == ["/body"])


async def test_a_client_that_leaves_behind_pipelined_requests_is_noticed(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/wait", close=False) + request("/next", close=False) * 5)
        await app.until(lambda: app.calls == ["/wait"])
        await client.send(request("/next", close=False) * 5)
    await app.until(lambda: app.left == ["/wait"])
    assert app.calls == ["/wait"]


async def test_the_application_can_abort_a_connection(app: App):
    async with served(app) as server, server.connect() as client:
        await client.send(request("/wait", close=False))
        await app.until(lambda: app.calls == ["/wait"])
        app.state["abort_connection"]()
        assert await client.rest() == b""
        await app.until(lambda: app.left == ["/wait"])


# --- flow ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "at_most"), [("tcp", 2000), ("tls", 2000), ("unix", 300)])
async def test_a_stopped_reader_pushes_back_after_some_hundred_events_and_loses_none(
    kind: str, at_most: int, app: App, tmp_path: Path
):
    tls = both_contexts(tmp_path) if kind == "tls" else None
    path = tmp_path / "s.sock" if kind == "unix" else None
    async with served(app, path=path, tls=tls) as server:
        with await asyncio.to_thread(reader_that_waits, server) as sock:
            sock.sendall(request("/endless"))
            before = await stalled(app)
            assert 0 < before < at_most
            raw = await asyncio.to_thread(lambda: read_bytes(sock, 2 * before * len(event(0))))
            numbers = [int(number) for number in re.findall(rb"data: (\d{8}) ", raw)]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) > before
        await app.until(lambda: bool(app.left))


async def test_pipelined_requests_are_answered_in_order(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(b"".join(request(f"/{n}", close=False) for n in range(20)) + request("/last"))
        raw = await client.rest()
    assert raw.count(b"HTTP/1.1 200 OK") == 21
    assert app.calls == [f"/{n}" for n in range(20)] + ["/last"]


async def test_who_asks_more_and_reads_nothing_is_cut_off():
    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (8 << 20)})

    async with served(large, unread_s=0.3) as server, server.connect() as client:
        # The first answer fills all buffers, the second one can't even begin.
        await client.send(request("/", close=False) * 3)
        async with asyncio.timeout(20):
            while not server.server.open_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while server.server.open_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_more_than_is_allowed_before_the_answer_ends_the_connection(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/wait", close=False))
        await app.until(lambda: app.calls == ["/wait"])
        try:
            for _ in range(40):
                await client.send(b"x" * 10_000)
        except ConnectionError:
            pass
        assert await client.rest() == b""
        await app.until(lambda: app.left == ["/wait"])


async def test_bytes_after_the_last_request_are_no_fault(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/wait"))
        await app.until(lambda: app.calls == ["/wait"])
        await client.send(b"\r\n")
        app.release.set()
        assert Reply.of(await client.rest()).status == 200


async def test_a_finished_answer_that_nobody_reads_is_dropped_after_a_bound(app: App):
    async with served(app, unread_s=0.1, keep_alive_s=0.1) as server:
        for close in (True, False):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(request("/?5000000", close=close))
                await app.until(lambda: bool(app.calls))
                app.calls.clear()
                await nobody(server)


async def test_a_large_answer_that_is_read_slowly_is_not_cut(app: App):
    async with served(app, unread_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request("/?4000000"))
            raw = bytearray()
            pauses = 20  # longer together than the bound
            while data := await asyncio.to_thread(sock.recv, 1 << 14):
                raw += data
                if pauses and len(raw) % 3 == 0:
                    pauses -= 1
                    await asyncio.sleep(0.03)
            assert raw.count(b"k") >= 4_000_000


async def test_an_error_in_mid_answer_ends_the_connection_without_an_end_of_the_body(
    app: App, caplog: pytest.LogCaptureFixture
):
    async with served(app) as server:
        reply = await server.exchange(request("/broken"))
    assert reply.status == 200
    assert not reply.raw.endswith(b"0\r\n\r\n")
    assert "in mid-answer" in caplog.text


# --- slow and many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_a_head_that_does_not_come_is_answered_with_408(app: App, sent: bytes):
    async with served(app, header_timeout_s=0.1) as server:
        reply = await server.exchange(sent)
    assert (reply.status, reply.code) == (408, "request_timeout")
    assert reply.headers["connection"] == "close"
    assert app.calls == []


async def test_a_head_that_drips_does_not_win_time(app: App):
    async with served(app, header_timeout_s=0.2) as server, server.connect() as client:
        started = time.monotonic()
        answer = asyncio.create_task(client.rest())
        try:
            while not answer.done() and time.monotonic() - started < WITHIN_S:
                await client.send(b"G")
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        assert Reply.of(await answer).status in (400, 408)
        assert time.monotonic() - started < WITHIN_S


async def test_a_connection_that_says_nothing_is_closed(app: App):
    async with served(app, header_timeout_s=0.1) as server, server.connect() as client:
        assert await client.rest() == b""


async def test_an_idle_connection_is_closed(app: App):
    async with served(app, keep_alive_s=0.1) as server, server.connect() as client:
        await client.send(request("/", close=False))
        raw = await client.rest()
    assert Reply.of(raw).status == 200


async def test_the_next_request_on_a_connection_must_come_in_time_as_well(app: App):
    async with served(app, header_timeout_s=0.1) as server, server.connect() as client:
        await client.send(request("/", close=False))
        await client.until(b"kk")
        await client.send(b"GET /second HT")
        raw = await client.rest()
    assert b" 408 " in raw
    assert app.calls == ["/"]


async def test_the_rest_of_a_body_that_nobody_reads_must_come_in_time(app: App):
    async with served(app, header_timeout_s=0.1) as server, server.connect() as client:
        await client.send(request("/", b"x" * 1000, close=False)[:-900])
        await client.until(b"kk")
        await client.send(b"x")
        await client.rest()
    assert app.calls == ["/"]


async def test_a_connection_too_many_is_answered_with_503_and_closed(app: App):
    async with served(app, max_connections=2) as server:
        async with server.connect() as one, server.connect() as two:
            for client in (one, two):
                await client.send(request("/wait", close=False))
            await app.until(lambda: len(app.calls) == 2)
            reply = await server.exchange(request("/"))
            assert (reply.status, reply.code) == (503, "too_many_requests")
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["x-request-id"].startswith("req-")
            assert len(app.calls) == 2
        await app.until(lambda: len(app.left) == 2)
        assert (await server.exchange(request("/"))).status == 200


async def test_far_too_many_connections_are_reset(app: App):
    async with served(app, max_connections=1, max_refused=1, linger_s=5) as server:
        async with server.connect() as one, server.connect(), server.connect() as third:
            await one.send(request("/wait", close=False))
            assert await third.rest() == b""
