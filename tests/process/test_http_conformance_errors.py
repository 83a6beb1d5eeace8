"""What OpenAI's own client makes of errors and of waiting, and what its leaving does to the worker."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import anyio
import httpx
import openai
import pytest
from openai import OpenAI

from infervisor import EndReason
from infervisor.supervisor.events import RequestReleased
from tests.helpers.openai_service import HI, KEY, saying

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


async def test_errors_are_of_the_classes_that_clients_expect() -> None:
    async with saying({"pace_s": 0.01}, {"api_keys": (KEY,)}, slots=1, max_queue=0) as (service, _):
        ask = service.client.chat.completions.create
        for wrong in (
            {"temperature": -1},
            {"seed": 2**64},
            {"stop": [""]},
            {"extra_body": {"tempurature": 1}},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(model="m", messages=HI, **wrong)
            assert refused.value.param is not None
        with pytest.raises(openai.AuthenticationError):
            await service.blocking(lambda c: c.models.list(), api_key="sk-wrong")
        stream = await ask(model="m", messages=HI, stream=True)
        async with stream:
            async for _chunk in stream:
                with pytest.raises(openai.RateLimitError):
                    await ask(model="m", messages=HI)
                break


async def test_a_stream_that_breaks_raises_in_the_client() -> None:
    async with saying({"pace_s": 0.01}) as (service, _):
        stream = await service.client.chat.completions.create(
            model="m", messages=HI, stream=True, extra_headers={"X-Infervisor-Total-Timeout": "0.3"}
        )
        pieces: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError) as broken:
            await read()
        assert broken.value.code == "total_timeout"
        assert "".join(pieces).startswith("w0 w1")


async def test_closing_a_stream_frees_the_worker() -> None:
    async with saying({"pace_s": 0.002}) as (service, told):
        stream = await service.client.chat.completions.create(model="m", messages=HI, stream=True)
        async for _chunk in stream:
            break
        await stream.close()
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED

        def leave(client: OpenAI) -> None:
            with client.chat.completions.create(model="m", messages=HI, stream=True) as blocking:
                next(iter(blocking))

        await service.blocking(leave)
        event = await told.wait_for(RequestReleased, count=2)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
        # A whole answer that the client doesn't wait for any longer.
        with pytest.raises(openai.APITimeoutError):
            await service.client.with_options(timeout=0.3).chat.completions.create(model="m", messages=HI)
        event = await told.wait_for(RequestReleased, count=3)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED


async def test_a_client_retries_what_may_be_retried_and_nothing_else() -> None:
    fault = {"at": "decode", "kind": "raise", "after": 0}
    async with saying({"faults": [fault], "text": "one"}) as (service, told):
        with pytest.raises(openai.InternalServerError):
            await service.client.with_options(max_retries=2).chat.completions.create(model="m", messages=HI)
        assert len(told.of(RequestReleased)) == 1


async def test_a_client_that_waits_as_it_is_told_gets_its_answer() -> None:
    tried_s: list[float] = []
    was_refused = anyio.Event()

    async def note(response: httpx.Response) -> None:
        tried_s.append(time.monotonic())
        if response.status_code == 429:
            assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
            was_refused.set()

    async with AsyncExitStack() as entered:
        service, _ = await entered.enter_async_context(saying({"pace_s": 0.01}, slots=1, max_queue=0))
        http = await entered.enter_async_context(
            openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
        )
        patient = service.client.with_options(max_retries=20, http_client=http)
        running = await service.client.chat.completions.create(model="m", messages=HI, stream=True)

        async def leave_when_refused() -> None:
            await was_refused.wait()
            await running.close()

        async with anyio.create_task_group() as group:
            group.start_soon(leave_when_refused)
            raw = await patient.chat.completions.with_raw_response.create(
                model="m", messages=HI, max_tokens=2
            )
        assert raw.parse().choices[0].message.content == "w0 w1 "
        assert raw.retries_taken == len(tried_s) - 1 >= 1
        # Without the header it would be back after half a second at the most.
        assert tried_s[1] - tried_s[0] > 0.9
