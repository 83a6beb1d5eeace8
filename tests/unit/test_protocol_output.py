"""What an answer must look like: every field at its edges, and what can't be asked for together."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infervisor.protocol.errors import InvalidRequest
from infervisor.protocol.output import (
    MAX_GRAMMAR_BYTES,
    MAX_PRIORITY,
    MAX_TOP_LOGPROBS,
    PLAIN_OUTPUT,
    TOOL_CHOICES,
    Output,
    check_priority,
    refuse_endless,
)
from infervisor.protocol.quoting import quoted

HUGE = 10**5000
SCHEMA = '{"type": "object"}'


def refused(field: str, **given: Any) -> str:
    """Return the message of the refusal, which names `field`."""
    with pytest.raises(InvalidRequest) as caught:
        Output(**given)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300
    return str(caught.value)


def named(value: object) -> str:
    return quoted(value, 20)


@pytest.mark.parametrize("value", [None, 0, 1, 5, "true", [], HUGE], ids=named)
@pytest.mark.parametrize("name", ["logprobs", "normalise"])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    assert "true or false" in refused(name, **{name: value})


@pytest.mark.parametrize("value", [-1, MAX_TOP_LOGPROBS + 1, True, None, 1.0, "5", HUGE], ids=named)
def test_how_many_others_are_told_is_a_small_number(value: object) -> None:
    refused("top_logprobs", logprobs=True, top_logprobs=value)


def test_others_are_told_only_beside_the_chosen_one() -> None:
    assert "logprobs=True" in refused("top_logprobs", top_logprobs=3)
    assert Output(logprobs=True, top_logprobs=MAX_TOP_LOGPROBS).top_logprobs == 20


@pytest.mark.parametrize("name", ["grammar", "json_schema", "tool"])
def test_texts_are_texts_that_can_be_sent_and_understood_in_time(name: str) -> None:
    for value in (5, b"x", [], True, {}, HUGE):
        assert "must be a string" in refused(name, **{name: value})
    assert "U+DFFF" in refused(name, **{name: "a\udfff"})
    assert str(MAX_GRAMMAR_BYTES) in refused(name, **{name: "ü" * (MAX_GRAMMAR_BYTES // 2) + "x"})
    assert getattr(Output(**{name: "x" * MAX_GRAMMAR_BYTES}), name)


@pytest.mark.parametrize("grammar", ["", " ", "\n\t"])
def test_a_grammar_says_something(grammar: str) -> None:
    # llama.cpp takes an empty one, and ignores it.
    assert "empty" in refused("grammar", grammar=grammar)


@pytest.mark.parametrize("choice", [None, "", "any", True, [], {}, HUGE, ["auto"]], ids=named)
def test_a_choice_is_one_of_three(choice: object) -> None:
    assert "auto, none, required" in refused("tool_choice", tool_choice=choice)


def test_what_contradicts_itself_is_refused() -> None:
    assert "not both" in refused("grammar", grammar="root ::= x", json_schema=SCHEMA)
    assert "must be called" in refused("tool_choice", tool_choice="none", tool="look_up")
    for form in ({"grammar": 'root ::= "x"'}, {"json_schema": SCHEMA}):
        for choice in ({"tool_choice": "required"}, {"tool": "look_up"}):
            assert next(iter(form)) in refused("tool_choice", **form, **choice)
        assert Output(**form, tool_choice="auto").form == next(iter(form))
    assert PLAIN_OUTPUT.form is None


def test_which_answers_must_be_a_call() -> None:
    assert [Output(tool_choice=choice).must_call for choice in TOOL_CHOICES] == [False, False, True]
    assert Output(tool="look_up").must_call


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (Output(grammar='root ::= "x"'), "grammar"),
        (Output(json_schema=SCHEMA), "json_schema"),
        (Output(tool_choice="required"), "tool_choice"),
        (Output(tool="look_up"), "tool_choice"),
    ],
)
def test_a_form_that_ends_is_not_ignored_with_the_end(output: Output, said: str) -> None:
    refuse_endless(output, False)
    with pytest.raises(InvalidRequest, match=said) as caught:
        refuse_endless(output, True)
    assert caught.value.field == "ignore_eos"
    refuse_endless(Output(logprobs=True, tool_choice="auto"), True)


texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)


@given(
    logprobs=st.booleans(),
    schema=texts,
    tool=texts,
    choice=st.sampled_from(["auto", "required"]),
    normalise=st.booleans(),
)
def test_what_is_taken_arrives_as_it_was(
    logprobs: bool, schema: str | None, tool: str | None, choice: str, normalise: bool
) -> None:
    if schema is not None:
        tool, choice = None, "auto"
    output = Output(logprobs, 3 * logprobs, None, schema, choice, tool, normalise)
    wire = msgpack.unpackb(msgpack.packb(output.to_wire()))
    assert Output.from_wire(wire) == output


def test_only_what_is_asked_for_travels() -> None:
    assert PLAIN_OUTPUT.to_wire() == {}
    assert Output(logprobs=True).to_wire() == {"logprobs": True}
    with pytest.raises(InvalidRequest, match="unknown option 'logprob'"):
        Output.from_wire({"logprob": True})


@pytest.mark.parametrize("priority", [-MAX_PRIORITY, -1, 0, 1, MAX_PRIORITY])
def test_priorities_within_the_range_are_taken(priority: int) -> None:
    assert check_priority(priority) == priority


@pytest.mark.parametrize("priority", [-101, 101, 1.0, True, None, "high", HUGE], ids=named)
def test_a_priority_is_a_small_number(priority: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_priority(priority)
    assert caught.value.field == "priority"
