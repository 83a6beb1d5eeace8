"""The messages: wire layout and field checks, every field against every kind of wrong value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.messages import ENDED_WHY, FROM_WORKER, TO_WORKER, Cancel, Message, Tokens

U64_MAX = (1 << 64) - 1

# The wire layout, written out a second time: whoever changes a message changes it here knowingly.
LAYOUT: dict[str, tuple[tuple[str, str], ...]] = {
    "load": (
        ("engine", "text"),
        ("model", "text?"),
        ("options", "map"),
        ("snapshot_share", "fraction?"),
        ("step_budget_s", "number?"),
        ("workers", "u64"),
    ),
    "submit": (
        ("id", "u64"),
        ("prompt", "text?"),
        ("messages", "maps?"),
        ("sampling", "map"),
        ("seed", "u64"),
        ("template_clock_s", "number?"),
        ("special", "flag"),
        ("limits", "map"),
        ("credit", "u64"),
        ("delivered", "ids"),
        ("snapshot", "area?"),
        ("texts", "texts?"),
        ("output", "map"),
        ("tools", "maps?"),
        ("priority", "integer"),
    ),
    "credit": (("id", "u64"), ("limit", "u64")),
    "cancel": (("id", "u64"),),
    "query": (("id", "u64"), ("kind", "text"), ("arguments", "map")),
    "drain": (),
    "shutdown": (),
    "hello": (("t_ns", "u64"), ("protocol", "u64"), ("pid", "u64"), ("versions", "map")),
    "progress": (("t_ns", "u64"), ("phase", "text"), ("fraction", "fraction")),
    "ready": (("t_ns", "u64"), ("fingerprint", "text"), ("facts", "map")),
    "failed": (
        ("t_ns", "u64"),
        ("code", "text"),
        ("message", "text"),
        ("detail", "text"),
        ("permanent", "flag"),
    ),
    "started": (
        ("t_ns", "u64"),
        ("id", "u64"),
        ("slot", "u64"),
        ("cached_tokens", "u64"),
        ("prompt_tokens", "u64"),
    ),
    "tokens": (("t_ns", "u64"), ("id", "u64"), ("index", "u64"), ("tokens", "tokens")),
    "vectors": (("t_ns", "u64"), ("id", "u64"), ("index", "u64"), ("vectors", "vectors")),
    "answered": (("t_ns", "u64"), ("id", "u64"), ("value", "answer"), ("error", "map?")),
    "ended": (
        ("t_ns", "u64"),
        ("id", "u64"),
        ("why", "why"),
        ("text", "text"),
        ("usage", "counts"),
        ("error", "map?"),
    ),
    "released": (("t_ns", "u64"), ("id", "u64"), ("noticed_ns", "u64?"), ("freed_ns", "u64")),
    "beat": (
        ("t_ns", "u64"),
        ("steps", "u64"),
        ("longest_ns", "counts"),
        ("active", "u64"),
        ("waiting", "u64"),
    ),
    "log": (("t_ns", "u64"), ("level", "text"), ("text", "text"), ("dropped", "u64")),
}

GOOD: dict[str, list[Any]] = {
    "text": ["", "a", "歪\x00\u2028"],
    "text?": [None, "", "a"],
    "u64": [0, 1, U64_MAX],
    "u64?": [None, 0, U64_MAX],
    "fraction": [0, 1, 0.0, 0.5, 1.0],
    "fraction?": [None, 0, 1, 0.5],
    "area?": [None, [0, 0], [U64_MAX, 4096]],
    "number?": [None, 0, -1, 1.5, 1e308, U64_MAX],
    "flag": [True, False],
    "map": [{}, {"a": 1}, {"a": {1: [None, {}]}}],
    "map?": [None, {}, {"a": 1}],
    "maps?": [None, [], [{}], [{"role": "user"}, {"a": [1]}]],
    "ids": [[], [0], [U64_MAX, 0, 0]],
    "counts": [{}, {"a": 0, "b": U64_MAX}],
    "why": sorted(ENDED_WHY),
    "integer": [0, -100, 1 << 40],
    "texts?": [None, [], ["a", ""]],
    "vectors": [[b"1234"], [b"12345678", b"1234"]],
    "answer": [None, 0, U64_MAX, b"", b"abc"],
    "tokens": [[[0, "", None]], [[5, "a", []], [U64_MAX, "", [[1, -0.5]]]]],
}

# Everything that msgpack can put into a field, and numbers just beyond each range.
ANYTHING: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1 << 64,
    1.0,
    1.5,
    -0.001,
    1.0000001,
    math.nan,
    math.inf,
    -math.inf,
    "a",
    b"a",
    [],
    [None],
    [True],
    [-1],
    [1.0],
    ["a"],
    [[]],
    [1],
    [1, 2, 3],
    [1, -2],
    [1, "a"],
    [b"123"],
    [b""],
    [b"1234", "1234"],
    [[1, "a"]],
    [[1, "a", None, None]],
    [[True, "a", None]],
    [[-1, "a", None]],
    [[1.0, "a", None]],
    [["1", "a", None]],
    [[[], "a", None]],
    [[1, b"a", None]],
    [[1, None, None]],
    [[1, "a", 0.5]],
    [[1, "a", {}]],
    [[1, "a", "b"]],
    [{1: 2}],
    [{"a": 1}, None],
    {1: 2},
    {None: 1},
    {b"a": 1},
    {"a": 1, 2: 2},
    {"a": -1},
    {"a": True},
    {"a": 1.0},
    {"a": None},
    {"a": []},
    msgpack.ExtType(1, b""),
    msgpack.ExtType(5, b"ab"),
    msgpack.Timestamp(1, 0),
]


def is_u64(value: Any) -> bool:
    return type(value) is int and 0 <= value <= U64_MAX


def is_text_map(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


# An independent, naive reading of each kind: what of ANYTHING may pass.
NAIVE: dict[str, Any] = {
    "text": lambda v: type(v) is str,
    "text?": lambda v: v is None or type(v) is str,
    "u64": is_u64,
    "u64?": lambda v: v is None or is_u64(v),
    "fraction": lambda v: type(v) in (int, float) and not math.isnan(v) and 0 <= v <= 1,
    "fraction?": lambda v: v is None or NAIVE["fraction"](v),
    "area?": lambda v: v is None or (NAIVE["ids"](v) and len(v) == 2),
    "number?": lambda v: v is None or (type(v) in (int, float) and abs(v) < math.inf),
    "flag": lambda v: type(v) is bool,
    "map": is_text_map,
    "map?": lambda v: v is None or is_text_map(v),
    "maps?": lambda v: v is None or (type(v) is list and all(map(is_text_map, v))),
    "ids": lambda v: type(v) is list and all(map(is_u64, v)),
    "counts": lambda v: is_text_map(v) and all(map(is_u64, v.values())),
    "why": lambda v: False,
    "integer": lambda v: type(v) is int,
    "texts?": lambda v: v is None or (type(v) is list and all(type(entry) is str for entry in v)),
    "vectors": lambda v: False,
    "answer": lambda v: v is None or type(v) is bytes or is_u64(v),
    "tokens": lambda v: False,
}

ALL: dict[str, type[Message]] = {**TO_WORKER, **FROM_WORKER}
FIELDS = [(name, at, field) for name, layout in LAYOUT.items() for at, (field, _) in enumerate(layout)]


def good_values(name: str) -> list[Any]:
    return [GOOD[kind][-1] for _, kind in LAYOUT[name]]


def test_both_directions_are_known_and_disjoint() -> None:
    assert set(TO_WORKER) == {"load", "submit", "credit", "cancel", "query", "drain", "shutdown"}
    assert set(TO_WORKER) | set(FROM_WORKER) == set(LAYOUT)
    assert not set(TO_WORKER) & set(FROM_WORKER)
    assert all(layout[0][0] == "t_ns" for name, layout in LAYOUT.items() if name in FROM_WORKER)


@pytest.mark.parametrize("name", LAYOUT)
def test_the_wire_form_is_the_name_and_the_fields_in_order(name: str) -> None:
    values = good_values(name)
    message = ALL[name].from_wire(values)
    assert message.to_wire() == [name, *values]
    for (field, _), value in zip(LAYOUT[name], values, strict=True):
        assert getattr(message, field) == value
    assert ALL[name].from_wire(message.to_wire()[1:]) == message


@pytest.mark.parametrize("name", LAYOUT)
def test_one_field_more_or_fewer_is_refused(name: str) -> None:
    values = good_values(name)
    with pytest.raises(RemoteProtocolError, match=rf"^{name}: {len(values) + 1} fields"):
        ALL[name].from_wire([*values, None])
    if values:
        with pytest.raises(RemoteProtocolError, match=rf"^{name}: {len(values) - 1} fields"):
            ALL[name].from_wire(values[:-1])


@pytest.mark.parametrize(("name", "at", "field"), FIELDS)
def test_a_field_takes_all_of_its_range_and_nothing_else(name: str, at: int, field: str) -> None:
    kind = LAYOUT[name][at][1]
    values = good_values(name)
    for good in GOOD[kind]:
        values[at] = good
        assert getattr(ALL[name].from_wire(values), field) == good
    refused = 0
    for value in ANYTHING:
        values[at] = value
        if NAIVE[kind](value):
            ALL[name].from_wire(values)
            continue
        refused += 1
        with pytest.raises(RemoteProtocolError, match=rf"^{name}\.{field}: unexpected") as caught:
            ALL[name].from_wire(values)
        assert len(str(caught.value)) < 120
    assert refused > len(ANYTHING) / 2


def test_a_value_too_large_to_print_is_refused_like_any_other() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    for monster in (nested, [10**5000], 10**5000):
        with pytest.raises(RemoteProtocolError, match=r"^cancel\.id: unexpected .* too large to show"):
            Cancel.from_wire([monster])
    # Taken apart by hand: the interpreter's own clean-up of such a nest may be as deep as the nest.
    while nested:
        nested = nested[0]


def test_messages_are_values() -> None:
    assert Cancel(1) == Cancel(1) != Cancel(2)
    for name, _, field in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(ALL[name].from_wire(good_values(name)), field, 2)
    with pytest.raises(RemoteProtocolError, match="tokens"):
        Tokens.from_wire([0, 1, 0, []])
