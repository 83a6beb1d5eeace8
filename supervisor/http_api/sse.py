"""Framing of server-sent events. Pure.

JSON is written in ASCII: no text can hold a line end of any kind, so none can forge an event. Source: the HTML
standard of WHATWG, "Server-sent events".
"""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams say that they are whole."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return one event with JSON as its data. name: its type, where the dialect has them."""
    line = b"data: " + dumps(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode("ascii") + b"\n" + line


def comment(text: str) -> bytes:
    """Return a line that clients skip."""
    return b": " + text.encode("ascii") + b"\n\n"


def dumps(data: Any) -> bytes:
    """Return JSON in ASCII, without spaces. Raises `ValueError` for what JSON can't say."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
