"""What a caller asks of an answer's form: a schema, a grammar, tools, log-probabilities. Turned into an `Output`.

Decides what is allowed together and says why not; whether a model can do it is not known here. Pure: no clock, no
worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.json_schema import check_schema, parsed_schema
from infervisor.protocol.output import MAX_GRAMMAR_BYTES, TOOL_CHOICES, Output, refuse_endless
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.plain_values import PlainValues

MAX_SCHEMA_DEPTH = 100
"""Of values in each other; schemas in each other take two or three times as many."""
MAX_TOOLS = 128
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_OBJECT = '{"type": "object"}'

Tool = Mapping[str, Any]


def check_output(
    *,
    logprobs: object,
    top_logprobs: object,
    grammar: object,
    json_schema: object,
    response_format: object,
    tools: object,
    tool_choice: object,
    has_messages: bool,
    ignore_eos: bool,
) -> tuple[Output, tuple[Tool, ...] | None]:
    """Return what the answer must look like, and a copy of the tools, or None. Raises `InvalidRequest`."""
    schema = None if json_schema is None else _schema_text("json_schema", json_schema)
    wanted = _format_schema(response_format)
    if wanted is not None:
        for name, given in (("json_schema", json_schema), ("grammar", grammar)):
            if given is not None:
                raise InvalidRequest(
                    f"response_format asks for JSON, and {name} for something else: give one of the two",
                    "response_format",
                )
    checked_tools = _tools(tools)
    if checked_tools is not None and not has_messages:
        raise InvalidRequest(
            "tools are shown to the model by its chat template: give messages instead of a prompt", "tools"
        )
    choice, tool = _tool_choice(tool_choice, checked_tools)
    output = Output(
        logprobs=logprobs,  # type: ignore[arg-type]  # checked there
        top_logprobs=top_logprobs,  # type: ignore[arg-type]
        grammar=grammar,  # type: ignore[arg-type]
        json_schema=schema if wanted is None else wanted,
        tool_choice=choice,
        tool=tool,
    )
    refuse_endless(output, ignore_eos)
    return output, checked_tools


# --- schemas -----------------------------------------------------------------------------------------


def _schema_text(name: str, schema: object) -> str:
    """Return a schema as JSON text, its properties in the order in which they were given."""
    if isinstance(schema, str):
        # Before it is read: what is longer takes minutes.
        if len(schema) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{name} has {len(schema)} characters; at most {MAX_GRAMMAR_BYTES} bytes are taken", name
            )
        schema = parsed_schema(schema, name)
    if not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"{name} must be a JSON schema, an object such as {_ANY_OBJECT}, not {quoted(schema, 80)}", name
        )
    copy = PlainValues(name, MAX_SCHEMA_DEPTH).copy(name, schema)
    check_schema(copy, name)
    return json.dumps(copy, ensure_ascii=False)


def _format_schema(response_format: object) -> str | None:
    """Return the schema that a `response_format` asks for, or None for free text."""
    if response_format is None:
        return None
    field = "response_format"
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(response_format, Mapping) or kind not in RESPONSE_FORMATS:
        raise InvalidRequest(
            f"response_format must be an object whose type is one of {', '.join(RESPONSE_FORMATS)}, "
            f"not {quoted(response_format, 120)}",
            field,
        )
    _refuse_others(field, response_format, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return _ANY_OBJECT if kind == "json_object" else None
    field += ".json_schema"
    wrapped = response_format.get("json_schema")
    if not isinstance(wrapped, Mapping):
        raise InvalidRequest(
            f"{field} must be an object such as {{'name': 'answer', 'schema': {{…}}}}, "
            f"not {quoted(wrapped, 80)}",
            field,
        )
    _refuse_others(field, wrapped, ("name", "description", "schema", "strict"))
    for name, kinds, wish in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        value = wrapped.get(name)
        if value is not None and not isinstance(value, kinds):
            raise InvalidRequest(f"{field}.{name} must be {wish}, not {quoted(value, 80)}", f"{field}.{name}")
    if not isinstance(wrapped.get("schema"), Mapping):
        raise InvalidRequest(
            f"{field}.schema must be a JSON schema, an object, not {quoted(wrapped.get('schema'), 80)}",
            f"{field}.schema",
        )
    return _schema_text(f"{field}.schema", wrapped["schema"])


def _refuse_others(name: str, value: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequest(
                f"{name} has the unknown part {quoted(key, 80)}; known are {', '.join(known)}", name
            )


# --- tools -------------------------------------------------------------------------------------------


def _tools(tools: object) -> tuple[Tool, ...] | None:
    """Return a copy of the tools; None if there are none."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest(
            f"tools must be a list of objects of type 'function', not {quoted(tools, 80)}", "tools"
        )
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; at most {MAX_TOOLS} are taken", "tools")
    plain = PlainValues("tools")
    names: set[str] = set()
    checked: list[Tool] = []
    for index, tool in enumerate(tools):
        copy = _tool(f"tools[{index}]", tool, plain.copy)
        name = copy["function"]["name"]
        if name in names:
            raise InvalidRequest(
                f"two tools have the name {name}: a call must say which one it means",
                f"tools[{index}].function.name",
            )
        names.add(name)
        checked.append(copy)
    return tuple(checked) or None


def _tool(name: str, tool: object, copy: Callable[[str, object], Any]) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            f"{name} must be an object such as {{'type': 'function', 'function': {{'name': …}}}}, "
            f"not {quoted(tool, 120)}",
            name,
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(
            f"{name}.function must be an object with a name, not {quoted(function, 80)}", f"{name}.function"
        )
    called = function.get("name")
    if not isinstance(called, str) or not _TOOL_NAME.fullmatch(called):
        raise InvalidRequest(
            f"{name}.function.name must be 1 to 64 letters, digits, dots, dashes and underscores, "
            f"not {quoted(called, 80)}",
            f"{name}.function.name",
        )
    if not isinstance(function.get("description", ""), str):
        raise InvalidRequest(
            f"{name}.function.description must be a string, not {quoted(function['description'], 80)}",
            f"{name}.function.description",
        )
    checked: Tool = copy(name, tool)
    parameters = checked["function"].get("parameters")
    if parameters is not None:
        field = f"{name}.function.parameters"
        if not isinstance(parameters, Mapping):
            raise InvalidRequest(
                f"{field} must be a JSON schema, an object, not {quoted(parameters, 80)}", field
            )
        check_schema(parameters, field)
    return checked


def _tool_choice(choice: object, tools: Sequence[Tool] | None) -> tuple[str, str | None]:
    """Return one of `TOOL_CHOICES`, and the name of the one tool that must be called, or None."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str) and choice in TOOL_CHOICES:
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice is required, and there are no tools: give tools", "tool_choice")
        return choice, None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(TOOL_CHOICES)}, or "
            f"{{'type': 'function', 'function': {{'name': …}}}}, not {quoted(choice, 120)}",
            "tool_choice",
        )
    known = [tool["function"]["name"] for tool in tools or ()]
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "there are no tools"
        raise InvalidRequest(
            f"tool_choice names {quoted(name, 80)}, which isn't a tool: {there}", "tool_choice"
        )
    return "required", name
