"""Schemas, response formats and tools as callers pass them: what is taken, and which field a refusal names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from infervisor.protocol.codec import MAX_TO_WORKER_BYTES, Decoder, encode
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Submit
from infervisor.protocol.output import MAX_GRAMMAR_BYTES, PLAIN_OUTPUT
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.output_input import MAX_TOOLS
from infervisor.supervisor.request_input import MAX_CHOICES, MAX_PROMPT_BYTES, RequestInput, check_request

HUGE = 10**5000
PERSON = {"type": "object", "properties": {"zoe": {"type": "string"}, "age": {"type": "integer"}}}
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
CHAT = [{"role": "user", "content": "hi"}]


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


def check(prompt: str | None = "x", messages: object = None, **given: Any) -> RequestInput:
    return check_request(prompt, messages, seed=1, **given)


def chat(**given: Any) -> RequestInput:
    return check(None, CHAT, **given)


def refused(field: str, **given: Any) -> str:
    """Return the message of the refusal of a chat, which names `field` and is short and printable."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**given)
    assert caught.value.field == field, str(caught.value)
    json.dumps(str(caught.value), ensure_ascii=False).encode()
    assert len(str(caught.value)) < 400
    return str(caught.value)


def named(value: object) -> str:
    return quoted(value, 30)


def schema_of(given: RequestInput) -> Any:
    assert given.output.json_schema is not None
    return json.loads(given.output.json_schema)


# --- schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["mapping", "text"])
def test_a_schema_travels_as_text_with_its_properties_in_their_order(schema: Any) -> None:
    given = check(json_schema=schema)
    assert schema_of(given) == PERSON
    assert list(schema_of(given)["properties"]) == ["zoe", "age"]


@pytest.mark.parametrize("schema", [5, True, [], b"{}", "[]", "5", "true", HUGE], ids=named)
def test_a_schema_is_an_object(schema: object) -> None:
    assert "object" in refused("json_schema", json_schema=schema)


@pytest.mark.parametrize(
    "text", ["", "{", "{'a': 1}", '{"a": NaN}', "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"]
)
def test_a_schema_that_isnt_json_is_told_so(text: str) -> None:
    refused("json_schema", json_schema=text)


def test_a_schema_holds_plain_data_and_fits() -> None:
    with pytest.raises(InvalidRequest, match="plain data") as caught:
        check(json_schema={"type": "object", "default": object()})
    assert caught.value.field == "json_schema.default"
    with pytest.raises(InvalidRequest):
        check(json_schema={"default": math.nan})
    assert str(MAX_GRAMMAR_BYTES) in refused("json_schema", json_schema="x" * (MAX_GRAMMAR_BYTES + 1))
    assert "U+D800" in refused("json_schema.title", json_schema={"type": "object", "title": "\ud800"})


def test_an_impossible_schema_is_refused_here() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(json_schema={"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 2})
    assert (caught.value.field or "").startswith("json_schema")


# --- response_format ---------------------------------------------------------------------------------


def test_response_formats_become_schemas() -> None:
    assert check(response_format={"type": "text"}).output == PLAIN_OUTPUT
    assert schema_of(check(response_format={"type": "json_object"})) == {"type": "object"}
    wrapped = {"name": "person", "strict": True, "schema": PERSON}
    assert schema_of(check(response_format={"type": "json_schema", "json_schema": wrapped})) == PERSON


@pytest.mark.parametrize(
    "given",
    [5, "json_object", {}, {"type": "xml"}, {"type": ["text"]}, {"json_schema": PERSON}, [], {"type": None}],
    ids=named,
)
def test_a_response_format_is_one_of_three(given: object) -> None:
    assert "text, json_object, json_schema" in refused("response_format", response_format=given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "json_object", "schema": PERSON}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "{}"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "schemas": 1}}, "response_format.json_schema"),
    ],
)  # fmt: skip
def test_a_malformed_response_format_names_its_part(given: object, field: str) -> None:
    refused(field, response_format=given)


def test_two_forms_are_one_too_many() -> None:
    wanted = {"type": "json_object"}
    assert "one of the two" in refused("response_format", response_format=wanted, json_schema=PERSON)
    assert "one of the two" in refused("response_format", response_format=wanted, grammar='root ::= "x"')
    assert "not both" in refused("grammar", json_schema=PERSON, grammar='root ::= "x"')
    assert check(response_format={"type": "text"}, grammar='root ::= "x"').output.form == "grammar"


def test_a_form_knows_its_end() -> None:
    for form in (
        {"grammar": 'root ::= "x"'},
        {"json_schema": PERSON},
        {"response_format": {"type": "json_object"}},
    ):
        refused("ignore_eos", ignore_eos=True, **form)
    refused("ignore_eos", ignore_eos=True, tools=[tool()], tool_choice="required")


# --- tools -------------------------------------------------------------------------------------------


def test_tools_are_copied_and_none_are_none() -> None:
    given = tool()
    taken = chat(tools=[given]).tools
    assert taken == (tool(),)
    given["function"]["name"] = "changed later"
    assert taken == (tool(),)
    assert chat(tools=[]).tools is None
    assert check(tools=()).tools is None


@pytest.mark.parametrize(
    "tools",
    [5, "weather", b"x", {"type": "function"}, {1}, iter([]), HUGE],
    ids=["number", "text", "bytes", "mapping", "set", "iterator", "huge"],
)
def test_tools_are_a_list(tools: object) -> None:
    assert "must be a list" in refused("tools", tools=tools)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("weather", ""),
        ({}, ""),
        ({"type": "retrieval"}, ""),
        ({"function": {"name": "x"}}, ""),
        ({"type": "function"}, ".function"),
        ({"type": "function", "function": "x"}, ".function"),
        ({"type": "function", "function": {}}, ".function.name"),
        ({"type": "function", "function": {"name": ""}}, ".function.name"),
        ({"type": "function", "function": {"name": 5}}, ".function.name"),
        ({"type": "function", "function": {"name": "two words"}}, ".function.name"),
        ({"type": "function", "function": {"name": "x" * 65}}, ".function.name"),
        ({"type": "function", "function": {"name": "x\n"}}, ".function.name"),
        (tool(description=5), ".function.description"),
        (tool(parameters="{}"), ".function.parameters"),
        (tool(more={"x": {1}}), ".function.more.x"),
        (tool(), ".function.name"),
    ],
    ids=named,
)
def test_a_tool_is_a_function_with_a_name_of_its_own(bad: object, field: str) -> None:
    refused(f"tools[1]{field}", tools=[tool(), bad])


def test_parameters_that_nobody_could_give_are_refused() -> None:
    impossible = {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]}
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[tool(), tool("other", parameters=impossible)])
    assert (caught.value.field or "").startswith("tools[1].function.parameters")


def test_tools_are_not_too_many_and_need_a_chat() -> None:
    assert len(chat(tools=[tool(f"t{index}") for index in range(MAX_TOOLS)]).tools or ()) == MAX_TOOLS
    assert str(MAX_TOOLS) in refused("tools", tools=[tool(f"t{index}") for index in range(MAX_TOOLS + 1)])
    with pytest.raises(InvalidRequest, match="messages") as caught:
        check(tools=[tool()])
    assert caught.value.field == "tools"


def test_which_tool_is_called_is_a_choice_among_them() -> None:
    tools = [tool(), tool("news")]
    for choice in ("auto", "none", "required"):
        output = chat(tools=tools, tool_choice=choice).output
        assert (output.tool_choice, output.tool) == (choice, None)
    output = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "news"}}).output
    assert (output.tool_choice, output.tool, output.must_call) == ("required", "news", True)
    assert chat(tool_choice="auto").output == chat(tool_choice=None).output == PLAIN_OUTPUT


@pytest.mark.parametrize(
    "choice",
    ["any", "", 5, True, [], {}, {"type": "function"}, {"function": {"name": "weather"}}, HUGE,
     {"type": "function", "function": {"name": 5}}],
    ids=named,
)  # fmt: skip
def test_a_choice_of_another_form_is_refused(choice: object) -> None:
    assert "auto, none, required" in refused("tool_choice", tools=[tool()], tool_choice=choice)


def test_a_call_can_only_be_required_of_a_tool_that_is_there() -> None:
    other = {"type": "function", "function": {"name": "wether"}}
    assert "there are weather" in refused("tool_choice", tools=[tool()], tool_choice=other)
    assert "no tools" in refused("tool_choice", tool_choice=other)
    assert "no tools" in refused("tool_choice", tool_choice="required", tools=[])
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        for form in ({"grammar": 'root ::= "x"'}, {"json_schema": PERSON}):
            refused("tool_choice", tools=[tool()], tool_choice=choice, **form)


def test_an_answer_of_calls_alone_may_be_part_of_a_chat() -> None:
    calls = [{"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    for empty in ({"content": None}, {}, {"content": ""}):
        said = {"role": "assistant", "tool_calls": calls, **empty}
        taken = check(
            None, [*CHAT, said, {"role": "tool", "content": "sunny", "tool_call_id": "call_0"}]
        ).messages
        assert taken is not None
        assert taken[1] == {"role": "assistant", "tool_calls": calls, "content": ""}
    with pytest.raises(InvalidRequest):
        check(None, [{"role": "assistant", "content": None, "tool_calls": []}])


# --- several answers, and the whole ------------------------------------------------------------------


def test_each_answer_has_a_seed_of_its_own() -> None:
    given = check_request("x", None, seed=(1 << 32) - 1, choices=3)
    assert [given.choice(index).seed for index in range(3)] == [(1 << 32) - 1, 0, 1]
    assert given.choice(0) == given


@pytest.mark.parametrize("n", [0, -1, True, None, 2.0, "2", MAX_CHOICES + 1, HUGE], ids=named)
def test_how_many_answers_is_a_number(n: object) -> None:
    refused("n", choices=n)


def test_one_stream_isnt_several() -> None:
    assert "streams(" in refused("n", sampling={"n": 3})


def test_all_of_it_reaches_the_worker() -> None:
    given = chat(
        logprobs=True,
        top_logprobs=5,
        tools=[tool()],
        tool_choice="required",
        priority=-7,
        choices=2,
        stop="x",
    )
    (arrived,) = Decoder.to_worker().feed(encode(given.to_submit(1, 5)))
    assert isinstance(arrived, Submit)
    assert arrived.output == {"logprobs": True, "top_logprobs": 5, "tool_choice": "required"}
    assert arrived.tools == [tool()]
    assert arrived.priority == -7
    plain = chat().to_submit(1, 5)
    assert (plain.output, plain.tools, plain.priority, plain.texts) == ({}, None, 0, None)


def test_what_is_small_enough_by_itself_may_be_too_much_together() -> None:
    most: dict[str, Any] = {
        "stop": [f"{index:04}" + "\U0001f999" * 1020 for index in range(64)],
        "sampling": {"logit_bias": {(1 << 31) - 1 - index: -99.9 for index in range(4096)}},
    }
    grammar = 'root ::= "' + "x" * (MAX_GRAMMAR_BYTES - 12) + '"'
    assert "together" in refused_prompt("x" * MAX_PROMPT_BYTES, grammar=grammar, **most)
    largest = check("x" * (MAX_PROMPT_BYTES - MAX_GRAMMAR_BYTES - 100), grammar=grammar, **most)
    assert len(encode(largest.to_submit(1, 5))) <= MAX_TO_WORKER_BYTES
    described = tool(description="x" * (MAX_PROMPT_BYTES - 1000))
    assert chat(tools=[described]).tools
    assert "together" in refused("messages", tools=[described], grammar=grammar)


def refused_prompt(prompt: str, **given: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(prompt, **given)
    assert caught.value.field == "prompt"
    return str(caught.value)
