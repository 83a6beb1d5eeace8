"""/v1/responses without a server: what bodies come down to, and the events that answers become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from infervisor import Answer, Chunk, EndReason, Overloaded, Report, TokenLogprob, ToolCall, TopLogprob, Usage
from infervisor.protocol.timeline import Timeline
from infervisor.supervisor.http_api.endpoints.input_model import parse
from infervisor.supervisor.http_api.endpoints.responses_input import ResponseAsked, ResponseRequest
from infervisor.supervisor.http_api.endpoints.responses_writer import ResponsesWriter
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.settings import HttpSettings
from tests.helpers.responses_types import checked_events, checked_response

S = 1_000_000_000
HEAD = {"id": "resp-7", "created": 1000, "model": "m", "system_fingerprint": None}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = ToolCall("abcdefgh0", "weather", '{"place": "Oslo"}')


def asked(**body: Any) -> ResponseAsked:
    return parse(ResponseRequest, json.dumps(body).encode(), HttpSettings()).asked()


def refused(**body: Any) -> HttpRefused:
    with pytest.raises(HttpRefused) as caught:
        asked(**body)
    assert caught.value.code == "invalid_request"
    return caught.value


# --- input -----------------------------------------------------------------------------------------


def test_text_is_a_message_of_the_user_and_instructions_come_before_it():
    given = asked(model="m", input="hello", instructions="be short")
    assert given.model == "m"
    assert given.messages == (
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
    )


def test_items_become_messages():
    given = asked(
        input=[
            {"role": "developer", "content": "rules"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "d"},
                ],
            },
            {"type": "message", "role": "user", "content": "e", "status": "completed"},
        ]
    )
    assert given.messages == (
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
    )


def test_calls_join_the_message_before_them_and_results_have_the_function_s_name():
    call = {
        "type": "function_call",
        "name": "weather",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    result = {"type": "function_call_output", "output": "snow"}
    given = asked(
        input=[
            {"role": "user", "content": "?"},
            {**call, "call_id": "a"},
            {**call, "call_id": "b"},
            {**result, "call_id": "a"},
            {**result, "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "so"},
            {**call, "call_id": "c"},
            {**result, "call_id": "unknown"},
        ]
    )

    def in_chat(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}

    assert given.messages == (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [in_chat("a"), in_chat("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "snow", "name": "weather"},
        {"role": "tool", "tool_call_id": "b", "content": "rain", "name": "weather"},
        {"role": "assistant", "content": "so", "tool_calls": [in_chat("c")]},
        {"role": "tool", "tool_call_id": "unknown", "content": "snow"},
    )


def test_tools_and_formats_take_the_form_that_they_have_in_a_chat():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    given = asked(
        input="?",
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert given.options["tools"] == [{"type": "function", "function": function}]
    assert given.options["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert given.options["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert list(given.options["response_format"]["json_schema"]["schema"]["properties"]) == ["b", "a"]
    assert asked(input="?", text={"format": {"type": "json_object"}}).options["response_format"] == {
        "type": "json_object"
    }
    assert asked(input="?", text={"format": {"type": "text"}}).options["response_format"] is None


def test_numbers_reach_the_library_and_what_is_not_said_means_what_openai_says():
    given = asked(input="?", max_output_tokens=5, temperature=0.5, top_p=0.25, top_logprobs=3, stream=True)
    assert given.stream
    for name, value in (
        ("max_tokens", 5), ("temperature", 0.5), ("top_p", 0.25), ("logprobs", True), ("top_logprobs", 3),
    ):  # fmt: skip
        assert given.options[name] == value
    plain = asked(input="?").options
    assert (plain["temperature"], plain["top_p"], plain["logprobs"]) == (1.0, 1.0, False)
    assert (plain["top_k"], plain["min_p"]) == (0, 0.0)
    assert asked(input="?", include=["message.output_text.logprobs"]).options["logprobs"]
    assert not asked(input="?", include=["reasoning.encrypted_content"]).options["logprobs"]


def test_what_changes_nothing_here_is_accepted():
    given = asked(
        input="?", store=True, parallel_tool_calls=False, user="u", metadata={"k": "v"}, background=False,
        truncation="disabled", previous_response_id=None, conversation=None, prompt=None, service_tier="auto",
        reasoning={"effort": None, "summary": None}, text={"verbosity": "medium"}, safety_identifier="s",
        prompt_cache_key="p", max_tool_calls=3, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert given.repeated["metadata"] == {"k": "v"}
    assert given.repeated["user"] == "u"


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items"),
        ({"conversation": "conv_1"}, "conversation", "send their items"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "send their items"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send their text"),
        ({"background": True}, "background", "stream this one"),
        ({"truncation": "auto"}, "truncation", "leave out items"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "leave it out"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "leave it out"),
        ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
        ({"context_management": []}, "context_management", "as much as"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "no built-in tools"),
        ({"tools": [FUNCTION, {"type": "mcp", "server_label": "s"}]}, "tools[1]", "no built-in tools"),
        ({"tool_choice": "any"}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "send only those"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", ""),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", ""),
        ({"text": {"format": {"type": "xml"}}}, "text.format", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"max_output_tokens": "5"}, "max_output_tokens", ""),
        ({"temperature": 2.5}, "temperature", ""),
        ({"top_logprobs": 21}, "top_logprobs", ""),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", ""),
        ({"input": []}, "input", ""),
        ({"input": 5}, "input", "a list of items"),
        ({"input": ["hello"]}, "input[0]", "an object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input[0]", "Leave out others"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "Send text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", ""),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ""),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", ""),
        ({"imput": "x"}, "imput", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_field_and_the_next_step(
    body: dict[str, Any], field: str, says: str
):
    error = refused(**{"input": "hello", **body})
    assert error.field == field
    assert says in str(error)


def test_unknown_fields_can_be_left_out():
    body = {"input": [{"role": "user", "content": "hello", "mood": "glad"}], "colour": 1}
    lenient = HttpSettings(unknown_fields="ignore")
    given = parse(ResponseRequest, json.dumps(body).encode(), lenient).asked()
    assert given.messages == ({"role": "user", "content": "hello"},)
    assert set(given.warnings) == {"input[0].mood", "colour"}


def test_input_is_needed():
    assert refused(model="m").field == "input"


def test_fields_are_named_as_the_body_has_them():
    given = asked(
        instructions="i",
        input=[
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "user", "content": "b"},
        ],
    )
    for theirs, ours in (
        ("messages[0].content", "instructions"), ("messages[1].content", "input[0]"), ("messages[2]", "input[2]"),
        ("messages", "input"), ("max_tokens", "max_output_tokens"), ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"), ("tools[2].function.name", "tools[2].name"),
        ("tools[2]", "tools[2]"), ("top_logprobs", "top_logprobs"), ("logprobs", "include"),
        ("temperature", "temperature"), (None, None), ("prompt", "input"), ("json_schema", "text.format"),
    ):  # fmt: skip
        assert given.field_of(theirs) == ours


# --- answers ---------------------------------------------------------------------------------------


@dataclass
class Ended:
    """What the writer looks at in a stream that has ended."""

    report: Report

    @property
    def end_reason(self) -> EndReason | None:
        return self.report.end_reason


def ended(reason: EndReason = EndReason.STOP) -> Any:
    timeline = Timeline(queued_ns=5 * S, ended_ns=8 * S, released_ns=8 * S)
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3)
    return Ended(Report(1, reason, timeline, usage, None, 0, 32, 7))


def logprob(text: str) -> TokenLogprob:
    other = TopLogprob(2, b"\xff", -3.0)
    return TokenLogprob(1, text.encode(), -0.5, (other,))


def chunk(text: str, *calls: ToolCall, logprobs: tuple[TokenLogprob, ...] = ()) -> Chunk:
    return Chunk(text, 0, (1,), 0, logprobs, calls)


def writer(**body: Any) -> ResponsesWriter:
    return ResponsesWriter(HEAD, asked(**{"input": "hello", **body}).repeated)


def streamed(
    *chunks: Chunk, reason: EndReason = EndReason.STOP, report: Any = None, **body: Any
) -> list[Any]:
    """Return the events of an answer, in the order in which the exchange asks for them."""
    writing = writer(**body)
    stream = ended(reason)
    pieces = [writing.chunk(0, each) for each in chunks]
    pieces = [writing.begin(), *pieces, writing.end(0, stream, None), writing.done([stream], report)]
    return checked_events(b"".join(pieces))


def kinds(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


OPENED = ["created", "in_progress"]
MESSAGE_BEGUN = ["output_item.added", "content_part.added"]
MESSAGE_ENDED = ["output_text.done", "content_part.done", "output_item.done"]
CALLED = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
]  # fmt: skip


def test_text_comes_as_the_reference_has_it():
    events = streamed(chunk("Hel"), chunk("lo"))
    deltas = ["output_text.delta", "output_text.delta"]
    assert kinds(events) == [*OPENED, *MESSAGE_BEGUN, *deltas, *MESSAGE_ENDED, "completed"]
    created, last = events[0].response, events[-1].response
    assert (created.status, created.output, created.usage) == ("in_progress", [], None)
    assert (last.id, last.created_at, last.completed_at, last.model) == ("resp_7", 1000, 1003, "m")
    assert (last.status, last.error, last.incomplete_details) == ("completed", None, None)
    assert last.output_text == "Hello"
    assert [event.delta for event in events if event.type.endswith("delta")] == ["Hel", "lo"]
    (item,) = last.output
    assert events[2].item.status == "in_progress"
    assert item == events[-2].item
    assert item.status == "completed"
    places = {(e.item_id, e.output_index, e.content_index) for e in events if hasattr(e, "content_index")}
    assert places == {(item.id, 0, 0)}
    usage = last.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 3, 12)
    assert usage.input_tokens_details.cached_tokens == 4


def test_calls_are_items_of_their_own_and_text_after_them_is_another_message():
    second = ToolCall("abcdefgh1", "weather", "{}")
    events = streamed(chunk("so ", CALL, second), chunk("done"), tools=[FUNCTION])
    text = [*MESSAGE_BEGUN, "output_text.delta", *MESSAGE_ENDED]
    assert kinds(events) == [*OPENED, *text, *CALLED, *CALLED, *text, "completed"]
    last = events[-1].response
    assert [item.type for item in last.output] == ["message", "function_call", "function_call", "message"]
    assert len({item.id for item in last.output}) == 4
    assert last.output_text == "so done"
    call = last.output[1]
    assert (call.call_id, call.name, call.arguments) == ("abcdefgh0", "weather", '{"place": "Oslo"}')
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert added[1].item.arguments == ""
    (delta, _) = (e for e in events if e.type == "response.function_call_arguments.delta")
    assert (delta.item_id, delta.output_index, delta.delta) == (call.id, 1, call.arguments)


def test_an_answer_without_text_has_an_empty_message_unless_it_calls():
    assert streamed()[-1].response.output_text == ""
    assert len(streamed()[-1].response.output) == 1
    assert kinds(streamed(chunk("", CALL))) == [*OPENED, *CALLED, "completed"]


@pytest.mark.parametrize("reason", [EndReason.LENGTH, EndReason.CONTEXT_FULL])
def test_an_answer_that_had_to_end_is_incomplete(reason: EndReason):
    events = streamed(chunk("Hel"), reason=reason)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.completed_at is None
    assert last.response.output[0].status == "incomplete"
    assert events[-2].item.status == "incomplete"
    whole = checked_response(writer().whole([Answer("Hel", ended(reason).report)], None))
    assert whole.model_dump() == last.response.model_dump()


def test_a_stop_string_is_a_whole_answer():
    assert streamed(chunk("Hel"), reason=EndReason.STOP_SEQUENCE)[-1].type == "response.completed"


def test_a_failure_is_the_terminal_and_has_what_came_before_it():
    writing = writer()
    pieces = [writing.chunk(0, chunk("so", CALL)), writing.chunk(0, chunk("Hel"))]
    raw = b"".join([writing.begin(), *pieces, writing.failed(Overloaded("Too much."), [{"stage": None}])])
    events = checked_events(raw)
    last = events[-1]
    assert kinds(events)[-1] == "failed"
    assert sum(kind in ("failed", "completed", "incomplete") for kind in kinds(events)) == 1
    assert b"[DONE]" not in raw
    assert last.response.status == "failed"
    error = last.response.error
    assert (error.code, error.message, error.type) == ("rate_limit_exceeded", "Too much.", "rate_limit_error")
    assert error.x_infervisor_code == "overloaded"
    assert last.response.x_infervisor == [{"stage": None}]
    assert [item.status for item in last.response.output] == ["completed", "completed", "incomplete"]
    assert last.response.output_text == "soHel"


def test_an_unforeseen_failure_tells_nothing_of_itself():
    writing = writer()
    (_, _, last) = checked_events(writing.begin() + writing.failed(ValueError("secret"), None))
    assert last.response.error.code == "server_error"
    assert "secret" not in last.model_dump_json()


def test_whole_and_streamed_answers_are_the_same_object():
    report = [{"end_reason": "stop"}]
    body: dict[str, Any] = {
        "instructions": "i", "tools": [FUNCTION], "tool_choice": "required", "metadata": {"k": "v"}, "top_p": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, "user": "u",
        "max_output_tokens": 9, "temperature": 0,
    }  # fmt: skip
    told = (logprob("Hi"),)
    last = streamed(chunk("Hi", logprobs=told), chunk("", CALL), report=report, **body)[-1].response
    answer = Answer("Hi", ended().report, told, (CALL,))
    whole = checked_response(writer(**body).whole([answer], report))
    assert whole.model_dump() == last.model_dump()
    assert last.x_infervisor == report
    assert last.store is False
    assert (last.instructions, last.metadata, last.max_output_tokens) == ("i", {"k": "v"}, 9)
    assert (last.temperature, last.top_p, last.tool_choice, last.user) == (0, 0.5, "required", "u")
    assert last.tools[0].name == "weather"
    assert last.text.format.schema_ == {"type": "object"}
    assert not hasattr(streamed()[-1].response, "x_infervisor")


def test_log_probabilities_come_with_deltas_and_parts():
    events = streamed(chunk("a", logprobs=(logprob("a"),)), chunk("b", logprobs=(logprob("b"),)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[told.token for told in event.logprobs] for event in deltas] == [["a"], ["b"]]
    assert deltas[0].logprobs[0].top_logprobs[0].logprob == -3.0
    (part,) = events[-1].response.output[0].content
    assert [told.token for told in part.logprobs] == ["a", "b"]
    assert part.logprobs[0].top_logprobs[0].bytes == [255]


def test_no_text_can_forge_an_event():
    evil = (
        'a\n\nevent: response.completed\ndata: {"type": "response.completed"}\n\n\u2028data: [DONE]\r\r\x85b'
    )
    events = streamed(chunk(evil))
    assert kinds(events) == [*OPENED, *MESSAGE_BEGUN, "output_text.delta", *MESSAGE_ENDED, "completed"]
    assert events[-1].response.output_text == evil
