"""Requests that are wrong, in several hundred ways: each is refused by the real service, and no worker sees one."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from infervisor import Supervisor
from infervisor.supervisor.http_api import create_app
from tests.helpers.malformed import GOOD, post, wrong_requests
from tests.helpers.raw_http import Served, served
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

AT_MOST_S = 5.0
"""For one answer: a request that was taken by mistake may never end."""


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


def seen_by_worker(supervisor: Supervisor) -> tuple[int, int]:
    """Return the worker's pid and how many requests it was given."""
    (worker,) = supervisor.status().workers
    return worker.pid, worker.submits


async def asks_well(service: Served) -> None:
    reply = await service.exchange(post(json.dumps(GOOD).encode()))
    assert reply.status == 200, reply.raw
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "w0 w1 w2 "


async def test_every_wrong_request_is_refused_and_the_worker_untouched():
    kinds = wrong_requests()
    assert len(kinds) >= 200
    wrong: dict[str, Any] = {}
    async with scripted() as (supervisor, _):
        app = create_app({"scripted": supervisor})
        async with served(app) as service:
            await asks_well(service)
            pid, submits = seen_by_worker(supervisor)
            for name, raw in kinds.items():
                try:
                    async with asyncio.timeout(AT_MOST_S):
                        reply = await service.exchange(raw)
                    assert 400 <= reply.status < 500, reply.status
                    assert reply.code
                    assert reply.headers["content-type"] == "application/json"
                    assert reply.headers["x-request-id"].startswith("req-")
                    assert reply.headers["x-content-type-options"] == "nosniff"
                    assert len(re.findall(rb"HTTP/1.1 [0-9]", reply.raw)) == 1, "more than one answer"
                    assert seen_by_worker(supervisor) == (pid, submits), "a worker was asked"
                except (AssertionError, TimeoutError) as error:
                    wrong[name] = (str(error) or "no answer").splitlines()[0]
                    pid, submits = seen_by_worker(supervisor)
            assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
            await asks_well(service)
            assert seen_by_worker(supervisor) == (pid, submits + 1)
