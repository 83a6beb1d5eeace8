"""Sampling and limits: every field at every edge, and everything that isn't a value of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.generation import (
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SEED_LIMIT,
    Limits,
    Sampling,
    check_seed,
    check_text,
)

HUGE = 10**5000
"""More digits than Python converts to text, and far beyond any float."""

NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
INTEGERS = {"top_k": (0, 1 << 20), "repeat_last_n": (0, 1 << 20)}
NOT_NUMBERS: list[Any] = [None, True, False, "1", b"1", [], [1], {}, 1j, [HUGE], object]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 1.0, 1.5, math.nan, math.inf]


def sampling_with(name: str, value: Any) -> Sampling:
    return Sampling(**{name: value})


def refuse(field: str | None, build: Callable[..., object], *given: Any) -> str:
    """Return the message of the `InvalidRequest` that names `field`; any other error fails."""
    with pytest.raises(InvalidRequest) as caught:
        build(*given)
    assert type(caught.value) is InvalidRequest
    assert caught.value.field == field
    message = str(caught.value)
    message.encode()  # can be shown anywhere, whatever the bad value held
    assert len(message) < 300
    return message


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_from_edge_to_edge(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (
        low,
        high,
        (low + high) / 2,
        int(high),
        math.nextafter(low, high),
        math.nextafter(high, low),
    ):
        taken = getattr(sampling_with(name, value), name)
        assert taken == value
        assert type(taken) is float
    for value in (
        math.nextafter(low, -math.inf),
        math.nextafter(high, math.inf),
        int(low) - 1,
        int(high) + 1,
    ):
        message = refuse(name, sampling_with, name, value)
        assert f"{name} must be between {low:g} and {high:g}" in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), HUGE], ids=lambda v: f"{type(v).__name__}"
)
def test_a_number_without_a_finite_float_is_refused(name: str, value: Any) -> None:
    assert "must be between" in refuse(name, sampling_with, name, value)


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_what_is_no_number_is_refused(name: str) -> None:
    for value in NOT_NUMBERS:
        message = refuse(name, sampling_with, name, value)
        assert message.startswith(f"{name} must be a ")


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_taken_from_edge_to_edge_and_never_rounded(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, low + 1, high):
        assert getattr(sampling_with(name, value), name) == value
    for beyond in (low - 1, high + 1, 1 << 64, HUGE, -HUGE):
        assert "must be between" in refuse(name, sampling_with, name, beyond)
    for value in NOT_INTEGERS:
        assert "whole number" in refuse(name, sampling_with, name, value)


def test_logit_bias_takes_token_ids_and_biases_in_range() -> None:
    bias = {0: 100, (1 << 31) - 1: -100.0, 5: -math.inf, 6: 0.5}
    taken = Sampling(logit_bias=bias).logit_bias
    assert taken == bias
    assert all(type(value) is float for value in taken.values())
    bias[7] = 1.0
    assert 7 not in taken, "a later change by the caller must not reach a request that was checked"


@pytest.mark.parametrize(
    "token",
    [-1, -7, 1 << 31, 1 << 64, HUGE, "5", "-7", None, True, 1.0, b"1", (1,)],
    ids=lambda t: type(t).__name__,
)
def test_logit_bias_refuses_what_is_no_token_id(token: Any) -> None:
    refuse("logit_bias", lambda: Sampling(logit_bias={token: 1.0}))


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 100.1, -100.1, 10**400, HUGE, -HUGE, "5", None, True, [], [HUGE]],
    ids=lambda value: type(value).__name__,
)
def test_logit_bias_refuses_what_is_no_bias(value: Any) -> None:
    refuse("logit_bias", lambda: Sampling(logit_bias={3: value}))


def test_only_a_float_can_ban_a_token() -> None:
    class EqualToEverything:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    refuse("logit_bias", lambda: Sampling(logit_bias={3: EqualToEverything()}))  # type: ignore[dict-item]


@pytest.mark.parametrize("bias", [None, [], [[1, 2]], "5", 5, HUGE], ids=range(6))
def test_logit_bias_must_be_a_mapping(bias: Any) -> None:
    refuse("logit_bias", lambda: Sampling(logit_bias=bias))


def test_logit_bias_is_bounded_in_size() -> None:
    assert len(Sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 0.0)).logit_bias) == 4096
    refuse("logit_bias", lambda: Sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0)))


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1, 2, 10**12, (1 << 63) - 1])
def test_max_tokens_is_none_or_at_least_one(value: int | None) -> None:
    assert Limits(max_tokens=value).max_tokens == value


@pytest.mark.parametrize(
    "value", [0, -1, -(10**12), 1 << 63, 1 << 64, HUGE], ids=lambda v: f"{v.bit_length()}bits"
)
def test_max_tokens_out_of_range_is_refused(value: int) -> None:
    assert "max_tokens must be between 1 and" in refuse("max_tokens", lambda: Limits(max_tokens=value))


@pytest.mark.parametrize(
    "value", [v for v in [*NOT_INTEGERS, "5", 2.5] if v is not None], ids=lambda v: f"{type(v).__name__}"
)
def test_max_tokens_is_never_converted(value: Any) -> None:
    assert "whole number" in refuse("max_tokens", lambda: Limits(max_tokens=value))


@pytest.mark.parametrize(
    ("stop", "taken"),
    [
        (None, ()),
        ([], ()),
        ((), ()),
        ("\n", ("\n",)),
        (["a"], ("a",)),
        (["b", "a", "b"], ("b", "a")),
        (("歪", "🦙", "\x00"), ("歪", "🦙", "\x00")),
        (["x" * MAX_STOP_CHARACTERS], ("x" * 1024,)),
        ([str(n) for n in range(MAX_STOP_STRINGS)], tuple(str(n) for n in range(64))),
    ],
    ids=range(9),
)
def test_stop_strings_that_are_taken(stop: Any, taken: tuple[str, ...]) -> None:
    assert Limits(stop=stop).stop == taken


@pytest.mark.parametrize(
    "stop",
    [
        "",
        [""],
        ["a", ""],
        ["a"] * (MAX_STOP_STRINGS + 1),
        [str(n) for n in range(MAX_STOP_STRINGS + 1)],
        ["x" * (MAX_STOP_CHARACTERS + 1)],
        "\ud83d",
        ["a", "ab\udc80"],
        5,
        True,
        HUGE,
        b"a",
        [b"a"],
        [5],
        [None],
        [["a"]],
        [HUGE],
        {"a"},
        {"a": 1},
    ],
    ids=range(19),
)
def test_stop_strings_that_are_refused(stop: Any) -> None:
    refuse("stop", lambda: Limits(stop=stop))


@pytest.mark.parametrize("value", [None, 0, 1, "true", [], HUGE], ids=lambda v: type(v).__name__)
def test_ignore_eos_is_a_flag(value: Any) -> None:
    refuse("ignore_eos", lambda: Limits(ignore_eos=value))


# --- seed and text -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 7, SEED_LIMIT - 1])
def test_a_seed_has_32_bits(seed: int) -> None:
    assert check_seed(seed) == seed
    assert SEED_LIMIT == 2**32


@pytest.mark.parametrize(
    "seed",
    [-1, 2**32, 2**64, -(2**63) - 1, HUGE, 1.5, 1.0, "7", None, True, math.nan, [HUGE]],
    ids=lambda seed: type(seed).__name__,
)
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    refuse("seed", lambda: check_seed(seed))


def test_a_lone_surrogate_is_named_with_its_place() -> None:
    assert check_text("prompt", "🦙\x00\u2028") == "🦙\x00\u2028"
    message = refuse("prompt", lambda: check_text("prompt", "ab\udc80"))
    assert "U+DC80 at character 2" in message


# --- the wire ------------------------------------------------------------------------------------

SAMPLING = st.builds(
    Sampling,
    **{name: st.floats(low, high) for name, (low, high) in NUMBERS.items()},
    **{name: st.integers(low, high) for name, (low, high) in INTEGERS.items()},
    logit_bias=st.dictionaries(
        st.integers(0, (1 << 31) - 1), st.floats(-100, 100) | st.just(-math.inf), max_size=4
    ),
)
LIMITS = st.builds(
    Limits,
    max_tokens=st.none() | st.integers(1, (1 << 63) - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=4),
    ignore_eos=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(sampling=SAMPLING, limits=LIMITS)
def test_what_is_valid_here_is_valid_there(sampling: Sampling, limits: Limits) -> None:
    wire = msgpack.unpackb(msgpack.packb([sampling.to_wire(), limits.to_wire()]), strict_map_key=False)
    assert Sampling.from_wire(wire[0]) == sampling
    assert Limits.from_wire(wire[1]) == limits


@pytest.mark.parametrize("cls", [Sampling, Limits])
def test_an_empty_mapping_means_the_defaults(cls: type[Sampling] | type[Limits]) -> None:
    assert cls.from_wire({}) == cls()


@pytest.mark.parametrize("cls", [Sampling, Limits])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("tempreature", "tempreature"),
        ("x" * 1000, "x" * 80),
        ("\ud800", "\ud800"),
        (5, None),
        (HUGE, None),
        (None, None),
    ],
    ids=["typing mistake", "long", "surrogate", "number", "huge number", "nil"],
)
def test_an_unknown_option_is_refused_not_ignored(
    cls: type[Sampling] | type[Limits], name: Any, field: str | None
) -> None:
    assert "unknown option" in refuse(field, lambda: cls.from_wire({name: 1}))


def test_the_other_end_checks_again() -> None:
    refuse("temperature", lambda: Sampling.from_wire({"temperature": -1}))
    refuse("max_tokens", lambda: Limits.from_wire({"max_tokens": 0}))
