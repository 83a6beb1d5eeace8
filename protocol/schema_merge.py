"""The keywords of one JSON schema, and of several that hold at once (`allOf`, or beside a `$ref`).

Owns which keywords are taken, their shapes, and how two schemas become one. Knows no paths and no references: its
two errors are told with the place by `protocol.json_schema`. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infervisor.protocol.quoting import quoted

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""Which keywords say something of which type."""
FORMATS = ("date", "time", "date-time", "uuid")
"""Those that an answer is held to; others say what is meant, as JSON Schema has it."""
MAX_OPTIONS = 100
_ANY_TYPE = ("type", "enum", "const", "anyOf", "allOf", "$ref")
_KNOWN = frozenset(_ANY_TYPE).union(*OF_TYPE.values())
_WITH_OTHERS = frozenset(("$ref", "properties", "prefixItems"))
"""What can't be joined by itself: what one schema lists, the other limits by its rest."""
_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_CANT = {
    "not": "say what is allowed instead",
    "if": "write the cases as anyOf",
    "patternProperties": "list the properties, or use additionalProperties",
    "minProperties": "require the properties by name",
    "maxProperties": "list the properties and set additionalProperties to false",
    "uniqueItems": "remove it, and drop repeated items yourself",
    "multipleOf": "remove it, and round the number yourself",
    "contains": "describe the items with items or prefixItems",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}


class Contradiction(Exception):
    """No value can satisfy it. The text says why, and what to change."""


class Unsupported(Exception):
    """It is malformed or can't be enforced. The text says what, and what to do."""


def keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what limits an answer, in one spelling; annotations and unknown keywords are left out.

    `oneOf` becomes `anyOf`, a list of `items` becomes `prefixItems`. Raises `Unsupported`.
    """
    most = schema.get("maxItems")
    single = isinstance(most, int) and most <= 1
    harmless: dict[str, Callable[[Any], bool]] = {
        "uniqueItems": lambda value: value is False or single,
        "minProperties": lambda value: value == 0,
        "multipleOf": lambda value: value == 1 and schema.get("type") == "integer",
    }
    for key, instead in _CANT.items():
        if key in schema and not (key in harmless and harmless[key](schema[key])):
            raise Unsupported(f"{key} can't be enforced while an answer is written: {instead}")
    found = {key: value for key, value in schema.items() if key in _KNOWN}
    if "oneOf" in schema:
        if "anyOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": found["anyOf"]}]
        found["anyOf"] = schema["oneOf"]
    if isinstance(found.get("items"), (list, tuple)):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in schema:
            found["items"] = schema["additionalItems"]
    for key, value in found.items():
        check, wanted = _SHAPES[key]
        if not check(value):
            raise Unsupported(f"{key} must be {wanted}, not {quoted(value)}")
    if isinstance(found.get("type"), (list, tuple)):
        kinds = [*dict.fromkeys(found["type"])]
        # Every integer is a number: both together would only say the same twice.
        kinds = [kind for kind in kinds if kind != "integer" or "number" not in kinds]
        found["type"] = kinds if len(kinds) > 1 else kinds[0]
    return found


def without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the schema without these keywords."""
    return {key: value for key, value in schema.items() if key not in names}


def narrowed(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what the schema says of one of its types."""
    return {"type": kind} | {key: value for key, value in schema.items() if key in OF_TYPE.get(kind, ())}


def implied_type(schema: Mapping[str, Any]) -> str | None:
    """Return the type whose keywords it has; None if it has none."""
    kinds = (kind for kind in ("object", "array", "string", "number") if set(OF_TYPE[kind]) & schema.keys())
    return next(kinds, None)


def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that holds where both hold; both as `keywords` gives them.

    What is inside (a property of both) becomes an `allOf`. Raises `Contradiction` and `Unsupported`.
    """
    both = {**a, **b}
    for key in sorted(a.keys() & b.keys() - _WITH_OTHERS):
        if key in _HIGHEST or key in _LOWEST:
            both[key] = max(a[key], b[key]) if key in _HIGHEST else min(a[key], b[key])
        elif key in _JOINED:
            both[key] = _JOINED[key](a[key], b[key])
        elif a[key] != b[key]:
            raise Unsupported(f"two different values of {key} can't be enforced together; keep one")
    if "$ref" in a and "$ref" in b:
        both["$ref"] = a["$ref"]
        both["allOf"] = [*both.get("allOf", ()), {"$ref": b["$ref"]}]
    if "properties" in both:
        both["properties"] = _properties(a, b)
    if "prefixItems" in both:
        both["prefixItems"] = _rows(a, b)
    return both


def _both(x: Any, y: Any) -> Any:
    if x is False or y is False:
        return False
    if x is True or y is True or x == y:
        return y if x is True else x
    return {"allOf": [x, y]}


def _properties(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in dict.fromkeys([*a.get("properties", ()), *b.get("properties", ())]):
        sides = [
            side.get("properties", {}).get(name, side.get("additionalProperties", True)) for side in (a, b)
        ]
        joined[name] = _both(*sides)
    return joined


def _types(x: Any, y: Any) -> Any:
    left, right = ([kinds] if isinstance(kinds, str) else [*kinds] for kinds in (x, y))
    common = [kind for kind in left if kind in right or (kind == "integer" and "number" in right)]
    common += [kind for kind in right if kind == "integer" and "number" in left and kind not in common]
    if not common:
        raise Contradiction(
            f"nothing is both {' or '.join(left)} and {' or '.join(right)}: its parts contradict each other"
        )
    return common if len(common) > 1 else common[0]


def _options(x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
    if len(x) * len(y) > MAX_OPTIONS:
        raise Unsupported(f"its alternatives combine in more than {MAX_OPTIONS} ways; simplify them")
    return [_both(left, right) for left in x for right in y]


def _values(x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
    common = [value for value in x if any(same(value, other) for other in y)]
    if not common:
        raise Contradiction("its enums have no value in common")
    return common


def _const(x: Any, y: Any) -> Any:
    if not same(x, y):
        raise Contradiction(f"it can't be both {quoted(x)} and {quoted(y)}")
    return x


def _format(x: str, y: str) -> str:
    held_to = {name for name in (x, y) if name in FORMATS}
    if len(held_to) > 1:
        raise Unsupported(f"the formats {x} and {y} can't be enforced together: keep one")
    return held_to.pop() if held_to else x


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Any]:
    first, second = a.get("prefixItems", ()), b.get("prefixItems", ())
    rests = a.get("items", True), b.get("items", True)
    return [
        _both(*(row[at] if at < len(row) else rest for row, rest in zip((first, second), rests, strict=True)))
        for at in range(max(len(first), len(second)))
    ]


def same(x: Any, y: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true aren't."""
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    return bool(x == y)


_JOINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "anyOf": _options,
    "enum": _values,
    "const": _const,
    "required": lambda x, y: [*dict.fromkeys([*x, *y])],
    "allOf": lambda x, y: [*x, *y],
    "additionalProperties": _both,
    "propertyNames": _both,
    "items": _both,
    "format": _format,
}


def _is_schema(value: Any) -> bool:
    return isinstance(value, (bool, Mapping))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_count(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == value // 1
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_type(value: Any) -> bool:
    return (isinstance(value, str) and value in TYPES) or (
        _is_list(value) and bool(value) and all(isinstance(kind, str) and kind in TYPES for kind in value)
    )


_SCHEMAS = (lambda value: _is_list(value) and bool(value), "a list of schemas, not empty")
_COUNT = (_is_count, "a whole number, not negative")
_NUMBER = (_is_number, "a number")
_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (lambda value: _is_list(value) and bool(value), "a list of the allowed values, not empty"),
    "const": (lambda value: True, ""),
    "anyOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "prefixItems": _SCHEMAS,
    "$ref": (lambda value: isinstance(value, str), "a string"),
    "properties": (
        lambda value: isinstance(value, Mapping) and all(_is_name(name) for name in value),
        "an object of schemas whose names are valid text",
    ),
    "required": (
        lambda value: _is_list(value) and all(_is_name(name) for name in value),
        "a list of property names",
    ),
    "additionalProperties": (_is_schema, "a schema"),
    "propertyNames": (_is_schema, "a schema"),
    "items": (_is_schema, "a schema"),
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "format": (lambda value: isinstance(value, str), "a string"),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
}
