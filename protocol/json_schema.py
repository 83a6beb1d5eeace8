"""JSON schemas that an answer can be made to follow: reads one, refuses what is impossible or can't be enforced.

Owns the rules of which schemas are taken. `prepared_schema` turns one into a plainer one of the same meaning or
stricter, in which every part is one of: `{}` (anything), `$ref` to `#/$defs/…`, `anyOf`, `enum`, or one `type` with
its own keywords; the engine writes its grammar from that. What a grammar can't enforce (`not`, `uniqueItems`,
`multipleOf` …) is refused instead of ignored; annotations and formats without a grammar are ignored, as JSON
Schema allows. `oneOf` is read as `anyOf`. An object that lists its properties gets no others unless
`additionalProperties` says so. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.quoting import quoted
from infervisor.protocol.schema_merge import (
    Contradiction,
    Unsupported,
    implied_type,
    keywords,
    merged,
    narrowed,
    without,
)
from infervisor.protocol.schema_values import enum_values, number_limits, size_limits, text_limits

MAX_DEPTH = 24
"""Of schemas inside schemas."""
MAX_PARTS = 2000
"""Schemas in one schema, after `allOf` and the like have been carried out."""
_MAX_VALUES = 20_000
_Schema = Mapping[str, Any]


def parsed_schema(text: str, field: str = "json_schema") -> dict[str, Any]:
    """Return the schema that a JSON text holds. Raises `InvalidRequest` if it is no JSON object."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deep to be read; flatten it", field) from None
    except ValueError as error:
        raise InvalidRequest(f"{field} is not JSON: {quoted(str(error), 200)}", field) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} must be a JSON object, not {quoted(schema)}", field)
    return schema


def check_schema(schema: Mapping[str, Any], field: str = "json_schema") -> None:
    """Raise `InvalidRequest`, naming the place in the schema, if no answer could be made to follow it."""
    prepared_schema(schema, field)


def prepared_schema(schema: Mapping[str, Any], field: str = "json_schema") -> dict[str, Any]:
    """Return the plainer schema, with its own `$defs`. Raises `InvalidRequest` like `check_schema`.

    What follows it, follows `schema`; `schema` itself isn't changed.
    """
    _check_size(schema, field)
    preparing = _Preparing(schema, field)
    try:
        return preparing.finished(preparing.part(schema, field, 0))
    except _Impossible as error:
        raise InvalidRequest(str(error), error.field) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_size(schema: object, field: str) -> None:
    # By hand and level by level: a recursive walk would itself end in a RecursionError.
    level: list[object] = [schema]
    count = depth = 0
    while level:
        count += len(level)
        depth += 1
        if depth > 3 * MAX_DEPTH:
            raise InvalidRequest(
                f"{field} is nested too deep: at most {MAX_DEPTH} schemas inside each other", field
            )
        if count > _MAX_VALUES:
            raise InvalidRequest(f"{field} is too large: it holds more than {_MAX_VALUES} values", field)
        level = [inner for value in level for inner in _inside(value)]


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value


class _Preparing:
    """One schema on its way: its references, and what they have become."""

    def __init__(self, root: _Schema, field: str) -> None:
        self._root = root
        self._field = field
        self._names: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._defs: dict[str, dict[str, Any]] = {}
        self._parts = 0

    # --- one part ------------------------------------------------------------------------------

    def part(self, schema: object, path: str, depth: int) -> dict[str, Any]:
        """Return the prepared form of one schema within the whole."""
        self._count(path, depth)
        try:
            read = self._read(schema, path)
            if "$ref" in read and len(read) == 1:
                return {"$ref": f"#/$defs/{self._name(read['$ref'], path)}"}
            return self._plain(self._joined(read, path, depth), path, depth)
        except Contradiction as error:
            raise self._impossible(path, str(error)) from None
        except Unsupported as error:
            raise self._refused(path, str(error)) from None

    def _plain(self, schema: _Schema, path: str, depth: int) -> dict[str, Any]:
        if "anyOf" in schema:
            return self._any_of(schema, path, depth)
        if "const" in schema or "enum" in schema:
            return {"enum": enum_values(schema)}
        kind = schema.get("type") or implied_type(schema)
        if isinstance(kind, list):
            return self._any_of({"anyOf": [narrowed(schema, name) for name in kind]}, path, depth)
        if kind is None:
            return {}
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            return text_limits(schema)
        return number_limits(schema, kind) if kind in ("integer", "number") else {"type": kind}

    def _read(self, schema: object, path: str) -> _Schema:
        if schema is True:
            return {}
        if schema is False:
            raise self._impossible(path, "the schema false allows nothing; remove it")
        if not isinstance(schema, Mapping):
            raise self._refused(path, f"a schema must be an object, true or false, not {quoted(schema)}")
        return keywords(schema)

    def _joined(self, schema: _Schema, path: str, depth: int) -> _Schema:
        """Return the schema with a `$ref` that has neighbours, and `allOf`, merged into it."""
        while "$ref" in schema or "allOf" in schema:
            self._count(path, depth)
            rest = without(schema, "$ref", "allOf")
            others: list[object] = [*schema.get("allOf", [])]
            if "$ref" in schema:
                others.append(self._resolved(schema["$ref"], path))
            for other in others:
                self._count(path, depth)
                rest = merged(rest, self._read(other, path))
            schema = rest
        return schema

    def _any_of(self, schema: _Schema, path: str, depth: int) -> dict[str, Any]:
        rest = without(schema, "anyOf")
        options: list[dict[str, Any]] = []
        contradiction: InvalidRequest | None = None
        for index, option in enumerate(schema["anyOf"]):
            try:
                joined = {"allOf": [rest, option]} if rest else option
                options.append(self.part(joined, f"{path}.anyOf[{index}]", depth + 1))
            except _Impossible as error:
                # What its neighbours rule out is no option; that's how such schemas are meant.
                if not rest and option is not False:
                    raise
                contradiction = error
        if not options:
            raise contradiction or self._impossible(path, "anyOf is empty; name an alternative")
        return self._options(options)

    def _options(self, options: Sequence[dict[str, Any]]) -> dict[str, Any]:
        unique = [option for index, option in enumerate(options) if option not in options[:index]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    # --- objects and arrays --------------------------------------------------------------------

    def _object(self, schema: _Schema, path: str, depth: int) -> dict[str, Any]:
        listed: Mapping[str, Any] = schema.get("properties", {})
        rest = schema.get("additionalProperties", "properties" not in schema)
        required = set(schema.get("required", ()))
        properties: dict[str, Any] = {}
        for name in dict.fromkeys([*listed, *schema.get("required", ())]):
            inner = listed.get(name, rest if "additionalProperties" in schema else True)
            where = f"{path}.properties.{name}"
            if inner is not False:
                properties[name] = self.part(inner, where, depth + 1)
            elif name in required:
                why = "its schema is false" if name in listed else "additionalProperties is false"
                raise Contradiction(
                    f"the property {quoted(name)} is required, but {why}: allow it, or don't require it"
                )
        prepared: dict[str, Any] = {"type": "object", "properties": properties}
        prepared["required"] = [name for name in properties if name in required]
        if rest is not False:
            prepared["additionalProperties"] = self.part(rest, f"{path}.additionalProperties", depth + 1)
        if "propertyNames" in schema:
            if properties:
                raise Unsupported("propertyNames can't be enforced beside properties: remove one of them")
            prepared["propertyNames"] = self._names_of(
                schema["propertyNames"], f"{path}.propertyNames", depth
            )
        return prepared

    def _names_of(self, schema: object, path: str, depth: int) -> dict[str, Any]:
        return self.part({"type": "string", "allOf": [schema]}, path, depth + 1)

    def _array(self, schema: _Schema, path: str, depth: int) -> dict[str, Any]:
        least, most = size_limits(schema, "array")
        first: list[Any] = [*schema.get("prefixItems", ())]
        rest = schema.get("items", True)
        ends = first.index(False) if False in first else len(first) if rest is False else None
        if ends is not None and least > ends:
            raise Contradiction(f"minItems is {least}, but only {ends} items are allowed: lower minItems")
        most = min((limit for limit in (most, ends) if limit is not None), default=None)
        if most is None and first and "items" not in schema:
            most = max(least, len(first))
        first = first if most is None else first[:most]
        prepared: dict[str, Any] = {"type": "array", "minItems": max(least, len(first))}
        if most is not None:
            prepared["maxItems"] = most
        if first:
            prepared["prefixItems"] = [
                self.part(item, f"{path}.prefixItems[{index}]", depth + 1) for index, item in enumerate(first)
            ]
        if most is None or most > len(first):
            prepared["items"] = self.part(rest, f"{path}.items", depth + 1)
        return prepared

    # --- references ----------------------------------------------------------------------------

    def _name(self, reference: object, path: str) -> str:
        self._resolved(reference, path)
        pointer = str(reference)
        if pointer not in self._names:
            # Own names: those of the caller may be anything, and grammars know letters, digits and dashes.
            self._names[pointer] = name = f"r{len(self._names)}"
            self._paths[name] = self._field + pointer[1:].replace("/", ".")
        return self._names[pointer]

    def _resolved(self, reference: object, path: str) -> object:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._refused(
                path, f"$ref must point into this schema, like #/$defs/name, not to {quoted(reference)}"
            )
        target: object = self._root
        for step in unquote(reference).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, (list, tuple)) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise self._refused(path, f"{quoted(reference)} points to nothing: {quoted(key)} isn't there")
        return target

    def finished(self, root: dict[str, Any]) -> dict[str, Any]:
        """Return the whole: `root` and all that it refers to. Refuses recursion that never ends."""
        while missing := [pointer for pointer, name in self._names.items() if name not in self._defs]:
            for pointer in missing:
                name = self._names[pointer]
                self._defs[name] = self.part(self._resolved(pointer, pointer), self._paths[name], 0)
        ends: set[str] = set()
        while more := {name for name, part in self._defs.items() if name not in ends and _ends(part, ends)}:
            ends |= more
        for name in self._defs:
            if name not in ends:
                raise self._impossible(
                    self._paths[name], "it always contains itself, so no value of it ever ends: make the "
                    "property that leads back optional, or allow null for it"
                )  # fmt: skip
            if name in _reached(name, self._defs):
                raise self._refused(
                    self._paths[name], "it refers to itself with nothing in between: remove that alternative"
                )
        return {**root, "$defs": self._defs} if self._defs else root

    # --- refusals ------------------------------------------------------------------------------

    def _count(self, path: str, depth: int) -> None:
        self._parts += 1
        if depth > MAX_DEPTH:
            raise self._refused(path, f"it is nested too deep: at most {MAX_DEPTH} schemas inside each other")
        if self._parts > MAX_PARTS:
            raise self._refused(path, f"the schema is too large: more than {MAX_PARTS} parts; simplify it")

    def _refused(self, path: str, text: str) -> InvalidRequest:
        return InvalidRequest(_sendable(f"{path:.300}: {text}"), self._field)

    def _impossible(self, path: str, text: str) -> InvalidRequest:
        return _Impossible(_sendable(f"{path:.300}: {text}"), self._field)


def _sendable(text: str) -> str:
    # Names in a schema may hold half a surrogate pair, which an error that crosses a pipe can't.
    return text.encode("utf-8", "backslashreplace").decode()


class _Impossible(InvalidRequest):
    """No value can satisfy this part; as one of several alternatives it may be left out."""


def _ends(part: _Schema, ending: set[str]) -> bool:
    """Whether a value of this part can be finished, if values of the named definitions can."""
    if "$ref" in part:
        return _target(part) in ending
    if "anyOf" in part:
        return any(_ends(option, ending) for option in part["anyOf"])
    if part.get("type") == "object":
        return all(_ends(part["properties"][name], ending) for name in part["required"])
    if part.get("type") == "array":
        first = part.get("prefixItems", [])
        rest = [part["items"]] if part["minItems"] > len(first) else []
        return all(_ends(item, ending) for item in [*first, *rest])
    return True


def _reached(name: str, defs: Mapping[str, _Schema]) -> set[str]:
    """Return the definitions that a value of `name` can be without any brackets around them."""
    found: set[str] = set()
    waiting = [defs[name]]
    while waiting:
        part = waiting.pop()
        waiting += part.get("anyOf", ())
        if "$ref" in part and _target(part) not in found:
            found.add(_target(part))
            waiting.append(defs[_target(part)])
    return found


def _target(part: _Schema) -> str:
    return str(part["$ref"]).rpartition("/")[2]
