"""From the bytes of a body to a checked model of it.

Here it is shapes alone. What a value means is checked by the library: all ways to ask refuse the same things. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_errors import Loc, path_of, place_of, refusal
from infervisor.supervisor.http_api.endpoints.json_body import read_json
from infervisor.supervisor.http_api.errors import HttpRefused

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.settings import HttpSettings

M = TypeVar("M", bound="InputModel")

MAX_MISTAKES = 10_000
"""To write down one of them takes longer than to find it, and the event loop stands still meanwhile."""
MAX_IGNORED = 20
"""Names of ignored fields that are told: they travel in a header."""


class InputModel(BaseModel):
    """A body, or a part of one. Strict: a number in quotes is none."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    _raw: dict[str, Any] = {}
    _ignored: tuple[str, ...] = ()

    @property
    def raw(self) -> dict[str, Any]:
        """The body as it was sent, without what was ignored."""
        return self._raw

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of unknown fields that were left out, as far as a header can hold them."""
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
            if error.error_count() > MAX_MISTAKES:
                raise HttpRefused(
                    "invalid_request",
                    f"The body is wrong in {error.error_count()} places. /openapi.json has the form that is taken.",
                ) from None
            left_out = _leave_out_unknown(error, data) if settings.unknown_fields == "ignore" else []
            if not left_out:
                raise refusal(model, error, data) from None
            ignored += left_out
            continue
        made._raw = data
        # Names are the client's: one with a line break would be another header.
        telling = [name for name in ignored if name.isascii() and name.isprintable()]
        made._ignored = tuple(telling[:MAX_IGNORED])
        return made


def only(taken: str | bool | None = None, *, why: str) -> BeforeValidator:
    """Return what refuses any value but null and the one that is taken. why: a sentence with what to do."""

    def check(value: Any) -> Any:
        # By type, too: 0 is not false.
        if value is not None and not (type(value) is type(taken) and value == taken):
            raise PydanticCustomError("not_taken", "{why}", {"why": why})
        return value

    return BeforeValidator(check)


def _leave_out_unknown(error: ValidationError, data: dict[str, Any]) -> list[str]:
    """Take unknown fields out of a body, and return their paths."""
    places = [
        place_of(each["loc"], data, is_there=True)
        for each in error.errors(include_url=False, include_context=False, include_input=False)
        if each["type"] == "extra_forbidden"
    ]
    return [path_of(place) for place in places if place and _take_out(place, data)]


def _take_out(place: Loc, data: Any) -> bool:
    """Return whether it was still there: it may have been in something that is gone."""
    *way, name = place
    for part in way:
        if isinstance(data, dict) and part not in data:
            return False
        data = data[part]
    if name not in data:
        return False
    del data[name]
    return True


_BODY_NAMES: Mapping[str, str] = {"texts": "input"}


def field_of(field: str | None) -> str | None:
    """Return a field of the library as bodies of these endpoints name it."""
    if field is None:
        return None
    return re.sub(r"^\w+", lambda found: _BODY_NAMES.get(found[0], found[0]), field)
