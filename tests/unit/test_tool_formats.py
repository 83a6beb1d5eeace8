"""How a model family writes calls: told from its template, described to others, and forced by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.tool_calls import FORMATS, ToolCallParser
from infervisor.worker.engines.llama.tool_formats import (
    call_schema,
    format_of,
    grammar_for_call,
    marks,
    uses_tools,
    with_tools_in_system,
)
from tests.helpers.grammar_walk import GrammarWalk
from tests.helpers.models import CHATML, LOOP, build_model

QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{ tool | tojson }}"
    "{%- endfor %}{{ '</tools>\\n<tool_call>\\n{\"name\": <function-name>}\\n</tool_call><|im_end|>' }}{%- endif %}"
)
LLAMA_31 = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name, "parameters": dictionary}\' }}'
    "{%- endif %}{{- '<|start_header_id|>user<|end_header_id|>' }}{{- '<|python_tag|>' + message.name }}"
)
LLAMA_32 = LLAMA_31.replace("{{- '<|python_tag|>' + message.name }}", "")
MISTRAL = "{%- for t in tools %}[AVAILABLE_TOOLS]{{ t }}{%- endfor %}{{- '[TOOL_CALLS][' }}"


@pytest.mark.parametrize(
    ("template", "call_format", "used"),
    [
        (QWEN, "hermes", True),
        (LLAMA_31, "llama3", True),
        (LLAMA_32, "llama3", True),
        (MISTRAL, "mistral", True),
        (CHATML, "hermes", False),
        (None, "hermes", False),
        ("{{ 'the tools are <tool_call>' }}".replace("tools", "TOOLS"), "hermes", False),
        ("Use tools as <tool_call>. {{ messages }}", "hermes", False),
        (QWEN + "<function=name>", "hermes", False),
        (MISTRAL + "[ARGS]", "hermes", False),
        ("{% if tools %}<｜tool▁calls▁begin｜>{% endif %}", "hermes", False),
        ("{% if tools %}```tool_code{% endif %}", "hermes", False),
        ("{{ '[TOOL_CALLS]' }}", "hermes", False),
        ("{% if tools %}{% never closed <tool_call>", "hermes", True),
    ],
)
def test_what_the_template_says(template: str | None, call_format: str, used: bool) -> None:
    assert (format_of(template), uses_tools(template)) == (call_format, used)


def test_marks_are_what_the_engine_must_print() -> None:
    assert marks("hermes") == ("<tool_call>", "</tool_call>")
    assert marks("mistral") == ("[TOOL_CALLS]",)
    assert marks("json") == ()


def function(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    described = {"name": name, "description": f"{name} something"}
    return {
        "type": "function",
        "function": {**described, **({"parameters": parameters} if parameters else {})},
    }


def lookup(of: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "what": {"$ref": "#/$defs/thing"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 20},
        },
        "required": ["what"],
        "$defs": {"thing": of},
    }


TOOLS = [
    function("find", lookup({"type": "string", "maxLength": 4})),
    function("say", lookup({"enum": ["hi", 'a "quoted" word', {"$ref": "no reference"}]})),
    function("now"),
]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarWalk]:
    opened = GrammarWalk(build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP))
    yield opened
    opened.close()


@pytest.mark.parametrize("call_format", [*FORMATS])
@pytest.mark.parametrize("tool", [None, "find", "say", "now"])
def test_a_forced_call_is_found_and_follows_its_parameters(
    walk: GrammarWalk, call_format: str, tool: str | None
) -> None:
    grammar = grammar_for_call(call_format, TOOLS, tool)
    schemas = {entry["function"]["name"]: entry["function"].get("parameters", {}) for entry in TOOLS}
    called: set[str] = set()
    for seed in range(25):
        answer = walk.answer(grammar, seed)
        assert answer is not None
        parser = ToolCallParser(call_format, [*schemas])
        pieces = [parser.feed(answer), parser.finish()]
        calls = [call for piece in pieces for call in piece.calls]
        assert len(calls) == 1
        assert "".join(piece.text for piece in pieces) == ""
        called.add(calls[0].name)
        jsonschema.validate(json.loads(calls[0].arguments), schemas[calls[0].name])
    assert called == ({tool} if tool else {*schemas})


def test_what_a_forced_call_looks_like(walk: GrammarWalk) -> None:
    takes = {
        "hermes": '<tool_call>\n{"name": "find", "arguments": {"what": "x"}}\n</tool_call>',
        "llama3": '{"name": "find", "parameters": {"what": "x", "limit": 20}}',
        "mistral": '[TOOL_CALLS][{"name": "find", "arguments": {"what": "x"}}]',
        "json": '{"name": "find", "arguments": {"what": "x"}}',
    }
    for call_format, answer in takes.items():
        grammar = grammar_for_call(call_format, TOOLS, "find")
        assert walk.takes(grammar, answer)
        assert not walk.takes(grammar, answer.replace("find", "say"))
        assert not walk.takes(grammar, answer.replace('"x"', '"too long"'))
        assert not walk.takes(grammar, "Sure! " + answer)


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="'rm' isn't among the tools; offered are find, say, now"
    ) as refused:
        call_schema("hermes", TOOLS, "rm")
    assert refused.value.field == "tool"
    with pytest.raises(InvalidRequest, match="offered are none"):
        call_schema("hermes", [], None)
    bad = [function("ok"), function("bad", {"type": "object", "properties": {"x": {"not": {}}}})]
    assert call_schema("hermes", bad, "ok")
    with pytest.raises(InvalidRequest, match=r"^tools\[1\]\.function\.parameters\.properties\.x: not can't"):
        call_schema("hermes", bad, None)


def test_tools_are_described_to_a_template_without_them() -> None:
    asked = {"role": "user", "content": "What time is it?"}
    system, user = with_tools_in_system([asked], TOOLS)
    assert user == asked
    assert system["role"] == "system"
    listed = system["content"].partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [tool["function"] for tool in TOOLS]
    assert (
        '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>'
        in system["content"]
    )

    assert (
        'like this:\n{"name": "tool name", "arguments"'
        in with_tools_in_system([], TOOLS, "json")[0]["content"]
    )

    extended, _ = with_tools_in_system([{"role": "system", "content": "Be brief."}, asked], TOOLS)
    assert extended["content"] == f"Be brief.\n\n{system['content']}"


def test_earlier_calls_and_results_become_text() -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "find", "arguments": '{"what": "x"}'}}
    earlier = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "found"},
        {
            "role": "assistant",
            "content": "Again:",
            "tool_calls": [{"function": {"name": "now", "arguments": {}}}],
        },
    ]
    kept = json.dumps(earlier)
    written = with_tools_in_system(earlier, TOOLS)[1:]
    assert json.dumps(earlier) == kept
    assert written[0] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "find", "arguments": {"what": "x"}}\n</tool_call>',
    }
    assert written[1] == {"role": "user", "content": "<tool_response>\nfound\n</tool_response>"}
    assert written[2]["content"].startswith("Again:\n<tool_call>")
    parser = ToolCallParser("hermes", ["find"])
    assert [c.arguments for c in parser.feed(written[0]["content"]).calls] == ['{"what": "x"}']
    with pytest.raises(InvalidRequest, match="each entry of tool_calls"):
        with_tools_in_system([{"role": "assistant", "tool_calls": [5]}], TOOLS)


def test_earlier_calls_are_written_out_though_no_tool_is_offered() -> None:
    messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "content": "20 degrees"},
    ]
    plain = with_tools_in_system(messages, ())
    assert [message["role"] for message in plain] == ["user", "assistant", "user"]
    assert "weather" in plain[1]["content"]
    assert "20 degrees" in plain[2]["content"]
    assert "tool_calls" not in plain[1]
