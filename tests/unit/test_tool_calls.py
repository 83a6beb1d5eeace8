"""Calls of tools in streamed answers: what is a call, what stays text, and that cutting changes nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.tool_calls import (
    FORMATS,
    MAX_CALL_CHARACTERS,
    ToolCall,
    ToolCallParser,
)

NAMES = ("get_weather", "add")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'
ADD = r'{"name": "add", "arguments": {"a": 1, "b": [2, "}", "\"}\\"]}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}'
WEATHER_CALL = ("get_weather", {"city": "Zürich", "days": 3})
ADD_CALL = ("add", {"a": 1, "b": [2, "}", '"}\\']})


def parsed(call_format: str, *texts: str) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(call_format, NAMES, "c-")
    pieces = [*(parser.feed(text) for text in texts), parser.finish()]
    return "".join(piece.text for piece in pieces), [call for piece in pieces for call in piece.calls]


def read(call_format: str, *texts: str) -> tuple[str, list[tuple[str, Any]]]:
    text, calls = parsed(call_format, *texts)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("call_format", "answer", "text", "calls"),
    [
        ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [WEATHER_CALL]),
        ("hermes", f"Let me see.\n\n<tool_call>\n{WEATHER}\n</tool_call>\n", "Let me see.", [WEATHER_CALL]),
        (
            "hermes",
            f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
            "",
            [WEATHER_CALL, ADD_CALL],
        ),
        ("hermes", f"<tool_call>{WEATHER}", "", [WEATHER_CALL]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call>\n\nDone <b>.", "Done <b>.", [WEATHER_CALL]),
        ("hermes", WEATHER, WEATHER, []),
        ("llama3", LLAMA, "", [WEATHER_CALL]),
        ("llama3", f"<|python_tag|>{LLAMA}", "", [WEATHER_CALL]),
        ("llama3", f"\n\n{LLAMA}; {LLAMA}\n", "", [WEATHER_CALL, WEATHER_CALL]),
        ("llama3", f"I call {LLAMA}", f"I call {LLAMA}", []),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("mistral", f"[TOOL_CALLS][{WEATHER}, {ADD}]", "", [WEATHER_CALL, ADD_CALL]),
        ("mistral", f"[{WEATHER}]", "", [WEATHER_CALL]),
        ("mistral", f"Yes. [TOOL_CALLS] [{WEATHER}]", "Yes.", [WEATHER_CALL]),
        ("mistral", "[1, 2]", "[1, 2]", []),
        ("mistral", "[see below]", "[see below]", []),
        ("json", ADD, "", [ADD_CALL]),
        ("json", f"[{ADD},{WEATHER}]", "", [ADD_CALL, WEATHER_CALL]),
        (
            "json",
            '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}',
            "",
            [("add", {"a": 1})],
        ),
        ("json", '{"name": "add"}', "", [("add", {})]),
    ],
)
def test_calls_of_each_family(call_format: str, answer: str, text: str, calls: list[Any]) -> None:
    assert read(call_format, answer) == (text, calls)
    assert read(call_format, *answer) == (text, calls)


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>",
        '<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "no JSON"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arg',
        "<tool_call>",
        "<tool_call> text </tool_call>",
        "  a <tool_cal",
        "   ",
        '{"name": "add", "arguments": {}}',
    ],
)
def test_what_is_no_call_stays_text_unchanged(answer: str) -> None:
    assert parsed("hermes", answer) == (answer, [])
    assert parsed("hermes", *answer) == (answer, [])


def test_ids_are_numbered_within_the_answer() -> None:
    _, calls = parsed("mistral", f"[TOOL_CALLS][{WEATHER}, {ADD}]")
    assert [call.id for call in calls] == ["c-0", "c-1"]


def test_arguments_are_sendable_text() -> None:
    _, calls = parsed("json", r'{"name": "add", "arguments": {"a": "\ud800"}}')
    assert json.loads(calls[0].arguments) == {"a": "\ud800"}
    assert calls[0].arguments.encode()


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    parser = ToolCallParser("hermes", NAMES)
    assert parser.feed("a < b").text == "a < b"
    assert parser.feed(" and <tool").text == " and"[:4]
    assert parser.feed("s>").text == " <tools>"
    assert parser.feed("<tool_call>no").text == "<tool_call>no"
    bare = ToolCallParser("llama3", NAMES)
    assert bare.feed('{"ci').text == '{"ci'
    assert bare.feed('ty": ').text == 'ty":'


def test_a_call_comes_out_as_soon_as_it_is_whole() -> None:
    parser = ToolCallParser("hermes", NAMES)
    assert not parser.feed(f"<tool_call>{ADD[:-1]}").calls
    assert [call.name for call in parser.feed("}").calls] == ["add"]


def test_holding_back_is_bounded() -> None:
    parser = ToolCallParser("hermes", NAMES)
    said = parser.feed('<tool_call>{"name": "add", "arguments": {"a": "').text
    blocks = 0
    while not said:
        said += parser.feed("x" * 1000).text
        blocks += 1
        assert blocks <= MAX_CALL_CHARACTERS // 1000 + 1
    assert said.startswith('<tool_call>{"name"')
    assert parser.feed("y").text == "y"


_BITS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", WEATHER, ADD, LLAMA, f"[{ADD}]",
    "\n", " ", " " * 17, "{", "}", "[", "]", ";", ",", '"', "\\", "<", "/",
    '{"name', '": "add"', "<tool", "_call>", "text", "é",
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    call_format=st.sampled_from([*FORMATS]),
    bits=st.lists(st.sampled_from(_BITS), max_size=12),
    data=st.data(),
)
def test_cutting_changes_nothing_and_nothing_is_lost(
    call_format: str, bits: list[str], data: st.DataObject
) -> None:
    answer = "".join(bits)
    whole = parsed(call_format, answer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    edges = [0, *cuts, len(answer)]
    chunks = [answer[start:end] for start, end in itertools.pairwise(edges)]
    assert parsed(call_format, *chunks) == whole
    assert parsed(call_format, *answer) == whole
    text, calls = whole
    if not calls:
        assert text == answer
    # What remains is the answer without whole calls: its characters in their order.
    left = iter(answer)
    assert all(character in left for character in text)


@settings(max_examples=300, deadline=None)
@given(call_format=st.sampled_from([*FORMATS]), answer=st.text(max_size=60))
def test_any_text_survives(call_format: str, answer: str) -> None:
    assert parsed(call_format, answer) == (answer, [])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="known are hermes"):
        ToolCallParser("xml", NAMES)
