"""Grammars and schemas that end or hang the bare library are refused, and the next job works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engines.llama.grammar_source import rule_names
from infervisor.worker.engines.llama.sandbox import Sandbox
from infervisor.worker.engines.llama.sandbox_job import Limits
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import LOOP, build_model

GOOD = 'root ::= "a" [b-c]* | "{" x "}"\nx ::= "a"?'


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    path = build_model(tmp_path_factory.mktemp("model") / "loop.gguf", LOOP)
    with no_leftovers():
        made = Sandbox(str(path), None, "", "", "", [], Limits(cpu_s=1, memory_bytes=128 << 20))
        try:
            yield made
        finally:
            made.close()


def refusal(sandbox: Sandbox, gbnf: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        sandbox.check_grammar(gbnf)
    assert len(str(refused.value)) < 600
    return refused.value


@pytest.mark.parametrize(
    "gbnf",
    [
        GOOD,
        'root ::= "a"{2} "b"{1,3} "c"{2,}',
        '# root ::= {9,1}\nroot ::= "{9,1}" [{9,1}] | every\nevery ::= "é🦙"',
        'root ::= "a\nno ::= rule"',
        "\n".join([*(f'r{i} ::= "x" r{i + 1}' for i in range(1500)), 'r1500 ::= "y"', "root ::= r0"]),
        'root ::= [^"\\\\\\x7F\\x00-\\x1F]+',
    ],
    ids=["plain", "repeated", "words in strings", "newline in a string", "many rules", "negated"],
)
def test_good_grammars_pass(sandbox: Sandbox, gbnf: str) -> None:
    sandbox.check_grammar(gbnf)


DEADLY = {
    "nullable left recursion": 'root ::= x\nx ::= y x "b" | "c"\ny ::= z\nz ::= "" | "d"',
    "nullable left recursion, late": 'root ::= "a"{600} x\nx ::= y x "b" | "c"\ny ::= z\nz ::= "" | "d"',
    "left recursion": 'root ::= root "x" | "a"',
    "crossed repetition": 'root ::= "a"{3,1}',
    "crossed repetition, late": 'root ::= "a" ("b" | "c"{ 40 , 39 })',
    "nested parentheses": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "20,000 parentheses": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "nested repeats": 'root ::= "b" (((("a"{0,40}){0,40}){0,40}){0,40}){0,40}',
    "many optional": 'root ::= "b" ' + '"a"? ' * 3000,
    "many optional, late": 'root ::= "bcbcbc" ' + '"a"? ' * 3000,
    "many repetitions": 'root ::= "a"{1000000000}',
    "number too large": 'root ::= "a"{99999999999999999999999999999999}',
}


@pytest.mark.parametrize("name", DEADLY)
def test_deadly_grammars_are_refused_and_the_next_job_works(sandbox: Sandbox, name: str) -> None:
    pid = sandbox.pid
    assert refusal(sandbox, DEADLY[name]).field == "grammar"
    sandbox.check_grammar(f'{GOOD}\nother ::= "{name}"')
    assert pid in (None, sandbox.pid)


MALFORMED = {
    "empty": ("", "no rule named root"),
    "spaces": (" \n", "no rule named root"),
    "comment": ('# root ::= "a"', "no rule named root"),
    "no root": ('roof ::= "a"', "no rule named root"),
    "typo": ('root :== "a"', "no rule named root"),
    "undefined": ("root ::= x", "Undefined rule identifier 'x'"),
    "unclosed": ('root ::= "a', "unexpected end of input"),
    "nul": ('root ::= "a"\0', "NUL"),
    "no text": ('root ::= "\ud800"', "is no text"),
    "empty answer": ('root ::= ""', "would be empty"),
    "no character": ("root ::= [^\\x00-\\U00FFFFFF]", "would be empty"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_grammars_say_what_is_wrong(sandbox: Sandbox, name: str) -> None:
    gbnf, told = MALFORMED[name]
    assert told in str(refusal(sandbox, gbnf))


def test_crossed_numbers_are_told(sandbox: Sandbox) -> None:
    assert "repeats {3,1}: the least number is larger" in str(refusal(sandbox, DEADLY["crossed repetition"]))


def test_reasons_of_a_death_are_told(sandbox: Sandbox) -> None:
    assert "crashes with SIGSEGV" in str(refusal(sandbox, DEADLY["nested parentheses"]))
    # Too much time, too much memory, or the library's own way to say so: whichever comes first.
    endless = str(refusal(sandbox, DEADLY["nullable left recursion"]))
    assert "more than" in endless or "crashes with SIGABRT" in endless


def test_refusals_are_remembered(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    first = refusal(sandbox, DEADLY["20,000 parentheses"])
    sandbox.check_grammar(GOOD)
    gbnf = sandbox.grammar_of_schema('{"type": "boolean"}')
    monkeypatch.setattr(sandbox, "_ask", None)
    again = refusal(sandbox, DEADLY["20,000 parentheses"])
    assert (str(again), again.field) == (str(first), first.field)
    sandbox.check_grammar(GOOD)
    assert sandbox.grammar_of_schema('{"type": "boolean"}') == gbnf


def test_what_is_remembered_is_bounded(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infervisor.worker.engines.llama.sandbox.KNOWN_GRAMMARS", 3)
    for letter in "abcdefg":
        sandbox.check_grammar(f'root ::= "{letter}"')
    assert len(sandbox._known) <= 64
    sandbox._known.clear()
    for letter in "abcdefg":
        sandbox.check_grammar(f'root ::= "{letter}"')
    assert len(sandbox._known) == 3


def test_schema_becomes_a_grammar(sandbox: Sandbox) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["n"],
    }
    gbnf = sandbox.grammar_of_schema(json.dumps(schema))
    assert "root" in rule_names(gbnf)
    sandbox.check_grammar(gbnf)


SCHEMAS: dict[str, Any] = {
    "no json": "{",
    "a list": [],
    "true": True,
    "deep json": "[" * 100_000,
    "deep": '{"items":' * 900 + "{}" + "}" * 900,
    "word border": {"type": "string", "pattern": "^\\bx$"},
    "nothing to repeat": {"type": "string", "pattern": "^*$"},
    "empty enum": {"enum": []},
    "no target": {"$ref": "#/x"},
    "elsewhere": {"$ref": "https://example.com/x"},
    "unknown type": {"type": "banana"},
    "not": {"not": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_are_not_supported_are_refused(sandbox: Sandbox, name: str) -> None:
    schema = SCHEMAS[name]
    with pytest.raises(InvalidRequest, match=r"^json_schema") as refused:
        sandbox.grammar_of_schema(schema if isinstance(schema, str) else json.dumps(schema))
    assert refused.value.field == "json_schema"
    assert len(str(refused.value)) < 600
    sandbox.grammar_of_schema(json.dumps({"const": name}))


WIDE: dict[str, Any] = {
    "true inside": {"properties": {"a": True}},
    "long string": {"type": "string", "maxLength": 5000},
    "no anchors": {"type": "string", "pattern": "x"},
    "quotes in a name": {"type": "object", "properties": {'a"b': {"type": "string"}}},
    "itself": {"$defs": {"a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
}  # fmt: skip
"""What llama.cpp's own converter can't make a grammar of."""


@pytest.mark.parametrize("name", WIDE)
def test_schemas_beyond_the_librarys_own_converter_become_grammars(sandbox: Sandbox, name: str) -> None:
    assert "root" in rule_names(sandbox.grammar_of_schema(json.dumps(WIDE[name])))


def test_a_vocabulary_that_cannot_be_read_is_the_engines_fault(tmp_path: Any) -> None:
    with no_leftovers():
        made = Sandbox(str(tmp_path / "gone.gguf"), "{{ messages[0].content }}", "t", "", "", [])
        try:
            with pytest.raises(RuntimeError, match=r"gone\.gguf can't be read"):
                made.check_grammar(GOOD)
            assert made.render([{"role": "user", "content": "x"}], None, None).text == "x"
        finally:
            made.close()
