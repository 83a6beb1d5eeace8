"""/v1/responses with OpenAI's own client against a real server and real workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from infervisor import EndReason, Supervisor
from infervisor.supervisor.events import RequestReleased
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.models import CHATML, build_model, byte_token, chain
from tests.helpers.raw_http import served
from tests.helpers.responses_types import checked_events, checked_response
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

SAID = "It snows in Oslo."
CITY = {
    "type": "object",
    "properties": {"city": {"const": "Oslo"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


class Service:
    """A server of some models, and ways to ask it."""

    def __init__(
        self, port: int, http: httpx.AsyncClient, client: AsyncOpenAI, supervisor: Supervisor
    ) -> None:
        self.supervisor = supervisor
        self.http = http
        self.client = client
        self._url = f"http://127.0.0.1:{port}/v1"

    async def in_thread(self, ask: Callable[[OpenAI], Any]) -> Any:
        """Return what somebody gets who blocks."""

        def run() -> Any:
            with OpenAI(api_key="none", base_url=self._url, max_retries=0) as client:
                return ask(client)

        return await anyio.to_thread.run_sync(run)

    async def raw(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """Return the whole answer to a body, whatever it is."""
        return await self.http.post("/v1/responses", json={"input": "hello", **body}, headers=headers)

    async def events(self, **body: Any) -> list[Any]:
        """Return all events of a stream."""
        answer = await self.raw(stream=True, **body)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        return checked_events(answer.content)


@asynccontextmanager
async def serving(supervisor: Supervisor, **settings: Any) -> AsyncIterator[Service]:
    """Serve a supervisor as the model `m`."""
    app = create_app({"m": supervisor}, settings=HttpSettings(**settings))
    async with AsyncExitStack() as entered:
        service = await entered.enter_async_context(served(app))
        assert service.port is not None
        url = f"http://127.0.0.1:{service.port}"
        http = await entered.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        client = AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        await entered.enter_async_context(client)
        yield Service(service.port, http, client, supervisor)


@asynccontextmanager
async def saying(
    options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, Told]]:
    """Serve the scripted engine."""
    async with scripted({"text": SAID} if options is None else options, **settings) as (supervisor, told):
        async with serving(supervisor) as service:
            yield service, told


@asynccontextmanager
async def table_model(directory: Path) -> AsyncIterator[Service]:
    """Serve a tiny model: a real engine, whose answers follow grammars and which says "hi" otherwise."""
    path = build_model(directory / "hi.gguf", chain(*map(byte_token, b"hi")), CHATML)
    async with Supervisor(path, options={"n_ctx": 1024}) as supervisor, serving(supervisor) as service:
        yield service


# --- text ------------------------------------------------------------------------------------------


async def test_an_answer_of_text():
    async with saying() as (service, _):
        response = await service.client.responses.create(model="m", input="hello", instructions="be brief")
        assert response.output_text == SAID
        assert response.status == "completed"
        assert response.model == "m"
        assert response.instructions == "be brief"
        assert response.usage is not None
        assert response.usage.input_tokens == 3
        assert response.usage.output_tokens == response.usage.total_tokens - 3 == 4
        again = await service.in_thread(lambda client: client.responses.create(model="m", input="hello"))
        assert again.output_text == SAID


async def test_a_stream_of_text():
    async with saying() as (service, _):
        text = ""
        stream = await service.client.responses.create(model="m", input="hello", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == SAID
        assert event.type == "response.completed"
        assert event.response.output_text == SAID

        def read(client: OpenAI) -> Any:
            with client.responses.stream(model="m", input="hello") as events:
                kinds = [event.type for event in events]
                return kinds, events.get_final_response()

        kinds, last = await service.in_thread(read)
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert last.output_text == SAID


async def test_events_and_objects_are_what_the_client_s_types_say():
    async with saying() as (service, _):
        events = await service.events()
        whole = checked_response((await service.raw()).json())
        last = events[-1].response
        assert last.output_text == whole.output_text == SAID
        assert set(last.model_dump()) == set(whole.model_dump())
        assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
        assert last.id != whole.id


async def test_an_answer_that_was_cut_is_incomplete():
    async with saying() as (service, _):
        response = await service.client.responses.create(model="m", input="hello", max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "It snows"
        assert (await service.events(max_output_tokens=2))[-1].type == "response.incomplete"


async def test_the_conversation_reaches_the_model():
    async with saying({"mode": "echo"}) as (service, _):
        response = await service.client.responses.create(
            model="m",
            instructions="one",
            input=[
                {"role": "user", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "three"},
                {"role": "user", "content": [{"type": "input_text", "text": "four"}]},
            ],
        )
        assert response.output_text.split() == ["one", "two", "three", "four"]


@pytest.mark.parametrize("place", ["body", "header", "off"])
async def test_the_report_goes_where_the_client_wants_it(place: str):
    async with saying() as (service, _):
        answer = await service.raw({"X-Infervisor-Report": place})
        told = answer.json().get("x_infervisor")
        header = answer.headers.get("x-infervisor-report")
        assert (told is not None, header is not None) == (place == "body", place == "header")
        for report in told or json.loads(header or "[]"):
            assert report["end_reason"] == "stop"
            assert report["time_points_ns"]["released"] is not None
        streamed = await service.raw({"X-Infervisor-Report": place}, stream=True)
        last = checked_events(streamed.content)[-1].response
        assert hasattr(last, "x_infervisor") == (place == "body")


# --- forms -----------------------------------------------------------------------------------------


class Verdict(BaseModel):
    """What the model is made to say."""

    ok: Literal[True]


async def test_text_follows_a_schema(tmp_path: Path):
    async with table_model(tmp_path) as service:
        ask = {"model": "m", "input": "alpha", "temperature": 0}
        response = await service.client.responses.parse(**ask, text_format=Verdict)
        assert response.output_parsed == Verdict(ok=True)
        assert json.loads(response.output_text) == {"ok": True}

        async with service.client.responses.stream(**ask, text_format=Verdict) as stream:
            assert (await stream.get_final_response()).output_parsed == Verdict(ok=True)

        again = await service.in_thread(lambda client: client.responses.parse(**ask, text_format=Verdict))
        assert again.output_parsed == Verdict(ok=True)
        loose = await service.client.responses.create(**ask, text={"format": {"type": "text"}})
        assert loose.output_text == "hi"


async def test_a_function_is_called_and_told_what_came_of_it(tmp_path: Path):
    async with table_model(tmp_path) as service:
        ask: dict[str, Any] = {"model": "m", "temperature": 0, "tools": [WEATHER]}
        chosen = {"type": "function", "name": "weather"}
        said: list[Any] = [{"role": "user", "content": "alpha"}]
        response = await service.client.responses.create(**ask, input=said, tool_choice="required")
        (call,) = response.output
        assert call.type == "function_call"
        assert call.name == "weather"
        assert json.loads(call.arguments) == {"city": "Oslo"}
        assert response.status == "completed"

        # The call goes back as it came, as clients do it.
        said += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}]
        response = await service.client.responses.create(**ask, input=said, tool_choice="none")
        assert response.output_text == "hi"
        # And so does a message.
        said += [*response.output, {"role": "user", "content": "beta"}]
        response = await service.client.responses.create(**ask, input=said, tool_choice="none")
        assert response.output_text == "hi"

        def read(client: OpenAI) -> list[Any]:
            return list(client.responses.create(**ask, input="alpha", tool_choice=chosen, stream=True))

        events = await service.in_thread(read)
        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert json.loads(events[4].arguments) == {"city": "Oslo"}
        assert events[-1].response.output == [events[5].item]
        checked = await service.events(**ask, input="alpha", tool_choice="required")
        assert checked[-1].response.tools[0].name == "weather"


async def test_log_probabilities_are_told_if_they_are_wanted(tmp_path: Path):
    async with table_model(tmp_path) as service:
        response = await service.client.responses.create(
            model="m",
            input="alpha",
            temperature=0,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
        (message,) = response.output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert [told.token for told in part.logprobs] == ["h", "i"]
        assert all(len(told.top_logprobs) == 2 for told in part.logprobs)
        events = await service.events(input="alpha", temperature=0, top_logprobs=1)
        told = [each.token for e in events if e.type == "response.output_text.delta" for each in e.logprobs]
        assert told == ["h", "i"]


# --- errors ----------------------------------------------------------------------------------------


async def test_what_is_wrong_is_refused_with_its_field():
    async with saying() as (service, _):
        create = partial(service.client.responses.create, model="m", input="hello")
        with pytest.raises(openai.BadRequestError, match="send the items") as refused:
            await create(previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        assert refused.value.code == "invalid_request"
        with pytest.raises(openai.BadRequestError) as refused:
            await create(tools=[{**WEATHER, "name": "no name"}])
        assert refused.value.param == "tools[0].name"
        with pytest.raises(openai.BadRequestError, match="there are no tools") as refused:
            await create(tool_choice="required")
        assert refused.value.param == "tool_choice"
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="other")
        assert unknown.value.code == "model_not_found"
        # What only the worker can know: the scripted engine follows no schema.
        schema: Any = {"type": "json_schema", "name": "n", "schema": CITY}
        with pytest.raises(openai.BadRequestError, match="json_schema") as refused:
            await create(text={"format": schema}, stream=True)
        assert refused.value.param == "text.format"
        assert (await create()).output_text == SAID


async def test_nothing_is_stored():
    async with saying() as (service, _):
        response = await service.client.responses.create(model="m", input="hello", store=True)
        stored = service.client.responses
        for ask in (stored.retrieve, stored.delete, stored.cancel, stored.input_items.list):
            with pytest.raises(openai.NotFoundError, match="aren't stored here"):
                await ask(response.id)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_worker_that_dies_before_the_first_token_is_a_status(streams: bool):
    faults = [{"at": "prefill", "kind": "signal"}]
    async with saying({"faults": faults}) as (service, _):
        with pytest.raises(openai.APIStatusError) as failed:
            await service.client.responses.create(model="m", input="hello", stream=streams)
        assert failed.value.status_code >= 500
        assert failed.value.code in ("worker_crashed", "worker_killed")


async def test_a_stream_that_breaks_ends_with_one_failure():
    faults = [{"at": "decode", "after": 2, "kind": "signal"}]
    async with saying({"faults": faults}) as (service, _):
        answer = await service.raw(stream=True)
        assert b"[DONE]" not in answer.content
        events = checked_events(answer.content)
        ends = [
            event for event in events if event.type.split(".")[1] in ("completed", "incomplete", "failed")
        ]
        assert ends == events[-1:]
        response = events[-1].response
        assert response.status == "failed"
        assert response.error.code == "server_error"
        assert response.error.x_infervisor_code in ("worker_crashed", "worker_killed")
        assert response.output_text == "w0 w1 "
        assert response.output[0].status == "incomplete"
        assert response.x_infervisor[0]["end_reason"] == response.error.x_infervisor_code


async def test_closing_the_stream_frees_the_worker():
    async with saying({"pace_s": 0.01}) as (service, told):
        stream = await service.client.responses.create(model="m", input="hello", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        released = await told.wait_for(RequestReleased)
        assert released.report.end_reason is EndReason.CLIENT_DISCONNECTED

        def leave(client: OpenAI) -> None:
            with client.responses.stream(model="m", input="hello") as events:
                next(iter(events))

        await service.in_thread(leave)
        released = await told.wait_for(RequestReleased, count=2)
        assert released.report.end_reason is EndReason.CLIENT_DISCONNECTED
