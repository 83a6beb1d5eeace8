"""What a client says with headers: deadlines, priority, what becomes of it in a crash, where its report goes.

Pure. Source of the names: docs/serve.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, cast

from starlette.datastructures import Headers

from infervisor import Deadlines
from infervisor.supervisor.http_api.errors import HttpRefused

DEADLINE_HEADERS: Mapping[str, str] = {
    f"x-infervisor-{field.name.removesuffix('_s').replace('_', '-')}-timeout": field.name
    for field in fields(Deadlines)
}
"""Header → field of `Deadlines`."""
PRIORITY, ON_CRASH, REPORT = "x-infervisor-priority", "x-infervisor-on-crash", "x-infervisor-report"
CLIENT_ID = "x-client-request-id"
MAX_CLIENT_ID = 512
MAX_SECONDS = 365 * 86400

ReportPlace = Literal["body", "header", "off"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the headers of one request ask for. None: nothing was said."""

    deadlines: Deadlines | None = None
    priority: int | None = None
    on_crash: str | None = None
    report: ReportPlace | None = None
    client_id: str | None = None


def wishes_of(headers: Headers, deadlines: Deadlines) -> Wishes:
    """Return what headers ask for; deadlines: those that hold where a header says nothing.

    Raises `HttpRefused` naming the header.
    """
    seconds = {
        field: _seconds(name, headers[name]) for name, field in DEADLINE_HEADERS.items() if name in headers
    }
    report = headers.get(REPORT)
    if report is not None and report not in ("body", "header", "off"):
        raise _wrong(REPORT, report, "body, header or off")
    on_crash = headers.get(ON_CRASH)
    if on_crash is not None and on_crash not in ("resume", "fail"):
        raise _wrong(ON_CRASH, on_crash, "resume or fail")
    client_id = headers.get(CLIENT_ID)
    if client_id is not None and not (
        len(client_id) <= MAX_CLIENT_ID and client_id.isascii() and client_id.isprintable()
    ):
        raise _wrong(CLIENT_ID, client_id, f"at most {MAX_CLIENT_ID} printable ASCII characters")
    return Wishes(
        deadlines=replace(deadlines, **seconds) if seconds else None,
        priority=_priority(headers.get(PRIORITY)),
        on_crash=on_crash,
        report=cast("ReportPlace | None", report),
        client_id=client_id,
    )


def _seconds(name: str, text: str) -> float | None:
    if text.strip().lower() == "none":
        return None
    try:
        # Python takes 1_000 for a number.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    # Refuses NaN, too.
    if not 0 < value <= MAX_SECONDS:
        raise _wrong(name, text, f"a number of seconds above 0 and up to {MAX_SECONDS}, or none")
    return value


def _priority(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = int(text) if len(text) < 8 and "_" not in text else None
    except ValueError:
        value = None
    if value is None or not -100 <= value <= 100:
        raise _wrong(PRIORITY, text, "a whole number from -100 to 100")
    return value


def _wrong(name: str, value: str, right: str) -> HttpRefused:
    shown = value[:80].encode("ascii", "backslashreplace").decode()
    return HttpRefused(
        "invalid_request", f"The header {name} must be {right}, not {shown!r}.", f"header.{name}"
    )
