"""Tools for a llama.cpp model: how its family writes calls, how to tell a model without it, how to force a call.

Decides by what the chat template spells. A template that doesn't know tools, or writes calls in a form that
`protocol.tool_calls` can't read, gets them described in a system message, in the form of Hermes and Qwen. Marks
such as `<tool_call>` can be control tokens, which the engine doesn't print: `marks` names those it must print when
tools are offered. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.json_schema import prepared_schema
from infervisor.protocol.quoting import quoted
from infervisor.protocol.tool_calls import FORMATS
from infervisor.worker.engines.llama.schema_grammar import gbnf_of_prepared

_UNREADABLE = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]", "tool▁calls", "<|channel|>", ">>>")
"""Forms of calls that look like one of the known ones, or stand beside it, and aren't."""
_AROUND = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "llama3": ("", ""),
    "mistral": ("[TOOL_CALLS][", "]"),
    "json": ("", ""),
}
"""The text before and after the JSON of one call."""
_INSTRUCTIONS = """You can call these tools:
<tools>
{tools}
</tools>

To call one, answer with its name and arguments in JSON, exactly like this:
{example}
Call a tool only if it helps to answer; otherwise answer in plain text."""


def format_of(template: str | None) -> str:
    """Return the name of the format in which this template's model writes calls; see `FORMATS`."""
    return _own_format(template) or "hermes"


def uses_tools(template: str | None) -> bool:
    """Whether the template itself tells the model about tools, in a form that can be read back."""
    return _own_format(template) is not None


def _own_format(template: str | None) -> str | None:
    if template is None or any(form in template for form in _UNREADABLE):
        return None
    if not any("tools" in code for code in _statements(template)):
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def marks(call_format: str) -> tuple[str, ...]:
    """Return the texts whose tokens must be printed, control tokens or not, for calls to be found."""
    spelled = FORMATS[call_format]
    return tuple(mark for mark in (spelled.opens, spelled.closes) if mark)


def _statements(template: str) -> Iterator[str]:
    at = 0
    while (
        begin := min((i for i in (template.find("{%", at), template.find("{{", at)) if i >= 0), default=-1)
    ) >= 0:
        end = template.find("%}" if template[begin + 1] == "%" else "}}", begin)
        at = end if end >= 0 else len(template)
        yield template[begin:at]


# --- for templates without tools ---------------------------------------------------------------


def with_tools_in_system(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], call_format: str = "hermes"
) -> list[dict[str, Any]]:
    """Return the messages with the tools described in the first system message, and calls and results as text.

    For a template that prints only role and content. tools: perhaps none; earlier calls are written out all the
    same. The messages given are not changed. Raises `InvalidRequest` for malformed calls in them.
    """
    plain = [_as_text(message, call_format) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = _written("tool name", '{"argument": "value"}', call_format)
    instructions = _INSTRUCTIONS.format(tools=listed, example=example)
    if plain and plain[0].get("role") == "system":
        content = _text_of(plain[0].get("content"))
        return [
            {**plain[0], "content": f"{content}\n\n{instructions}" if content else instructions},
            *plain[1:],
        ]
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(message: Mapping[str, Any], call_format: str) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = _text_of(message.get("content"))
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)) or not calls:
        return {**message}
    written = [_written_call(call, call_format) for call in calls]
    content = _text_of(message.get("content"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*([content] if content else []), *written])}


def _written_call(call: object, call_format: str) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f'each entry of tool_calls must be {{"function": {{"name": …, "arguments": …}}}}, not {quoted(call)}',
            "messages",
        )
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _written(function["name"], text, call_format)


def _written(name: str, arguments: str, call_format: str) -> str:
    before, after = _AROUND[call_format]
    key = FORMATS[call_format].arguments
    return f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments}}}{after}'


def _text_of(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content)


# --- a call that must be made ------------------------------------------------------------------


def call_schema(
    call_format: str, tools: Sequence[Mapping[str, Any]], tool: str | None
) -> tuple[str, dict[str, Any], str]:
    """Return the text before, the prepared schema of, and the text after exactly one call.

    tool: the one that must be called, or None for any. Raises `InvalidRequest` if `tool` isn't among them, or
    naming the place in a tool's `parameters` that can't be enforced.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for index, offered in enumerate(tools):
        function = offered["function"]
        if tool is not None and function["name"] != tool:
            continue
        place = f"tools[{index}].function.parameters"
        parameters = prepared_schema(function.get("parameters") or _NO_PARAMETERS, place)
        for name, part in parameters.pop("$defs", {}).items():
            definitions[f"t{index}-{name}"] = _renamed(part, f"t{index}-")
        calls.append(_call(call_format, function["name"], _renamed(parameters, f"t{index}-")))
    if not calls:
        named = ", ".join(str(offered["function"]["name"]) for offered in tools)
        raise InvalidRequest(
            f"the tool {quoted(tool, 80)} isn't among the tools; offered are {named or 'none'}", "tool"
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    before, after = _AROUND[call_format]
    return before, {**schema, "$defs": definitions} if definitions else schema, after


def grammar_for_call(call_format: str, tools: Sequence[Mapping[str, Any]], tool: str | None) -> str:
    """Return GBNF that forces exactly one call, with arguments that follow the parameters of its tool.

    Raises `InvalidRequest` like `call_schema`.
    """
    before, schema, after = call_schema(call_format, tools, tool)
    return gbnf_of_prepared(schema, before, after, "tools")


_NO_PARAMETERS = {"type": "object", "properties": dict[str, Any]()}


def _call(call_format: str, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    arguments = FORMATS[call_format].arguments
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, arguments: parameters},
        "required": ["name", arguments],
    }


def _renamed(part: Any, prefix: str) -> Any:
    """Return a prepared schema whose references begin with `prefix`: each tool has definitions of its own."""
    if isinstance(part, list):
        return [_renamed(inner, prefix) for inner in part]
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("$ref"), str):
        return {"$ref": f"#/$defs/{prefix}{part['$ref'].rpartition('/')[2]}"}
    return {key: value if key == "enum" else _renamed(value, prefix) for key, value in part.items()}
