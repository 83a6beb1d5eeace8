"""Keep what callers write literal: message text that spells a control token must not become one.

Before a chat template is rendered, the spellings of control tokens inside the caller's strings are replaced
by single private-use characters (markers); after it, the tokeniser finds control tokens in the rest alone
and puts the spellings back as ordinary text. Text without such a spelling passes unchanged.

A string that begins or ends with a piece of such a spelling has that piece marked too, so that two
neighbouring strings can't build a token together. What the *template* puts together stays its own affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from infervisor.protocol.errors import InvalidRequest

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_MAX_DEPTH = 32


class ControlTexts:
    """The spellings to guard: computed once per model, shared by all requests."""

    def __init__(self, spellings: Iterable[str], template: str) -> None:
        known = {text for text in spellings if text}
        whole = _any_of(known)
        self.pattern = re.compile(whole) if known else None
        self._guarded = re.compile(f"{whole}|[\U000f0000-\U0010ffff]" if known else "[\U000f0000-\U0010ffff]")
        self._heads = {text[:cut] for text in known for cut in range(1, len(text))}
        self._tails = {text[cut:] for text in known for cut in range(1, len(text))}
        self._longest = max((len(text) for text in known), default=0)
        # A character that the template itself uses can't serve as a marker.
        self.reserved = frozenset(template)

    def edges(self, text: str) -> tuple[int, int]:
        """Return (a, b): text[:a] could end a control token's spelling, text[b:] could begin one."""
        reach = min(self._longest, len(text) + 1)
        start = next((cut for cut in range(reach - 1, 0, -1) if text[:cut] in self._tails), 0)
        end = next(
            (len(text) - cut for cut in range(reach - 1, 0, -1) if text[-cut:] in self._heads), len(text)
        )
        return start, max(start, end)

    def guarded(self, text: str) -> Iterable[re.Match[str]]:
        """Yield the spellings in `text`, and the private-use characters, which markers could be taken for."""
        return self._guarded.finditer(text)


class Markers:
    """What the markers in one rendered text stand for."""

    def __init__(self, text_of: Mapping[str, str]) -> None:
        self.text_of = text_of

    def restore(self, text: str) -> str:
        """Return `text` with every marker replaced by what it stands for."""
        return "".join(self.text_of.get(character, character) for character in text)

    def marks(self, text: str) -> bool:
        """Whether `text` holds a marker."""
        return any(marker in text for marker in self.text_of)


class Literals(Markers):
    """The markers of one request, made as they are needed."""

    def __init__(self, control: ControlTexts) -> None:
        self._made: dict[str, str] = {}
        super().__init__(self._made)
        self._control = control
        self._marker_of: dict[str, str] = {}
        self._free = (
            chr(code) for block in _PRIVATE_USE for code in block if chr(code) not in control.reserved
        )

    def protect(self, value: Any, field: str = "messages") -> Any:
        """Return `value` with every string in it protected; mappings and lists are copied.

        Mappings keep their class. Raises `InvalidRequest`, naming `field`, for nesting that no message needs.
        """
        return self._protect(value, field, 0)

    def _protect(self, value: Any, field: str, depth: int) -> Any:
        if isinstance(value, str):
            return self._protect_text(value, field)
        if depth >= _MAX_DEPTH:
            raise InvalidRequest(f"{field} are nested more than {_MAX_DEPTH} deep", field)
        if isinstance(value, Mapping):
            copied = type(value) if isinstance(value, dict) else dict
            protect = self._protect
            return copied(
                (protect(key, field, depth + 1), protect(entry, field, depth + 1))
                for key, entry in value.items()
            )
        if isinstance(value, (list, tuple)):
            return [self._protect(entry, field, depth + 1) for entry in value]
        return value

    def _protect_text(self, text: str, field: str) -> str:
        start, end = self._control.edges(text)
        middle = text[start:end]
        pieces: list[str] = [self._marker(text[:start], field)] if start else []
        position = 0
        for found in self._control.guarded(middle):
            pieces.append(middle[position : found.start()])
            pieces.append(self._marker(found.group(), field))
            position = found.end()
        pieces.append(middle[position:])
        if end < len(text):
            pieces.append(self._marker(text[end:], field))
        return "".join(pieces)

    def _marker(self, literal: str, field: str) -> str:
        marker = self._marker_of.get(literal)
        if marker is None:
            marker = next(self._free, "")
            if not marker:
                raise InvalidRequest(f"the {field} use all private-use characters of Unicode", field)
            self._marker_of[literal] = marker
            self._made[marker] = literal
        return marker


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern for any of `texts`, the longest that fits.

    As a tree: a vocabulary can have thousands of control tokens that all begin with `<`, and a plain
    alternation would try each of them at every `<` of a page of HTML.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _pattern_of(tree)


def _pattern_of(tree: dict[str, Any]) -> str:
    branches: list[str] = []
    for character, branch in tree.items():
        # A run without a fork is written in one go: nesting then grows with forks, not with letters.
        run = character
        while len(branch) == 1 and "" not in branch:
            ((character, branch),) = branch.items()
            run += character
        if run:
            branches.append(re.escape(run) + _pattern_of(branch))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in tree else f"(?:{'|'.join(branches)})"
    return joined + "?" if "" in tree else joined
