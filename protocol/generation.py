"""What a request asks for: sampling and limits, with their ranges. Pure values, checked at both ends.

The parent checks before anything is sent, so that bad input never reaches a worker; the worker checks
again, because it trusts nobody. The names follow llama.cpp's and OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.quoting import quoted

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIASES = 4096
SEED_LIMIT = 1 << 32
"""Seeds are 32-bit: llama.cpp's random generator takes no more."""


def _number(name: str, value: object, low: float, high: float, part: str = "") -> float:
    what = name + part
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{what} must be a number, not {quoted(value, 80)}", name)
    if not low <= value <= high:  # refuses NaN and whole numbers too large for a float, too
        raise InvalidRequest(f"{what} must be between {low:g} and {high:g}, not {quoted(value, 80)}", name)
    return float(value)


def check_integer(name: str, value: object, low: int, high: int, part: str = "") -> int:
    """Return `value` if it is a whole number in a range. Raises `InvalidRequest` naming it otherwise."""
    what = name + part
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{what} must be a whole number, not {quoted(value, 80)}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{what} must be between {low} and {high}, not {_short(value)}", name)
    return value


def _short(value: int) -> str:
    # A number of thousands of digits must not become a message of thousands of digits.
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Defaults are greedy-free neutral values.

    temperature: 0 is greedy; 0 to 100. top_k: 0 is off. top_p, min_p, typical_p: shares from 0 to 1.
    repeat_penalty: 1 is off; over the last `repeat_last_n` tokens. frequency_penalty and
    presence_penalty: −2 to 2, 0 is off. logit_bias: token id → −100 to 100, or −inf to ban the token.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        for name, check in _SAMPLING_CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    def to_wire(self) -> dict[str, Any]:
        """Return the plain mapping that travels."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Sampling:
        """Rebuild from `to_wire`. Raises `InvalidRequest` for unknown names and bad values."""
        refuse_unknown(cls, wire)
        return cls(**wire)


_SAMPLING_CHECKS: dict[str, Callable[[str, object], float]] = {
    "temperature": lambda name, value: _number(name, value, 0, 100),
    "top_k": lambda name, value: check_integer(name, value, 0, 1 << 20),
    "top_p": lambda name, value: _number(name, value, 0, 1),
    "min_p": lambda name, value: _number(name, value, 0, 1),
    "typical_p": lambda name, value: _number(name, value, 0, 1),
    "repeat_penalty": lambda name, value: _number(name, value, 0.01, 100),
    "repeat_last_n": lambda name, value: check_integer(name, value, 0, 1 << 20),
    "frequency_penalty": lambda name, value: _number(name, value, -2, 2),
    "presence_penalty": lambda name, value: _number(name, value, -2, 2),
}


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, not {quoted(bias, 80)}", "logit_bias"
        )
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIASES} are taken", "logit_bias"
        )
    checked: dict[int, float] = {}
    for token, value in bias.items():
        token = check_integer("logit_bias", token, 0, (1 << 31) - 1, " token id")
        is_ban = isinstance(value, float) and value == -math.inf
        checked[token] = -math.inf if is_ban else _number("logit_bias", value, -100, 100, " value")
    return checked


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends by itself.

    max_tokens: None is "until the context is full"; otherwise at least 1. stop: strings at which the
    answer ends and which are not part of it. ignore_eos: go on past the model's own end token.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, (1 << 63) - 1)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(
                f"ignore_eos must be true or false, not {quoted(self.ignore_eos, 80)}", "ignore_eos"
            )

    def to_wire(self) -> dict[str, Any]:
        """Return the plain mapping that travels."""
        return {"max_tokens": self.max_tokens, "stop": list(self.stop), "ignore_eos": self.ignore_eos}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Limits:
        """Rebuild from `to_wire`. Raises `InvalidRequest` for unknown names and bad values."""
        refuse_unknown(cls, wire)
        return cls(**wire)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)):
        raise InvalidRequest(f"stop must be a string or a list of strings, not {quoted(stop, 80)}", "stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} entries; at most {MAX_STOP_STRINGS} are taken", "stop")
    for entry in stop:
        if not isinstance(entry, str):
            raise InvalidRequest(f"stop must hold strings, not {quoted(entry, 80)}", "stop")
        if not entry:
            raise InvalidRequest("stop holds an empty string, which would end every answer at once", "stop")
        if len(entry) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop string has {len(entry)} characters; at most {MAX_STOP_CHARACTERS} are taken", "stop"
            )
        check_text("stop", entry)
    return tuple(dict.fromkeys(stop))


def check_text(name: str, text: str) -> str:
    """Return `text` if it can be sent as UTF-8. Raises `InvalidRequest` naming the first bad character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: "
            "it is not valid text; decode the bytes it came from as UTF-8, or replace it",
            name,
        ) from None
    return text


def check_seed(seed: object) -> int:
    """Return `seed` if 0 ≤ seed < 2**32. Raises `InvalidRequest` otherwise."""
    return check_integer("seed", seed, 0, SEED_LIMIT - 1)


def refuse_unknown(cls: type[Any], wire: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for a name that isn't a field of this dataclass."""
    known = [f.name for f in fields(cls)]
    for name in wire:
        if name not in known:
            raise InvalidRequest(
                f"unknown option {quoted(name, 80)}; known are {', '.join(known)}",
                name[:80] if isinstance(name, str) else None,
            )
