"""How a coverage-guided fuzzer changes scripts: whole steps, small numbers, and msgpack values inside frames."""

from __future__ import annotations

import random
from typing import Any

import msgpack

from infervisor.protocol.messages import PROTOCOL_VERSION
from tests.fuzz.grammar import NUMBERS, ODD_BYTES, STRANGE_KEYS
from tests.fuzz.parent_side import KINDS
from tests.fuzz.script import Do, Step, bytes_of, step, steps_of

VALUES: list[Any] = [
    None, True, False, -1, 0.5, -0.0, float("nan"), float("inf"), "", "stop", "\x1b[2J", "x" * 300, b"\xff", [], {},
    [[1, "", None]], [[1, "a", [{}]]], {"decode": 1}, {"slots": 1, "context_tokens": 1}, *NUMBERS,
]  # fmt: skip
FRAMES: list[list[Any]] = [
    ["hello", 1, PROTOCOL_VERSION, 1, {}],
    ["progress", 1, "load", 0.5],
    ["ready", 1, "f", {"slots": 1, "context_tokens": 9}],
    ["failed", 1, "model_load", "no", "", True],
    ["started", 1, 1, 0, 0, 1],
    ["tokens", 1, 1, 0, [[1, "a", None], [2, "", None]]],
    ["ended", 1, 1, "stop", "", {"prompt_tokens": 1}, None],
    ["ended", 1, 1, "engine_error", "", {}, {"code": "x", "message": "m", "detail": "d", "field": "f"}],
    ["released", 1, 1, None, 1],
    ["vectors", 1, 1, 0, [bytes(12), bytes(12)]],
    ["tokens", 1, 1, 0, [[1, "a", [-0.5, [[1, b"a", -0.5]], b"a"]]]],
    ["answered", 1, 1, bytes(8), None],
    ["answered", 1, 1, None, {"code": "invalid_request", "message": "m", "field": "text"}],
    ["beat", 1, 1, {"prefill": 1}, 1, 0],
    ["log", 1, "info", "text", 0],
]
MAX_STEPS = 60


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a script that differs from `data` in one to four places."""
    steps = list(steps_of(data))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(steps) + 1)
        choice = rng.random()
        if choice < 0.4 or not steps:
            steps.insert(at, _new(rng))
        elif choice < 0.5:
            del steps[at % len(steps)]
        elif choice < 0.6:
            steps.insert(at, rng.choice(steps))
        elif choice < 0.7:
            other = rng.randrange(len(steps))
            steps[at % len(steps)], steps[other] = steps[other], steps[at % len(steps)]
        else:
            steps[at % len(steps)] = _changed(steps[at % len(steps)], rng)
    return bytes_of(steps[:MAX_STEPS])


def _new(rng: random.Random) -> Step:
    choice = rng.random()
    if choice < 0.45:
        return step(Do.PROPER, rng.randrange(len(KINDS)), rng.randrange(3), rng.randrange(256))
    if choice < 0.6:
        head = bytes([rng.randrange(len(KINDS)), rng.randrange(3), rng.randrange(256), rng.randrange(8)])
        return Step(Do.BUT, head + _value(rng))
    if choice < 0.7:
        return Step(Do.FRAME, msgpack.packb(_deranged(rng.choice(FRAMES), rng)))
    if choice < 0.74:
        # Rare: it takes as long as a hundred others.
        return Step(
            rng.choice([Do.STRETCH, Do.RAW]), bytes([rng.randrange(8)]) + msgpack.packb(rng.choice(FRAMES))
        )
    return step(
        rng.choice([do for do in Do if do > Do.STRETCH]),
        rng.choice([0, 1, 2, 3, rng.randrange(256)]),
        rng.randrange(8),
    )


def _value(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.choice(ODD_BYTES)
    value = rng.choice(VALUES)
    if rng.random() < 0.2:
        value = {rng.choice(STRANGE_KEYS): value}
    return bytes(msgpack.packb(value))


def _deranged(value: Any, rng: random.Random) -> Any:
    """Return a copy of a value with one thing in it changed."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        copy = list(value)
        at = rng.randrange(len(copy))
        if rng.random() < 0.1:
            del copy[at]
        else:
            copy[at] = _deranged(copy[at], rng)
        return copy
    if isinstance(value, dict) and rng.random() < 0.8:
        return {**value, rng.choice([*STRANGE_KEYS, *value]): rng.choice(VALUES)}
    if isinstance(value, int) and rng.random() < 0.5:
        return max(0, value + rng.choice([-1, 1, 2]))
    return rng.choice(VALUES)


def _changed(old: Step, rng: random.Random) -> Step:
    if old.do in (Do.FRAME, Do.STRETCH) and rng.random() < 0.7:
        start = 1 if old.do is Do.STRETCH else 0
        try:
            wire = msgpack.unpackb(old.payload[start:], strict_map_key=False)
            return Step(old.do, old.payload[:start] + msgpack.packb(_deranged(wire, rng)))
        except (ValueError, TypeError, RecursionError, OverflowError):
            pass
    if old.do is Do.BUT and rng.random() < 0.5:
        return Step(Do.BUT, old.payload[:4] + _value(rng))
    if not old.payload or rng.random() < 0.1:
        return Step(Do(rng.randrange(len(Do))), old.payload)
    payload = bytearray(old.payload)
    payload[rng.randrange(min(len(payload), 64))] = rng.choice([0, 1, 2, 255, rng.randrange(256)])
    return Step(old.do, bytes(payload))
