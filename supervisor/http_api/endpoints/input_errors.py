"""Which mistake of a body is told, where it is, and in what words.

Owns no shapes: those are the models'. Pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from infervisor.supervisor.http_api.endpoints.json_body import kind_of
from infervisor.supervisor.http_api.errors import HttpRefused

MAX_PATH = 160
"""Characters of a path that are told: parts of it are names which a client chose."""
MAX_SHOWN = 80
"""Characters of a wrong value that are told."""

Loc = tuple[int | str, ...]
"""Where pydantic says that a mistake is: keys and indices, and names of types in between."""

_KINDS: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
}
"""Type of mistake → what the value must be."""

_BOUNDS: Mapping[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}
_SIZES: Mapping[str, str] = {
    "too_short": "is too short: {min_length} or more are needed",
    "too_long": "is too long: at most {max_length} are taken",
    "string_too_short": "is too short: {min_length} or more characters are needed",
    "string_too_long": "is too long: at most {max_length} characters are taken",
    "string_pattern_mismatch": "must match {pattern}",
    "union_tag_invalid": "has a type that isn't known: there are {expected_tags}",
    "union_tag_not_found": "needs a type",
}


def refusal(model: type[BaseModel], error: ValidationError, data: Any) -> HttpRefused:
    """Return what a client is told of a body that doesn't fit: the first mistake."""
    mistakes = error.errors(include_url=False)
    for mistake in mistakes:
        # An unknown field is the likelier mistake: the field that it was meant to be is then missing.
        if mistake["type"] == "extra_forbidden":
            return _unknown(model, mistake["loc"], data)
    group = _of_first_value(mistakes, data)
    # A value may fit none of several types: the one in which it came furthest tells most.
    where, mistake = max(group, key=lambda each: (len(each[0]), each[1]["type"] not in _KINDS))
    path = path_of(where)
    if mistake["type"] == "missing":
        return HttpRefused("invalid_request", f"The field {path} is missing.", path)
    said = _said([each for place, each in group if place == where], mistake)
    return HttpRefused("invalid_request", f"{path or 'The body'}{said}", path or None)


def place_of(loc: Loc, data: Any, *, is_there: bool = False) -> Loc | None:
    """Return the keys and indices in the body that lead to a mistake, without names of types.

    is_there: None is returned unless there is something at that place; else the last part may be what is missing.
    """
    if not loc:
        return ()
    part, rest = loc[0], loc[1:]
    if _has(data, part):
        below = place_of(rest, data[part], is_there=is_there)
        if below is not None:
            return (part, *below)
    if rest:
        # A name of a type; perhaps one that is also the name of a field.
        return place_of(rest, data, is_there=is_there)
    if is_there:
        return None
    return (part,) if isinstance(data, dict) and isinstance(part, str) else ()


def path_of(place: Loc) -> str:
    """Return the path of a field as OpenAI writes it."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:MAX_PATH]}" if path else part[:MAX_PATH]
    return path[:MAX_PATH]


def _has(data: Any, part: int | str) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _of_first_value(mistakes: Sequence[Any], data: Any) -> list[tuple[Loc, Any]]:
    """Return the mistakes at the place of the first one, and inside of it, each with its place."""
    group: list[tuple[Loc, Any]] = []
    for mistake in mistakes:
        place = place_of(mistake["loc"], data) or ()
        if group and place[: len(group[0][0])] != group[0][0]:
            # They come in order; and there can be very many.
            break
        group.append((place, mistake))
    return group


def _said(mistakes: Sequence[Any], chosen: Any) -> str:
    """Return what is wrong. mistakes: all at one place, where a value may fit none of several types."""
    kind, context, value = chosen["type"], chosen.get("ctx", {}), chosen["input"]
    if kind in _KINDS:
        wanted = [
            _KINDS[each["type"]].format(**each.get("ctx", {})) for each in mistakes if each["type"] in _KINDS
        ]
        return f" must be {' or '.join(dict.fromkeys(wanted))}, not {_shown(value)}."
    if kind in _BOUNDS:
        bound = {name: f"{limit:.15g}" for name, limit in context.items()}
        return f" {_BOUNDS[kind].format(**bound)}, not {_shown(value)}."
    if kind in _SIZES:
        return f" {_SIZES[kind].format(**context)}."
    message = chosen["msg"]
    return f": {message}" if message.endswith(".") else f": {message}."


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return kind_of(value)
    cut = value[: MAX_SHOWN + 1] if isinstance(value, str) else value
    text = json.dumps(cut, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _unknown(model: type[BaseModel], loc: Loc, data: Any) -> HttpRefused:
    path = path_of(place_of(loc, data, is_there=True) or loc)
    close: list[str] = []
    if len(loc) == 1:
        # What is only there to be refused is nobody's wish.
        known = [
            field.alias or name
            for name, field in model.model_fields.items()
            if field.annotation is not type(None)
        ]
        close = difflib.get_close_matches(str(loc[0])[:80], known, 1)
    meant = f" Did you mean {close[0]}?" if close else " Leave it out."
    return HttpRefused("invalid_request", f"There is no field {path!r} here.{meant}", path)
