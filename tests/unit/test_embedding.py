"""Texts to embed, as the parent checks them, and vectors, as it takes them from a worker that it doesn't trust."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import FlowControlError, InvalidRequest, RemoteProtocolError
from infervisor.protocol.machines.attempt import AttemptPhase
from infervisor.protocol.messages import Ended, Released, Started, Tokens, Vectors
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.embedding import (
    MAX_DIMENSIONS,
    MAX_TEXTS,
    check_texts,
    embeddings_of,
    read_vectors,
    without_embedded,
)
from infervisor.supervisor.request import Request
from infervisor.supervisor.request_input import MAX_PROMPT_BYTES, check_request
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import Deadlines
from infervisor.supervisor.worker import Worker

# --- bytes -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_ids_keep_their_numbers_and_travel_little_endian(ids: list[int]) -> None:
    data = pack_ids(ids)
    assert data == struct.pack(f"<{len(ids)}i", *ids)
    assert unpack_ids(data).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_keep_their_numbers_and_travel_little_endian(values: list[float]) -> None:
    data = pack_floats(values)
    assert data == struct.pack(f"<{len(values)}f", *values)
    assert unpack_floats(data).tolist() == values


# --- what callers pass -----------------------------------------------------------------------------


def test_a_string_is_one_text() -> None:
    assert check_texts("ab").texts == ("ab",)
    assert check_texts(["ab", "c"]).texts == check_texts(("ab", "c")).texts == ("ab", "c")
    assert check_texts("ab", normalise=False).output.normalise is False
    assert check_texts("ab", priority=7).priority == 7


@pytest.mark.parametrize(("texts", "field", "said"), [
    ([], "texts", "empty"),
    ((), "texts", "empty"),
    ("", "texts[0]", "empty"),
    (["a", ""], "texts[1]", "empty"),
    (["a", 5], "texts[1]", "string"),
    (["a", None], "texts[1]", "string"),
    (["a", b"b"], "texts[1]", "string"),
    (None, "texts", "NoneType"),
    (b"a", "texts", "bytes"),
    ({"a": 1}, "texts", "dict"),
    ({"a"}, "texts", "set"),
    (["a", "\udc80"], "texts[1]", "surrogate"),
    (["a"] * (MAX_TEXTS + 1), "texts", "2048"),
    (["a", "b" * (MAX_PROMPT_BYTES + 1)], "texts[1]", "bytes"),
    (["b" * (MAX_PROMPT_BYTES // 16)] * 17, "texts", "several calls"),
])  # fmt: skip
def test_texts_that_are_refused(texts: object, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        check_texts(texts)
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "value"), [("normalise", 1), ("normalise", None), ("priority", 101)])
def test_options_that_are_refused(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequest) as caught:
        check_texts("a", **options)
    assert caught.value.field == name


def test_only_texts_without_a_vector_go_to_the_next_worker() -> None:
    texts = check_texts(["a", "b", "c"], normalise=False)
    submit = texts.to_submit(5, 3)
    first = without_embedded(submit, 0)
    assert (first.texts, first.credit, first.prompt, first.messages) == (("a", "b", "c"), 3, None, None)
    assert first.output == {"normalise": False}
    rest = without_embedded(submit, 2)
    assert (rest.texts, rest.credit, rest.id) == (("c",), 1, 5)
    generation = check_request("hello", None, seed=1).to_submit(6, 32)
    assert without_embedded(generation, 0) is generation


# --- what workers send -----------------------------------------------------------------------------


def test_vectors_are_read() -> None:
    first = read_vectors([pack_floats([1, 2.5]), pack_floats([-3, 0])], None)
    assert [one.tolist() for one in first] == [[1, 2.5], [-3, 0]]
    assert len(read_vectors([pack_floats([1, 2])], 2)) == 1


@pytest.mark.parametrize(("packed", "dimensions"), [
    ([pack_floats([1, 2]), pack_floats([1])], None),
    ([pack_floats([1, 2])], 3),
    ([pack_floats([1, float("nan")])], None),
    ([pack_floats([float("inf"), 1])], 2),
    ([pack_floats([float("inf"), float("-inf")])], 2),
    ([bytes(4 * MAX_DIMENSIONS + 4)], None),
])  # fmt: skip
def test_vectors_that_cant_be_are_a_protocol_error(packed: list[bytes], dimensions: int | None) -> None:
    with pytest.raises(RemoteProtocolError, match="vectors"):
        read_vectors(packed, dimensions)


# --- an attempt ------------------------------------------------------------------------------------


class Owner:
    """What an attempt tells."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((name.removeprefix("attempt_"), *arguments[1:]))


NOW = 1000


def attempt_of(texts: list[str], vectors: int = 0) -> tuple[Attempt, Owner]:
    """Return an attempt that has started, of a request that has some vectors already."""
    given = check_texts(texts)
    request = Request(1, given, Deadlines(), OnCrash.RESUME, NOW)
    request.vectors.extend(array("f", [1, 2]) for _ in range(vectors))
    owner = Owner()
    attempt = Attempt(9, request, cast(Worker, None), cast(Any, owner), NOW)
    attempt.on_started(Started(NOW, 9, 0, 0, 12), NOW)
    owner.told.clear()
    return attempt, owner


def vectors(index: int, count: int = 1, dimensions: int = 2) -> Vectors:
    return Vectors(NOW, 9, index, [pack_floats([index] * dimensions)] * count)


def ended(why: str = "stop") -> Ended:
    usage = {"prompt_tokens": 12, "cached_tokens": 0, "completion_tokens": 3, "computed_tokens": 0}
    return Ended(NOW, 9, why, "", usage, None)


def test_the_last_vector_ends_the_request() -> None:
    attempt, owner = attempt_of(["a", "b", "c"])
    attempt.on_vectors(vectors(0, 2), NOW + 1)
    assert (attempt.step_phase, attempt.owes_a_step, owner.told) == ("prefill", True, [])
    attempt.on_vectors(vectors(2), NOW + 2)
    assert owner.told == [("finished", EndReason.STOP)]
    assert attempt.owes_a_step  # its end, and its release
    assert [one.tolist() for one in attempt.request.vectors] == [[0, 0], [0, 0], [2, 2]]
    assert attempt.request.timeline.tokens == 0
    assert attempt.request.timeline.first_token_ns == NOW + 1


def test_a_later_attempt_counts_from_its_own_first_text() -> None:
    attempt, owner = attempt_of(["a", "b", "c"], vectors=2)
    attempt.on_vectors(vectors(0), NOW)
    assert owner.told == [("finished", EndReason.STOP)]
    assert len(attempt.request.vectors) == 3


def test_usage_is_that_of_all_texts() -> None:
    attempt, _ = attempt_of(["a", "b"])
    attempt.on_vectors(vectors(0, 2), NOW)
    attempt.on_ended(ended(), NOW)
    usage = attempt.request.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.computed_tokens) == (12, 0, 0)
    assert attempt.state.phase is AttemptPhase.ENDING
    attempt.on_released(Released(NOW, 9, None, NOW), NOW)


@pytest.mark.parametrize("message", [
    vectors(1), vectors(0, 4), vectors(0, dimensions=3), Tokens(NOW, 9, 0, [[5, "a", None]]),
    ended("stop"), ended("length"), ended("context_full"),
])  # fmt: skip
def test_what_a_worker_may_not_say_of_texts(message: Vectors | Tokens | Ended) -> None:
    attempt, owner = attempt_of(["a", "b", "c", "d"], vectors=1)
    take: Callable[[Any, int], None] = getattr(attempt, f"on_{message.name}")
    with pytest.raises(RemoteProtocolError):
        take(message, NOW)
    assert owner.told == []


def test_vectors_twice_or_too_many_break_flow_control() -> None:
    attempt, _ = attempt_of(["a", "b"])
    attempt.on_vectors(vectors(0), NOW)
    with pytest.raises(FlowControlError, match="where 1 was due"):
        attempt.on_vectors(vectors(0), NOW)
    with pytest.raises(FlowControlError, match="for 2 texts"):
        attempt.on_vectors(vectors(1, 2), NOW)


def test_vectors_for_a_prompt_are_a_protocol_error() -> None:
    request = Request(1, check_request("hello", None, seed=1), Deadlines(), OnCrash.RESUME, NOW)
    attempt = Attempt(9, request, cast(Worker, None), cast(Any, Owner()), NOW)
    attempt.on_started(Started(NOW, 9, 0, 0, 12), NOW)
    with pytest.raises(RemoteProtocolError, match="nothing to embed"):
        attempt.on_vectors(vectors(0), NOW)


def test_the_result() -> None:
    attempt, _ = attempt_of(["a", "b"], vectors=2)
    result = embeddings_of(attempt.request.vectors, attempt.request.report())
    assert result.dimensions == 2
    assert np.asarray(result.vectors).tolist() == [[1, 2], [1, 2]]
    assert result.report.request_id == 1
