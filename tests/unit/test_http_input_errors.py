"""Bodies that are wrong, without a server: each is refused with its field and a reason, and in little time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.completion_input import CompletionRequest
from infervisor.supervisor.http_api.endpoints.embedding_input import EmbeddingsRequest
from infervisor.supervisor.http_api.endpoints.input_model import (
    MAX_IGNORED,
    MAX_MISTAKES,
    InputModel,
    field_of,
    parse,
)
from infervisor.supervisor.http_api.endpoints.json_body import MAX_DEPTH, MAX_VALUES, read_json
from infervisor.supervisor.http_api.endpoints.responses_input import ResponseRequest
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.settings import HttpSettings

HI = {"role": "user", "content": "hi"}
STRICT, LENIENT = HttpSettings(), HttpSettings(unknown_fields="ignore")


def refused(model: type[InputModel], body: Any, settings: HttpSettings = STRICT) -> HttpRefused:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(HttpRefused) as caught:
        parse(model, raw, settings).asked()  # type: ignore[attr-defined]
    return caught.value


def refusal_of(do: Callable[[], Any]) -> HttpRefused | None:
    try:
        do()
    except HttpRefused as error:
        return error
    return None


def wrong_chat(**body: Any) -> HttpRefused:
    error = refused(ChatRequest, {"messages": [HI], **body})
    assert error.code == "invalid_request"
    return error


# --- JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "empty"),
        (b" \r\n\t ", "empty"),
        (b"[]", "object, not a list"),
        (b"null", "object, not null"),
        (b"true", "object, not true or false"),
        (b"1.5", "object, not a number"),
        (b'"x"', "object, not a string"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1,\n}', "line 2, column 1"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1, "a": 1}', "'a' is there twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' is there twice"),
        (b'{"a": "\xff"}', "byte FF at offset 7"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ('{"a": 1}'.encode("utf-16"), "isn't UTF-8"),
        (b'{"a": "\\ud83d"}', r"\ud83d"),
        (b'{"a": "\\ude00\\ud83d"}', r"\ude00"),
        (b'{"\\udc00": 1}', r"\udc00"),
        (b'{"a": ' + b"7" * 5000 + b"}", "thousands of digits"),
        (b'{"a":' * 100_000, "nested more than 200 deep"),
        (b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH, "nested more than 200 deep"),
    ],
)  # fmt: skip
def test_what_is_no_object_of_json_is_refused_with_a_reason(raw: bytes, said: str) -> None:
    with pytest.raises(HttpRefused) as caught:
        read_json(raw)
    assert caught.value.code == "invalid_json"
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")


def test_json_up_to_the_limits_is_taken() -> None:
    deepest = b'{"a":' * (MAX_DEPTH - 1) + b"{}" + b"}" * (MAX_DEPTH - 1)
    assert read_json(deepest)
    assert len(read_json(json.dumps({"a": [0] * (MAX_VALUES - 1)}).encode())["a"]) == MAX_VALUES - 1
    with pytest.raises(HttpRefused, match="more than 100000 values"):
        read_json(json.dumps({"a": [0] * MAX_VALUES}).encode())


def test_whole_characters_are_taken_however_they_are_written() -> None:
    assert read_json(b'{"a": "\\ud83d\\ude00 \\\\ud83d"}') == {"a": "\U0001f600 \\ud83d"}
    assert read_json('{"a": "\U0001f600"}'.encode()) == {"a": "\U0001f600"}


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_are_refused(raw: bytes) -> None:
    error = refusal_of(lambda: read_json(raw))
    assert error is None or error.code == "invalid_json"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), st.sampled_from([ChatRequest, CompletionRequest, EmbeddingsRequest, ResponseRequest]))
def test_any_values_are_taken_or_refused_with_a_path(data: st.DataObject, model: type[InputModel]) -> None:
    names = st.sampled_from(list(model.model_fields)) | st.text(max_size=8)
    body = data.draw(st.dictionaries(names, VALUES, max_size=4))
    settings = data.draw(st.sampled_from([STRICT, LENIENT]))
    error = refusal_of(lambda: parse(model, json.dumps(body).encode(), settings))
    # Strings may hold half characters.
    if error is not None and error.code != "invalid_json":
        assert error.code == "invalid_request"
        assert error.field is not None
        assert error.field in str(error) or repr(error.field) in str(error)


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"messages": "x"}, "messages", "messages must be a list, not \"x\"."),
        ({"messages": []}, "messages", "messages is too short"),
        ({"messages": [7]}, "messages[0]", "messages[0] must be an object, not 7."),
        ({"messages": [HI, {"content": "x"}]}, "messages[1].role", "The field messages[1].role is missing."),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "must be a string, not 7."),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "a string or a list, not 7."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
         "messages[0].content[0].text", "must be a string, not 7."),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]", "Send text."),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]},
         "messages[0].tool_calls[0].function", "is missing."),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls", "be a list, not 7."),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "Send role tool"),
        ({"messages": [{"role": "assistant", "function_call": {}}]},
         "messages[0].function_call", "Send tool_calls."),
        ({"max_tokens": "5"}, "max_tokens", "must be a whole number, not \"5\"."),
        ({"max_tokens": 2.5}, "max_tokens", "must be a whole number, not 2.5."),
        ({"max_tokens": True}, "max_tokens", "must be a whole number, not true."),
        ({"max_tokens": 0}, "max_tokens", "Send 1 or more, or -1 or null for no limit."),
        ({"max_completion_tokens": -2}, "max_completion_tokens", "Send 1 or more"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send only one"),
        ({"temperature": -1}, "temperature", "must be at least 0, not -1."),
        ({"seed": 1 << 32}, "seed", "must be below 4294967296, not 4294967296."),
        ({"n": 1000}, "n", "must be at most 128, not 1000."),
        ({"stop": 7}, "stop", "must be a string or a list, not 7."),
        ({"stop": ["a", None]}, "stop[1]", "must be a string, not null."),
        ({"logit_bias": {"a": 1}}, "logit_bias", "ids of tokens"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "ids of tokens"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number, not \"x\"."),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "Only tools of type function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]},
         "tools[0].function.parametres", "There is no field"),
        ({"tool_choice": "sometimes"}, "tool_choice", "Send none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "is missing."),
        ({"response_format": {"type": "poem"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"modalities": ["text", "audio"]}, "modalities", "Answers are text here"),
        ({"functions": []}, "functions", "Send tools"),
        ({"function_call": "auto"}, "function_call", "Send tools"),
        ({"audio": {}}, "audio", "leave it out"),
        ({"prediction": {}}, "prediction", "leave it out"),
        ({"web_search_options": {}}, "web_search_options", "Offer a function"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "leave it out"),
        ({"temprature": 1}, "temprature", "Did you mean temperature?"),
        ({"max_token": 5}, "max_token", "Did you mean max_tokens?"),
        ({"function_cal": 1}, "function_cal", "Leave it out."),
        ({"nonsense": 1}, "nonsense", "Leave it out."),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "There is no field"),
        ({"top_p": "x" * 1000}, "top_p", "x…."),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_field(body: dict[str, Any], field: str, said: str) -> None:
    error = wrong_chat(**body)
    assert error.field == field
    assert said in str(error)
    assert len(str(error)) < 250


def test_names_that_a_client_chose_make_no_endless_message() -> None:
    for body in ({"x" * 100_000: 1}, {"logit_bias": {"9" * 100_000: "x"}}):
        error = wrong_chat(**body)
        assert len(str(error)) + len(str(error.field)) < 600


def test_a_number_beyond_floats_is_none() -> None:
    raw = b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": -1e999}}'
    assert refused(ChatRequest, raw).field == "logit_bias.1"


def test_very_many_mistakes_are_not_gone_through() -> None:
    many = MAX_MISTAKES + 1
    for body in (
        {"messages": [HI], **{f"a{number}": 1 for number in range(many)}},
        {"messages": [{"role": "user", "content": [1] * many}]},
        {"messages": [HI], "logit_bias": {str(number): "x" for number in range(many)}},
    ):
        for settings in (STRICT, LENIENT):
            error = refused(ChatRequest, body, settings)
            assert error.field is None
            assert "places" in str(error)


def test_fields_of_the_library_are_named_as_in_the_body() -> None:
    assert field_of("texts[3]") == "input[3]"
    assert field_of("texts") == "input"
    assert field_of("messages[0].texts") == "messages[0].texts"
    assert field_of(None) is None


# --- unknown fields that are ignored -----------------------------------------------------------------


def test_unknown_fields_can_be_ignored_and_are_told() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "extra": 1}]}],
        "tools": [{"type": "function", "cached": True, "function": {"name": "f", "x": 1}}],
        "mirostat": 2,
    }
    asked = parse(ChatRequest, json.dumps(body).encode(), LENIENT).asked()
    assert sorted(asked.warnings) == [
        "messages[0].content[0].extra",
        "mirostat",
        "tools[0].cached",
        "tools[0].function.x",
    ]
    assert asked.options["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert asked.messages == ({"role": "user", "content": [{"type": "text", "text": "a"}]},)
    # What can't be served isn't unknown.
    assert refused(ChatRequest, {"messages": [HI], "audio": {}, "mirostat": 2}, LENIENT).field == "audio"


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "message", "role": "user", "content": "x", "message": "x"}]},
        {"input": [{"type": "message", "role": "user", "content": "x", "message": {}, "x": 1}]},
        {"input": [{"type": "message", "role": "user", "content": "x", "message": {"x": 1}, "x": 1}]},
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "json_schema": {}}}},
        {"input": "x", "tool_choice": {"type": "function", "name": "f", "function": {"name": "f"}},
         "tools": [{"type": "function", "name": "f"}]},
    ],
)  # fmt: skip
def test_an_unknown_field_may_have_the_name_of_its_own_type(body: dict[str, Any]) -> None:
    made = parse(ResponseRequest, json.dumps(body).encode(), LENIENT)
    assert made.ignored
    assert parse(ResponseRequest, json.dumps(made.raw).encode(), STRICT).ignored == ()
    assert refused(ResponseRequest, body).field in made.ignored


def test_names_of_ignored_fields_fit_a_header() -> None:
    names = ["a\r\nSet-Cookie: x", "a\x00", "ü", *(f"a{number}" for number in range(100))]
    made = parse(ChatRequest, json.dumps({"messages": [HI], **dict.fromkeys(names, 1)}).encode(), LENIENT)
    assert made.ignored == tuple(f"a{number}" for number in range(MAX_IGNORED))
