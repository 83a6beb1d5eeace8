"""From the words of a command line to what an answer must look like. Every refusal is a `typer.BadParameter`.

Says what can't be read; whether a grammar, a schema or a tool is any good says the library, for all its users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import typer

from infervisor.supervisor.cli.arguments import file_text, text_of

TOOL_CHOICES = ("auto", "none", "required")


def form(
    *,
    grammar: str | None,
    json_schema: str | None,
    wants_json: bool,
    tools: str | None,
    tool_choice: str | None,
) -> dict[str, Any]:
    """Return the keywords of `Supervisor.stream` for the form of an answer; only those that were asked for."""
    asked: dict[str, Any] = {}
    if grammar is not None:
        asked["grammar"] = file_text(grammar, "--grammar")
    if json_schema is not None:
        asked["json_schema"] = _schema(json_schema)
    if wants_json:
        asked["response_format"] = {"type": "json_object"}
    if tools is not None:
        asked["tools"] = json_file(tools, "--tools")
    if tool_choice is not None:
        choice = text_of(tool_choice, "--tool-choice")
        named = {"type": "function", "function": {"name": choice}}
        asked["tool_choice"] = choice if choice in TOOL_CHOICES else named
    return asked


def _schema(word: str) -> str:
    text = text_of(word, "--json-schema")
    if text.lstrip().startswith("{"):
        return text
    return file_text(word, "--json-schema", hint="; a schema itself begins with {")


def json_file(path: str, flag: str, *, has_input: bool = False) -> list[Any]:
    """Return the list that a file of JSON holds. has_input: whether - may be standard input."""
    text = file_text(path, flag, has_input=has_input)
    try:
        value = json.loads(text)
    except RecursionError:
        raise typer.BadParameter(f"{flag}: {path} holds values too deep in each other") from None
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: {path} isn't JSON: {error}") from None
    if not isinstance(value, list):
        raise typer.BadParameter(f"{flag}: {path} must hold a list in JSON, not {type(value).__name__}")
    return value


def logit_bias(given: Sequence[str]) -> dict[int, float]:
    """Return the biases of `--logit-bias TOKEN=X`. Ranges are checked by the library."""
    biases: dict[int, float] = {}
    for entry in given:
        token, _, value = text_of(entry, "--logit-bias").rpartition("=")
        try:
            number, bias = int(token), float(value)
        except ValueError:
            number, bias = 0, math.nan
        if math.isnan(bias):
            raise typer.BadParameter(
                f"--logit-bias: {entry!r} isn't of the form TOKEN=X, such as 198=-inf; "
                "'supervise tokenize' tells the ids of tokens"
            )
        if number in biases:
            raise typer.BadParameter(f"--logit-bias: the token {number} is given twice")
        biases[number] = bias
    return biases
