"""Real answers and events of a real model against what the OpenAPI document says of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.applications import Starlette

from infervisor import Supervisor
from infervisor.supervisor.http_api import create_app
from infervisor.supervisor.http_api.endpoints import output_schemas as out
from tests.helpers.asgi_call import ask
from tests.helpers.models import CHATML, build_model, byte_token, chain

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"const": "Oslo"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALLING = {"tools": [WEATHER], "tool_choice": "required"}
WHOLE_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def service(directory: Path) -> AsyncIterator[Starlette]:
    """Serve a tiny model of llama.cpp, whose answers follow grammars, and which says "hi" otherwise."""
    path = build_model(directory / "hi.gguf", chain(*map(byte_token, b"hi")), CHATML, context_tokens=1024)
    async with Supervisor(path, options={"n_ctx": 1024}) as supervisor:
        yield create_app({"m": supervisor})


async def test_whole_answers_are_what_the_document_says(tmp_path: Path) -> None:
    async with service(tmp_path) as app:
        for more in ({}, {"logprobs": True, "top_logprobs": 2, "n": 2}, CALLING):
            chat = out.ChatCompletion.model_validate((await ask(app, CHAT, {**HI, **more})).json)
            assert len(chat.x_infervisor) == len(chat.choices)
        assert chat.choices[0].message.tool_calls[0].function.name == "weather"
        whole = await ask(
            app, COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 2, "temperature": 0, "max_tokens": 3}
        )
        completion = out.Completion.model_validate(whole.json)
        assert all(choice.logprobs and choice.logprobs.tokens for choice in completion.choices)
        response = out.ResponseObject.model_validate((await ask(app, RESPONSES, {"input": "hi"})).json)
        assert response.status == "completed"
        wrong = out.ErrorBody.model_validate((await ask(app, CHAT, {"messages": []})).json)
        assert wrong.error.param == "messages"


async def test_events_are_what_the_document_says(tmp_path: Path) -> None:
    async with service(tmp_path) as app:
        for more in ({}, {"logprobs": True, "top_logprobs": 2, "n": 2}, CALLING):
            streamed = await ask(app, CHAT, {**HI, **WHOLE_USAGE, **more})
            chats = [out.ChatCompletionChunk.model_validate(event) for event in streamed.events[:-1]]
            assert streamed.events[-1] == "[DONE]"
            assert chats[-1].usage is not None
            assert any(chat.x_infervisor for chat in chats)
        assert any(choice.delta.tool_calls for chat in chats for choice in chat.choices)
        body = {"prompt": "a", "logprobs": 2, "echo": False, "temperature": 0, "max_tokens": 3, **WHOLE_USAGE}
        streamed = await ask(app, COMPLETIONS, body)
        pieces = [out.CompletionChunk.model_validate(event) for event in streamed.events[:-1]]
        assert any(choice.logprobs for piece in pieces for choice in piece.choices)
        streamed = await ask(app, RESPONSES, {"input": "hi", "stream": True})
        told = [out.ResponseEvent.model_validate(event) for event in streamed.events]
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert told[-1].type == "response.completed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"finish_reason": "other"},
        {"index": "0"},
        {"delta": {"content": None}},
        {"logprobs": {"content": [{}]}},
    ],
)
def test_what_the_document_does_not_say_is_seen(wrong: dict[str, Any]) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    out.ChatCompletionChunk.model_validate({**chunk, "choices": [choice]})
    with pytest.raises(ValidationError):
        out.ChatCompletionChunk.model_validate({**chunk, "choices": [{**choice, **wrong}]})
