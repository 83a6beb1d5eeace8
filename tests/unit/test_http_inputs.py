"""Bodies of chats, completions and embeddings without a server: what they come down to, and what is not served."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_message_param
from openai.types.chat import completion_create_params as chat_create_params

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.chat_messages import Message
from infervisor.supervisor.http_api.endpoints.completion_input import CompletionRequest
from infervisor.supervisor.http_api.endpoints.embedding_input import EmbeddingsRequest
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, parse
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.settings import HttpSettings

HI = {"role": "user", "content": "hi"}
STRICT, LENIENT = HttpSettings(), HttpSettings(unknown_fields="ignore")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling as OpenAI's reference has it where nothing is said."""


def chat(**body: Any) -> Asked:
    return parse(ChatRequest, json.dumps({"messages": [HI], **body}).encode(), STRICT).asked()


def completion(**body: Any) -> Asked:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **body}).encode(), STRICT).asked()


def embeddings(**body: Any) -> EmbeddingsRequest:
    return parse(EmbeddingsRequest, json.dumps(body).encode(), STRICT)


def refused(model: type[InputModel], body: Any, settings: HttpSettings = STRICT) -> HttpRefused:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(HttpRefused) as caught:
        parse(model, raw, settings).asked()  # type: ignore[attr-defined]
    return caught.value


# --- what bodies come down to ------------------------------------------------------------------------


def test_what_is_left_out_means_what_openai_says() -> None:
    assert chat() == Asked(model=None, messages=(HI,), options={**NEUTRAL, "max_tokens": None})
    assert completion() == Asked(model=None, prompts=("hi",), options={**NEUTRAL, "max_tokens": 16})
    nothing = {name: None for name in ChatRequest.model_fields if name != "messages"}
    assert chat(**nothing) == chat()


@pytest.mark.parametrize("limit", [-1, None])
def test_there_are_two_ways_to_say_no_limit(limit: int | None) -> None:
    assert chat(max_tokens=limit).options["max_tokens"] is None
    assert completion(max_tokens=limit).options["max_tokens"] is None


def test_the_limit_goes_by_two_names() -> None:
    for body in (
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ):
        assert chat(**body).options["max_tokens"] == 5


def test_all_that_says_how_tokens_are_chosen_goes_on() -> None:
    options = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.1,
        "repeat_last_n": 32, "frequency_penalty": 0.5, "presence_penalty": -0.5, "stop": ["a", "b"], "seed": 3,
        "grammar": "root ::= \"a\"", "ignore_eos": True, "max_tokens": 9,
    }  # fmt: skip
    assert chat(**options).options == options
    assert completion(**options).options == options
    assert chat(logit_bias={"7": -100, "0": 1.5}).options["logit_bias"] == {7: -100, 0: 1.5}
    assert chat(top_k=-1).options["top_k"] == 0
    assert chat(json_schema={"type": "object"}).options["json_schema"] == {"type": "object"}


def test_streams_and_several_answers() -> None:
    asked = chat(model="m", n=3, stream=True, stream_options={"include_usage": True})
    assert (asked.model, asked.n, asked.stream, asked.include_usage) == ("m", 3, True, True)
    assert not chat(stream=True).include_usage


def test_messages_reach_the_template_in_its_words() -> None:
    messages = [
        {"role": "developer", "content": "rules", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": "never", "annotations": []},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        # Some models have roles of their own.
        {"role": "ipython", "content": "4"},
    ]  # fmt: skip
    assert chat(messages=messages).messages == (
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        {"role": "assistant", "content": "never", "annotations": []},
        messages[4],
        messages[5],
        messages[6],
    )


def test_tools_and_the_form_of_the_answer_go_on_as_they_are() -> None:
    body = {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
        "logprobs": True,
        "top_logprobs": 4,
    }
    options = chat(**body).options
    assert {name: options[name] for name in body} == body


def test_prompts_their_echo_and_their_logprobs() -> None:
    asked = completion(prompt=["a", "b"], echo=True, n=2, best_of=2, suffix="", logprobs=None)
    assert (asked.prompts, asked.echo, asked.n) == (("a", "b"), True, 2)
    assert completion(logprobs=0).options["logprobs"] is True
    assert completion(logprobs=5).options["top_logprobs"] == 5


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"prompt": [1, 2]}, "prompt", "Send their text"),
        ({"prompt": [[1, 2]]}, "prompt", "Send their text"),
        ({"prompt": ["a", 2]}, "prompt[1]", "must be a string, not 2."),
        ({"prompt": []}, "prompt", "is too short"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": 7}, "prompt", "Send a text"),
        ({"prompt": None}, "prompt", "Send a text"),
        ({"suffix": "x"}, "suffix", "isn't filled in"),
        ({"best_of": 2}, "best_of", "choose"),
        ({"echo": True, "logprobs": 1}, "echo", "leave one"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"messages": [HI]}, "messages", "There is no field"),
    ],
)
def test_completions_that_can_not_be_served(body: dict[str, Any], field: str, said: str) -> None:
    error = refused(CompletionRequest, {"prompt": "hi", **body})
    assert error.field == field
    assert said in str(error)


def test_texts_to_embed() -> None:
    assert embeddings(input="a").texts() == ["a"]
    made = embeddings(input=["a", "b"], model="m", encoding_format="base64", dimensions=4, user="u")
    assert (made.texts(), made.encoding_format, made.dimensions) == (["a", "b"], "base64", 4)
    for body, field in (
        ({"input": [1, 2]}, "input"), ({"input": [[1], [2]]}, "input"), ({"input": []}, "input"),
        ({"input": "a", "encoding_format": "png"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": ["a"] * 2049}, "input"), ({"input": ["a", None]}, "input[1]"), ({}, "input"),
    ):  # fmt: skip
        with pytest.raises(HttpRefused) as caught:
            embeddings(**body)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingsRequest, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_openai_client_is_known(model: type[InputModel], theirs: Any) -> None:
    assert set(typing.get_type_hints(theirs)) <= set(model.model_fields)


@pytest.mark.parametrize("theirs", typing.get_args(chat_completion_message_param.ChatCompletionMessageParam))
def test_every_field_of_a_message_of_the_openai_client_is_known(theirs: Any) -> None:
    assert set(typing.get_type_hints(theirs)) <= set(Message.model_fields)
