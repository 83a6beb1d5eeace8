"""The bytes of a body as the JSON object that they are, or why they are none.

Owns the bounds of what is looked at at all: what lies beyond them would keep the event loop from everybody else.
Knows no endpoint. Pure; runs in the task of the request.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from infervisor.supervisor.http_api.errors import HttpRefused

MAX_DEPTH = 200
"""Objects and lists in each other: more than any schema has that is taken."""
MAX_VALUES = 100_000
"""Values in a whole body: as many as the library takes in one field of it."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _NotJson(ValueError):
    """Something that Python's reader takes and JSON hasn't."""


def read_json(raw: bytes) -> dict[str, Any]:
    """Return the object that a body is. Raises `HttpRefused` for everything else.

    A name that an object has twice is refused: which of the two is meant, readers don't agree about.
    """
    if not raw.strip():
        raise _refused("The body is empty. Send a JSON object.")
    if raw.startswith(codecs.BOM_UTF8):
        raise _refused("The body begins with a byte-order mark. Send it without.")
    try:
        data = json.loads(raw.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
        _check_bounds(data)
        _check_text(raw, data)
    except UnicodeDecodeError as error:
        raise _refused(
            f"The body isn't UTF-8: byte {raw[error.start]:02X} at offset {error.start}."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _refused(
            f"The body isn't JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except _NotJson as error:
        raise _refused(f"The body isn't JSON: {error}.") from None
    except ValueError:
        # Python's reader refuses what takes it quadratic time.
        raise _refused("The body holds a number of thousands of digits.") from None
    if not isinstance(data, dict):
        raise _refused(f"The body must be a JSON object, not {kind_of(data)}.")
    return data


def kind_of(value: object) -> str:
    """Return what a value is called in JSON, with its article."""
    names = {list: "a list", dict: "an object", str: "a string", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "true or false")


def _refused(message: str) -> HttpRefused:
    return HttpRefused("invalid_json", message)


def _too_deep() -> HttpRefused:
    return _refused(f"The body is nested more than {MAX_DEPTH} deep. Send it flatter.")


def _refuse_constant(name: str) -> float:
    raise _NotJson(f"{name} is no number in JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _NotJson(f"the name {name[:80]!r} is there twice in one object")
            seen.add(name)
    return made


def _check_bounds(data: object) -> None:
    """Look at one level after the other, without recursion."""
    level = [data] if isinstance(data, (dict, list)) else []
    depth = values = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for part in level:
            values += len(part)
            if values > MAX_VALUES:
                raise HttpRefused(
                    "invalid_request",
                    f"The body holds more than {MAX_VALUES} values. Send it in several requests.",
                )
            inner = part.values() if isinstance(part, dict) else part
            below += [value for value in inner if isinstance(value, (dict, list))]
        level = below


def _check_text(raw: bytes, data: object) -> None:
    """Refuse half characters, which no answer, log or worker could write. Only escapes can make them."""
    if not _SURROGATE.search(raw):
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"{ord(error.object[error.start]):04x}"
        raise _refused(
            f"A string of the body holds half of a character, the lone surrogate \\u{half}. "
            "Send characters whole."
        ) from None
