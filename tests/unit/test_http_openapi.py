"""The OpenAPI document by itself: it can be followed, it says all, and it allows no less than it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.completion_input import CompletionRequest
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, parse
from infervisor.supervisor.http_api.errors import KINDS, HttpRefused
from infervisor.supervisor.http_api.openapi import OPERATIONS, document
from infervisor.supervisor.http_api.request_headers import DEADLINE_HEADERS
from infervisor.supervisor.http_api.settings import HttpSettings

DOCUMENT = document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
HI = {"role": "user", "content": "hi"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, told in methods.items():
            yield method, path, told


def fits(name: str, value: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def is_taken(model: type[InputModel], body: dict[str, Any]) -> bool:
    try:
        parse(model, json.dumps(body).encode(), HttpSettings())
    except HttpRefused:
        return False
    return True


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["description"]


def test_every_reference_leads_somewhere_and_nothing_is_left_over() -> None:
    named = {part.split('"')[0] for part in json.dumps(DOCUMENT).split("#/components/schemas/")[1:]}
    assert named == set(SCHEMAS)


def test_bodies_and_answers_do_not_share_a_name() -> None:
    inputs = {operation.body for operation in OPERATIONS} - {None}
    answers = {each for operation in OPERATIONS for each in (operation.answer, operation.event)} - {None}
    defined: list[str] = []
    for models in (inputs, answers):
        names = {model.__name__ for model in models if model}
        names |= {name for model in models if model for name in model.model_json_schema().get("$defs", {})}
        defined += names
    assert len(defined) == len(set(defined))


def test_operations_have_ids_answers_and_the_form_of_errors() -> None:
    ids = [told["operationId"] for _, _, told in operations()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)
    for method, path, told in operations():
        statuses = set(told["responses"])
        assert statuses & {"200", "202"}, path
        assert {"400", "401", "403", "413", "500"} <= statuses
        for answer in told["responses"].values():
            assert answer["headers"]["X-Request-Id"]["required"]
            assert answer["content"]
        assert ("requestBody" in told) == (method == "post" and not path.endswith("/cancel"))


def test_who_asks_a_model_can_meet_every_error_and_say_how_it_is_to_run() -> None:
    headers = {*DEADLINE_HEADERS, "x-infervisor-priority", "x-infervisor-on-crash", "x-infervisor-report"}
    asking = [told for _, path, told in operations() if path.startswith("/v1/") and "requestBody" in told]
    assert len(asking) == 4
    for told in asking:
        for code, kind in KINDS.items():
            answer = told["responses"][str(kind.status)]
            assert code in answer["description"].split(", ")
            assert kind.retry_after_s is None or "Retry-After" in answer["headers"]
        assert headers < {each["name"] for each in told["parameters"] if each["in"] == "header"}


def test_streams_say_what_their_events_hold() -> None:
    streaming = {
        path: json.dumps(content["text/event-stream"]["schema"]["properties"]["data"])
        for _, path, told in operations()
        for answer in told["responses"].values()
        if "text/event-stream" in (content := answer["content"])
    }
    assert set(streaming) == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    assert "ChatCompletionChunk" in streaming["/v1/chat/completions"]
    assert "CompletionChunk" in streaming["/v1/completions"]
    assert "ResponseEvent" in streaming["/v1/responses"]
    assert {path for path, told in streaming.items() if "[DONE]" in told} == set(streaming) - {
        "/v1/responses"
    }


def test_only_health_needs_no_key() -> None:
    is_open = {path for _, path, told in operations() if told["security"] == []}
    assert is_open == {"/health/live", "/health/ready"}
    assert DOCUMENT["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": -1}, {"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": -2},
        {"max_tokens": 1.5}, {"max_tokens": "5"}, {"max_tokens": 1 << 63}, {"temperature": 0}, {"temperature": -1},
        {"seed": (1 << 32) - 1}, {"seed": 1 << 32}, {"stop": "a"}, {"stop": ["a"] * 64}, {"stop": ["a"] * 65},
        {"stop": 1}, {"n": 128}, {"n": 129}, {"n": 0}, {"top_k": -1}, {"top_k": -2}, {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": 101}}, {"logit_bias": {"1": None}}, {"response_format": {"type": "text"}},
        {"response_format": {"type": "poem"}}, {"user": "u", "store": True, "metadata": {"a": 1}}, {"nonsense": 1},
        {"stream_options": {"include_usage": True}}, {"stream_options": {"nonsense": True}}, {"stream": "yes"},
        {"repeat_penalty": 1}, {"repeat_penalty": 0}, {"json_schema": {}}, {"json_schema": 1}, {"min_p": 1.1},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("model", "least"), [(ChatRequest, {"messages": [HI]}), (CompletionRequest, {"prompt": "hi"})]
)
def test_what_the_document_allows_is_what_is_taken(
    model: type[InputModel], least: dict[str, Any], more: dict[str, Any]
) -> None:
    body = {**least, **more}
    assert fits(model.__name__, body) == is_taken(model, body)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"messages": []}, {"messages": [HI] * 2}, {"messages": "hi"}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "", "content": "a"}]}, {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{**HI, "of": "the template"}]},
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f f"}}]},
        {"messages": [HI], "tools": [{"type": "custom"}]},
        {"messages": [HI], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [HI], "tool_choice": "sometimes"},
        {"messages": [HI], "modalities": ["text"]}, {"messages": [HI], "modalities": ["audio"]},
        {"messages": [HI], "modalities": []}, {"messages": [HI], "modalities": ["text", "text"]},
        {"messages": [HI], "audio": None, "functions": None}, {"messages": [HI], "audio": {}},
        {"messages": [HI], "reasoning_effort": "none"}, {"messages": [HI], "reasoning_effort": "high"},
    ],
)  # fmt: skip
def test_what_the_document_allows_of_a_chat_is_what_is_taken(body: dict[str, Any]) -> None:
    assert fits("ChatRequest", body) == is_taken(ChatRequest, body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]}, {"prompt": []}, {"prompt": ["a"] * 129}, {"prompt": [1, 2]}, {"prompt": None},
        {"prompt": "a", "suffix": ""}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "logprobs": 20},
        {"prompt": "a", "logprobs": 21}, {"prompt": "a", "echo": True},
    ],
)  # fmt: skip
def test_what_the_document_allows_of_a_completion_is_what_is_taken(body: dict[str, Any]) -> None:
    assert fits("CompletionRequest", body) == is_taken(CompletionRequest, body)
