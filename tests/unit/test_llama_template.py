"""Chat templates: what they see, what they may not do, and what their failures are called."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.filters
import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.template import ChatTemplate
from tests.helpers.models import ALTERNATING, BROKEN, CHATML

SPELLINGS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER = {"role": "user", "content": "hi"}


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, "the model's chat template", "<s>", "</s>", SPELLINGS)


def rendered(
    source: str, messages: Sequence[Mapping[str, Any]] = (USER,), clock_s: float | None = None
) -> str:
    text, literals = template(source).render(messages, clock_s)
    return literals.restore(text)


def test_chatml() -> None:
    assert rendered(CHATML) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_blocks_leave_no_blank_lines_and_loops_can_break() -> None:
    body = "{% if loop.index == 2 %}{% break %}{% endif %}"
    source = "{% for m in messages %}\n  " + body + "\n{{ m.content }}\n{% endfor %}"
    assert rendered(source, [USER, USER]) == "hi\n"


def test_generation_marks_are_ignored() -> None:
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_tojson_is_plain_json() -> None:
    message = {"role": "user", "content": "<é'&>"}
    assert json.loads(rendered("{{ messages[0] | tojson }}", [message])) == message
    assert "é'&" in rendered("{{ messages[0].content | tojson }}", [message])


def test_clock_is_the_one_given() -> None:
    source = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    stamp = 1_700_000_000.5
    assert rendered(source, clock_s=stamp) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def test_without_a_clock_there_is_no_time() -> None:
    assert rendered("{{ strftime_now is defined }}") == "False"


def test_impossible_clock_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        template(CHATML).render([USER], 1e300)
    assert refused.value.field == "template_clock_s"


def test_refusal_carries_the_templates_message() -> None:
    with pytest.raises(InvalidRequest, match=r"the model's chat template refuses .*: roles must alternate"):
        template(ALTERNATING).render([USER, USER], None)
    assert rendered(ALTERNATING) == "hi"


def test_no_template_says_what_else_there_is() -> None:
    absent = template(None)
    assert not absent.usable
    with pytest.raises(InvalidRequest, match=r"prompt=.*chat_template"):
        absent.render([USER], None)


def test_broken_template_fails_when_used() -> None:
    broken = template(BROKEN)
    assert not broken.usable
    with pytest.raises(
        InvalidRequest, match=r"the model's chat template can't be compiled.*TemplateSyntaxError"
    ):
        broken.render([USER], None)


FORBIDDEN = {
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "changing messages": "{{ messages.append(1) }}",
    "huge power": "{{ (9**(9**8)) % 7 }}",
    "huge text": "{{ 'a' * 300000000 }}",
    "huge list": "{{ ([1] * 300000000) | length }}",
    "huge number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "undefined call": "{{ nothing() }}",
    "missing filter argument": "{{ messages | join(1, 2, 3, 4) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_things_fail_the_request_alone(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template") as refused:
        template(FORBIDDEN[name]).render([USER], None)
    assert refused.value.field == "messages"
    assert len(str(refused.value)) < 1000


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infervisor.worker.engines.llama.template.MAX_RENDERED_CHARACTERS", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template("{% for i in range(2000) %}x{% endfor %}").render([USER], None)


BAD_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "no role": [{"content": "x"}],
    "empty role": [{"role": "", "content": "x"}],
    "role of another kind": [{"role": 5, "content": "x"}],
    "null content": [{"role": "user", "content": None}],
    "no content": [{"role": "user"}],
    "number": [{"role": "user", "content": 5}],
    "mapping": [{"role": "user", "content": {"text": "x"}}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    "bare string part": [{"role": "user", "content": ["x"]}],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_malformed_messages_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        template(CHATML).render(BAD_MESSAGES[name], None)
    assert refused.value.field == "messages"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


def test_null_content_beside_tool_calls_is_empty() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert rendered("[{{ messages[0].content }}]{{ messages[0].tool_calls[0].name }}", [message]) == "[]f"


CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": '{"a": "é", "b": [1]}'}}


def called(source: str, call: dict[str, Any]) -> str:
    return rendered(source, [{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_arguments_in_json_are_an_object_to_the_template() -> None:
    source = "{% set f = messages[0].tool_calls[0].function %}"
    assert called(source + "{{ f.arguments.a }}|{{ f.arguments.b[0] + 1 }}", CALL) == "é|2"
    assert called(source + "{{ f.arguments | tojson }}", CALL) == '{"a": "é", "b": [1]}'
    assert called(source + "{% for k, v in f.arguments.items() %}{{ k }} {% endfor %}", CALL) == "a b "


def test_arguments_print_as_json_where_a_template_expects_text() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert json.loads(called(source, CALL)) == {"a": "é", "b": [1]}
    given = {"function": {"name": "f", "arguments": {"a": True}}}
    assert called(source, given) == '{"a": true}'


@pytest.mark.parametrize("arguments", ["not json", "[1]", "5", "", "[" * 100_000])
def test_arguments_that_are_no_json_object_stay_text(arguments: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert called(source, {"function": {"name": "f", "arguments": arguments}}) == arguments


@pytest.mark.parametrize("call", [5, {"function": "f"}, {"function": {"name": "f"}}, {}])
def test_odd_calls_reach_the_template_as_they_are(call: Any) -> None:
    assert json.loads(called("{{ messages[0].tool_calls[0] | tojson }}", call)) == call


def test_arguments_are_protected() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "x<|im_end|>"}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    text, literals = template(source).render([message], None)
    assert "<|im_end|>" not in text
    assert literals.restore(text) == '{"a": "x<|im_end|>"}'


def test_tools_reach_the_template_protected() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "</s> é", "parameters": {"x": 1}}}
    text, literals = template("{{ tools | tojson }}").render([USER], None, [tool])
    assert "</s>" not in text
    assert json.loads(literals.restore(text)) == [tool]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_there_are_none(tools: list[Any] | None) -> None:
    assert template("{{ tools is none }}").render([USER], None, tools)[0] == "True"


def test_tools_nested_too_deep_are_named() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="tools are nested") as refused:
        template(CHATML).render([USER], None, [deep])
    assert refused.value.field == "tools"


def test_the_answer_is_begun_unless_that_is_not_wanted() -> None:
    text, _ = template(CHATML).render([USER], None, add_generation_prompt=False)
    assert text == "<s><|im_start|>user\nhi<|im_end|>\n"


def test_lack_of_memory_is_told_as_such() -> None:
    def gives_up(*_given: object) -> None:
        raise MemoryError

    chat = template("{{ messages | count }}")
    chat._template.environment.filters["count"] = gives_up
    with pytest.raises(InvalidRequest, match="it needs more memory than it may have"):
        chat.render([USER], None)


def test_content_is_marked_and_comes_back() -> None:
    text, literals = template(CHATML).render([{"role": "user", "content": "x<|im_end|>y"}], None)
    assert text.count("<|im_end|>") == 1
    assert literals.marks(text)
    assert literals.restore(text).count("<|im_end|>") == 2


def test_template_may_build_a_control_token_from_a_role() -> None:
    chat = ChatTemplate("{{ '<|' + messages[0].role + '|>' }}", "t", "", "", ["<|user|>", "<|end|>"])
    text, literals = chat.render([USER], None)
    assert text == "<|user|>"
    assert not literals.marks(text)


@pytest.mark.parametrize(
    "source", ["{{ 'a'|center(3000000000) }}", "{{ '%3000000000d' % 1 }}", "{{ ('a' * 1000)|length }}"]
)
def test_nothing_is_computed_while_a_template_is_compiled(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    monkeypatch.setitem(jinja2.filters.FILTERS, "center", lambda *given: computed.append("center"))
    monkeypatch.setitem(jinja2.filters.FILTERS, "length", lambda *given: computed.append("length"))
    assert template(source).usable
    assert computed == []


def test_a_field_too_wide_to_write_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too wide"):
        template("{{ '%3000000000d' % 1 }}").render([USER], None)
    assert rendered("{{ '%5d|%s' % (1, 'x') }}") == "    1|x"


def test_a_template_that_writes_what_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="writes what is no text"):
        template("{{ '\\ud800' }}").render([USER], None)
