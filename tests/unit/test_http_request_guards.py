"""The guards of the HTTP service, in memory: how many requests, and how large and of which kind they may be."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from starlette.requests import Request

from infervisor.supervisor.http_api.guards.order import ClientLeft, read_body
from infervisor.supervisor.http_api.settings import HttpSettings
from tests.helpers.guarded import DISCONNECT, HOST, JSON, Service

pytestmark = pytest.mark.anyio


# --- places ----------------------------------------------------------------------------------------


async def test_requests_beyond_the_limit_are_refused_and_a_place_is_free_again_afterwards():
    service = Service(max_requests=2)
    entered, leave = anyio.Event(), anyio.Event()

    async def enter(scope: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            if len(service.endpoint.calls) == 2:
                entered.set()
            await leave.wait()

    service.endpoint.enter = enter
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(service.ask, "GET", "/wait")
        await entered.wait()
        full = await service.ask()
        assert (full.status, full.code) == (503, "too_many_requests")
        assert int(full.headers["retry-after"]) >= 1
        assert (await service.ask(path="/health/live")).status == 200
        leave.set()
    assert (await service.ask()).status == 200


# --- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content_type",
    [b"application/json", b"APPLICATION/JSON", b"application/json; charset=utf-8",
     b"application/json;charset=UTF-8", b'application/json; charset="utf-8"', b"application/json;",
     b"application/json; version=1"],
)  # fmt: skip
async def test_json_is_taken(content_type: bytes):
    headers = [HOST, (b"content-type", content_type), (b"content-length", b"2")]
    assert (await Service().ask("POST", headers=headers, body=b"{}")).status == 200


@pytest.mark.parametrize(
    "headers",
    [[], [(b"content-type", b"text/plain")], [(b"content-type", b"application/x-www-form-urlencoded")],
     [(b"content-type", b"multipart/form-data; boundary=x")], [(b"content-type", b"application/jsonp")],
     [(b"content-type", b"application/json; charset=utf-16")], [(b"content-type", b"text/json")], [JSON, JSON],
     [(b"content-type", b"application/json, text/plain")], [(b"content-type", b"")],
     [JSON, (b"content-encoding", b"gzip")],
     [JSON, (b"content-encoding", b"identity"), (b"content-encoding", b"br")]],
)  # fmt: skip
async def test_other_bodies_are_not_taken(headers: list[tuple[bytes, bytes]]):
    service = Service()
    reply = await service.ask("POST", headers=[HOST, (b"content-length", b"2"), *headers], body=b"{}")
    assert (reply.status, reply.code) == (415, "unsupported_media_type")
    assert service.endpoint.calls == []


async def test_a_post_without_a_body_needs_no_type_but_no_form_either():
    assert (await Service().ask("POST", headers=[HOST])).status == 200
    form = (b"content-type", b"application/x-www-form-urlencoded")
    assert (await Service().ask("POST", headers=[HOST, form])).status == 415


async def test_a_declared_body_beyond_the_limit_is_refused_unread_and_the_connection_closed():
    service = Service(max_body_bytes=100)
    headers = [HOST, JSON, (b"content-length", b"101")]
    reply = await service.ask("POST", headers=headers, body=[b"x" * 50, DISCONNECT])
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert service.endpoint.calls == []
    large = [HOST, JSON, (b"content-length", str(10**9).encode())]
    assert (await service.ask("POST", headers=large, body=[DISCONNECT])).headers["connection"] == "close"


async def test_a_body_of_exactly_the_limit_is_taken():
    service = Service(max_body_bytes=100)
    headers = [HOST, JSON, (b"content-length", b"100")]
    assert (await service.ask("POST", headers=headers, body=[b"x" * 60, b"x" * 40])).status == 200
    assert service.endpoint.bodies == [b"x" * 100]


async def test_a_chunked_body_is_counted_while_it_comes():
    service = Service(max_body_bytes=100)
    headers = [HOST, JSON, (b"transfer-encoding", b"chunked")]
    reply = await service.ask("POST", headers=headers, body=[b"x" * 60, b"x" * 60, b"x", DISCONNECT])
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"


async def test_a_body_that_does_not_come_in_time_is_answered_and_the_connection_closed():
    service = Service(body_timeout_s=0.05)
    headers = [HOST, JSON, (b"transfer-encoding", b"chunked")]
    reply = await service.ask("POST", headers=headers, body=[b"{", 60, b"}"])
    assert (reply.status, reply.code) == (408, "request_timeout")
    assert reply.headers["connection"] == "close"


async def test_a_client_that_leaves_while_it_sends_gets_no_answer():
    service = Service()
    headers = [HOST, JSON, (b"content-length", b"10")]
    reply = await service.ask("POST", headers=headers, body=[b"{", DISCONNECT, b"never"])
    assert reply.messages == []


async def test_reading_says_that_the_client_left():
    async def receive() -> Any:
        return DISCONNECT

    with pytest.raises(ClientLeft):
        await read_body(Request({"type": "http"}, receive), HttpSettings())


@pytest.mark.parametrize(
    "headers",
    [[(b"content-length", b"2"), (b"transfer-encoding", b"chunked")], [(b"content-length", b"two")],
     [(b"content-length", b"-2")], [(b"content-length", b"2"), (b"content-length", b"3")],
     [(b"content-length", b"")], [(b"content-length", b"9" * 40)], [(b"expect", b"200-ok")]],
)  # fmt: skip
async def test_a_body_whose_end_is_in_doubt_is_refused(headers: list[tuple[bytes, bytes]]):
    reply = await Service().ask("POST", headers=[HOST, JSON, *headers], body=[b"{}", DISCONNECT])
    assert (reply.status, reply.code) == (400, "invalid_http")


async def test_an_early_answer_leaves_little_to_the_server_and_closes_before_more():
    service = Service(api_keys=("k",))
    for extra, closes in [
        ([(b"content-length", b"1000")], False),
        ([(b"content-length", b"100000")], True),
        ([(b"transfer-encoding", b"chunked")], True),
        ([(b"content-length", b"1000"), (b"expect", b"100-continue")], True),
        ([], False),
    ]:
        reply = await service.ask("POST", headers=[HOST, JSON, *extra], body=[b"x", DISCONNECT])
        assert (reply.status, "connection" in reply.headers) == (401, closes), extra


async def test_what_comes_after_an_early_answer_is_thrown_away_before_the_end():
    service = Service(max_body_bytes=100)
    headers = [HOST, JSON, (b"content-length", b"200000")]
    pieces: list[Any] = [b"x" * 50_000] * 4
    reply = await service.ask("POST", headers=headers, body=pieces)
    assert [message.get("more_body", False) for message in reply.messages[1:]] == [True, False]
    assert reply.code == "body_too_large"


# --- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [[(b"x-a", b"b")] * 100, [(b"x-a", b"b" * 33_000)], [(b"x" * 33_000, b"")]],
    ids=["many", "long", "name"],
)
async def test_a_large_head_is_refused(headers: list[tuple[bytes, bytes]]):
    reply = await Service().ask(headers=[HOST, *headers])
    assert (reply.status, reply.code) == (431, "headers_too_large")


async def test_a_long_target_is_refused():
    assert (await Service().ask(query_string=b"x" * 33_000)).status == 431


async def test_a_version_of_http_that_is_none_is_refused():
    assert (await Service().ask(http_version="7.3")).status == 400
    assert (await Service().ask(http_version="2")).status == 200
