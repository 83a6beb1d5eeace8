"""From the bytes of a body to a checked model: JSON, its shape, and errors that name the field.

Semantic checks are the library's, so that all ways to ask refuse the same things; here it is shapes alone. Pure.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from infervisor.supervisor.http_api.errors import HttpRefused

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.settings import HttpSettings

M = TypeVar("M", bound="InputModel")

MAX_DEPTH = 200
"""More nested than any request: refused before Python's own limit."""


class InputModel(BaseModel):
    """A body, or a part of one. Strict: a number in quotes is none."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    _raw: dict[str, Any] = {}
    _ignored: tuple[str, ...] = ()

    @property
    def raw(self) -> dict[str, Any]:
        """The body as it was sent, without what was ignored."""
        return self._raw

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of unknown fields that were left out."""
        return self._ignored


def parse(model: type[M], raw: bytes, settings: HttpSettings) -> M:
    """Return the body as a model. Raises `HttpRefused` naming what is wrong; the first mistake is told."""
    data = read_json(raw)
    ignored: list[str] = []
    # Each turn leaves out at least one field, so that it ends.
    while True:
        try:
            made = model.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)
            unknown = [each for each in first if each["type"] == "extra_forbidden"]
            if settings.unknown_fields == "ignore" and unknown:
                for each in unknown:
                    ignored.append(_path(each["loc"], data))
                    _leave_out(each["loc"], data)
                continue
            # An unknown field is the likelier mistake: the field that it was meant to be is then missing.
            raise _refusal(model, (unknown or first)[0], data) from None
        made._raw, made._ignored = data, tuple(name for name in ignored if name.isascii())
        return made


def read_json(raw: bytes) -> dict[str, Any]:
    """Return the object that a body is. Raises `HttpRefused` for everything else."""
    if not raw:
        raise HttpRefused("invalid_json", "The body is empty. Send a JSON object.")
    try:
        data = json.loads(raw.decode(), parse_constant=_no_number, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise HttpRefused(
            "invalid_json", f"The body isn't UTF-8: byte {raw[error.start]:02X} at offset {error.start}."
        ) from None
    except RecursionError:
        raise HttpRefused("invalid_json", "The body is nested too deeply. Send it flatter.") from None
    except ValueError as error:
        raise HttpRefused("invalid_json", f"The body isn't JSON: {str(error)[:200]}.") from None
    if not isinstance(data, dict):
        raise HttpRefused("invalid_json", f"The body must be a JSON object, not {_kind(data)}.")
    return data


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:80]!r} is there twice in one object")
    return made


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


# --- errors ------------------------------------------------------------------------------------------


def _refusal(model: type[InputModel], error: Any, data: dict[str, Any]) -> HttpRefused:
    path = _path(error["loc"], data)
    if error["type"] == "extra_forbidden":
        known = sorted(_names(model)) if len(error["loc"]) == 1 else []
        close = difflib.get_close_matches(str(error["loc"][-1])[:80], known, 1)
        meant = f" Did you mean {close[0]}?" if close else " Leave it out."
        return HttpRefused("invalid_request", f"There is no field {path[:160]!r} here.{meant}", path[:160])
    if error["type"] == "missing":
        return HttpRefused("invalid_request", f"The field {path} is missing.", path)
    said = error["msg"]
    said = said[0].lower() + said[1:] if said.startswith("Input ") else said
    shown = "" if isinstance(error["input"], (dict, list)) else f" It is {_shown(error['input'])}."
    return HttpRefused(
        "invalid_request", f"{path or 'The body'}: {said}.{shown}".replace("..", "."), path or None
    )


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:80] + "…"


def _names(model: type[InputModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _path(loc: tuple[int | str, ...], data: Any) -> str:
    """Return the path of a field as OpenAI writes it. What names a type of a union is no part of it."""
    path = ""
    here = data
    for position, part in enumerate(loc):
        is_last = position == len(loc) - 1
        if isinstance(part, int) and isinstance(here, list):
            path += f"[{part}]"
            here = here[part] if part < len(here) else None
        elif isinstance(part, str) and isinstance(here, dict) and (part in here or is_last):
            path += f".{part}" if path else part
            here = here.get(part)
    return path


def _leave_out(loc: tuple[int | str, ...], data: Any) -> None:
    here = data
    for part in loc[:-1]:
        if (isinstance(part, int) and isinstance(here, list)) or (isinstance(here, dict) and part in here):
            here = here[part]  # type: ignore[index]
    here.pop(loc[-1], None)


_BODY_NAMES: Mapping[str, str] = {"texts": "input"}


def field_of(field: str | None) -> str | None:
    """Return a field of the library as bodies of these endpoints name it."""
    if field is None:
        return None
    return re.sub(r"^\w+", lambda found: _BODY_NAMES.get(found[0], found[0]), field)
