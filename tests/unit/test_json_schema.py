"""JSON schemas: what is refused, and how that is said."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.json_schema import check_schema, parsed_schema, prepared_schema
from infervisor.protocol.schema_pattern import lengths, parsed_pattern


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


NODE = {"$ref": "#/$defs/node"}
DEEP: dict[str, Any] = {}
for _ in range(30):
    DEEP = {"type": "array", "items": DEEP}
BOTTOMLESS: dict[str, Any] = {}
for _ in range(100_000):
    BOTTOMLESS = {"items": BOTTOMLESS}

IMPOSSIBLE = [
    ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems 3 is more than maxItems 1"),
    ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength 3 is more than maxLength 1"),
    (
        obj(age={"type": "integer", "minimum": 5, "maximum": 3}),
        r"json_schema\.properties\.age: minimum 5 is more",
    ),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "exclusiveMinimum 1 is as much as maximum 1"),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.7}, "no whole number lies between 0.5 and 0.7"),
    ({"enum": []}, "enum must be a list of the allowed values, not empty"),
    ({"enum": [1, 2], "type": "string"}, "no value of its enum is of type string"),
    ({"enum": ["long"], "maxLength": 2}, "within its other limits"),
    ({"enum": [1], "const": 2}, "const isn't among"),
    ({"type": "text"}, "type must be one of object"),
    ({"required": ["a"], "properties": {}, "additionalProperties": False}, "'a' is required, but additional"),
    (obj(a=False), "'a' is required, but its schema is false"),
    ({"allOf": [{"type": "string"}, {"type": "number"}]}, "nothing is both string and number"),
    ({"allOf": [{"const": 1}, {"const": True}]}, "can't be both 1 and True"),
    (
        {"type": "boolean", "anyOf": [{"type": "string"}, {"type": "null"}]},
        "nothing is both boolean and null",
    ),
    ({"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}]}, r"json_schema\.anyOf\[0\]: minLength"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "only 1 items are allowed"),
    ({"items": False, "minItems": 1}, "only 0 items are allowed"),
    ({"$ref": "#/$defs/x"}, r"points to nothing: '\$defs' isn't there"),
    ({"$ref": "https://json-schema.org/x"}, "must point into this schema"),
    ({"$ref": "#"}, "always contains itself"),
    (obj(next={"$ref": "#"}), "always contains itself"),
    ({**NODE, "$defs": {"node": NODE}}, r"json_schema\.\$defs\.node: it always contains itself"),
    ({**NODE, "$defs": {"node": {"anyOf": [NODE, {"type": "null"}]}}}, "with nothing in between"),
    ({**NODE, "$defs": {"node": {"allOf": [NODE, {"type": "null"}]}}}, "too large"),
    ({"anyOf": [False]}, "the schema false allows nothing"),
]

UNSUPPORTED = [
    ({"not": {}}, "not can't be enforced.*say what is allowed instead"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems can't be enforced"),
    (obj(a={"type": "number", "multipleOf": 0.1}), r"properties\.a: multipleOf can't be enforced"),
    ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
    ({"type": "string", "pattern": r"\bword"}, r"it has \\b near character 2"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "lookaround"),
    ({"type": "string", "pattern": "^(a)\\1$"}, r"\\1"),
    ({"type": "string", "pattern": "^(a*)*$"}, "repeats what can be empty"),
    ({"type": "string", "pattern": "^a{3,1}$"}, "at least 3 and at most 1"),
    ({"type": "string", "pattern": "^a{9000}$"}, "more than 2000 times"),
    ({"type": "string", "pattern": "[" + "a" * 3000 + "]"}, "3002 characters"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "write the length into the pattern"),
    ({"type": "string", "format": "date", "pattern": "^a$"}, "the format date can't be enforced beside"),
    ({"type": "string", "format": "uuid", "maxLength": 35}, "the format uuid can't be enforced beside"),
    ({"enum": ["x"], "format": "date"}, "format can't be enforced beside enum"),
    ({"enum": ["x"], "pattern": "y"}, "pattern can't be enforced beside enum"),
    ({"allOf": [{"format": "date"}, {"format": "uuid"}]}, "date and uuid can't be enforced together"),
    ({"type": "string", "minLength": 100_000}, "minLength 100000 is more than can be enforced"),
    ({"type": "array", "minItems": 5000}, "minItems 5000"),
    ({"type": "number", "minimum": 1e300}, "remove the bound"),
    ({"type": "number", "minimum": 1e-20}, "decimal places"),
    ({"minimum": "3"}, "minimum must be a number, not '3'"),
    ({"minimum": True}, "minimum must be a number"),
    ({"minLength": -1}, "minLength must be a whole number"),
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "required must be a list"),
    ({"properties": {"\ud800": {}}}, "valid text"),
    ({"const": "\ud800"}, "no JSON value"),
    ({"items": 5}, "items must be a schema"),
    ({"anyOf": [5]}, r"anyOf\[0\]: a schema must be an object"),
    ({"properties": {"a": {}}, "propertyNames": {}, "type": "object"}, "propertyNames"),
    ({"anyOf": [{}] * 11, "allOf": [{"anyOf": [{}] * 11}]}, "more than 100 ways"),
    (DEEP, "nested too deep"),
    (BOTTOMLESS, "nested too deep"),
    ({"enum": [*range(30_000)]}, "too large"),
    (obj(**{f"p{n}": {} for n in range(3000)}), "too large: more than 2000 parts"),
]


@pytest.mark.parametrize(("schema", "told"), [*IMPOSSIBLE, *UNSUPPORTED])
def test_bad_schemas_are_refused_in_words(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        check_schema(schema)
    assert refused.value.field == "json_schema"
    assert str(refused.value).startswith("json_schema")
    assert str(refused.value).encode()
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"minimum": NaN}', "NaN is no JSON number"),
        ("[" * 200_000, "too deep"),
        ('{"const": ' + "9" * 10_000 + "}", "is not JSON"),
    ],
)
def test_texts_that_are_no_schema(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        parsed_schema(text)


def test_the_schema_given_is_not_changed() -> None:
    schema = {**NODE, "$defs": {"node": {"allOf": [obj(a={}), {"type": "object"}]}}}
    before = json.dumps(schema)
    prepared = prepared_schema(schema)
    assert json.dumps(schema) == before
    assert prepared_schema(prepared) == prepared


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", (1, 1)),
        ("a", (1, None)),
        (r"^\d{2,4}(x|yz)?$", (2, 6)),
        ("^$", (0, 0)),
        ("^(a+|b){2}$", (2, None)),
    ],
)
def test_lengths_of_patterns(pattern: str, expected: tuple[int, int | None]) -> None:
    assert lengths(parsed_pattern(pattern)) == expected


def test_references_that_double_are_refused_at_once() -> None:
    deep: dict[str, Any] = {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)
    }
    deep["d40"] = {"type": "object", "properties": {"a": {"type": "string"}}}
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        check_schema({"$ref": "#/$defs/d0", "$defs": deep})
    # Exponential time would be minutes.
    assert time.monotonic() - began < 5
