"""The guards in front of the real service, with a real worker behind it: keys, pages of strangers, a mount."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from infervisor import Supervisor
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.malformed import GOOD, post
from tests.helpers.raw_http import request, served
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

KEY = b"Authorization: Bearer right"
BODY = json.dumps(GOOD).encode()


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


@pytest.fixture
async def supervisor(anyio_backend: str) -> AsyncIterator[Supervisor]:
    async with scripted() as (running, _):
        await running.wait_ready()
        yield running


def submits(supervisor: Supervisor) -> int:
    return sum(worker.submits for worker in supervisor.status().workers)


async def test_without_a_key_only_health_and_the_page_are_answered(supervisor: Supervisor):
    app = create_app({"scripted": supervisor}, settings=HttpSettings(api_keys=("right",)))
    async with served(app) as service:
        for path in ("/health/live", "/health/ready"):
            assert (await service.exchange(request(path))).status == 200, path
        assert (await service.exchange(request("/"))).status in (200, 404)
        for path in ("/v1/models", "/metrics", "/openapi.json", "/api/requests", "/api/worker", "/nothing"):
            refused = await service.exchange(request(path))
            assert (refused.status, refused.code) == (401, "invalid_api_key"), path
        assert (await service.exchange(post(BODY))).status == 401
        assert submits(supervisor) == 0
        assert (await service.exchange(post(BODY, KEY))).status == 200
        assert (await service.exchange(post(BODY, b"x-api-key: right"))).status == 200
        assert submits(supervisor) == 2


async def test_a_strangers_page_can_neither_ask_nor_stop_anything(supervisor: Supervisor):
    async with served(create_app({"scripted": supervisor})) as service:
        for headers in (b"Origin: https://evil.example", b"Sec-Fetch-Site: cross-site", b"Origin: null"):
            for raw in (
                post(BODY, headers),
                post(b"{}", headers, path="/api/worker/restart"),
                request("/api/requests", None, headers),
            ):
                refused = await service.exchange(raw)
                assert (refused.status, refused.code) == (403, "forbidden_origin")
        rebound = await service.exchange(post(BODY).replace(b"Host: localhost", b"Host: evil.example"))
        assert (rebound.status, rebound.code) == (403, "forbidden_host")
        assert submits(supervisor) == 0


async def test_a_form_of_a_strangers_page_is_not_taken_for_json(supervisor: Supervisor):
    async with served(create_app({"scripted": supervisor})) as service:
        form = post(BODY).replace(b"application/json", b"text/plain")
        assert (await service.exchange(form)).status == 415
        empty = request("/api/worker/restart", b"").replace(b"application/json", b"text/plain")
        assert (await service.exchange(empty)).status == 415


async def test_errors_of_a_mounted_service_keep_their_shape(supervisor: Supervisor):
    inner = create_app({"scripted": supervisor}, settings=HttpSettings(api_keys=("right",)))
    async with served(Starlette(routes=[Mount("/llm", inner)])) as service:
        assert (await service.exchange(request("/llm/health/live"))).status == 200
        refused = await service.exchange(request("/llm/v1/models"))
        assert (refused.status, refused.code) == (401, "invalid_api_key")
        answer = await service.exchange(post(BODY, KEY, path="/llm/v1/chat/completions"))
        assert answer.status == 200
        assert answer.headers["x-request-id"].startswith("req-")
