"""What kinds of settings there are, and how each is read from words: of a flag, or of a variable.

Pure, and light: the help of `supervise` loads it. Knows no setting by name; those are in `serve_settings`.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Kind(enum.Enum):
    """What a setting is, whatever it is read from."""

    TEXT = enum.auto()
    PATH = enum.auto()
    WHOLE = enum.auto()
    SECONDS = enum.auto()
    SIZE = enum.auto()
    SWITCH = enum.auto()
    CHOICE = enum.auto()
    WORDS = enum.auto()
    PAIRS = enum.auto()
    OPTIONS = enum.auto()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field of the settings is: for its flag, its variable, its key in the file, and the documents.

    flags: other names than the one made of the field's. is_secret: by variable only, and never shown.
    takes_none: whether it can be set to no limit. low, high: the range of numbers, ends included.
    """

    kind: Kind
    help: str
    group: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    takes_none: bool = False
    is_secret: bool = False

    def wanted(self) -> str:
        """Return what is right for it, as the end of "must be …"."""
        limits = ""
        if self.low is not None or self.high is not None:
            low = "" if self.low is None else f" {'from ' if self.high is not None else ''}{self.low:g}"
            limits = low + (" or more" if self.high is None else f" to {self.high:.15g}")
        words = {
            Kind.TEXT: "text",
            Kind.PATH: "a path",
            Kind.WHOLE: f"a whole number{limits}",
            Kind.SECONDS: f"a number{limits}",
            Kind.SIZE: "a number of bytes, or text such as 512M or 2G",
            Kind.SWITCH: "true or false",
            Kind.CHOICE: " or ".join(self.choices),
            Kind.WORDS: "a list of texts",
            Kind.PAIRS: "a table of texts",
            Kind.OPTIONS: "a table",
        }[self.kind]
        return f"{words}, or none" if self.takes_none else words


def parse_size(text: str) -> int:
    """Return the bytes that a text such as 512M, 2GiB or 4096 means. Raises `ValueError`."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*([KMGT]?)(?:i?B)?\s*", text, flags=re.IGNORECASE | re.ASCII)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * SIZE_UNITS[found[2].upper()]


def plain(setting: Setting, value: Any) -> Any:
    """Return a value of the file with the texts that stand for something else read: none, and sizes.

    Everything else stays as it is, right or wrong.
    """
    if isinstance(value, str):
        if setting.takes_none and value.strip().lower() == "none":
            return None
        if setting.kind is Kind.SIZE:
            return parse_size(value)
    if setting.kind is Kind.SECONDS and setting.takes_none and not isinstance(value, bool) and value == 0:
        # As on the command line: no time at all is no limit.
        return None
    return value


def from_text(setting: Setting, text: str) -> Any:
    """Return the value that a variable or a flag gives as text. Raises `ValueError` if it means none."""
    kind = setting.kind
    if setting.takes_none and text.strip().lower() == "none":
        return None
    if kind is Kind.WHOLE:
        return int(text) if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text, flags=re.ASCII) else _no(text)
    if kind is Kind.SECONDS:
        seconds = float(text)
        return None if setting.takes_none and seconds == 0 else seconds
    if kind is Kind.SIZE:
        return parse_size(text)
    if kind is Kind.SWITCH:
        word = text.strip().lower()
        return word in ("1", "true", "yes", "on") or (word not in ("0", "false", "no", "off") and _no(text))
    if kind is Kind.WORDS:
        return _list(text)
    if kind is Kind.PAIRS:
        return _table(text) if text.lstrip().startswith("{") else dict(pair(part) for part in _list(text))
    if kind is Kind.OPTIONS:
        return _table(text)
    return text


def pair(text: str) -> tuple[str, str]:
    """Return name and value of `NAME=VALUE`. Raises `ValueError`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise ValueError(text)
    return name.strip(), value.strip()


def _list(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        given = json.loads(text)
        return given if isinstance(given, list) else _no(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _table(text: str) -> dict[str, Any]:
    given = json.loads(text)
    return given if isinstance(given, dict) else _no(text)


def _no(text: str) -> Any:
    raise ValueError(text)


def printable(text: str) -> str:
    """Return text with what can't be printed as the escapes that TOML has."""
    return "".join(character if character.isprintable() else f"\\U{ord(character):08x}" for character in text)


def to_toml(value: Any) -> str:
    """Return a value as TOML writes it, on one line. An entry of a table that is None is left out."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return '"none"'
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return printable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{to_toml(key)} = {to_toml(entry)}" for key, entry in value.items() if entry is not None
        )
        return f"{{ {inside} }}" if inside else "{}"
    return "[" + ", ".join(map(to_toml, value)) + "]"
