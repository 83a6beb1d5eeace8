"""Regular expressions of JSON schemas as values: which syntax a grammar can follow, and how long they match.

Owns the reading of `pattern`, as ECMA-262 means it: unanchored unless it says so, `\\d` and `\\w` are ASCII. Never
matches anything. What looks around, looks back or counts without end is refused, in words for the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

MAX_REPEATS = 2000
MAX_PATTERN_CHARACTERS = 2000
_MAX_DEPTH = 24
_LAST = 0x10FFFF
Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Code points, as sorted ranges without overlap, both ends included."""


class UnsupportedPattern(ValueError):
    """The pattern is malformed, or asks for what no grammar does. The text says which, and what to write."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Row:
    """One after the other; an empty row matches the empty text."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of them."""

    options: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """least to most times; most None is without end."""

    part: Part
    least: int
    most: int | None


Part: TypeAlias = Chars | Row | Choice | Repeat


def parsed_pattern(pattern: str) -> Part:
    """Return what a whole string must look like. Raises `UnsupportedPattern`."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UnsupportedPattern(
            f"it has {len(pattern)} characters; at most {MAX_PATTERN_CHARACTERS} are taken"
        )
    return _Reader(pattern).whole()


def lengths(part: Part) -> tuple[int, int | None]:
    """Return the shortest and the longest match in characters; None is without end."""
    if isinstance(part, Chars):
        return 1, 1
    if isinstance(part, Repeat):
        least, most = lengths(part.part)
        unbounded = part.most is None or most is None
        return least * part.least, None if unbounded else (most or 0) * (part.most or 0)
    each = [lengths(inner) for inner in (part.parts if isinstance(part, Row) else part.options)]
    shortest, longest = [least for least, _ in each], [most for _, most in each]
    bounded = [most for most in longest if most is not None]
    if isinstance(part, Row):
        return sum(shortest), sum(bounded) if len(bounded) == len(longest) else None
    return min(shortest), max(bounded) if len(bounded) == len(longest) else None


def merged(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the same code points sorted and without overlap."""
    tidy: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if tidy and low <= tidy[-1][1] + 1:
            tidy[-1] = tidy[-1][0], max(high, tidy[-1][1])
        else:
            tidy.append((low, high))
    return tuple(tidy)


def _complement(ranges: Ranges) -> Ranges:
    outside: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            outside.append((start, low - 1))
        start = high + 1
    return (*outside, *(((start, _LAST),) if start <= _LAST else ()))


def _characters(ranges: Ranges) -> Ranges:
    # Half of a surrogate pair is no character of any text.
    halves = ((0, 0xD7FF), (0xE000, _LAST))
    return merged([
        (max(low, start), min(high, end))
        for low, high in ranges for start, end in halves if max(low, start) <= min(high, end)
    ])  # fmt: skip


def _single(*characters: str) -> Ranges:
    return merged([(ord(character), ord(character)) for character in characters])


_DIGIT: Ranges = ((0x30, 0x39),)
_WORD = merged([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = merged([*_single(*" \t\n\r\f\v\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)])
_CLASSES = {
    "d": _DIGIT, "D": _complement(_DIGIT), "w": _WORD, "W": _complement(_WORD),
    "s": _SPACE, "S": _complement(_SPACE),
}  # fmt: skip
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_DOT = _complement(_single(*"\n\r\u2028\u2029"))
_ANYTHING = Repeat(Chars(((0, 0xD7FF), (0xE000, _LAST))), 0, None)
_HEX_DIGITS = {"x": 2, "u": 4}


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def whole(self) -> Part:
        # Anchors belong to an alternative: ^a|b$ is what begins with a or ends with b.
        options = [self._anchored()]
        while self._take("|"):
            options.append(self._anchored())
        if self._at < len(self._text):
            raise self._refused("a closing parenthesis without an opening one")
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _anchored(self) -> Part:
        begins = self._take("^")
        middle = self._row(0)
        ends = self._take("$")
        if self._at < len(self._text) and self._text[self._at] not in "|)":
            raise self._refused("an anchor in the middle")
        return Row((*(() if begins else (_ANYTHING,)), middle, *(() if ends else (_ANYTHING,))))

    def _choice(self, depth: int) -> Part:
        options = [self._row(depth)]
        while self._take("|"):
            options.append(self._row(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _row(self, depth: int) -> Part:
        if depth > _MAX_DEPTH:
            raise UnsupportedPattern(f"its groups are nested more than {_MAX_DEPTH} deep")
        parts: list[Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _repeated(self, part: Part) -> Part:
        counts = self._counts()
        if counts is None:
            return part
        self._take("?")  # lazy or not, the same texts match
        if self._peek() in ("*", "+", "{", "?"):
            raise self._refused("a repetition of a repetition; put the inner one in a group")
        least, most = counts
        if most is not None and least > most:
            raise UnsupportedPattern(f"it repeats at least {least} and at most {most} times")
        if max(least, most or 0) > MAX_REPEATS:
            raise UnsupportedPattern(f"it repeats more than {MAX_REPEATS} times")
        if lengths(part)[0] == 0 and most != 1:
            raise UnsupportedPattern(
                "it repeats what can be empty; let the group match one character at least"
            )
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if not self._take("{"):
            return None
        end = self._text.find("}", self._at)
        first, comma, second = self._text[self._at : end].partition(",")
        for number in (first, *([second] if second else [])):
            if end < 0 or not (number.isascii() and number.isdigit() and len(number) < 10):
                raise self._refused("an opening brace that isn't {n}, {n,} or {n,m}; escape it")
        self._at = end + 1
        return int(first), (int(second) if second else None) if comma else int(first)

    def _atom(self, depth: int) -> Part:
        character = self._next()
        if character == "(":
            if self._take("?") and not (self._take(":") or self._named()):
                raise self._refused("a lookaround or a flag")
            inner = self._choice(depth + 1)
            if not self._take(")"):
                raise self._refused("an anchor in a group, or a parenthesis that isn't closed")
            return inner
        if character == "[":
            return self._chars(self._set())
        if character == ".":
            return self._chars(_DOT)
        if character == "\\":
            return self._chars(self._escaped())
        if character in "^*+?{":
            raise self._refused(
                "an anchor in the middle" if character == "^" else f"nothing before {character}"
            )
        return self._chars(_single(character))

    def _named(self) -> bool:
        if self._peek() != "<" or self._text[self._at + 1 : self._at + 2] in ("=", "!"):
            return False
        end = self._text.find(">", self._at)
        self._at = end + 1 if end >= 0 else self._at
        return end >= 0

    def _escaped(self) -> Ranges:
        letter = self._next("a lone backslash at the end")
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _single(_CONTROLS[letter])
        if letter in _HEX_DIGITS:
            return self._code_point(_HEX_DIGITS[letter])
        if letter.isascii() and letter.isalnum():
            raise self._refused(f"\\{letter}")
        return _single(letter)

    def _code_point(self, digits: int) -> Ranges:
        number = self._text[self._at : self._at + digits]
        if len(number) < digits or any(digit not in "0123456789abcdefABCDEF" for digit in number):
            raise self._refused(f"an escape without its {digits} hexadecimal digits")
        self._at += digits
        return ((int(number, 16), int(number, 16)),)

    def _set(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._set_member()
            follows = self._text[self._at + 1 : self._at + 2]
            if self._peek() != "-" or follows in ("]", "") or low[0][0] != low[-1][1]:
                ranges += low
                continue
            self._at += 1
            high = self._set_member()
            if high[0][0] != high[-1][1] or high[0][0] < low[0][0]:
                raise self._refused("a range of characters in the wrong order")
            ranges.append((low[0][0], high[0][0]))
        return _complement(merged(ranges)) if negated else merged(ranges)

    def _chars(self, ranges: Ranges) -> Chars:
        found = _characters(ranges)
        if not found:
            raise self._refused("a set that no character is in")
        return Chars(found)

    def _set_member(self) -> Ranges:
        character = self._next("a set that isn't closed")
        if character != "\\":
            return _single(character)
        return _single("\b") if self._take("b") else self._escaped()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self, missing: str = "an end that comes too soon") -> str:
        character = self._peek()
        if not character:
            raise self._refused(missing)
        self._at += 1
        return character

    def _take(self, character: str) -> bool:
        found = self._peek() == character
        self._at += found
        return found

    def _refused(self, what: str) -> UnsupportedPattern:
        return UnsupportedPattern(f"it has {what} near character {min(self._at, len(self._text))}")
