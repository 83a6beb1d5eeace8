"""OpenAI's own client, another client of the field, and plain fetch, against a real server and real workers."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import openai
import pytest
from huggingface_hub import InferenceClient
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from infervisor import EndReason, Supervisor
from infervisor.supervisor.events import RequestReleased
from infervisor.supervisor.http_api import HttpSettings, create_app
from tests.helpers.encoder_model import build_encoder
from tests.helpers.models import CHATML, TOKEN, build_model, byte_token, chain
from tests.helpers.raw_http import served
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"const": "Oslo"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": CITY},
}
KEY = "sk-right"


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


class Service:
    """A server of some models, and clients of it."""

    def __init__(self, port: int, client: AsyncOpenAI) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.client = client

    async def blocking(self, ask: Callable[[OpenAI], Any], **options: Any) -> Any:
        """Return what somebody gets who blocks."""

        def run() -> Any:
            settings = {"api_key": KEY, "max_retries": 0, **options}
            with OpenAI(base_url=self.url, **settings) as client:
                return ask(client)

        return await anyio.to_thread.run_sync(run)


@asynccontextmanager
async def serving(models: dict[str, Supervisor], **settings: Any) -> AsyncIterator[Service]:
    app = create_app(models, settings=HttpSettings(**settings))
    async with AsyncExitStack() as entered:
        service = await entered.enter_async_context(served(app))
        assert service.port is not None
        url = f"http://127.0.0.1:{service.port}/v1"
        client = AsyncOpenAI(api_key=KEY, base_url=url, max_retries=0)
        await entered.enter_async_context(client)
        yield Service(service.port, client)


@asynccontextmanager
async def saying(
    options: dict[str, Any] | None = None, http: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, Told]]:
    async with scripted(options, **settings) as (supervisor, told):
        async with serving({"m": supervisor}, **(http or {})) as service:
            yield service, told


@asynccontextmanager
async def table_model(directory: Path) -> AsyncIterator[Service]:
    """Serve a tiny model of llama.cpp, whose answers follow grammars, and which says "hi" otherwise."""
    path = build_model(directory / "hi.gguf", chain(*map(byte_token, b"hi")), CHATML, context_tokens=1024)
    async with Supervisor(path, options={"n_ctx": 1024}) as supervisor, serving({"m": supervisor}) as service:
        yield service


# --- chat --------------------------------------------------------------------------------------------


async def test_a_chat_whole_and_streamed_blocking_and_not(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:
        whole = await service.client.chat.completions.create(model="m", messages=HI, temperature=0)
        assert whole.choices[0].message.content == "hi"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.object == "chat.completion"
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert whole._request_id is not None
        assert whole._request_id.startswith("req-")

        def read(client: OpenAI) -> tuple[str, Any]:
            chunks = list(
                client.chat.completions.create(
                    model="m", messages=HI, stream=True, stream_options={"include_usage": True}, temperature=0
                )
            )
            assert {chunk.id for chunk in chunks} == {chunks[0].id}
            assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return text, chunks[-1].usage

        text, usage = await service.blocking(read)
        assert text == "hi"
        assert usage.completion_tokens == whole.usage.completion_tokens


async def test_several_answers_seeds_stops_and_limits() -> None:
    async with saying({"mode": "random"}, slots=3) as (service, _):
        ask = service.client.chat.completions.create
        one = await ask(model="m", messages=HI, seed=7, max_tokens=8, temperature=1)
        again = await ask(model="m", messages=HI, seed=7, max_completion_tokens=8, temperature=1)
        other = await ask(model="m", messages=HI, seed=8, max_tokens=8, temperature=1)
        assert one.choices[0].message.content == again.choices[0].message.content
        assert one.choices[0].message.content != other.choices[0].message.content
        assert one.choices[0].finish_reason == "length"
        three = await ask(model="m", messages=HI, n=3, seed=7, max_tokens=8, temperature=1)
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert three.choices[0].message.content == one.choices[0].message.content
        assert len({choice.message.content for choice in three.choices}) == 3
    async with saying({"text": "one two three four"}) as (service, _):
        ask = service.client.chat.completions.create
        stopped = await ask(model="m", messages=HI, stop=[" three"])
        assert stopped.choices[0].message.content == "one two"
        assert stopped.choices[0].finish_reason == "stop"
        # Both are clients' ways to say: no limit.
        for unlimited in (-1, None):
            assert (await ask(model="m", messages=HI, max_tokens=unlimited)).choices[
                0
            ].finish_reason == "stop"


async def test_logprobs_bias_and_penalties(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:
        ask = service.client.chat.completions.create
        told = await ask(model="m", messages=HI, logprobs=True, top_logprobs=3, temperature=0)
        assert told.choices[0].logprobs is not None
        content = told.choices[0].logprobs.content
        assert content is not None
        assert "".join(each.token for each in content) == "hi"
        for each in content:
            assert len(each.top_logprobs) == 3
            assert each.top_logprobs[0].logprob == pytest.approx(each.logprob, abs=1e-6)
            assert all(-math.inf < top.logprob <= 0 for top in each.top_logprobs)
            assert bytes(each.bytes or []) == each.token.encode()
        chunks = [
            chunk
            async for chunk in await ask(
                model="m", messages=HI, logprobs=True, top_logprobs=3, temperature=0, stream=True
            )
        ]
        streamed = [
            each
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for each in choice.logprobs.content or []
        ]
        assert [each.token for each in streamed] == [each.token for each in content]
        # The model's first token is made impossible, and one of another letter likely.
        biased = await ask(
            model="m", messages=HI, temperature=0, max_tokens=1,
            logit_bias={str(byte_token(ord("h"))): -100, str(TOKEN["a"]): 100},
        )  # fmt: skip
        assert biased.choices[0].message.content == "a"
        penalised = await ask(
            model="m", messages=HI, temperature=0, frequency_penalty=0.5, presence_penalty=-0.5, top_p=0.9
        )
        assert penalised.choices[0].message.content


async def test_json_is_what_the_schema_says(tmp_path: Path) -> None:
    class Place(BaseModel):
        city: Literal["Oslo"]

    async with table_model(tmp_path) as service:
        parsed = await service.client.chat.completions.parse(model="m", messages=HI, response_format=Place)
        assert parsed.choices[0].message.parsed == Place(city="Oslo")
        loose = await service.client.chat.completions.create(
            model="m",
            messages=HI,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}},
        )
        assert json.loads(loose.choices[0].message.content or "") == {"city": "Oslo"}


async def test_tools_are_called_whole_and_streamed(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:
        ask = service.client.chat.completions.create
        called = await ask(model="m", messages=HI, tools=[WEATHER], tool_choice="required")
        (call,) = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        assert called.choices[0].finish_reason == "tool_calls"
        assert called.choices[0].message.content is None
        pieces: dict[int, list[str]] = {}
        reason = None
        async for chunk in await ask(
            model="m",
            messages=HI,
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            stream=True,
        ):
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.function is not None
                pieces.setdefault(piece.index, []).append(piece.function.arguments or "")
            reason = chunk.choices[0].finish_reason or reason
        assert {index: json.loads("".join(parts)) for index, parts in pieces.items()} == {0: {"city": "Oslo"}}
        assert reason == "tool_calls"
        # The answer to the call goes back to the model.
        answered = await ask(
            model="m",
            messages=[
                *HI,
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
                {"role": "tool", "tool_call_id": call.id, "content": "It snows."},
            ],
            tools=[WEATHER],
            tool_choice="none",
        )
        assert answered.choices[0].message.content == "hi"


# --- completions, embeddings, models -----------------------------------------------------------------


async def test_completions_of_one_and_of_several_prompts() -> None:
    async with saying({"mode": "echo"}, slots=4) as (service, _):
        ask = service.client.completions.create
        one = await ask(model="m", prompt="a b c")
        assert one.choices[0].text.split() == ["a", "b", "c"]
        assert one.object == "text_completion"
        several = await ask(model="m", prompt=["x y", "z"], n=2, echo=True)
        assert [choice.text.split() for choice in several.choices] == [
            ["x", "yx", "y"], ["x", "yx", "y"], ["zz"], ["zz"],
        ]  # fmt: skip
        assert several.usage is not None
        assert several.usage.prompt_tokens == 3
        text = ""
        async for chunk in await ask(model="m", prompt="a b c", stream=True, max_tokens=2):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
        assert (text.split(), reason) == (["a", "b"], "length")
        with pytest.raises(openai.BadRequestError, match="token ids"):
            await ask(model="m", prompt=[1, 2, 3])


async def test_embeddings_as_numbers_and_as_bytes(tmp_path: Path) -> None:
    async with Supervisor(build_encoder(tmp_path / "bert.gguf")) as supervisor, scripted() as (text, _):
        async with serving({"bert": supervisor, "m": text}) as service:
            # The client asks for base64 by itself, and decodes it.
            packed = await service.client.embeddings.create(model="bert", input=["abc", "xyz"])
            plain = await service.client.embeddings.create(
                model="bert", input=["abc", "xyz"], encoding_format="float"
            )
            for one, other in zip(packed.data, plain.data, strict=True):
                assert one.embedding == pytest.approx(other.embedding)
                assert math.fsum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-5)
            assert packed.usage.prompt_tokens == plain.usage.prompt_tokens > 0
            same = (await supervisor.embed("abc")).vectors[0]
            assert plain.data[0].embedding == pytest.approx(list(same))
            with pytest.raises(openai.BadRequestError, match="dimensions") as refused:
                await service.client.embeddings.create(model="bert", input="a", dimensions=7)
            assert refused.value.param == "dimensions"
            with pytest.raises(openai.BadRequestError, match="input") as refused:
                await service.client.embeddings.create(model="bert", input=["a", ""])
            assert refused.value.param == "input[1]"
            with pytest.raises(openai.BadRequestError, match="only makes embeddings"):
                await service.client.chat.completions.create(model="bert", messages=HI)


async def test_models_are_listed_and_found() -> None:
    async with saying() as (service, _):
        assert [model.id async for model in service.client.models.list()] == ["m"]
        assert (await service.client.models.retrieve("m")).owned_by == "infervisor"
        with pytest.raises(openai.NotFoundError):
            await service.client.models.retrieve("n")
        with pytest.raises(openai.NotFoundError, match="Served here: m"):
            await service.client.chat.completions.create(model="n", messages=HI)


# --- errors and leaving ------------------------------------------------------------------------------


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


# --- other clients -----------------------------------------------------------------------------------


async def test_the_client_of_hugging_face(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:

        def ask() -> tuple[str | None, str]:
            with InferenceClient(base_url=service.url, api_key=KEY) as client:
                whole = client.chat_completion(HI, model="m", temperature=0.0, max_tokens=10)
                pieces = client.chat_completion(HI, model="m", temperature=0.0, stream=True)
                text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
                return whole.choices[0].message.content, text

        assert await anyio.to_thread.run_sync(ask) == ("hi", "hi")


FETCH = """
const [url, leave] = process.argv.slice(1);
const abort = new AbortController();
const answer = await fetch(`${url}/chat/completions`, {
  method: "POST", signal: abort.signal, headers: { "Content-Type": "application/json" },
  body: JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream: true }),
});
let text = "";
try {
  for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
    text += part;
    if (leave && text.includes("w3")) abort.abort();
  }
} catch (error) {
  if (error.name !== "AbortError") throw error;
}
console.log(JSON.stringify(text));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
async def test_fetch_of_a_browser_s_language() -> None:
    def run(*arguments: str) -> str:
        command = ["node", "--input-type=module", "-e", FETCH, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        told: str = json.loads(done.stdout)
        return told

    async with saying({"text": "one two"}) as (service, _):
        text = await anyio.to_thread.run_sync(run, service.url)
        assert text.endswith("data: [DONE]\n\n")
        assert '"content":" two"' in text
    async with saying({"pace_s": 0.005}) as (service, told):
        await anyio.to_thread.run_sync(run, service.url, "leave")
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
