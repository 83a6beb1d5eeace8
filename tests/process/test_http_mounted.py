"""The service within another application, as FastAPI's users do it, and several models in one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from infervisor import ConfigurationError, Supervisor
from infervisor.supervisor.http_api import create_app
from infervisor.supervisor.http_api.models import name_of
from tests.helpers.asgi_call import ask, calling
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def mounted(supervisor: Supervisor) -> AsyncIterator[FastAPI]:
    app = FastAPI()
    app.mount("/llm", create_app(supervisor))
    yield app


async def test_mounted_it_answers_below_its_prefix_and_sees_who_leaves() -> None:
    async with scripted({"pace_s": 0.002}) as (supervisor, _), mounted(supervisor) as app:
        call = await ask(app, "/llm/v1/chat/completions", {**HI, "max_tokens": 3})
        assert call.json["choices"][0]["message"]["content"] == "w0 w1 w2 "
        page = await ask(app, "/llm/", b"", method="GET")
        assert page.status == 200
        assert 'src="console/console.js"' in page.text
        assert (await ask(app, "/llm/console/console.js", b"", method="GET")).status == 200
        async with calling(app, "/llm/v1/chat/completions", {**HI, "stream": True}) as call:
            await call.until("w3")
            call.leave()
            await call.over()
        assert supervisor.status().in_flight == 0
        listed = await ask(app, "/llm/api/requests", b"", method="GET")
        assert listed.json["requests"][0]["choices"][0]["report"]["end_reason"] == "client_disconnected"
        assert (await ask(app, "/v1/models", b"", method="GET")).status == 404


async def test_each_name_goes_to_its_model() -> None:
    async with scripted({"text": "I am one"}) as (one, _), scripted({"text": "I am two"}) as (two, _):
        app = create_app({"one": one, "two": two}, aliases={"gpt": "two"})
        said = {}
        for name in (None, "one", "two", "gpt"):
            call = await ask(app, "/v1/chat/completions", {**HI, **({} if name is None else {"model": name})})
            said[name] = (call.json["model"], call.json["choices"][0]["message"]["content"])
        assert said == {
            None: ("one", "I am one"),
            "one": ("one", "I am one"),
            "two": ("two", "I am two"),
            "gpt": ("two", "I am two"),
        }
        call = await ask(app, "/v1/chat/completions", {**HI, "model": "too"})
        assert call.status == 404
        assert call.json["error"]["code"] == "model_not_found"
        assert "two" in call.json["error"]["message"]
        listed = await ask(app, "/v1/models", b"", method="GET")
        assert [model["id"] for model in listed.json["data"]] == ["one", "two", "gpt"]
        assert (await ask(app, "/v1/models/gpt", b"", method="GET")).json["id"] == "gpt"
        assert (await ask(app, "/v1/models/a/b", b"", method="GET")).status == 404


async def test_impossible_models_are_refused_at_once() -> None:
    async with scripted() as (supervisor, _):
        with pytest.raises(ConfigurationError, match="no model"):
            create_app({})
        with pytest.raises(ConfigurationError, match="alias 'a'"):
            create_app({"a": supervisor}, aliases={"a": "a"})
        with pytest.raises(ConfigurationError, match="isn't served"):
            create_app({"a": supervisor}, aliases={"b": "c"})
        assert name_of(supervisor) == "default"


async def test_a_supervisor_that_is_not_running_is_no_model_failure() -> None:
    app: ASGIApp = create_app(Supervisor(engine="scripted"))
    call = await ask(app, "/v1/chat/completions", HI)
    assert call.status == 500
    assert call.json["error"]["code"] == "internal_error"
