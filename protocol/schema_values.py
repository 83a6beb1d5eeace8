"""The leaves of a JSON schema: lengths, ranges, patterns, formats and enums, and when they contradict each other.

Raises the two errors of `protocol.schema_merge`; the place in the schema is added by `protocol.json_schema`. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from infervisor.protocol.quoting import quoted
from infervisor.protocol.schema_merge import FORMATS, Contradiction, Unsupported, same
from infervisor.protocol.schema_pattern import UnsupportedPattern, lengths, parsed_pattern

_FORMAT_LENGTHS = {"date": (10, 10), "time": (9, 21), "date-time": (20, 32), "uuid": (36, 36)}
MAX_LENGTH = 65_536
MAX_ITEMS = 1000
MAX_PLACES = 12
_LARGEST = {"integer": 10**30, "number": 10**15}
"""Bounds beyond it become it: stricter, never looser."""
_SIZES = {"string": ("minLength", "maxLength", MAX_LENGTH), "array": ("minItems", "maxItems", MAX_ITEMS)}
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list, tuple), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def size_limits(schema: Mapping[str, Any], kind: str) -> tuple[int, int | None]:
    """Return the least and the most characters or items; None is any number.

    A maximum that is more than can be enforced becomes the largest that can: stricter, never looser.
    """
    low_name, high_name, largest = _SIZES[kind]
    least = int(schema.get(low_name, 0))
    most = int(schema[high_name]) if high_name in schema else None
    if most is not None and least > most:
        raise Contradiction(
            f"{low_name} {least} is more than {high_name} {most}: lower the one or raise the other"
        )
    if least > largest:
        raise Unsupported(
            f"{low_name} {quoted(least)} is more than can be enforced; at most {largest} is taken"
        )
    return least, None if most is None else min(most, largest)


def text_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prepared string: with a pattern, or a format, or lengths."""
    least, most = size_limits(schema, "string")
    limits: dict[str, Any] = {"type": "string"}
    if schema.get("format") in FORMATS:
        shortest, longest = _FORMAT_LENGTHS[schema["format"]]
        if "pattern" in schema or least > shortest or (most is not None and most < longest):
            raise Unsupported(
                f"the format {schema['format']} can't be enforced beside a pattern or another length: keep one"
            )
        return limits | {"format": schema["format"]}
    if "pattern" in schema:
        limits["pattern"] = schema["pattern"]
        _check_pattern(schema["pattern"], least, most)
    elif least or most is not None:
        limits |= {"minLength": least} | ({} if most is None else {"maxLength": most})
    return limits


def _check_pattern(pattern: str, least: int, most: int | None) -> None:
    try:
        shortest, longest = lengths(parsed_pattern(pattern))
    except UnsupportedPattern as error:
        raise Unsupported(f"the pattern {quoted(pattern)} can't be enforced: {error}") from None
    if least > shortest or (most is not None and (longest is None or longest > most)):
        raise Unsupported(
            "minLength and maxLength can't be enforced beside a pattern that allows other lengths: "
            "write the length into the pattern, like ^[a-z]{2,8}$"
        )


def number_limits(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a prepared number or integer. An integer has whole bounds, minimum and maximum alone."""
    bounds = {name: value for name, value in schema.items() if name in _BOUNDS}
    low, low_open = _strictest(bounds, "minimum", "exclusiveMinimum", max)
    high, high_open = _strictest(bounds, "maximum", "exclusiveMaximum", min)
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        low_name = "exclusiveMinimum" if low_open else "minimum"
        high_name = "exclusiveMaximum" if high_open else "maximum"
        relation = "more than" if low > high else "as much as"
        raise Contradiction(
            f"{low_name} {quoted(low)} is {relation} {high_name} {quoted(high)}: lower the one or raise the other"
        )
    largest = _LARGEST[kind]
    if (low is not None and low > largest) or (high is not None and high < -largest):
        raise Unsupported(f"a range beyond {largest:.0e} can't be enforced; remove the bound")
    low, high = (None if bound is None else max(-largest, min(bound, largest)) for bound in (low, high))
    limits: dict[str, Any] = {"type": kind}
    if kind == "number":
        for name, bound, is_open in (("inimum", low, low_open), ("aximum", high, high_open)):
            if bound is not None:
                limits[f"exclusiveM{name}" if is_open else f"m{name}"] = _few_places(bound)
        return limits
    if low is not None:
        limits["minimum"] = math.floor(low) + 1 if low_open else math.ceil(low)
    if high is not None:
        limits["maximum"] = math.ceil(high) - 1 if high_open else math.floor(high)
    if low is not None and high is not None and limits["minimum"] > limits["maximum"]:
        raise Contradiction(f"no whole number lies between {quoted(low)} and {quoted(high)}")
    return limits


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _few_places(bound: Any) -> Any:
    if Decimal(repr(bound)).as_tuple().exponent < -MAX_PLACES:  # type: ignore[operator]
        raise Unsupported(f"the bound {quoted(bound)} has more than {MAX_PLACES} decimal places; round it")
    return bound


def _strictest(bounds: Mapping[str, Any], closed: str, opened: str, of: Any) -> tuple[Any, bool]:
    values = [bounds[name] for name in (closed, opened) if name in bounds]
    if not values:
        return None, False
    strictest = of(values)
    return strictest, opened in bounds and bounds[opened] == strictest


def enum_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of `enum` and `const` that the schema's other keywords allow."""
    values: list[Any] = [*schema["enum"]] if "enum" in schema else [schema["const"]]
    for value in values:
        _check_value(value)
    if "const" in schema:
        values = [value for value in values if same(value, schema["const"])]
    if not values:
        raise Contradiction("const isn't among the values of enum")
    kinds = schema.get("type")
    if kinds is not None:
        names = [kinds] if isinstance(kinds, str) else kinds
        values = [value for value in values if any(_is_of(value, name) for name in names)]
        if not values:
            raise Contradiction(f"no value of its enum is of type {' or '.join(names)}")
    beside = [name for name in schema if name not in ("enum", "const", "type", "format", *_BOUNDS, *_LENGTHS)]
    beside += ["format"] if schema.get("format") in FORMATS else []
    if beside:
        raise Unsupported(
            f"{beside[0]} can't be enforced beside enum or const: list only values that fit it, and remove it"
        )
    values = [value for value in values if _within(value, schema)]
    if not values:
        raise Contradiction("no value of its enum lies within its other limits")
    return values


_LENGTHS = ("minLength", "maxLength")


def _is_of(value: Any, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _within(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
    if _is_of(value, "number"):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above = "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
        return bool(low <= value <= high and above and value < schema.get("exclusiveMaximum", math.inf))
    return True


def _check_value(value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise Unsupported(f"{quoted(value)} in enum or const is no JSON value") from None
