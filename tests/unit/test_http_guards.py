"""The guards of the HTTP service, in memory: hosts, origins, keys, and what every answer carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.guards.order import guarded
from infervisor.supervisor.http_api.settings import HttpSettings
from tests.helpers.guarded import HOST, JSON, UNIX, Service

pytestmark = pytest.mark.anyio


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
