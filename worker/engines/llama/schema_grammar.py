"""GBNF of a JSON schema: every answer that follows it is JSON that the schema takes.

Written here because `llama_cpp.llama_grammar.json_schema_to_gbnf`, which it can replace, ignores `minimum`,
`maximum` and `required` without `properties`, lets raw line breaks into strings, mixes up definitions that are
named like a property, and fails at quotes in names, recursion and `maxLength` of some thousand. Takes what
`protocol.json_schema` prepared; its size is bounded by that. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.json_schema import parsed_schema, prepared_schema
from infervisor.protocol.output import MAX_GRAMMAR_BYTES
from infervisor.protocol.schema_pattern import Chars, Choice, Part, Repeat, Row, parsed_pattern
from infervisor.worker.engines.llama.number_grammar import integer_between, number_between

_BLOCK = 500
"""llama.cpp takes a count of more than 2000 for no limit, or refuses it."""
_COMMA = '"," space'
_KEY_CHARS = r'"\\\x00-\x1F\x7F'
_HEX = "[0-9a-fA-F]"
_DAYS = '("0" [1-9] | "1" [0-9] | "2" [0-8])'
_LEAP_YEAR = '([1-9] [0-9] ("0" [48] | [2468] [048] | [13579] [26]) | ([2468] [048] | [13579] [26]) "00")'
_BASIC = {
    # As in llama.cpp: enough for indented JSON, too little for a model to lose itself in.
    "space": r'( " " | "\n" [ \t]{0,20} )?',
    # Half a surrogate pair is no text, so it isn't written as an escape either.
    "char": rf'[^{_KEY_CHARS}] | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] {_HEX} | [dD] [0-7]) {_HEX} {_HEX})',
    "string": r'"\"" char* "\""',
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "object": '"{" space (string ":" space value ("," space string ":" space value)* space)? "}"',
    "array": '"[" space (value ("," space value)* space)? "]"',
    "number": number_between(None, None, False, False),
    "integer": integer_between(None, None),
    "boolean": '"true" | "false"',
    "null": '"null"',
    "date": (
        f'[1-9] [0-9]{{3}} "-" (("0" [13578] | "1" [02]) "-" ({_DAYS} | "29" | "3" [01])'
        f' | ("0" [469] | "11") "-" ({_DAYS} | "29" | "30") | "02-" {_DAYS}) | {_LEAP_YEAR} "-02-29"'
    ),
    "clock": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]',
    "time": 'clock ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [+-] clock)',
}
_USES = {
    "string": ["char"], "value": ["object", "array", "string", "number"], "object": ["space", "string", "value"],
    "array": ["space", "value"], "time": ["clock"],
}  # fmt: skip
_FORMATS = {
    "date": r'"\"" date "\""',
    "time": r'"\"" time "\""',
    "date-time": r'"\"" date "T" time "\""',
    "uuid": '"\\"" ' + ' "-" '.join(f"{_HEX}{{{count}}}" for count in (8, 4, 4, 4, 12)) + ' "\\""',
}
_FORMAT_USES = {"date": ["date"], "time": ["time"], "date-time": ["date", "time"], "uuid": []}
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\b": r"\b", "\f": r"\f", '"': r"\"", "\\": r"\\"}


def gbnf_of_schema(schema_json: str) -> str:
    """Return the grammar whose `root` is an answer that follows a JSON schema, given as JSON text.

    Raises `InvalidRequest` with the field json_schema for what is impossible or can't be enforced.
    """
    return gbnf_of_prepared(prepared_schema(parsed_schema(schema_json)))


def gbnf_of_prepared(
    prepared: Mapping[str, Any], before: str = "", after: str = "", field: str = "json_schema"
) -> str:
    """Return the grammar of a schema that `prepared_schema` returned, with literal text before and after it.

    Raises `InvalidRequest` if it would be too large.
    """
    writer = _Writer()
    for name, part in prepared.get("$defs", {}).items():
        writer.define(f"def-{name}", part)
    writer.define("root", prepared, before, after)
    grammar = writer.text()
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{field} needs a grammar of more than {MAX_GRAMMAR_BYTES} bytes: make it smaller", field
        )
    return grammar


def gbnf_literal(text: str) -> str:
    """Return the GBNF of exactly this text."""
    return '"' + "".join(_in_literal(character) for character in text) + '"'


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character >= " " and character != "\x7f" else f"\\x{ord(character):02X}"


class _Writer:
    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def define(self, name: str, part: Mapping[str, Any], before: str = "", after: str = "") -> None:
        """Write the rule of one part under a name of its own."""
        around = [gbnf_literal(text) if text else "" for text in (before, after)]
        self._rules[name] = f"{around[0]} {self._part(part)} {around[1]}".strip()

    def text(self) -> str:
        """Return all rules, `root` first."""
        rules = {"root": self._rules["root"], **self._rules}
        return "\n".join(f"{name} ::= {rule}" for name, rule in rules.items()) + "\n"

    def _rule(self, text: str) -> str:
        """Return the name of a rule with this text: what is the same is written once."""
        if text not in self._names:
            self._names[text] = f"r{len(self._names)}"
            self._rules[self._names[text]] = text
        return self._names[text]

    def _basic(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = _BASIC[name]
            for used in _USES.get(name, ()):
                self._basic(used)
        return name

    # --- parts ---------------------------------------------------------------------------------

    def _part(self, part: Mapping[str, Any]) -> str:
        if "$ref" in part:
            return f"def-{part['$ref'].rpartition('/')[2]}"
        if "anyOf" in part:
            return self._rule(" | ".join(self._part(option) for option in part["anyOf"]))
        if "enum" in part:
            written = (gbnf_literal(json.dumps(value, ensure_ascii=False)) for value in part["enum"])
            return self._rule(" | ".join(dict.fromkeys(written)))
        kind = part.get("type", "value")
        if kind == "object":
            return self._rule(self._object(part))
        if kind == "array":
            return self._rule(self._array(part))
        if kind == "string":
            return self._string(part)
        if kind == "integer" and len(part) > 1:
            return self._rule(integer_between(part.get("minimum"), part.get("maximum")))
        if kind == "number" and len(part) > 1:
            low, low_open = _bound(part, "minimum", "exclusiveMinimum")
            high, high_open = _bound(part, "maximum", "exclusiveMaximum")
            return self._rule(number_between(low, high, low_open, high_open))
        return self._basic(kind)

    def _object(self, part: Mapping[str, Any]) -> str:
        self._basic("space")
        required = set(part["required"])
        members = [
            (
                self._rule(
                    f'{gbnf_literal(json.dumps(name, ensure_ascii=False))} ":" space {self._part(inner)}'
                ),
                name,
            )
            for name, inner in part["properties"].items()
        ]
        other = self._other_member(part) if "additionalProperties" in part else None
        # From the end: what may follow once a member has been written, so that commas come out right.
        rest = f"({_COMMA} {other})*" if other else ""
        begins: list[str] = [f"{other} {rest}"] if other else []
        for member, name in reversed(members):
            begin = f"{member} {rest}".rstrip()
            begins = [begin] if name in required else [begin, *begins]
            follows = f"{_COMMA} {member}" if name in required else f"({_COMMA} {member})?"
            rest = self._rule(f"{follows} {rest}".rstrip())
        if not begins:
            return '"{" space "}"'
        optional = "" if required else "?"
        return f'"{{" space (({" | ".join(begins)}) space){optional} "}}"'

    def _other_member(self, part: Mapping[str, Any]) -> str:
        if "propertyNames" in part:
            name = self._part(part["propertyNames"])
        else:
            name = self._other_name(part["properties"])
        return self._rule(f'{name} ":" space {self._part(part["additionalProperties"])}')

    def _other_name(self, listed: Iterable[str]) -> str:
        """Return any name but those listed, without escapes: two spellings of one name would be one property."""
        letter = f"[^{_KEY_CHARS}]"
        names = {name for name in listed if not any(c < " " or c in '"\\\x7f' for c in name)}
        follow: dict[str, set[str]] = {"": set()}
        for name in names:
            for at, character in enumerate(name):
                follow.setdefault(name[:at], set()).add(character)
            follow.setdefault(name, set())
        nodes: dict[str, str] = {}
        for prefix in sorted(follow, key=len, reverse=True):
            letters = sorted(follow[prefix])
            excluded = "".join(_in_class(ord(character)) for character in letters)
            options = [f"[^{_KEY_CHARS}{excluded}] {letter}*"]
            options += [f"{gbnf_literal(character)} {nodes[prefix + character]}" for character in letters]
            nodes[prefix] = self._rule(f"({' | '.join(options)})" + ("" if prefix in names else "?"))
        return self._rule(rf'"\"" {nodes[""]} "\""')

    def _array(self, part: Mapping[str, Any]) -> str:
        self._basic("space")
        first = [self._part(item) for item in part.get("prefixItems", ())]
        least, most = part["minItems"], part.get("maxItems")
        inner = f" {_COMMA} ".join(first)
        if "items" in part:
            item = self._part(part["items"])
            more = f"({_COMMA} {item})"
            if first:
                inner += f" {_times(more, least - len(first), None if most is None else most - len(first))}"
            else:
                inner = (
                    f"{item} {_times(more, max(0, least - 1), None if most is None else most - 1)}".rstrip()
                )
        if not inner:
            return '"[" space "]"'
        return f'"[" space ({inner} space)? "]"' if least == 0 else f'"[" space {inner} space "]"'

    def _string(self, part: Mapping[str, Any]) -> str:
        if "pattern" in part:
            return self._rule(rf'"\"" {self._pattern(parsed_pattern(part["pattern"]))} "\""')
        if "format" in part:
            for used in _FORMAT_USES[part["format"]]:
                self._basic(used)
            return self._rule(_FORMATS[part["format"]])
        if "minLength" not in part:
            return self._basic("string")
        self._basic("char")
        return self._rule(rf'"\"" {self._counted(part["minLength"], part.get("maxLength"))} "\""')

    def _counted(self, least: int, most: int | None) -> str:
        block = self._rule(f"char{{{_BLOCK}}}") if max(least, most or 0) > 2 * _BLOCK else ""
        if not block:
            return _times("char", least, most) or '""'
        blocks, letters = divmod(least, _BLOCK)
        texts = [_times(block, blocks, blocks), _times("char", letters, letters)]
        if most is None:
            texts.append("char*")
        else:
            blocks, letters = divmod(most - least, _BLOCK)
            below = f"{_times(block, 0, blocks - 1)} {_times('char', 0, _BLOCK - 1)} | " if blocks else ""
            texts.append(f"({below}{_times(block, blocks, blocks)} {_times('char', 0, letters)})")
        return " ".join(text for text in texts if text)

    # --- patterns ------------------------------------------------------------------------------

    def _pattern(self, part: Part) -> str:
        if isinstance(part, Chars):
            return _class(part)
        if isinstance(part, Choice):
            return f"({' | '.join(self._pattern(option) for option in part.options)})"
        if isinstance(part, Repeat):
            inner = self._pattern(part.part)
            # A count copies what it counts, and holds for the last of a row: a name is short and one.
            counted = inner if isinstance(part.part, Chars) else self._rule(inner)
            return _times(counted, part.least, part.most) or '""'
        return " ".join(self._pattern(inner) for inner in part.parts if inner != Row(())) or '""'


def _class(chars: Chars) -> str:
    """Return one character as JSON writes it within a string: some only as an escape."""
    escapes: list[str] = []
    plain: list[tuple[int, int]] = []
    for low, high in chars.ranges:
        escapes += [chr(code) for code in range(low, min(high, 0x1F) + 1)]
        escapes += [character for character in '"\\' if low <= ord(character) <= high]
        for start, end in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)):
            if max(low, start) <= min(high, end):
                plain.append((max(low, start), min(high, end)))
    if len(plain) == 1 and not escapes and plain[0][0] == plain[0][1]:
        return gbnf_literal(chr(plain[0][0]))
    inside = "".join(f"{_in_class(low)}-{_in_class(high)}" for low, high in plain)
    options = [f"[{inside}]"] if plain else []
    options += [gbnf_literal(_ESCAPES.get(character, f"\\u{ord(character):04x}")) for character in escapes]
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _in_class(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _times(text: str, least: int, most: int | None) -> str:
    if most is None:
        return f"{text}*" if least == 0 else f"{text}+" if least == 1 else f"{text}{{{least},}}"
    if most == 0:
        return ""
    if least == most:
        return text if most == 1 else f"{text}{{{most}}}"
    return f"{text}?" if (least, most) == (0, 1) else f"{text}{{{least},{most}}}"


def _bound(part: Mapping[str, Any], closed: str, opened: str) -> tuple[Decimal | None, bool]:
    value = part.get(closed, part.get(opened))
    return None if value is None else Decimal(repr(value)), opened in part
