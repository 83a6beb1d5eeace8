"""Grammars of JSON schemas on real llama.cpp: what they take, and that what follows them follows the schema."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.json_schema import check_schema
from infervisor.protocol.schema_pattern import UnsupportedPattern, parsed_pattern
from infervisor.worker.engines.llama.number_grammar import integer_between, number_between
from infervisor.worker.engines.llama.schema_grammar import gbnf_of_schema
from tests.helpers.grammar_walk import GrammarWalk
from tests.helpers.models import LOOP, build_model


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarWalk]:
    opened = GrammarWalk(build_model(tmp_path_factory.mktemp("m") / "loop.gguf", LOOP))
    yield opened
    opened.close()


def gbnf(schema: object) -> str:
    return gbnf_of_schema(json.dumps(schema))


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


NODE = {"$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        ({}, ['{"a": [1, null]}', "3", '"x"'], ["x", ""]),
        ({"title": "anything", "x-own": 1, "$schema": "…"}, ["null"], ["nul"]),
        (obj(a={"type": "integer"}), ['{"a": 1}', '{"a":1}', '{\n  "a": 1\n}'],
         ["{}", '{"a": 1, "b": 2}', '{"a": 1.5}']),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
         ['{"b": 1}', '{"a": 1, "b": 1}', '{"a": 1, "b": 1, "c": 1}', '{"b": 1, "c": 1}'],
         ["{}", '{"a": 1}', '{"a": 1, "c": 1}', '{"a": 1 "b": 1}', '{"b": 1,}']),
        ({"properties": {"a": {}, "b": {}}},
         ["{}", '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ['{"b": 1, "a": 1}']),
        ({"properties": {"ab": {"const": None}, "a": {"const": None}}, "additionalProperties": {"type": "integer"}},
         ['{"ab": null, "x": 1}', '{"x": 1, "y": 2}', '{"abc": 1}', '{"a": null}', '{"": 1}', "{}"],
         ['{"ab": 1}', '{"x": null}', '{"x": 1, "a": 2}', '{"\\u0061": 2}']),
        ({"required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}", '{"b": 2}']),
        ({"type": "object", "additionalProperties": True}, ['{"x": [1]}', "{}"], ["[]"]),
        (obj(**{'q"\\\n': {}, "": {}}), ['{"q\\"\\\\\\n": 1, "": 2}'], ["{}"]),
        (obj(root={"enum": ["r"]}, space=obj(x={}), string=obj(y={})),
         ['{"root": "r", "space": {"x": 1}, "string": {"y": 1}}'], ['{"root": 1}']),
        ({"type": "object", "propertyNames": {"enum": ["x", 5]}}, ['{"x": 1}', "{}"], ['{"y": 1}', "{5: 1}"]),
        ({"enum": ['say "hi"\\', None, 1.5, {"a": [1]}]},
         ['"say \\"hi\\"\\\\"', "null", "1.5", '{"a": [1]}'], ["1", '"say']),
        ({"const": "Zürich"}, ['"Zürich"'], ['"Zurich"']),
        ({"enum": ["a", 1, None], "type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        ({"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null"], ['"abc"', "1"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
         ["[true]", "[true, false]"], ["[]", "[true, true, true]", "[1]"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, ["[]"], ["[null]"]),
        ({"prefixItems": [{"type": "null"}, {"type": "integer"}]}, ["[null, 1]"], ["[null]", "[null, 1, 2]"]),
        ({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}, "minItems": 2},
         ["[null, 1]", "[null, 1, 2]"], ["[null]", "[null, null]"]),
        ({"type": "string"}, ['"ü 🦙 \\n \\u00e9"', '""'], ['"\n"', '"\\ud800"', '"\\x"', '"a']),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"ü"', '"🦙\\n"'], ['""', '"abc"']),
        ({"type": "string", "maxLength": 5000}, ['""', f'"{"x" * 5000}"'], [f'"{"x" * 5001}"']),
        ({"type": "string", "minLength": 1700}, [f'"{"x" * 1700}"', f'"{"x" * 1800}"'], [f'"{"x" * 1699}"']),
        ({"type": "string", "pattern": r"^\d{3}-[A-F]+$"}, ['"123-AF"'], ['"12-A"', '"123-"', '"123-A "']),
        ({"type": "string", "pattern": "b.b"}, ['"abcbd"', '"b b"'], ['"bb"', '"b\\nb"']),
        ({"type": "string", "pattern": r'^[^a]"\\\t(x|yz)?$'},
         ['"b\\"\\\\\\tyz"', '"\\"\\"\\\\\\t"'], ['"a\\"\\\\\\t"']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ac"', '"cb"'], ['"ca"', '"cbc"']),
        ({"type": "string", "pattern": "^é[α-ω]{2}$"}, ['"éαω"'], ['"eαω"', '"éα"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"2024-04-31"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59.5+01:00"'], ['"2024-02-29"']),
        ({"allOf": [{"format": "date"}, {"format": "email", "minLength": 3}]}, ['"2024-02-29"'], ['"abc"']),
        ({"type": "string", "format": "email"}, ['"any text"'], ["5"]),
        ({"type": "integer", "minimum": 0, "maximum": 150},
         ["0", "9", "99", "150"], ["-1", "151", "007", "1.0", ""]),
        ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 2}, ["-2", "0", "1"], ["-3", "2"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1},
         ["0.05", "0.999", "1", "1.0"], ["0", "1.01", "-0.5"]),
        ({"allOf": [obj(a={"type": "integer"}), {"properties": {"b": {}, "a": {"minimum": 3}}}]},
         ['{"a": 3}', '{"a": 4, "b": 1}'], ['{"a": 2}', "{}"]),
        ({"type": "integer", "allOf": [{"minimum": 1, "maximum": 9}, {"minimum": 3, "maximum": 20}]}, ["3", "9"],
         ["2", "10"]),
        ({"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"a": {}, "b": {}}}]},
         ['{"a": 1}', "{}"], ['{"b": 1}']),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a": 1}', '{"b": 1}'], ["{}"]),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"type": "string"}]}, ["5"], ["4", '"a"']),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, ["null", "true"], ["1"]),
        ({**NODE, "$defs": {"node": obj(v={"type": "integer"}, next={"anyOf": [NODE, {"type": "null"}]})}},
         ['{"v": 1, "next": null}', '{"v": 1, "next": {"v": 2, "next": null}}'],
         ['{"v": 1}', '{"v": 1, "next": 2}']),
        ({"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": {"type": "null"}}, "title": "…"},
         ["null"], ["1"]),
        ({"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": {"type": "string"}}}, ['"a"'], ['"ab"']),
        ({"properties": {"s": {"type": "integer"}, "t": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"type": "null"}}},
         ['{"s": 1, "t": null}'], ['{"t": 1}']),
    ],
)  # fmt: skip
def test_what_a_schema_takes(
    walk: GrammarWalk, schema: dict[str, Any], takes: list[str], refuses: list[str]
) -> None:
    grammar = gbnf(schema)
    assert [text for text in takes if not walk.takes(grammar, text)] == []
    assert [text for text in refuses if walk.takes(grammar, text)] == []


class Colour(enum.Enum):
    RED = "red"
    OTHER = 'with "quotes" and \\'


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=1, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str = pydantic.Field(min_length=1, max_length=6)


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(description="the full name", min_length=1, max_length=8)
    age: Annotated[int, pydantic.Field(ge=0, lt=150)]
    share: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    colour: Colour
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None = None
    children: list[Person] = pydantic.Field([], max_length=1)
    born: datetime.date
    seen: datetime.datetime | None = None
    post_code: str = pydantic.Field("00000", pattern=r"^\d{5}$")
    pair: tuple[int, str] = (0, "")
    marks: dict[Colour, float] = {}
    key: uuid.UUID | None = None
    extra: Any = None


def test_pydantic_models(walk: GrammarWalk) -> None:
    schema = Person.model_json_schema()
    grammar = gbnf(schema)
    answers = [answer for seed in range(25) if (answer := walk.answer(grammar, seed, 3000)) is not None]
    assert len(answers) > 5
    for answer in answers:
        jsonschema.validate(json.loads(answer), schema)
        Person.model_validate_json(answer)


_NAMES = st.sampled_from(["a", "b", "ab", "root", "string", 'q"', "é", "", "a b", "item", "value"])
_COUNT = st.integers(0, 4)
_BOUND = st.one_of(st.integers(-200, 200), st.decimals(-50, 50, places=2).map(float))
_PATTERNS = st.sampled_from(
    [
        r"^[a-c]{1,3}$",
        r"^\d+(\.\d{2})?$",
        "x",
        "^(?:ab|c)*$",
        r"^\w-\S$",
        r"^(?:a\.b){0,2}c?$",
        r"^[^\"\\]?é$",
    ]
)
_LEAVES = st.one_of(
    st.just({}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "format": "date"}]),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": _COUNT, "maxLength": _COUNT, "title": st.just("t")},
    ),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": _PATTERNS}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number", ["number", "null"]])},
        optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    ),
    st.fixed_dictionaries(
        {"enum": st.lists(st.one_of(_NAMES, st.integers(), st.none(), st.booleans()), min_size=1)}
    ),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")}, optional={"items": inner, "minItems": _COUNT, "maxItems": _COUNT}
        ),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=4)},
            optional={
                "required": st.lists(_NAMES, max_size=2, unique=True),
                "additionalProperties": st.one_of(st.booleans(), inner),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"prefixItems": st.lists(inner, min_size=1, max_size=2)}),
        st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]),
    )


_SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=8)


@settings(max_examples=120, deadline=None)
@given(schema=_SCHEMAS, a=_SCHEMAS, b=_LEAVES, seed=st.integers(0, 1000))
def test_what_follows_the_grammar_follows_the_schema(
    walk: GrammarWalk, schema: dict[str, Any], a: dict[str, Any], b: dict[str, Any], seed: int
) -> None:
    whole = {**schema, "$defs": {"a": a, "b": b}}
    jsonschema.Draft202012Validator.check_schema(whole)
    try:
        grammar = gbnf(whole)
    except InvalidRequest:
        assume(False)
        raise
    assert walk.parses(grammar), grammar
    for turn in range(3):
        answer = walk.answer(grammar, seed + turn)
        if answer is not None:
            jsonschema.validate(json.loads(answer), whole, format_checker=jsonschema.FormatChecker())


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-9, 99),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
_WORDS = st.sampled_from(
    ["type", "properties", "items", "anyOf", "allOf", "oneOf", "$ref", "enum", "const", "required", "minimum",
     "maximum", "minItems", "maxItems", "pattern", "format", "minLength", "additionalProperties", "prefixItems",
     "propertyNames", "uniqueItems", "$defs", "maxLength", "exclusiveMinimum"]
)  # fmt: skip
_WILD = st.recursive(
    st.one_of(_JSON, st.sampled_from(["object", "array", "string", "number", "#", "#/$defs/a", "#/items"])),
    lambda inner: st.one_of(st.dictionaries(_WORDS, inner, max_size=4), st.lists(inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(schema=st.dictionaries(_WORDS, _WILD, max_size=5))
def test_whatever_is_given_is_refused_in_words_or_parses(walk: GrammarWalk, schema: dict[str, Any]) -> None:
    refused: InvalidRequest | None = None
    try:
        check_schema(schema)
    except InvalidRequest as error:
        refused = error
    if refused is None:
        assert walk.parses(gbnf(schema))
    else:
        assert (refused.field, str(refused).encode()[:11]) == ("json_schema", b"json_schema")


@settings(max_examples=150, deadline=None)
@given(low=st.integers(-1200, 1200), size=st.integers(0, 1500), data=st.data())
def test_whole_numbers_in_a_range(walk: GrammarWalk, low: int, size: int, data: st.DataObject) -> None:
    high = low + size
    grammar = f"root ::= {integer_between(low, high)}"
    for number in (low - 1, low, high, high + 1, data.draw(st.integers(-3000, 3000))):
        assert walk.takes(grammar, str(number)) == (low <= number <= high), number
    number = data.draw(st.integers(-3000, 3000))
    assert walk.takes(f"root ::= {integer_between(low, None)}", str(number)) == (number >= low)
    assert walk.takes(f"root ::= {integer_between(None, high)}", str(number)) == (number <= high)


_PLACES = st.decimals(-30, 30, places=2)


@settings(max_examples=100, deadline=None)
@given(
    low=_PLACES,
    high=_PLACES,
    low_open=st.booleans(),
    high_open=st.booleans(),
    number=st.decimals(-31, 31, places=3),
)
def test_decimal_numbers_in_a_range(
    walk: GrammarWalk, low: Decimal, high: Decimal, low_open: bool, high_open: bool, number: Decimal
) -> None:
    assume(low < high)
    grammar = f"root ::= {number_between(low, high, low_open, high_open)}"
    for tried in (number, low, high, low + Decimal("0.001"), high - Decimal("0.001")):
        inside = (low < tried or (low == tried and not low_open)) and (
            tried < high or (tried == high and not high_open)
        )
        assert walk.takes(grammar, f"{tried:.3f}") == inside or (tried == 0 and inside), (grammar, tried)
    for whole in range(-3, 4):
        inside = (low < whole or (low == whole and not low_open)) and (
            whole < high or (whole == high and not high_open)
        )
        assert walk.takes(grammar, str(whole)) == inside


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab^$()[]{}|*+?.\\dwsbux01,-:<", max_size=14))
def test_any_pattern_is_read_or_refused(walk: GrammarWalk, pattern: str) -> None:
    try:
        parsed_pattern(pattern)
    except UnsupportedPattern:
        return
    assert walk.parses(gbnf({"type": "string", "pattern": pattern}))
