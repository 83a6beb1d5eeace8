"""The guards of the HTTP service, in memory: what is refused, with which status, and what every answer carries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.requests import Request

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.guards import ClientLeft, guarded, read_body
from infervisor.supervisor.http_api.settings import HttpSettings

pytestmark = pytest.mark.anyio

JSON = (b"content-type", b"application/json")
HOST = (b"host", b"127.0.0.1:8080")
TCP = ("127.0.0.1", 8080)
UNIX = ("/run/infervisor.sock", None)
DISCONNECT = {"type": "http.disconnect"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    messages: list[dict[str, Any]]

    @property
    def code(self) -> str | None:
        return json.loads(self.body)["error"]["code"]


class Endpoint:
    """An application that reads its body and says what it got."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.enter: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append((scope["method"], scope["path"]))
        if self.enter is not None:
            await self.enter(scope, send)
        self.bodies.append(await read_body(Request(scope, receive), self.settings))
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Service:
    """The guards around an endpoint, asked without any server."""

    def __init__(self, **settings: Any) -> None:
        self.settings = HttpSettings(**settings)
        self.endpoint = Endpoint(self.settings)
        self.app = guarded(self.endpoint, SimpleNamespace(settings=self.settings))  # type: ignore[arg-type]

    async def ask(
        self,
        method: str = "GET",
        path: str = "/v1/models",
        headers: list[tuple[bytes, bytes]] | None = None,
        body: list[Any] | bytes = b"",
        server: tuple[str, int | None] | None = TCP,
        **scope: Any,
    ) -> Reply:
        """Return the answer. `body` may be a list of what the server hands over, pauses in seconds included."""
        sent: list[dict[str, Any]] = []
        pieces = iter(body if isinstance(body, list) else [body])
        more = body if isinstance(body, list) else [body]
        left = len([piece for piece in more if isinstance(piece, bytes)])

        async def receive() -> Any:
            nonlocal left
            for piece in pieces:
                if isinstance(piece, int | float):
                    await anyio.sleep(piece)
                elif isinstance(piece, bytes):
                    left -= 1
                    return {"type": "http.request", "body": piece, "more_body": left > 0}
                else:
                    return piece
            return await anyio.sleep_forever()

        async def send(message: Any) -> None:
            sent.append(message)

        whole = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [HOST] if headers is None else headers,
            "server": server,
            "client": ("127.0.0.1", 50000),
            **scope,
        }
        with anyio.fail_after(20):
            await self.app(whole, receive, send)
        if not sent:
            return Reply(0, {}, b"", sent)
        assert sent[0]["type"] == "http.response.start"
        assert [message for message in sent[1:] if not message.get("more_body", False)] == sent[-1:]
        headers_sent = [(k.decode().lower(), v.decode()) for k, v in sent[0]["headers"]]
        assert len(dict(headers_sent)) == len(headers_sent), "a header twice"
        return Reply(
            sent[0]["status"], dict(headers_sent), b"".join(m.get("body", b"") for m in sent[1:]), sent
        )


async def test_every_answer_has_an_id_of_its_own_and_the_headers_against_sniffing_and_framing():
    service = Service()
    replies = [
        await service.ask(),
        await service.ask(path="/"),
        await service.ask(headers=[(b"host", b"evil")]),
    ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == 3
    assert all(one.startswith("req-") and len(one) == 26 for one in ids)
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert replies[0].headers["cache-control"] == "no-store"
    assert "script-src" not in replies[0].headers["content-security-policy"]
    assert "script-src 'self'" in replies[1].headers["content-security-policy"]
    assert "unsafe" not in replies[1].headers["content-security-policy"]


async def test_the_application_sees_the_id_that_the_answer_carries():
    service = Service()
    seen = []

    async def enter(scope: Any, send: Any) -> None:
        seen.append(scope["state"]["request_id"])

    service.endpoint.enter = enter
    assert (await service.ask()).headers["x-request-id"] == seen[0]


async def test_what_the_application_says_about_caching_is_kept():
    service = Service()
    service.endpoint.headers = [(b"cache-control", b"no-cache")]
    reply = await service.ask()
    assert reply.headers["cache-control"] == "no-cache"


# --- errors ----------------------------------------------------------------------------------------


async def test_an_unexpected_error_is_answered_with_500_and_logged_with_its_id(
    caplog: pytest.LogCaptureFixture,
):
    service = Service()

    async def enter(scope: Any, send: Any) -> None:
        raise KeyError("a secret detail")

    service.endpoint.enter = enter
    reply = await service.ask()
    assert (reply.status, reply.code) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert reply.headers["x-request-id"] in caplog.text


async def test_an_error_after_the_answers_begin_goes_on_to_the_server():
    service = Service()

    async def enter(scope: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("late")

    service.endpoint.enter = enter
    with pytest.raises(KeyError):
        await service.ask()


async def test_a_websocket_is_refused():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await Service().app({"type": "websocket", "path": "/", "headers": []}, None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_the_life_span_is_passed_on():
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await guarded(app, SimpleNamespace(settings=HttpSettings()))({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


# --- hosts -----------------------------------------------------------------------------------------

LOCAL = ["localhost", "127.0.0.1.", "LOCALHOST:1", "localhost.", "localhost.:80", "127.0.0.1", "127.9.8.7:65535",
         "[::1]", "[::1]:80", "[0:0:0:0:0:0:0:1]"]  # fmt: skip
FOREIGN = ["evil.example", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example", "0.0.0.0",
           "128.0.0.1", "[::2]", "192.168.0.1", "app.example"]  # fmt: skip
MALFORMED = ["", " ", "user@localhost", "localhost:", "localhost:x", "localhost:99999", "localhost:-1",
             "local host", "localhost/path", "localhost,evil", "[::1", "::1", "[::1%25lo]", "[localhost]",
             "127.1", "0x7f.1", "http://localhost", "localhost#", "localhost\x00", "löcalhost",
             ".", "..", "[127.0.0.1]", "localhost:80:80", "*", "localhost?"]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
async def test_this_machines_loopback_is_served(host: str):
    assert (await Service().ask(headers=[(b"host", host.encode("latin-1"))])).status == 200


@pytest.mark.parametrize("host", [*FOREIGN, *MALFORMED])
async def test_another_host_is_refused_before_the_application(host: str):
    service = Service()
    reply = await service.ask(headers=[(b"host", host.encode("latin-1"))])
    assert (reply.status, reply.code) == (403, "forbidden_host")
    assert service.endpoint.calls == []


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"localhost"], [b"localhost", b"evil.example"]])
async def test_no_host_or_several_are_refused(hosts: list[bytes]):
    assert (await Service().ask(headers=[(b"host", host) for host in hosts])).code == "forbidden_host"


async def test_listed_hosts_are_served_with_any_port_or_the_one_that_is_listed():
    service = Service(allowed_hosts=("App.example", "tight.example:444", "[fe80::1]"))
    for host, status in {
        b"app.example": 200,
        b"APP.example:99": 200,
        b"app.example.": 200,
        b"tight.example:444": 200,
        b"tight.example": 403,
        b"[FE80:0::1]:5": 200,
        b"b.app.example": 403,
    }.items():
        assert (await service.ask(headers=[(b"host", host)])).status == status, host


async def test_a_star_allows_every_wellformed_host():
    service = Service(allowed_hosts=("*",))
    assert (await service.ask(headers=[(b"host", b"evil.example")])).status == 200
    assert (await service.ask(headers=[(b"host", b"user@evil.example")])).status == 403


async def test_through_a_unix_socket_every_host_is_fine():
    assert (await Service().ask(headers=[(b"host", b"whatever")], server=UNIX)).status == 200
    assert (await Service().ask(headers=[], server=UNIX)).status == 200


async def test_a_target_in_absolute_form_is_served_by_its_path_and_checked_by_its_host():
    service = Service()
    assert (await service.ask(path="http://127.0.0.1:8080/v1/models")).status == 200
    assert service.endpoint.calls == [("GET", "/v1/models")]
    assert (await service.ask(path="http://evil.example/v1/models")).status == 403
    assert (await service.ask(path="http://user@127.0.0.1:8080/v1/models")).status == 403


@pytest.mark.parametrize("host", ["http://app.example", "user@app.example", "", "a b"])
def test_an_impossible_host_among_the_settings_is_said(host: str):
    with pytest.raises(ConfigurationError, match="allowed_hosts"):
        Service(allowed_hosts=(host,))


# --- origins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", [b"http://127.0.0.1:8080", b"https://127.0.0.1:8080", b"HTTP://127.0.0.1:8080"]
)
async def test_the_services_own_page_is_served(origin: bytes):
    assert (await Service().ask(headers=[HOST, (b"origin", origin)])).status == 200


@pytest.mark.parametrize(
    "origin",
    [b"http://evil.example", b"null", b"", b"http://127.0.0.1", b"http://127.0.0.1:8081", b"http://localhost:8080",
     b"http://127.0.0.1:8080.evil.example", b"http://127.0.0.1:8080@evil.example", b"127.0.0.1:8080", b"file://",
     b"http://127.0.0.1:8080/", b"chrome-extension://abc"],
)  # fmt: skip
async def test_another_pages_request_is_refused(origin: bytes):
    service = Service()
    reply = await service.ask("POST", headers=[HOST, JSON, (b"origin", origin)], body=b"{}")
    assert (reply.status, reply.code) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in reply.headers
    assert service.endpoint.calls == []


async def test_several_origins_are_refused():
    own = (b"origin", b"http://127.0.0.1:8080")
    assert (await Service().ask(headers=[HOST, own, own])).code == "forbidden_origin"


@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"Cross-Site"])
async def test_what_a_foreign_page_loads_without_saying_its_origin_is_refused(site: bytes):
    assert (await Service().ask(headers=[HOST, (b"sec-fetch-site", site)])).code == "forbidden_origin"


@pytest.mark.parametrize("site", [b"same-origin", b"none"])
async def test_what_the_user_opens_is_served(site: bytes):
    assert (await Service().ask(headers=[HOST, (b"sec-fetch-site", site)])).status == 200


async def test_a_link_from_another_page_may_be_followed_but_not_framed():
    link = [HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    assert (await Service().ask(path="/", headers=[*link, (b"sec-fetch-dest", b"document")])).status == 200
    assert (await Service().ask(path="/", headers=[*link, (b"sec-fetch-dest", b"iframe")])).status == 403
    form = [*link, (b"sec-fetch-dest", b"document"), JSON]
    assert (await Service().ask("POST", headers=form, body=b"{}")).status == 403


async def test_a_listed_origin_may_read_answers_and_errors():
    service = Service(cors_origins=("https://app.example",), api_keys=("k",))
    page = [HOST, (b"origin", b"https://app.example"), (b"sec-fetch-site", b"cross-site")]
    good = await service.ask(headers=[*page, (b"authorization", b"Bearer k")])
    refused = await service.ask(headers=page)
    assert (good.status, refused.status) == (200, 401)
    for reply in (good, refused):
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
        assert "Origin" in reply.headers["vary"]
        assert "access-control-allow-credentials" not in reply.headers


async def test_a_preflight_of_a_listed_origin_needs_no_key():
    service = Service(cors_origins=("https://app.example",), api_keys=("k",))
    asked = b"authorization, content-type, x-infervisor-priority, x-stainless-lang"
    reply = await service.ask(
        "OPTIONS",
        headers=[
            HOST,
            (b"origin", b"https://app.example"),
            (b"access-control-request-method", b"POST"),
            (b"access-control-request-headers", asked),
            (b"access-control-request-private-network", b"true"),
        ],
    )
    assert reply.status == 200
    assert reply.headers["access-control-allow-headers"] == asked.decode()
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert service.endpoint.calls == []


async def test_a_preflight_of_another_origin_gets_nothing():
    for listed in ((), ("https://app.example",)):
        headers = [HOST, (b"origin", b"https://evil.example"), (b"access-control-request-method", b"POST")]
        reply = await Service(cors_origins=listed).ask("OPTIONS", headers=headers)
        assert reply.status == 403
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/", "https://", "null", ""])
def test_an_impossible_origin_among_the_settings_is_said(origin: str):
    with pytest.raises(ConfigurationError, match="cors_origins"):
        Service(cors_origins=(origin,))


# --- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [(b"authorization", b"Bearer two"), (b"authorization", b"bearer  one"), (b"x-api-key", b"two"),
     (b"authorization", "Bearer schlüssel".encode())],
)  # fmt: skip
async def test_each_key_opens(header: tuple[bytes, bytes]):
    assert (await Service(api_keys=("one", "two", "schlüssel")).ask(headers=[HOST, header])).status == 200


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer three")], [(b"authorization", b"Basic one")], [(b"authorization", b"one")],
     [(b"authorization", b"Bearer")], [(b"authorization", b"Bearer ")], [(b"x-api-key", b"")],
     [(b"x-api-key", b"ONE")], [(b"authorization", b"Bearer one two")], [(b"authorization", b"Bearer on")]],
)  # fmt: skip
async def test_anything_else_is_refused_with_a_hint_how_to_ask(headers: list[tuple[bytes, bytes]]):
    service = Service(api_keys=("one", "two"))
    reply = await service.ask(headers=[HOST, *headers])
    assert (reply.status, reply.code) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert service.endpoint.calls == []


async def test_health_and_the_page_are_open_and_nothing_else():
    service = Service(api_keys=("one",))
    for method, path, status in [
        ("GET", "/health/live", 200),
        ("GET", "/health/ready", 200),
        ("GET", "/", 200),
        ("HEAD", "/", 200),
        ("GET", "/console/console.css", 200),
        ("POST", "/", 401),
        ("GET", "/metrics", 401),
        ("GET", "/openapi.json", 401),
        ("GET", "/api/requests", 401),
        ("GET", "/healthy", 401),
        ("GET", "//", 401),
        ("GET", "", 401),
    ]:
        assert (await service.ask(method, path)).status == status, (method, path)


async def test_paths_are_those_below_the_mount():
    service = Service(api_keys=("one",))
    assert (await service.ask(path="/llm/health/live", root_path="/llm")).status == 200
    assert (await service.ask(path="/llm/", root_path="/llm")).status == 200
    assert (await service.ask(path="/llm/health/live")).status == 401
    assert (await service.ask(path="/health/v1/models", root_path="/health")).status == 401


async def test_without_keys_whatever_a_client_sends_is_fine():
    assert (await Service().ask(headers=[HOST, (b"authorization", b"Bearer anything")])).status == 200


async def test_a_refused_key_is_nowhere_in_answer_or_log(caplog: pytest.LogCaptureFixture):
    service = Service(api_keys=("right-key",))
    reply = await service.ask(headers=[HOST, (b"authorization", b"Bearer wrong-key")])
    for text in (reply.body.decode(), str(reply.headers), caplog.text, repr(vars(service.app))):
        assert "wrong-key" not in text
        assert "right-key" not in text


def test_an_empty_key_is_said():
    with pytest.raises(ConfigurationError, match="api_keys"):
        Service(api_keys=("good", " "))


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
