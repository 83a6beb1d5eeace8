"""OpenAI's own client against a real server and real workers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from infervisor import Supervisor
from tests.helpers.encoder_model import build_encoder
from tests.helpers.models import TOKEN, byte_token
from tests.helpers.openai_service import HI, saying, serving, table_model
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

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


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


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


async def test_the_answer_s_head_names_its_request(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:
        chat = service.client.chat.completions
        raw = await chat.with_raw_response.create(model="m", messages=HI, temperature=0)
        assert raw.parse().choices[0].message.content == "hi"
        assert raw.request_id is not None
        assert raw.request_id == raw.headers["x-request-id"]
        async with chat.with_streaming_response.create(model="m", messages=HI, stream=True) as streaming:
            assert streaming.request_id not in (None, raw.request_id)
            assert [line async for line in streaming.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.create(model="m", messages=[])
        assert refused.value.request_id is not None
        assert refused.value.param == "messages"


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
        # Any JSON object: this model would say "hi" and end, which isn't one.
        free = await service.client.chat.completions.create(
            model="m", messages=HI, temperature=0, max_tokens=40, response_format={"type": "json_object"}
        )
        assert (free.choices[0].message.content or "").lstrip().startswith("{")
        # The client's own reader of streams puts the same together from the pieces.
        async with service.client.chat.completions.stream(
            model="m", messages=HI, response_format=Place
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"content.delta", "content.done"} <= kinds
        assert final.choices[0].message.parsed == Place(city="Oslo")


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

        class Weather(BaseModel):
            """Where."""

            city: Literal["Oslo"]

        async with service.client.chat.completions.stream(
            model="m",
            messages=HI,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
        ) as stream:
            final = await stream.get_final_completion()
        (read,) = final.choices[0].message.tool_calls or []
        assert read.function.parsed_arguments == Weather(city="Oslo")
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
