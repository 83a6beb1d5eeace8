"""What the HTTP server says to clients that are wrong, old or odd, and how it ends. With real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from infervisor.supervisor.http_api.guards.order import guarded, read_body
from infervisor.supervisor.http_api.server.server import HttpServer, open_sockets
from infervisor.supervisor.http_api.settings import HttpSettings
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


# --- malformed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [70_000, 1_000_000])
async def test_a_huge_head_is_answered_with_431_while_it_is_still_sent(anywhere: Served, app: App, size: int):
    reply = await anywhere.exchange(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * size)
    assert (reply.status, reply.code) == (431, "headers_too_large")


async def test_what_is_no_http_is_answered_in_json_and_the_connection_closed(anywhere: Served, app: App):
    reply = await anywhere.exchange(b"\x16\x03\x01 hello\r\n\r\n")
    assert (reply.status, reply.code) == (400, "invalid_http")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["connection"] == "close"
    assert app.calls == []


async def test_a_broken_body_ends_the_request_that_reads_it(anywhere: Served, app: App):
    head = b"POST /body HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with anywhere.connect() as client:
        await client.send(head + b"2\r\nab\r\n")
        await app.until(lambda: app.calls == ["/body"])
        await client.send(b"nonsense\r\n")
        reply = Reply.of(await client.rest())
    assert reply.status == 400
    assert app.left == ["/body"]
    assert reply.raw.count(b"HTTP/1.1 ") == 1


async def test_a_broken_body_behind_half_an_answer_ends_the_connection_without_another_one(app: App):
    head = b"POST /early HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served(app) as server, server.connect() as client:
        await client.send(head + b"2\r\nab\r\n")
        await client.until(event(0))
        await client.send(b"nonsense\r\n")
        assert b"HTTP/1.1" not in await client.rest()
        await app.until(lambda: app.left == ["/early"])


async def test_a_second_request_that_is_malformed_is_answered_after_the_first(app: App):
    async with served(app) as server, server.connect() as client:
        await client.send(request("/wait", close=False) + b"nonsense\r\n\r\n")
        await app.until(lambda: app.calls == ["/wait"])
        app.release.set()
        raw = await client.rest()
    assert raw.index(b" 200 ") < raw.index(b" 400 ")


async def test_nothing_is_logged_about_malformed_requests(app: App, caplog: pytest.LogCaptureFixture):
    async with served(app) as server:
        await server.exchange(b"nonsense\r\n\r\n")
        await server.exchange(request("/", None, b"Upgrade: websocket", b"Connection: upgrade"))
    assert caplog.records == []


async def test_what_is_no_tls_is_dropped_without_a_word(
    app: App, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with served(app, tls=both_contexts(tmp_path)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("/"))
        try:
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), WITHIN_S)
        except ConnectionError:
            pass
        writer.close()
        async with server.connect() as client:
            await client.send(request("/"))
            assert Reply.of(await client.rest()).status == 200
    assert caplog.records == []


# --- manners ---------------------------------------------------------------------------------------


async def test_expect_100_continue_is_answered_when_the_body_is_read(anywhere: Served, app: App):
    async with anywhere.connect() as client:
        await client.send(request("/body", b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 2"))
        assert b" 100 " in await client.until(b"\r\n\r\n")
        await client.send(b"ab")
        assert Reply.of(await client.rest()).status == 200
    assert app.bodies == [b"ab"]


async def test_a_client_of_http_1_0_is_served_and_its_connection_closed(app: App):
    async with served(app) as server:
        reply = await server.exchange(b"GET / HTTP/1.0\r\n\r\n")
    assert (reply.status, reply.body) == (200, b"kk")


async def test_head_has_no_body(app: App):
    async with served(app) as server:
        reply = await server.exchange(request("/", method="HEAD"))
    assert (reply.status, reply.body) == (200, b"")


async def test_upgrading_is_ignored(app: App):
    upgrade = (b"Upgrade: websocket", b"Sec-WebSocket-Key: eA==", b"Sec-WebSocket-Version: 13")
    async with served(app) as server, server.connect() as client:
        await client.send(request("/", None, b"Connection: upgrade", *upgrade, close=False))
        assert b" 200 " in await client.until(b"0\r\n\r\n")
        await client.send(request("/again"))
        assert Reply.of(await client.rest()).status == 200


# --- the server ------------------------------------------------------------------------------------


async def test_stopping_lets_a_running_request_be_answered(app: App):
    async with served(app, stop_grace_s=WITHIN_S) as server, server.connect() as client:
        await client.send(request("/wait", close=False))
        await app.until(lambda: app.calls == ["/wait"])
        server.server.stop(WITHIN_S)
        app.release.set()
        assert Reply.of(await client.rest()).status == 200


async def test_stopping_cuts_off_what_is_not_answered_within_the_grace(app: App):
    async with served(app) as server, server.connect() as client:
        await client.send(request("/wait", close=False))
        await app.until(lambda: app.calls == ["/wait"])
        server.server.stop(0.05)
        assert await client.rest() == b""
    assert app.left == ["/wait"]


async def test_cancelling_the_server_leaves_nothing(app: App):
    listening = open_sockets()
    server = HttpServer(app, listening)
    running = asyncio.create_task(server.serve())
    await server.accepting.wait()
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
    writer.write(request("/wait", close=False))
    await app.until(lambda: app.calls == ["/wait"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await app.until(lambda: app.left == ["/wait"])
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", listening.addresses[0].split(":")[1])
    gc.collect()


async def test_many_requests_one_after_the_other_leave_nothing(app: App):
    async with served(app) as server:
        async with server.connect() as client:
            for _ in range(500):
                await client.send(request("/", close=False))
                await client.until(b"kk")
        for _ in range(100):
            assert (await server.exchange(request("/body", json.dumps({}).encode()))).status == 200
        await until(lambda: not server.server.open_connections)


def test_there_are_no_more_connections_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("resource.getrlimit", lambda which: (400, 4096))
    with open_sockets() as listening:
        HttpServer(App(), listening)
    assert "at most 208 connections instead of 1024" in caplog.text


# --- behind the guards -----------------------------------------------------------------------------


def behind_guards(app: App, **settings: Any) -> Any:
    return guarded(app, SimpleNamespace(settings=HttpSettings(**settings)))  # type: ignore[arg-type]


def that_reads(settings: HttpSettings) -> Any:
    """Return an application behind the guards that reads its body as endpoints do."""

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        await read_body(Request(scope, receive), settings)

    return guarded(reading, SimpleNamespace(settings=settings))  # type: ignore[arg-type]


async def test_a_client_that_sends_far_too_much_can_read_why_it_was_refused():
    big = b"x" * 8_000_000
    async with served(that_reads(HttpSettings(max_body_bytes=1000))) as server:
        declared = await server.exchange(request("/", big))
        head = request("/", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        chunked = await server.exchange(head + b"%x\r\n%s\r\n" % (len(big), big))
    for reply in (declared, chunked):
        assert (reply.status, reply.code) == (413, "body_too_large")
        assert reply.headers["connection"] == "close"


async def test_a_refused_request_leaves_the_connection_to_the_next_one(app: App):
    async with served(behind_guards(app, api_keys=("k",))) as server, server.connect() as client:
        await client.send(request("/body", b"{}" * 1000, close=False))
        await client.until(b'"invalid_api_key"')
        await client.send(request("/body", b"{}", b"Authorization: Bearer k"))
        assert (await client.rest()).count(b" 200 ") == 1
    assert app.bodies == [b"{}"]


async def test_a_refused_client_is_not_asked_to_go_on(app: App):
    async with served(behind_guards(app, api_keys=("k",))) as server:
        head = request("/body", b"", b"Expect: 100-continue", close=False)
        reply = await server.exchange(head.replace(b"Length: 0", b"Length: 2"))
    assert (reply.status, reply.headers["connection"]) == (401, "close")
    assert b" 100 " not in reply.raw


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_a_body_that_drips_is_answered_with_408(framing: bytes):
    head = request("/", b"", close=False).replace(b"Content-Length: 0", framing)
    async with served(that_reads(HttpSettings(body_timeout_s=0.2))) as server:
        async with server.connect() as client:
            await client.send(head)
            answer = asyncio.create_task(client.rest())
            try:
                while not answer.done():
                    await client.send(b"1\r\nx\r\n" if b"chunked" in framing else b"x")
                    await asyncio.sleep(0.02)
            except ConnectionError:
                pass
            reply = Reply.of(await answer)
    assert (reply.status, reply.code) == (408, "request_timeout")
    assert reply.headers["connection"] == "close"


async def test_through_a_unix_socket_any_host_and_the_absolute_form_through_tcp(app: App, tmp_path: Path):
    guards = behind_guards(app)
    async with served(guards, path=tmp_path / "s.sock") as unix, served(guards) as tcp:
        anything = request("/").replace(b"localhost", b"anything")
        assert (await unix.exchange(anything)).status == 200
        assert (await tcp.exchange(anything)).status == 403
        assert (await tcp.exchange(request("http://localhost/absolute"))).status == 200
    assert app.calls[-1] == "/absolute"
