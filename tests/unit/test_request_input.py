"""What a caller passes, checked without a worker: every refusal names its field and is printable."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.codec import MAX_TO_WORKER_BYTES, Decoder, encode
from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.messages import Submit
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.plain_values import MAX_DEPTH, MAX_VALUES
from infervisor.supervisor.request_input import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    REQUEST_OPTIONS,
    SAMPLING_OPTIONS,
    RequestInput,
    check_request,
)
from infervisor.supervisor.request_options import RequestOptions, SamplingOptions

LONE = "a\udfffb"
HUGE = 10**5000
DEFAULTS: dict[str, Any] = {
    "window": 32, "max_tokens": None, "stop": None, "ignore_eos": False, "seed": 1, "special": True, "sampling": {},
}  # fmt: skip


def named(value: object) -> str:
    """Name a test case; pytest can't write a number of 5,000 digits out."""
    return quoted(value, 20)


def check(prompt: object = None, messages: object = None, **given: Any) -> RequestInput:
    return check_request(prompt, messages, **{**DEFAULTS, **given})


def refused(field: str | None, prompt: object = None, messages: object = None, **given: Any) -> str:
    """Return the message of the refusal, which names `field` and holds only good, short text."""
    with pytest.raises(InvalidRequest) as caught:
        check(prompt, messages, **given)
    assert caught.value.field == field
    message = str(caught.value)
    json.dumps({"message": message, "field": field}, ensure_ascii=False).encode()
    assert len(message) < 1000
    return message


def user(**parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi", **parts}]


# --- prompt or messages ----------------------------------------------------------------------------


def test_exactly_one_of_prompt_and_messages_is_taken() -> None:
    assert check("hi").prompt == "hi"
    assert check("hi").messages is None
    assert check(None, user()).prompt is None
    assert "not both" in refused("messages", "hi", user())
    assert "not both" in refused("prompt")


@pytest.mark.parametrize("prompt", [b"x", 5, ["x"], {}, True, HUGE], ids=named)
def test_a_prompt_is_a_string(prompt: object) -> None:
    assert type(prompt).__name__ in refused("prompt", prompt)


def test_a_prompt_is_neither_empty_nor_broken_nor_too_long() -> None:
    assert "nothing to continue" in refused("prompt", "")
    assert "U+DFFF" in refused("prompt", LONE)
    assert check("x" * MAX_PROMPT_BYTES).prompt
    assert str(MAX_PROMPT_BYTES + 1) in refused("prompt", "x" * (MAX_PROMPT_BYTES + 1))
    assert "at most" in refused("prompt", "ü" * (MAX_PROMPT_BYTES // 2 + 1))
    for prompt in (" ", "\0", "a\0b", "\u2028", "\ufeff", "\U0001f999"):
        assert check(prompt).prompt == prompt


# --- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", ["hi", b"hi", {"role": "user", "content": "hi"}, 5, iter([]), {1}, HUGE], ids=named
)
def test_messages_are_a_list(messages: object) -> None:
    assert "must be a list" in refused("messages", None, messages)


@pytest.mark.parametrize("message", ["hi", None, 5, ["role", "user"], HUGE, [[]] * 500], ids=named)
def test_a_message_is_an_object(message: object) -> None:
    assert "must be an object" in refused("messages[1]", None, [*user(), message])


def test_messages_are_neither_none_nor_too_many() -> None:
    assert "nothing to answer" in refused("messages", None, [])
    assert check(None, user() * MAX_MESSAGES).messages
    assert str(MAX_MESSAGES) in refused("messages", None, user() * (MAX_MESSAGES + 1))


@pytest.mark.parametrize("role", [None, "", 5, ["user"], True, HUGE], ids=named)
def test_a_role_is_a_string(role: object) -> None:
    assert "role" in refused("messages[0].role", None, user(role=role))


def test_role_and_content_must_be_there() -> None:
    refused("messages[0].role", None, [{"content": "hi"}])
    refused("messages[0].role", None, [{}])
    assert "missing" in refused("messages[0].content", None, [{"role": "user"}])
    assert check(None, user(content="")).messages == ({"role": "user", "content": ""},)


@pytest.mark.parametrize(
    "content", [None, 5, True, {"type": "text", "text": "hi"}, b"hi", HUGE, math.nan], ids=named
)
def test_a_content_is_text(content: object) -> None:
    assert "must be a string or a list of text parts" in refused(
        "messages[0].content", None, user(content=content)
    )


def test_text_parts_are_joined_and_nothing_else_is_taken_for_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    taken = check(None, user(content=parts)).messages
    assert taken is not None
    assert taken[0]["content"] == "one two"
    assert check(None, user(content=[])).messages == ({"role": "user", "content": ""},)
    for part in (
        "text", None, {"text": "x"}, {"type": "text"}, {"type": "text", "text": None},
        {"type": "image_url", "image_url": {"url": "x"}}, {"type": ["text"], "text": "x"}, HUGE,
    ):  # fmt: skip
        refused("messages[0].content[1]", None, user(content=[parts[0], part]))


def test_a_lone_surrogate_is_refused_wherever_it_stands() -> None:
    refused("messages[0].content", None, user(content=LONE))
    refused("messages[0].role", None, user(role=LONE))
    refused("messages[0].content[0]", None, user(content=[{"type": "text", "text": LONE}]))
    refused("messages[0].name", None, user(name=LONE))
    refused("messages[0].tool.deep[1]", None, user(tool={"deep": ["x", LONE]}))
    refused("stop", "x", stop=["fine", LONE])
    for messages in (user(**{LONE: "x"}), user(tool={LONE: "x"}), user(**{LONE: LONE})):
        with pytest.raises(InvalidRequest) as caught:
            check(None, messages)
        str(caught.value).encode()
        (caught.value.field or "").encode()


@pytest.mark.parametrize("key", [5, None, ("a",), b"role", HUGE], ids=named)
def test_keys_are_strings(key: object) -> None:
    assert "isn't a string" in refused("messages[0]", None, [{**user()[0], key: "x"}])
    refused("messages[0].tool", None, user(tool={key: "x"}))


def test_other_parts_of_a_message_are_plain_data_and_a_copy() -> None:
    tool = {"a": [1, 2.5, None, True, "x", {"b": []}], "big": (1 << 64) - 1, "small": -(1 << 63)}
    message = {**user()[0], "tool": tool}
    taken = check(None, [message]).messages
    assert taken == (message,)
    tool["a"] = "changed later"
    assert taken is not None
    assert taken[0]["tool"]["a"] == [1, 2.5, None, True, "x", {"b": []}]
    for bad in (math.nan, math.inf, 1 << 64, -(1 << 63) - 1, HUGE, b"x", {1}, object(), 1j):
        assert "plain data" in refused("messages[0].tool[0]", None, user(tool=[bad]))


def nested(levels: int) -> object:
    value: object = "x"
    for _ in range(levels):
        value = [value]
    return value


def test_depth_is_bounded_even_for_what_holds_itself() -> None:
    assert check(None, user(tool=nested(MAX_DEPTH))).messages
    for value in (nested(MAX_DEPTH + 1), nested(100_000)):
        with pytest.raises(InvalidRequest, match="levels deep") as caught:
            check(None, user(tool=value))
        assert str(caught.value.field).startswith("messages[0].tool[0]")
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(InvalidRequest, match="levels deep"):
        check(None, user(tool=itself))


@pytest.mark.parametrize(
    "messages",
    [
        user(content="x" * (MAX_PROMPT_BYTES + 1)),
        user(content="x" * (MAX_PROMPT_BYTES // 2)) * 3,
        user(**{"k" * (MAX_PROMPT_BYTES + 1): 1}),
        user(tool=["x" * 158] * 99_000),
    ],
    ids=["one", "together", "a key", "with its headers"],
)
def test_messages_that_are_too_large_are_refused_here(messages: list[Any]) -> None:
    assert "at most" in refused("messages", None, messages)


@pytest.mark.parametrize(
    "messages",
    [
        user(tool=[""] * MAX_VALUES),
        user(tool={str(number): [] for number in range(MAX_VALUES)}),
        user(content=[{"type": "text", "text": ""}] * (MAX_VALUES + 1)),
        user(tool=[0] * 20) * MAX_MESSAGES,
    ],
    ids=["a list", "an object", "text parts", "together"],
)
def test_more_values_than_can_be_checked_quickly_are_refused(messages: list[Any]) -> None:
    assert str(MAX_VALUES) in refused("messages", None, messages)
    assert check(None, user(tool=[""] * (MAX_VALUES - 10))).messages


def test_the_largest_request_that_is_taken_fits_one_frame() -> None:
    most: dict[str, Any] = {
        "stop": [f"{index:04}" + "\U0001f999" * 1020 for index in range(64)],
        "sampling": {"logit_bias": {(1 << 31) - 1 - index: -99.9 for index in range(4096)}},
        "seed": (1 << 32) - 1,
    }
    for request in (
        check("x" * MAX_PROMPT_BYTES, **most),
        check(None, user(content="x" * (MAX_PROMPT_BYTES - 99)), **most),
    ):
        frame = encode(request.to_submit((1 << 64) - 1, 1 << 20))
        assert len(frame) <= MAX_TO_WORKER_BYTES


# --- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, -1, 1.0, "5", True, None, (1 << 20) + 1, HUGE, math.nan], ids=named)
def test_a_window_is_a_number_of_tokens(window: object) -> None:
    assert "window must be" in refused("window", "x", window=window)


@pytest.mark.parametrize("window", [1, 2, 1 << 20])
def test_windows_within_the_range_are_taken(window: int) -> None:
    assert check("x", window=window).window == window


@pytest.mark.parametrize("max_tokens", [0, -1, "5", 2.5, True, HUGE, 1 << 63], ids=named)
def test_max_tokens_is_at_least_one(max_tokens: object) -> None:
    refused("max_tokens", "x", max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [None, 1, 10**12])
def test_max_tokens_within_the_range_are_taken(max_tokens: int | None) -> None:
    assert check("x", max_tokens=max_tokens).limits.max_tokens == max_tokens


@pytest.mark.parametrize(
    "stop", ["", [""], ["a", ""], 5, [5], [None], ["a"] * 65, "a" * 1025, {"a": 1}, b"a"]
)
def test_stop_strings_that_are_refused(stop: object) -> None:
    refused("stop", "x", stop=stop)


@pytest.mark.parametrize(
    ("stop", "taken"),
    [
        (None, ()),
        ([], ()),
        ("a", ("a",)),
        (["a", "b", "a"], ("a", "b")),
        (("a",), ("a",)),
        ("a" * 1024, ("a" * 1024,)),
    ],
)
def test_stop_strings_that_are_taken(stop: object, taken: tuple[str, ...]) -> None:
    assert check("x", stop=stop).limits.stop == taken


@pytest.mark.parametrize("seed", [-1, 1 << 32, "7", 7.0, True, HUGE], ids=named)
def test_seeds_are_32_bit(seed: object) -> None:
    refused("seed", "x", seed=seed)


def test_without_a_seed_one_is_drawn() -> None:
    assert check("x", seed=0).seed == 0
    assert check("x", seed=(1 << 32) - 1).seed == (1 << 32) - 1
    assert len({check("x", seed=None).seed for _ in range(20)}) >= 19


@pytest.mark.parametrize("name", ["special", "ignore_eos"])
@pytest.mark.parametrize("value", [None, 0, 1, "true", HUGE], ids=named)
def test_switches_are_true_or_false(name: str, value: object) -> None:
    assert "true or false" in refused(name, "x", **{name: value})


def test_unknown_options_and_bad_ranges_name_the_option() -> None:
    assert "did you mean temperature" in refused("temprature", "x", sampling={"temprature": 1})
    refused("temperature", "x", sampling={"temperature": 101})
    refused("top_p", "x", sampling={"top_p": "0.5"})
    refused("logit_bias", "x", sampling={"logit_bias": "5"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=4),
        max_leaves=20,
    )
)  # fmt: skip
def test_whatever_is_taken_arrives_as_it_was(tool: Any) -> None:
    request = check(None, user(tool=tool))
    submit = request.to_submit(1, 5)
    (arrived,) = Decoder.to_worker().feed(encode(submit))
    assert isinstance(arrived, Submit)
    assert arrived.messages is not None
    message: Mapping[str, Any] = arrived.messages[0]
    assert message == {"role": "user", "content": "hi", "tool": tool}
    assert (arrived.credit, arrived.seed, arrived.prompt) == (5, 1, None)


def test_a_misspelt_option_is_told_what_it_may_mean() -> None:
    given = {"window": 1, "max_tokens": None, "stop": None, "ignore_eos": False, "seed": 1, "special": True}
    with pytest.raises(InvalidRequest, match="did you mean max_tokens") as caught:
        check_request("x", None, sampling={"max_token": 5}, **given)  # type: ignore[arg-type]
    assert caught.value.field == "max_token"
    assert "temperature" in str(caught.value)


def test_the_types_for_editors_name_every_option() -> None:
    asked = {*REQUEST_OPTIONS, *SAMPLING_OPTIONS} - {"prompt", "messages"}
    assert set(RequestOptions.__annotations__) == asked
    assert set(SamplingOptions.__annotations__) == set(SAMPLING_OPTIONS)
