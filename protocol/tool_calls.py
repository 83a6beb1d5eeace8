"""Calls of tools, found in a model's answer while it streams.

Owns the shapes in which models write calls. A text that isn't a well-formed call of an offered tool stays text,
unchanged; only the white space around a call goes with it. However the answer is cut into pieces, the same text and
the same calls come out. Nothing that a model writes raises. Pure; one parser serves one answer, in one thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.json_extent import JsonExtent

MAX_CALL_CHARACTERS = 1 << 18
"""What is longer and still no whole call is text."""
_SPACE = " \t\r\n"
_MOST_SPACE = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What a piece of the answer turned out to be: text to show, and calls, in their order."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    opens, closes: what stands around the JSON, or ""; closing may be left out. bare: whether `opens` may be too, at
    the beginning of the answer or after a call. begins: how the JSON may begin. parts: what may part two calls.
    arguments: the key that holds them; when reading, either is taken.
    """

    opens: str
    closes: str
    bare: bool
    begins: str
    parts: str = ""
    arguments: str = "arguments"


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", False, "{"),
    # The marks of these two are control tokens, whose text most engines don't print: so they may be missing.
    "llama3": CallFormat("<|python_tag|>", "", True, "{", ";", "parameters"),
    "mistral": CallFormat("[TOOL_CALLS]", "", True, "["),
    "json": CallFormat("", "", True, "{[", ";"),
}


class ToolCallParser:
    """The calls in one answer. names: the tools offered; prefix: what the ids begin with, before a number."""

    def __init__(self, call_format: str, names: Collection[str], prefix: str = "call_") -> None:
        if call_format not in FORMATS:
            raise ConfigurationError(
                f"unknown format of calls {call_format!r}; known are {', '.join(FORMATS)}"
            )
        self._format = FORMATS[call_format]
        self._names = frozenset(names)
        self._prefix = prefix
        self._found = 0
        self._held = ""
        self._extent: JsonExtent | None = None
        self._fresh = self._format.bare  # whether a call without a mark may begin here
        self._after_call: str | None = None  # after a call, the mark that may still close it

    def feed(self, text: str) -> Piece:
        """Take the next text of the answer; return what of it, and of what was held back, is settled."""
        self._held += text
        return self._settled(final=False)

    def finish(self) -> Piece:
        """The answer has ended: return the rest."""
        return self._settled(final=True)

    def _settled(self, final: bool) -> Piece:
        texts: list[str] = []
        calls: list[ToolCall] = []
        while self._held:
            if self._after_call is not None and not self._skip_end(final):
                break
            step = self._step(final)
            if step is None:
                break
            length, found = step
            if found:
                calls += found
                self._after_call = self._format.closes
            else:
                texts.append(self._held[:length])
            self._fresh = bool(found) and self._format.bare
            self._held = self._held[length:]
            self._extent = None
        return Piece("".join(texts), tuple(calls))

    def _skip_end(self, final: bool) -> bool:
        """Drop what ends a call. Returns whether that is over."""
        self._held = self._held.lstrip(_SPACE)
        closes = self._after_call
        if closes and self._held.startswith(closes):
            self._held = self._held[len(closes) :].lstrip(_SPACE)
            self._after_call = closes = ""
        if not self._held or (closes and closes.startswith(self._held) and not final):
            return False
        self._after_call = None
        return True

    def _step(self, final: bool) -> tuple[int, list[ToolCall]] | None:
        """Return how much of what is held is settled, and the calls that it is; None if more text must come."""
        begins, value = self._candidate(final)
        if begins is None:
            return None
        if begins > 0 or value is None:
            return begins, []
        held, text = self._held, self._format.opens
        marked = len(text) if held.lstrip(_SPACE).startswith(text) else 0
        refused = (value + (0 if marked else 1), list[ToolCall]())
        at = value + _space(held[value:])
        if at == len(held):
            return refused if final or at - value > _MOST_SPACE else None
        if held[at] not in self._format.begins or at - value > _MOST_SPACE or _hopeless(held[at : at + 400]):
            return refused
        if self._extent is None:
            self._extent = JsonExtent(at)
        end = self._extent.end(held)
        if (end or len(held)) - at > MAX_CALL_CHARACTERS or (end is None and final):
            return refused
        if end is None:
            return None
        calls = self._calls(held[at:end])
        return (end, calls) if calls else refused

    def _candidate(self, final: bool) -> tuple[int | None, int | None]:
        """Return where a call may begin and where its JSON then does.

        (n, None): the first n characters are text. (None, None): that can't be said yet.
        """
        held, opens = self._held, self._format.opens
        if self._fresh:
            space = _space(held)
            parted = space + (self._found > 0 and held[space : space + 1] in tuple(self._format.parts))
            at = parted + _space(held[parted:])
            if at == len(held) and at <= 2 * _MOST_SPACE and not final:
                return None, None
            begun = held[at : at + len(opens)]
            if at <= 2 * _MOST_SPACE and at < len(held) and held[at] in self._format.begins:
                # [ can be JSON or the first character of [TOOL_CALLS].
                if not begun or not opens.startswith(begun):
                    return 0, at
                if begun != opens and not final:
                    return None, None
        if not opens:
            return len(held), None
        found = held.find(opens)
        if found >= 0:
            begins = found - _space_before(held[:found])
            return (begins, None) if begins else (0, found + len(opens))
        if final:
            return len(held), None
        # The longest end that can still become a mark, with the space before it.
        partial = next(cut for cut in range(len(opens) - 1, -1, -1) if held.endswith(opens[:cut]))
        whole = len(held) - partial
        settled = whole - _space_before(held[:whole])
        return (settled, None) if settled else (None, None)

    def _calls(self, text: str) -> list[ToolCall] | None:
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return None
        values = value if isinstance(value, list) else [value]
        calls: list[ToolCall] = []
        for entry in values:
            read = _read_call(entry, self._names)
            if read is None:
                return None
            calls.append(ToolCall(f"{self._prefix}{self._found + len(calls)}", *read))
        self._found += len(calls)
        return calls


def _read_call(value: Any, names: frozenset[str]) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            # Some write the object as a string of JSON.
            arguments = json.loads(arguments, parse_constant=_no_constant)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, escaped: as text it couldn't be sent on.
        text = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value["name"], text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_HEAD = re.compile(r'(?:\[\s*)?(?:\{\s*(?:"(?P<key>[^"]*)(?P<whole>")?)?)?')
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")


def _hopeless(text: str) -> bool:
    """Whether this JSON can't become a call, by its first key: then it needn't be held back."""
    head = _HEAD.match(text)
    key = head["key"] if head else ""
    if head is None or key is None:
        return head is None or (head.end() < len(text) and head.end() < 300)
    return key not in _KEYS if head["whole"] else not any(known.startswith(key) for known in _KEYS)


def _space(text: str) -> int:
    return len(text) - len(text.lstrip(_SPACE))


def _space_before(text: str) -> int:
    return min(_MOST_SPACE, len(text) - len(text.rstrip(_SPACE)))
